"""Where to look at a drift: how far states of a process lie apart, coordinate by coordinate, in any units; and what is
seen there."""

import jax
import numpy as np

from ..base.precision import double_precision
from .clock import Clock
from .process import Process

_PROBES = 64
"""Over two decades of distance, a pair of states for each factor of 1.16; and times of the drift, on average."""


def spread_of(process: Process, x: np.ndarray, rng: np.random.Generator, *, clock: Clock | None = None) -> np.ndarray:
    """How far states lie apart, for each coordinate: data and noise; where there is neither, the way the drift goes."""
    shape = x.shape[1:]
    totals = np.broadcast_to(np.asarray((clock or Clock(process)).totals_of(shape), float), shape)
    spread = x.std(axis=0) + np.sqrt(totals)
    states = x.mean(axis=0) + spread * rng.normal(size=(_PROBES, *shape))
    t = process.t1 * (np.arange(_PROBES) + 0.5) / _PROBES
    way = process.t1 * np.abs(np.asarray(jax.jit(jax.vmap(process.f))(states, t))).mean(axis=0)
    return np.where(spread > 0, spread, way)


def is_linear(process: Process, x: np.ndarray, *, clock: Clock | None = None) -> bool:
    """True when the drift is affine in the state: by its operations, at all times, and at midpoints of probe states.

    The second look is for operations that hide from differentiation, such as rounding or a derivative of one's own.
    """
    if not process.affine(x.shape[1:]):
        return False
    with double_precision():
        # From where the data lie to ten times as far as noise alone would carry them: a drift may bend only out there.
        reach = np.geomspace(0.1, 10.0, _PROBES // 2).reshape(-1, *(1 for _ in x.shape[1:]))
        rng = np.random.default_rng(0)
        reach = reach * spread_of(process, np.asarray(x, float), rng, clock=clock)
        a, b = (x[:1] + rng.normal(size=reach.shape) * reach for _ in range(2))
        f = jax.jit(jax.vmap(jax.vmap(process.f, in_axes=(None, 0)), in_axes=(0, None)))
        times = process.t1 * np.geomspace(1e-3, 1.0, 9)
        left, right, middle = (np.asarray(f(v, times)) for v in (a, b, 0.5 * (a + b)))  # (probes, times, *shape)
    bend, size = np.abs(left + right - 2.0 * middle), np.abs(left) + np.abs(right)
    # Each pair by itself, so that a far one does not hide how a near one bends; up to rounding of its largest term.
    rounding = 1e-9 * size.max(axis=tuple(range(1, size.ndim)), keepdims=True)
    return bool(np.all(bend <= 1e-5 * size + rounding))
