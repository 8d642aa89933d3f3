"""The chain along which sums are carried: steps in which drift and noise take turns, "Φ, then noise".

A step from a to b has a sixth of its noise at a, half of its drift, four sixths of the noise, the other half of the
drift, and a sixth of the noise at b (see `paths.schemes`). Noise at the end of a step and at the start of the next is
one kick. So a path is cut in the middles of its steps: a *piece* goes from the middle of one step to that of the next,
as drift, kick, drift, kick. A path to a time t leaves the chain in the middle of the step before, and ends with a
*branch*, a piece over a step that ends at t, with the drift and the kick of its second half.

Drift alone is followed to order three, by Kutta's method: a force that turns with time moves many coordinates together,
and a shift that is small against the deviation of each is not small against that of their mean. Small errors matter:
the flow of a learned score follows the true drift, and if the states that it was learned from follow another, the
difference adds up with time.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ..base.types import State
from ..paths.schemes import ENDS, MIDDLE, kutta
from ..process.noise import solve_Q
from ..process.process import Process


class Kick(NamedTuple):
    """The noise of a time h, as it is at t."""

    t: Array
    h: Array

    def noise(self, process: Process, xi: Array, shape: tuple[int, ...]) -> State:
        """`G ξ`."""
        return jnp.sqrt(self.h) * process.diffuse(self.t, xi, shape)

    def divided(self, process: Process, v: State) -> State:
        """`Q⁻¹ v`; of the noise itself that is `G⁻ᵀ ξ`."""
        return solve_Q(process, self.t, v) / self.h


class Piece(NamedTuple):
    """From the middle of the step before, of length `before` (0 for the first), over the step of length h from a."""

    before: Array
    a: Array
    h: Array

    @classmethod
    def along(cls, grid: Array) -> "Piece":
        """Those of all steps of a grid."""
        lengths = jnp.diff(grid)
        return cls(jnp.concatenate([jnp.zeros_like(lengths[:1]), lengths[:-1]]), grid[:-1], lengths)

    def drifts(self, process: Process) -> tuple[Callable[[State], State], ...]:
        """To the end of the step before; to the middle of this one; to its end."""
        before, half = 0.5 * self.before, 0.5 * self.h
        return (
            lambda y: kutta(process.f, y, self.a - before, before),
            lambda y: kutta(process.f, y, self.a, half),
            lambda y: kutta(process.f, y, self.a + half, half),
        )

    def kicks(self) -> tuple[Kick, Kick, Kick]:
        """Those that follow the drifts. The first is the noise at the end of the step before and at the start of this
        one, as it is at the mean of their middles: it is never asked for at t = 0, where it may vanish."""
        both, middle = self.before + self.h, self.a + 0.5 * self.h
        between = self.a + 0.5 * (self.h**2 - self.before**2) / both
        return Kick(between, ENDS * both), Kick(middle, MIDDLE * self.h), Kick(middle, ENDS * self.h)
