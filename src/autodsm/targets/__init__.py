"""Regression targets: ways to draw a state y_t and a vector whose mean given y_t is the score."""

from .adapted import Adapted
from .base import AbstractForward, AbstractTarget, Draw
from .kinetic import Kinetic
from .local import Local
from .oracle import Oracle
from .paths import Paths
from .tabulated import Tabulated

__all__ = ["AbstractForward", "AbstractTarget", "Adapted", "Draw", "Kinetic", "Local", "Oracle", "Paths", "Tabulated"]
