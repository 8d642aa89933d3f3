"""Objectives, defaults, training."""
