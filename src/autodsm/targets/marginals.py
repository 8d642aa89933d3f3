"""Mean and deviation of every coordinate of y_t over time, from a pilot of simulated paths.

They give a network a frame in which its inputs are of order one at every t, and a Gaussian guess of the score,
`−(y − m_t)/s_t²`, to start from.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import jit_once
from ..base.precision import warn_if_rounded
from ..base.types import PRNGKey, State
from ..paths.initial import initial_states
from ..process.process import Process
from . import AbstractForward

POINTS = 65
"""A cubic is off by `(3/128) (ω Δt)⁴` of a wave: by 6·10⁻⁴ for a mean with four periods in the time span."""
FLOOR = 1e-3
"""Smallest deviation of a coordinate, as a share of its largest: one of zero has no inverse."""
ROUNDING = 16
"""Deviations below so many roundings of a coordinate's mean are taken for rounding."""


class Marginals(eqx.Module):
    """`m_t` and `s_t` over a uniform grid of times: means between them by cubics through four, deviations linearly.

    marginals = Marginals.estimate(process, y0, forward, key=key)
    marginals.score(y, t)
    """

    mean: Float[Array, "points ..."]
    std: Float[Array, "points ..."]
    t1: float = eqx.field(static=True)

    @classmethod
    def estimate(cls, process: Process, y0, forward: AbstractForward, *, key: PRNGKey, n: int = 4096) -> "Marginals":
        """From n draws of `forward`; a deviation is no less than a thousandth of its coordinate's largest."""
        start_key, path_key = jax.random.split(key)
        x = initial_states(y0, n, key=start_key)
        if (problem := forward.covers(np.asarray(x))) is not None:
            raise ValueError(problem)
        times = jnp.linspace(0.0, process.t1, POINTS).at[0].set(1e-6 * process.t1).astype(x.dtype)
        shape = x.shape[1:]
        draw = jit_once(jax.vmap(lambda x, k: forward.states(x, times, key=k)), optimize=True)
        numbers = POINTS * int(np.prod(shape)) * process.structure_for(shape).rows  # kernels may hold matrices
        chunk = min(n, 1 << int(np.log2(max(1, (1 << 23) // max(1, numbers)))))  # divides n: one compilation
        mean, squares, seen = np.zeros(()), np.zeros(()), 0  # squares are summed around the mean of what was seen
        for i, keys in _chunks(path_key, n, chunk):
            states = np.asarray(draw(x[i : i + chunk], keys), np.float64)
            own = states.mean(axis=0)
            off = own - mean
            count = len(states)
            squares = squares + np.sum((states - own) ** 2, axis=0) + off**2 * (seen * count / (seen + count))
            mean = mean + off * (count / (seen + count))
            seen += count
        std = np.sqrt(squares / n)
        if not np.isfinite(std).all():
            raise ValueError("simulated states are not finite: paths leave the domain of the drift, or steps are few.")
        largest = std.max(axis=0)
        # A coordinate that is the same at all times, but for rounding, has its own size as its unit.
        size = np.abs(mean).max(axis=0)
        constant = largest <= ROUNDING * np.finfo(x.dtype).eps * size
        warn_if_rounded(mean, np.where(constant, 0.0, largest), x.dtype)
        largest = np.where(constant, np.where(size > 0, size, 1.0), largest)
        return cls(jnp.asarray(mean, float), jnp.asarray(np.maximum(std, FLOOR * largest), float), process.t1)

    def between(self, table: Float[Array, "points ..."], t) -> State:
        """A table over the times of the grid, linear between them."""
        place, left = self._place(t)
        p = place - left
        return (1 - p) * table[left] + p * table[left + 1]

    def at(self, t) -> tuple[State, State]:
        """`(m_t, s_t)`."""
        place, left = self._place(t)
        # Chords of a curved mean would all lie on one side of it: a cubic through four points instead.
        start = jnp.clip(left - 1, 0, POINTS - 4)
        a, b, c, d = place - start - jnp.arange(4.0)
        weights = jnp.stack([-b * c * d / 6, a * c * d / 2, -a * b * d / 2, a * b * c / 6])
        mean = jnp.tensordot(weights, jax.lax.dynamic_slice_in_dim(self.mean, start, 4), 1)
        return mean, self.between(self.std, t)

    def _place(self, t) -> tuple[Array, Array]:
        """Where t is on the grid, and the point before it."""
        place = jnp.clip(jnp.asarray(t, float) / self.t1 * (POINTS - 1), 0.0, POINTS - 1.0)
        return place, jnp.minimum(place.astype(int), POINTS - 2)

    def score(self, y: State, t) -> State:
        """That of the Gaussian with these moments."""
        mean, std = self.at(t)
        return ((mean - y) / std**2).astype(y.dtype)

    def standardize(self, y: State, t) -> State:
        mean, std = self.at(t)
        return ((y - mean) / std).astype(y.dtype)


def _chunks(key: PRNGKey, n: int, size: int):
    keys = jax.random.split(key, n)
    for i in range(0, n, size):
        yield i, keys[i : i + size]
