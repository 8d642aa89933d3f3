"""Which coordinates of an elementwise process follow the same scalar law, and where each law's table starts.

Two coordinates follow the same law when their drift and noise are equal at values of every scale that the data have,
and at many times where anything depends on time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..process.clock import Clock
from ..process.process import Process
from ..process.structure import expand_noise
from .spans import Span, even_span, span_of

MAX_LAWS = 64
"""Their tables take 0.2 to 3 GB, and as many solutions of a Fokker–Planck equation."""
_PROBED = 2048
"""Times at which drift and noise are compared, when they depend on time: what differs for less than this share of the
span may be missed."""
_PROBE_STARTS = 17  # of each scale of the data, where laws are compared
_SCALES = 8  # of the data at which laws are compared, where coordinates have different units


class Starts(NamedTuple):
    """Where tables start: in a range that was given, or where data are."""

    y_range: tuple[float, float] | None
    x: np.ndarray | None
    """(n, *shape)"""
    sampled: bool = False
    """Whether the law of the data may draw beyond them."""


class Laws(NamedTuple):
    """What `find_laws` found."""

    which: np.ndarray
    """(d,), the law that each coordinate follows"""
    separable: bool
    """Whether `f/g²` is the same at all times, and g² of all coordinates in proportion."""

    @property
    def count(self) -> int:
        return int(self.which.max()) + 1


def find_laws(process: Process, shape: tuple[int, ...], starts: Starts) -> Laws:
    """By drift and noise at the same values of every coordinate, at many times."""
    ys, rng = _probe_starts(starts), np.random.default_rng(0)
    steady = process.autonomous(shape) and process.constant_noise
    count = 1 if steady else _PROBED
    times = process.t1 * (np.arange(count) + rng.uniform(size=count)) / count

    def probe(y, t):  # drift and noise of every coordinate, (d,) each
        g = jnp.broadcast_to(expand_noise(process.g(t), shape), shape)
        return process.f(jnp.full(shape, y), t).ravel(), (g**2).ravel().astype(float)

    @jax.jit
    def at(t):  # (ys, d), (d,)
        f, q = jax.vmap(lambda y: probe(y, t))(ys)
        return f, q[0]

    def one(carry, given):
        sums, spread, largest, rising = carry
        t, weights = given  # random numbers, one for each of ys and one for the noise: equal laws have equal sums
        f, q = at(t)
        ratio = f / jnp.where(q > 0, q, jnp.nan)
        sums = sums + jnp.concatenate([weights[:-1, None] * f, weights[-1:, None] * q[None]])
        spread = jnp.maximum(spread, jnp.abs(ratio - first).max(axis=0))
        part = q / jnp.where(noise > 0, noise, 1.0)
        rising = jnp.maximum(rising, jnp.ptp(part) / jnp.maximum(part.max(), jnp.finfo(float).tiny))
        return (sums, spread, jnp.maximum(largest, jnp.abs(ratio).max(axis=0)), rising), None

    f, noise = at(times[0])
    first = f / jnp.where(noise > 0, noise, jnp.nan)
    zero = jnp.zeros(noise.shape)
    start = (jnp.zeros((len(ys) + 1, noise.size)), zero, zero, jnp.zeros(()))
    weights = 1.0 + rng.uniform(size=(count, len(ys) + 1))
    (sums, spread, largest, rising), _ = jax.jit(lambda: jax.lax.scan(one, start, (times, weights)))()
    same = np.all(np.asarray(spread) <= 1e-5 * np.asarray(largest))  # up to rounding of β(t) in single precision
    return Laws(_distinct(np.asarray(sums)), bool(same and rising <= 1e-5))


def _distinct(columns: np.ndarray) -> np.ndarray:
    """A number for each column, equal for columns that are equal to six digits in every entry, or to rounding: entries
    and columns may have different units."""
    d = columns.shape[1]
    forces = columns[:-1].reshape(-1, _PROBE_STARTS, d)  # of one scale each
    rounding = 1e-12 * np.abs(forces).max(axis=1, keepdims=True)
    forces = np.where(np.abs(forces) > rounding, forces, 0.0).reshape(-1, d)
    entries = np.concatenate([forces, columns[-1:]])
    size = np.log(np.abs(np.where(entries == 0, 1.0, entries)))
    return np.unique(np.concatenate([np.sign(entries), np.round(size, 6)]), axis=1, return_inverse=True)[1].ravel()


def _probe_starts(starts: Starts) -> np.ndarray:
    """Values of a coordinate at which laws are compared: at every scale that the data have."""
    if starts.y_range is not None:
        return np.linspace(*starts.y_range, _PROBE_STARTS)
    assert starts.x is not None
    x = np.asarray(starts.x, float).reshape(len(starts.x), -1)
    low, high = x.min(axis=0), x.max(axis=0)
    width = np.where(high > low, high - low, np.where(high != 0, np.abs(high), 1.0))
    scale = np.round(np.log2(width))
    scales = np.unique(scale)
    chosen = scales[np.unique(np.linspace(0, len(scales) - 1, _SCALES).round().astype(int))]
    pieces = []
    for one in chosen:
        like = scale == one
        margin = 0.5 * width[like].max()
        pieces.append(np.linspace(low[like].min() - margin, high[like].max() + margin, _PROBE_STARTS))
    return np.concatenate(pieces)


def spans_of(laws: Laws | None, starts: Starts, clock: Clock) -> tuple[Span, ...]:
    """Of the starts of each law."""
    if starts.y_range is not None:
        return (even_span(*starts.y_range),)
    assert laws is not None
    x = np.asarray(starts.x, float)
    noise = np.sqrt(np.broadcast_to(np.asarray(clock.totals_of(x.shape[1:]), float), x.shape[1:])).ravel()
    x = x.reshape(len(x), -1)
    return tuple(
        span_of(x[:, laws.which == k], sampled=starts.sampled, least=1e-3 * noise[laws.which == k].max())
        for k in range(min(laws.count, MAX_LAWS))
    )
