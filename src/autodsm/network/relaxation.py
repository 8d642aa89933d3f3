"""A base that goes over to the score of the stationary law, with a gain over time that is learned:

    b(y, t) + c(t) (s*(y) − b(y, t)),    c linear in the features of time, zero before training.

Near equilibrium the score is s* but for a small difference, and so is the velocity `f − ½ Q s` of the probability flow
all that is left of two large terms. With c near 1 a network learns that difference, and not s*.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.types import State
from ..process.clock import Clock
from .base import Frozen
from .mlp import TIMES, TimeFeatures


class Relaxation(eqx.Module):
    """Of one base; `stationary(y)` is the score that it goes over to, and frozen."""

    stationary: Frozen
    features: TimeFeatures
    weights: Float[Array, " features"]

    def __init__(self, stationary: Callable, clock: Clock):
        self.stationary, self.features = Frozen(stationary), TimeFeatures(clock)
        self.weights = jnp.zeros(TIMES[self.features.time] + 1)

    def gain(self, t) -> Float[Array, ""]:
        """`c(t)`."""
        return self.weights[0] + self.features(t) @ self.weights[1:]

    def __call__(self, y: State, t, base: State) -> State:
        return base + self.gain(t).astype(y.dtype) * (self.stationary.value(y) - base)
