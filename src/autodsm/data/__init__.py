"""Data sets as samplers `y0(key, n)` for `fit`: points in the plane, and images."""

from .images import RANGE, SPLITS, Images, cifar10, digits
from .points import checkerboard

__all__ = ["RANGE", "SPLITS", "Images", "checkerboard", "cifar10", "digits"]
