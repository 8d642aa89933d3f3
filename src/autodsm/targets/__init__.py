"""Regression targets: ways to draw a state y_t and a vector whose mean given y_t is the score."""

from .base import AbstractForward, AbstractTarget, Draw
from .kinetic import Kinetic
from .local import Local
from .paths import Paths
from .pathwise import Pathwise
from .tabulated import Tabulated

__all__ = ["AbstractForward", "AbstractTarget", "Draw", "Kinetic", "Local", "Paths", "Pathwise", "Tabulated"]
