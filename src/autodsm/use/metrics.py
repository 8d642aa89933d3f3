"""How far two samples are apart, and how far a score is from the exact one; each number with its uncertainty.

    MMD² = E k(x, x') + E k(y, y') − 2 E k(x, y),   k(x, y) = Σ_b exp(−|x − y|²/2b²)
    SW_p = (E_u W_p(u·x, u·y)^p)^{1/p},             u uniform on the unit sphere

A distance between finite samples of one law is not zero. Its noise floor is the 95% quantile of the distance when the
samples are pooled and split again at random: from 19 such splits on, samples of one law exceed it in at most 5% of
cases.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.spatial.distance import pdist

from ..base.errors import as_double, as_floating, as_time, check_callable, check_count, check_key, check_positive
from ..base.estimate import Estimate, estimate, over_samples
from ..base.types import PRNGKey
from ..process.noise import apply_Q, squared
from ..process.process import Process, check_process

_SPREAD = (0.5, 1.0, 2.0)  # bandwidths, in units of the median distance
_MEDIAN_POINTS = 1000  # half a million distances; a bandwidth matters by its order of magnitude
_ROWS = 1024  # of the kernel matrix, held at once
_LEVEL = 0.95  # of a distance that samples of one law exceed by chance, one time in twenty


class MMD(NamedTuple):
    """`MMD²`, unbiased (it may be below zero), against what samples of one law give."""

    value: float
    floor: float
    """The 95% quantile for one law."""
    p_value: float
    """How often one law gives as much: (1 + permutations that do)/(1 + permutations)."""
    bandwidths: tuple[float, ...]


class Distance(NamedTuple):
    """A distance between samples, never below zero, against what samples of one law give."""

    value: float
    floor: float
    """The 95% quantile for one law."""


class Moments(NamedTuple):
    """Mean and unbiased variance of each coordinate, with standard errors; arrays of a state's shape."""

    mean: np.ndarray
    mean_stderr: np.ndarray
    variance: np.ndarray
    variance_stderr: np.ndarray


def mmd2(x, y, *, key: PRNGKey, bandwidth=None, permutations: int = 100) -> MMD:
    """Unbiased `MMD²` of samples x, (n, *shape), and y, (m, *shape), under a sum of Gaussian kernels.

        found = mmd2(x, y, key=key)
        found.value > found.floor, found.p_value

    `bandwidth` is a number b, or several; by default 1/2, 1 and 2 times the median distance in the pooled sample. The
    kernel matrix is computed once, a slab of rows at a time, for all permutations together.
    """
    check_key(key)
    check_count("permutations", permutations)
    pooled, n = _pool(x, y)
    m = len(pooled) - n
    median_key, split_key = jax.random.split(key)
    bandwidths = _median_bandwidths(pooled, median_key) if bandwidth is None else _given_bandwidths(bandwidth)

    labels = _splits(split_key, n, m, permutations).T.astype(float)
    unit = max(bandwidths)  # lengths in this unit neither overflow nor vanish in single precision
    rates = [0.5 * (unit / b) ** 2 for b in bandwidths]
    columns = np.concatenate([labels, np.ones((n + m, 1))], axis=1)
    sums = np.asarray(_kernel_times(*(jnp.asarray(v, float) for v in (pooled / unit, rates, columns))), float)
    to_x, to_all = sums[:, :-1], sums[:, -1]
    xx = np.sum(labels * to_x, axis=0)
    xy = to_all @ labels - xx
    yy = np.sum(to_all) - 2 * xy - xx
    values = xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / (n * m)
    p_value = float(np.mean(values >= values[0]))  # the given split counts as one of the permutations
    return MMD(float(values[0]), _floor(values[1:]), p_value, bandwidths)


