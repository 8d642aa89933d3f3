"""The flow of a score against simulated paths: the errors of a score that add up over time.

States at the start of training are carried forwards by the probability flow. Their law at t is compared with that of
fresh states of the process: means in units of the deviations, variances relative to themselves, and MMD² with its
noise floor. Coverage is the share of carried states outside of the box that the fresh ones span, where no training
could show the score what to do; of n states in d coordinates 2d/n is what chance gives.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.estimate import Estimate, chunk_for, over_samples
from ..base.types import PRNGKey
from ..paths.initial import initial_states
from ..paths.simulate import simulate
from ..process.clock import EARLIEST
from ..process.process import Process
from .flow import flow_with_density, lost
from .metrics import MMD, mmd2

TOL = 1e-4
"""Of the flow: its own error is then far below that of a thousand samples."""
MMD_STATES, PERMUTATIONS = 1000, 99
"""It sees what moments do not, and is shown beside its floor; it takes no part in flags, whose rates need more."""


class Carried(NamedTuple):
    """The flow and the paths at one time."""

    t: float
    mean: Estimate
    """The difference of the means of the coordinate where it is most certain, in deviations of the paths."""
    variance: Estimate
    """The same of variances, relative to that of the paths."""
    mmd: MMD
    outside: float
    """Share of the flow's states outside of the box of the paths' states."""
    p_value: float
    """How often chance gives differences of means and variances like these, over all coordinates."""


def carry(process: Process, score: Callable, y0, times: np.ndarray, n: int, *, key: PRNGKey) -> np.ndarray:
    """n states at each of the times, (times, n, *shape): simulated up to where training starts, then by the flow."""
    start_key, path_key = jax.random.split(key)
    x = initial_states(y0, n, key=start_key)
    start = min(EARLIEST * process.t1, 0.5 * float(times[0]))
    at = jnp.asarray([start, *times], x.dtype)
    chunk = chunk_for(16 * len(at) * math.prod(x.shape[1:]))
    found = over_samples(eqx.Partial(_carried, process, score, at), x, key=path_key, chunk=chunk)
    if not np.all(np.isfinite(found)):
        raise lost(process, score, x[:256], np.asarray(at))
    return np.moveaxis(found, 1, 0)[1:]


def compare(times: np.ndarray, carried: np.ndarray, fresh: np.ndarray, *, key: PRNGKey) -> list[Carried]:
    """States of the flow, (times, n, *shape), against fresh ones, (times, m, *shape)."""
    found = []
    for t, flow, paths, k in zip(times, carried, fresh, jax.random.split(key, len(times)), strict=True):
        found.append(_compared(float(t), flow.reshape(len(flow), -1), paths.reshape(len(paths), -1), k))
    return found


def _compared(t: float, flow: np.ndarray, paths: np.ndarray, key) -> Carried:
    from scipy.special import erfc

    flow, paths = flow.astype(np.float64), paths.astype(np.float64)
    scale = paths.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    a, b = (flow - paths.mean(axis=0)) / scale, (paths - paths.mean(axis=0)) / scale
    mean, mean_error = a.mean(axis=0), np.sqrt(a.var(axis=0) / len(a) + b.var(axis=0) / len(b))
    squares = [(z - z.mean(axis=0)) ** 2 for z in (a, b)]
    variance = squares[0].mean(axis=0) - squares[1].mean(axis=0)
    variance_error = np.sqrt(sum(s.var(axis=0) / len(s) for s in squares))
    z = np.abs(np.concatenate([mean / np.maximum(mean_error, 1e-300), variance / np.maximum(variance_error, 1e-300)]))
    i, j = int(np.argmax(z[: len(mean)])), int(np.argmax(z[len(mean) :]))
    outside = np.any((flow < paths.min(axis=0)) | (flow > paths.max(axis=0)), axis=1)
    return Carried(
        t,
        Estimate(float(mean[i]), float(mean_error[i])),
        Estimate(float(variance[j]), float(variance_error[j])),
        mmd2(a[:MMD_STATES], b[:MMD_STATES], key=key, permutations=PERMUTATIONS),
        float(outside.mean()),
        float(min(1.0, len(z) * erfc(z.max() / np.sqrt(2.0)))),
    )


def _carried(process: Process, score: Callable, at, y, key):
    y = simulate(process, y, at[:1], key=key)[0]
    return flow_with_density(process, score, y, at, tol=TOL, divergence=None).y
