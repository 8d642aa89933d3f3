"""Gaussian kernels of the linearized process, and from where they start."""
