"""Score networks: any callable pytree `net(y, t)` that returns an array of the shape of y, for one state and time."""

from .base import (
    ACTIVATIONS,
    NON_SMOOTH,
    PARAMETERIZATIONS,
    Frozen,
    Odd,
    Score,
    gamma_squared,
    non_smooth_activation,
    trainable,
)
from .framed import Framed
from .mlp import MLP, TIMES, TimeFeatures
from .particles import Equivariant
from .relaxation import Relaxation
from .shape import network_name, state_shape
from .unet import UNet

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "NON_SMOOTH",
    "PARAMETERIZATIONS",
    "TIMES",
    "Equivariant",
    "Framed",
    "Frozen",
    "Odd",
    "Relaxation",
    "Score",
    "TimeFeatures",
    "UNet",
    "gamma_squared",
    "network_name",
    "non_smooth_activation",
    "state_shape",
    "trainable",
]