def sliced_wasserstein(
    x, y, *, key: PRNGKey, projections: int = 128, order: int | float = 2, permutations: int = 20
) -> Distance:
    """Sliced Wasserstein distance of x, (n, *shape), and y, (m, *shape), over random directions.

        found = sliced_wasserstein(x, y, key=key)
        found.value > found.floor

    In the units of the data. A direction sees of a difference in the mean about 1/√d of its length.
    """
    check_key(key)
    check_count("projections", projections)
    check_count("permutations", permutations)
    check_positive("order", order)
    if order < 1:
        raise ValueError(f"order={order} must be at least 1: below, the root is not a distance.")
    pooled, n = _pool(x, y)
    m, d = len(pooled) - n, pooled.shape[1]
    direction_key, split_key = jax.random.split(key)
    u = np.asarray(jax.random.normal(direction_key, (projections, d)), float)
    along = (u / np.linalg.norm(u, axis=1, keepdims=True)) @ pooled.T
    ranks = np.argsort(along, axis=1)
    along = np.take_along_axis(along, ranks, axis=1)

    # Both quantile functions are constant between these levels, in units of 1/nm, whatever the samples.
    levels = np.union1d(m * np.arange(n + 1), n * np.arange(m + 1))
    weights, in_x, in_y = np.diff(levels) / (n * m), levels[:-1] // m, levels[:-1] // n

    def distance(is_x: np.ndarray) -> float:
        is_x = is_x[ranks]  # n of them in each row, so that what is taken from sorted rows stays sorted
        gaps = along[is_x].reshape(-1, n)[:, in_x] - along[~is_x].reshape(-1, m)[:, in_y]
        return float(np.mean(np.abs(gaps) ** order @ weights) ** (1 / order))

    values = [distance(is_x) for is_x in _splits(split_key, n, m, permutations)]
    return Distance(values[0], _floor(np.array(values[1:])))


def moments(x) -> Moments:
    """Mean and variance of each coordinate over the first axis of x, (n, *shape).

        found = moments(x)
        (found.variance - exact) / found.variance_stderr

    The standard error of the variance comes from the fourth moment, and takes n well above the kurtosis.
    """
    x = as_double(x, "x")
    flat = _flat("x", x)
    n, shape = len(flat), np.shape(x)[1:]
    mean, variance = np.mean(flat, axis=0), np.var(flat, axis=0, ddof=1)
    fourth = np.mean((flat - mean) ** 4, axis=0)
    of_variance = np.sqrt((fourth - variance**2 * (n - 3) / (n - 1)) / n)
    return Moments(*(v.reshape(shape) for v in (mean, np.sqrt(variance / n), variance, of_variance)))


def relative_score_error(score: Callable, exact: Callable, y, t) -> Estimate:
    """`E|s − s*|² / E|s*|²` over the first axis of y, (n, *shape); score(y, t) and exact(y, t) take one state.

        relative_score_error(score, exact, y, 0.5)

    A score that returns zero has error 1. NaN when `score` is not finite at some state.
    """
    s, s_exact = _scores(score, exact, y, t)
    if not np.any(s_exact):
        raise ValueError("exact is zero at all states of y, and no error is relative to that; use fisher_divergence.")
    return _relative(s - s_exact, s_exact)


def relative_velocity_error(process: Process, score: Callable, exact: Callable, y, t) -> Estimate:
    """`E|v − v*|² / E|v*|²`, `v = f − ½ Q s`, over the first axis of y: the error of what carries the probability.

        relative_velocity_error(process, score, exact, y, 0.5)

    Near equilibrium v is the small difference of two large terms, and a small error of the score a large one of v.
    """
    check_process(process)
    s, s_exact = _scores(score, exact, y, t)
    at = as_time(t)
    pushed = eqx.Partial(_pushed, process, at)
    v_exact = over_samples(eqx.Partial(_drift, process, at), as_floating(y, "y")) - over_samples(pushed, s_exact)
    if not np.any(v_exact):
        raise ValueError(
            "the exact velocity is zero at all states of y, as in equilibrium: no error is relative to it."
        )
    return _relative(over_samples(pushed, s - s_exact), v_exact)


def _relative(off: np.ndarray, exact: np.ndarray) -> Estimate:
    """`E|off|²/E|exact|²`; NaN where `off` is not finite at some state."""
    off, exact = (v.reshape(len(v), -1).astype(float) for v in (off, exact))
    size = np.sum(exact**2, axis=1)
    error = np.where(np.all(np.isfinite(off), axis=1), np.sum(off**2, axis=1), np.nan)
    ratio = np.mean(error) / np.mean(size)
    stderr = estimate(error - ratio * size).stderr / np.mean(size)  # of a ratio of means, to first order
    return Estimate(float(ratio), float(stderr))


def fisher_divergence(process: Process, score: Callable, exact: Callable, y, t) -> Estimate:
    """`½ E‖s − s*‖²_Q`, `Q = g gᵀ`, over the first axis of y: the rate at which a wrong score adds to a KL bound.

        fisher_divergence(process, score, exact, y, 0.5)

    NaN when `score` is not finite at some state.
    """
    check_process(process)
    s, s_exact = _scores(score, exact, y, t)
    halves = 0.5 * over_samples(lambda v: squared(process, t, v), s - s_exact)
    return estimate(np.where(np.isfinite(halves), halves, np.nan))


