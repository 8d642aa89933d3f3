"""Moments of y_t over time, from a pilot of simulated paths: means, deviations, and correlations of coordinates.

They give a network a frame in which its inputs are of order one at every t, and a Gaussian guess of the score to start
from: with the means m_t, the deviations s_t and the inverse W_t of the matrix of correlations,

    s(y, t) = −W_t z / s_t,    z = (y − m_t)/s_t.

The times are even in `½ t/t1 + ½ log(1 + t/τ)/log(1 + t1/τ)`, τ where the use of a score begins (`EARLIEST` of t1):
near t = 0 moments change over times in proportion to t. Between them means are cubics in t through four points;
logarithms of deviations, and W, are linear.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import jit_once
from ..base.precision import warn_if_rounded
from ..base.types import PRNGKey, State
from ..paths.initial import initial_states
from ..process.clock import EARLIEST
from ..process.process import Process
from . import AbstractForward
from .correlations import LARGEST, Full, LowRank, invert_correlations

POINTS = 97
"""A seventh of t from one to the next where they are even in log t, t1/55 at t1: a variance in proportion to tᵖ is then
right to 10⁻³ for p up to 3, and so is a product with W."""
FLOOR = 1e-3
"""Smallest deviation of a coordinate, as a share of its largest: one of zero has no inverse."""
ROUNDING = 16
"""Deviations below so many roundings of a coordinate's mean are taken for rounding."""
_HALVED = 4  # states, at least: correlations of one half are tried on the other
KEPT = 1 << 24
"""Numbers in all states that correlations are taken from, at most: 64 MB."""


def _place(share):
    """Where a time, as a share of t1, is from 0 to 1."""
    xp = np if isinstance(share, np.ndarray) else jnp
    return 0.5 * share + 0.5 * xp.log1p(share / EARLIEST) / math.log1p(1.0 / EARLIEST)


def _shares() -> np.ndarray:
    """The times, as shares of t1, by halving intervals."""
    low, high, wanted = np.zeros(POINTS), np.ones(POINTS), np.linspace(0.0, 1.0, POINTS)
    for _ in range(60):
        middle = 0.5 * (low + high)
        before = _place(middle) < wanted
        low, high = np.where(before, middle, low), np.where(before, high, middle)
    return np.concatenate([[0.0], high[1:-1], [1.0]])


SHARES = _shares()


class Marginals(eqx.Module):
    """`m_t`, `s_t` and, where they are known, inverse correlations, in tables over `SHARES` of t1.

    marginals = Marginals.estimate(process, y0, forward, key=key)
    marginals.score(y, t)
    """

    mean: Float[Array, "points ..."]
    std: Float[Array, "points ..."]
    t1: float = eqx.field(static=True)
    inverse: Full | LowRank | None = None
    """W; the identity where there is none."""

    @classmethod
    def estimate(cls, process: Process, y0, forward: AbstractForward, *, key: PRNGKey, n: int = 4096) -> "Marginals":
        """From n draws of `forward`; a deviation is no less than a thousandth of its coordinate's largest."""
        start_key, path_key = jax.random.split(key)
        x = initial_states(y0, n, key=start_key)
        if (problem := forward.covers(np.asarray(x))) is not None:
            raise ValueError(problem)
        times = jnp.asarray(process.t1 * np.maximum(SHARES, 1e-6)).astype(x.dtype)
        shape, d = x.shape[1:], math.prod(x.shape[1:])
        draw = jit_once(jax.vmap(lambda x, k: forward.states(x, times, key=k)), optimize=True)
        numbers = POINTS * d * process.structure_for(shape).rows  # kernels may hold matrices
        chunk = min(n, 1 << int(np.log2(max(1, (1 << 23) // max(1, numbers)))))  # divides n: one compilation
        kept, most = [], KEPT // (POINTS * max(1, d)) if 1 < d <= LARGEST else 0
        mean, squares, seen = np.zeros(()), np.zeros(()), 0  # squares are summed around the mean of what was seen
        for i, keys in _chunks(path_key, n, chunk):
            drawn = np.asarray(draw(x[i : i + chunk], keys))
            if seen < most:
                kept.append(drawn[: most - seen])
            states = drawn.astype(np.float64)
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
        std = np.maximum(std, FLOOR * largest)
        inverse = None
        if kept and seen >= _HALVED:
            states = np.concatenate(kept)
            inverse = invert_correlations(
                ((states[:, i] - mean[i]) / std[i]).reshape(len(states), d) for i in range(POINTS)
            )
        return cls(jnp.asarray(mean, float), jnp.asarray(std, float), process.t1, inverse)

    def between(self, table: Float[Array, "points ..."], t) -> State:
        """A table over the times, linear in their place between them."""
        left, part = self._find(t)
        return (1 - part) * table[left] + part * table[left + 1]

    def at(self, t) -> tuple[State, State]:
        """`(m_t, s_t)`."""
        left, part = self._find(t)
        # Chords of a curved mean would all lie on one side of it: a cubic through four points instead.
        start = jnp.clip(left - 1, 0, POINTS - 4)
        known = jax.lax.dynamic_slice_in_dim(jnp.asarray(SHARES, float), start, 4)
        share = self._share(t)
        apart = known[:, None] - known + jnp.eye(4)
        weights = jnp.prod(jnp.where(np.eye(4, dtype=bool), 1.0, (share - known) / apart), axis=1)
        mean = jnp.tensordot(weights, jax.lax.dynamic_slice_in_dim(self.mean, start, 4), 1)
        return mean, self.std[left] * (self.std[left + 1] / self.std[left]) ** part

    def _share(self, t) -> Array:
        return jnp.clip(jnp.asarray(t, float) / self.t1, 0.0, 1.0)

    def _find(self, t) -> tuple[Array, Array]:
        """The point before t, and which part of the way to the next one t has gone."""
        place = (POINTS - 1) * _place(self._share(t))
        left = jnp.clip(place.astype(int), 0, POINTS - 2)
        return left, jnp.clip(place - left, 0.0, 1.0)

    def score(self, y: State, t) -> State:
        """That of the Gaussian with these moments."""
        mean, std = self.at(t)
        z = (y - mean) / std
        if self.inverse is not None:
            z = self.inverse(*self._find(t), z.reshape(-1)).reshape(z.shape)
        return (-z / std).astype(y.dtype)

    def standardize(self, y: State, t) -> State:
        mean, std = self.at(t)
        return ((y - mean) / std).astype(y.dtype)

    def typical_states(self) -> np.ndarray:
        """States like those at all times, (n, *shape), with independent coordinates: four at every eighth time."""
        mean, std = (np.repeat(np.asarray(table[::8], float), 4, axis=0) for table in (self.mean, self.std))
        return mean + std * np.random.default_rng(0).normal(size=mean.shape)


def _chunks(key: PRNGKey, n: int, size: int):
    keys = jax.random.split(key, n)
    for i in range(0, n, size):
        yield i, keys[i : i + size]
