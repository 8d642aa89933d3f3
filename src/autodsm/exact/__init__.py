"""Answers that are known."""