@jax.jit
def _kernel_times(
    z: Float[Array, "points d"], rates: Float[Array, " kernels"], columns: Float[Array, "points columns"]
) -> Float[Array, "points columns"]:
    """`K columns`, where `K_ij = Σ_r exp(−r |z_i − z_j|²)` off the diagonal, which is zero."""
    points = jnp.arange(len(z))
    norms = jnp.sum(z**2, axis=1)

    def row(i):
        distances = jnp.maximum(norms + norms[i] - 2 * jnp.matmul(z, z[i], precision="highest"), 0.0)
        k = sum(jnp.exp(-rate * distances) for rate in rates)
        return jnp.matmul(jnp.where(points == i, 0.0, k), columns, precision="highest")

    return jax.lax.map(row, points, batch_size=_ROWS)


def _splits(key: PRNGKey, n: int, m: int, permutations: int) -> np.ndarray:
    """Which of the pooled samples count as x, (1 + permutations, n + m): as given, then at random."""
    given = np.arange(n + m)
    return np.concatenate([given[None], _shuffles(key, permutations, n + m)]) < n


def _shuffles(key: PRNGKey, rows: int, n: int) -> np.ndarray:
    """Random orders of 0 … n−1, one in each row; jax.random.permutation would compile for seconds at each new n."""
    return np.argsort(np.asarray(jax.random.bits(key, (rows, n), "uint32")), axis=1)


def _floor(values: np.ndarray) -> float:
    return float(np.quantile(values, _LEVEL, method="higher"))


def _flat(name: str, x) -> np.ndarray:
    """Samples as finite rows (n, d) in double precision."""
    x = as_double(x, name)
    if x.ndim == 0 or len(x) < 2:
        raise ValueError(f"{name} has shape {x.shape}; give at least 2 samples, along the first axis.")
    flat = x.reshape(len(x), -1)
    bad = int(np.sum(~np.all(np.isfinite(flat), axis=1)))
    if bad:
        raise ValueError(f"{name} is not finite in {bad} of {len(x)} samples; drop those first.")
    return flat


def _pool(x, y) -> tuple[np.ndarray, int]:
    """Rows of x, then of y, about their common mean; and how many are x's."""
    x, y = as_double(x, "x"), as_double(y, "y")
    if np.shape(x)[1:] != np.shape(y)[1:]:
        raise ValueError(
            f"x has states of shape {np.shape(x)[1:]} and y of shape {np.shape(y)[1:]}; they must be the same."
        )
    x, y = _flat("x", x), _flat("y", y)
    pooled = np.concatenate([x, y])
    return pooled - np.mean(pooled, axis=0), len(x)


def _given_bandwidths(bandwidth) -> tuple[float, ...]:
    values = np.ravel(as_double(bandwidth, "bandwidth"))
    if values.size == 0 or not np.all((values > 0) & np.isfinite(values)):
        raise ValueError(f"bandwidth={bandwidth} must be a finite number above zero, or several.")
    return tuple(float(b) for b in values)


def _median_bandwidths(pooled: np.ndarray, key: PRNGKey) -> tuple[float, ...]:
    few = _shuffles(key, 1, len(pooled))[0, :_MEDIAN_POINTS]
    median = float(np.median(pdist(pooled[few])))
    if not median > 0:
        raise ValueError("bandwidth=None takes the median distance, which is zero: most samples are equal. Give one.")
    return tuple(b * median for b in _SPREAD)


def _drift(process: Process, t, y):
    return process.f(y, t)


def _pushed(process: Process, t, s):
    """`½ Q s`."""
    return 0.5 * apply_Q(process, t, s)


def _both(score: Callable, exact: Callable, t, y):
    return score(y, t), exact(y, t)


def _scores(score: Callable, exact: Callable, y, t) -> tuple[np.ndarray, np.ndarray]:
    """Both scores at all states of y, (n, *shape)."""
    t = as_time(t)
    for name, function in (("score", score), ("exact", exact)):
        check_callable(name, function, f"{name}(y, t)")
    _flat("y", y)
    y = as_floating(y, "y")
    s, s_exact = over_samples(eqx.Partial(_both, score, exact, t.astype(y.dtype)), y)
    for name, value in (("score", s), ("exact", s_exact)):
        if value.shape != y.shape:
            shapes = f"shape {value.shape[1:]} for a state of shape {y.shape[1:]}"
            raise ValueError(f"{name} returned {shapes}; it is called with ONE state and returns the state's shape.")
    bad = int(np.sum(~np.all(np.isfinite(s_exact.reshape(len(y), -1)), axis=1)))
    if bad:
        raise ValueError(f"exact is not finite at {bad} of {len(y)} states of y; drop those first.")
    return s, s_exact
