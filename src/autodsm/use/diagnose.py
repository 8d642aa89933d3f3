"""Whether a score is any good, without an exact one: `diagnose` looks at it on fresh states of the process.

For the exact score s at states y_t, with v = f − ½ Q s and δ = s_θ − s:

| check                | what is known                                                                     |
|----------------------|-----------------------------------------------------------------------------------|
| error                | `E‖δ‖²_Q ≥ ‖P gᵀδ‖²`, P on test fields, zero for s: see `projections`             |
| Stein                | `E[s] = 0`, the full matrix `E[s (y − m)ᵀ] = −I`, waves `E[s·φ + ∇·φ] = 0`        |
| Cramér–Rao           | `E[s sᵀ] ≥ C⁻¹`: the smallest eigenvalue of `C^½ E[s sᵀ] C^½` is at least one     |
| balance              | `E[∇·v] = −E[v·s]`, the two forms of dS/dt                                        |
| flow                 | the flow of s_θ has the means, variances and MMD of simulated paths               |
| steady state         | `∇·v + v·s = 0` everywhere, if asked for                                          |
| another score        | `E[‖s_A‖²_Q − ‖s_B‖²_Q − 2 (s_A − s_B)ᵀQ ŝ]`, by how much the error of A is larger |

Of noise in some coordinates only, δ and v mean the part in these. The verdict is in `findings`, rates of entropy with
the score's own error are in `rates`.
"""

import math
from collections.abc import Callable

import jax
import numpy as np

from ..base.errors import as_double, check_count, check_flag, check_key, check_times, suggest_options
from ..base.estimate import Estimate, estimate
from ..base.types import PRNGKey
from ..paths.initial import as_start, initial_states
from ..process.process import Process, check_process
from ..targets import AbstractForward
from .carried import carry, compare
from .findings import INCONSISTENT, LEVEL, Look, Report
from .flow import check_score
from .fresh import Fresh, draw_fresh
from .projections import (
    FIELDS,
    OUTPUTS,
    Whitened,
    by_stein,
    by_target,
    functions_of,
    least_noise,
    orthonormal,
    squared_mean,
)
from .rates import rates_of
from .stein import cramer_rao, diagonal, noise_columns, scores_at, stein_matrix

SHARES = (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Of t1, where a score is looked at."""
STATES, CARRIED = 8000, 2000
"""At each time, and carried by the flow, at most: squared errors of a percent are then seen of most scores, and of a
thousandth at late times, variances of a flow to a tenth."""
FEWEST, FEW = 64, 16
"""States at each time, and for each test field, at least."""
SHORT, _SHORT_STATES = (0.1, 0.4, 1.0), 1000
POOR = 0.1
"""A relative squared error that is a failure: a third of the score. Default trainings end below a few hundredths."""
TOLERANCE = 0.02
"""Of `E‖s_θ − s‖²_Q/E‖s‖²_Q`: what default trainings of smooth systems reach."""
MATRIX = 32
"""Directions of the noise in the full Stein matrix; of more, so many random ones."""
_NUMBERS = 1 << 25  # in all states, at most


@suggest_options()
def diagnose(
    process: Process,
    score: Callable,
    y0,
    *,
    key: PRNGKey,
    times=None,
    n: int | None = None,
    tolerance: float = TOLERANCE,
    flow: bool = True,
    rates: bool = True,
    steady: bool = False,
    other: Callable | None = None,
    forward: AbstractForward | None = None,
) -> Report:
    """Look at a score on fresh states of its process, and say how large its error is as far as can be seen.

        report = diagnose(process, model.score, y0, key=key)
        print(report)                  # what was found, and a table
        report.verdict                 # "consistent", "inconsistent" or "cannot tell"

    **Arguments:**

    - `y0`: the start, as for `fit`.
    - `times`: where to look; by default six from t1/50 to t1.
    - `n`: states at each time (8,000; fewer if they are large).
    - `tolerance`: of the relative squared error; the verdict compares its interval with this.
    - `flow`: carry states by the probability flow, and compare them with paths.
    - `rates`: entropy rates with the score's own error in theirs. They derive the score.
    - `steady`: the process is in a steady state; look at `∇·v + v·s`.
    - `other`: a second score, such as one of a longer training; the difference of errors is estimated.
    - `forward`: how states, and targets without bias, are drawn; by default chosen, with paths finer than in training.
    """
    check_process(process)
    check_key(key)
    for name, flag in (("flow", flow), ("rates", rates), ("steady", steady)):
        check_flag(name, flag)
    if not tolerance > 0:
        raise ValueError(f"tolerance={tolerance} must be above 0: it is compared with E‖s_θ − s‖²/E‖s‖².")
    times = np.atleast_1d(as_double(process.t1 * np.array(SHARES) if times is None else times, "times"))
    check_times("times", times, process.t1)
    if times.ndim != 1 or not np.all(np.diff(times) > 0) or not times[0] > 0:
        raise ValueError(f"times={times} must increase, from above 0 to t1={process.t1:g} at most.")
    y0 = as_start(y0)
    draw_key, look_key, flow_key, compare_key = jax.random.split(key, 4)
    shape = initial_states(y0, 2, key=key).shape[1:]
    check_score(score, shape)
    if other is not None:
        check_score(other, shape)
    most = max(64, _NUMBERS // (len(times) * math.prod(shape)))
    n = min(STATES, most) if n is None else n
    check_count("n", n)
    if n < FEWEST:
        raise ValueError(f"n={n} is too few states to tell anything: take at least {FEWEST}.")
    fresh = draw_fresh(process, y0, times, n, key=draw_key, forward=forward)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(look_key)))
    looks, fields = [], []
    for i, t in enumerate(times):
        look, x = _look(process, score, other, fresh, i, float(t), rng, rates, key=jax.random.fold_in(look_key, i))
        looks.append(look)
        fields.append(x)
    pooled = squared_mean(_together(fields), level=LEVEL).p_value
    found = None
    if flow:
        carried = carry(process, score, y0, times, min(n // 2, CARRIED), key=flow_key)
        found = tuple(compare(times, carried, fresh.y, key=compare_key))
    return Report(tuple(looks), pooled, found, n, float(tolerance), steady, fresh.about)


def poor(process: Process, score: Callable, y0, forward: AbstractForward, *, key: PRNGKey) -> str | None:
    """A short look, for the end of a training: what to say of a score that surely is poor, or None.

    On states as in training, a thousand at each of three times, so that it takes no time beside a training: an error
    that is surely larger than `POOR` shows, paths with too few steps do not.
    """
    times = process.t1 * np.array(SHORT)
    options: dict = dict(n=_SHORT_STATES, tolerance=POOR, flow=False, rates=False, forward=forward)
    report = diagnose(process, score, y0, key=key, times=times, **options)
    return report.sentence if report.verdict == INCONSISTENT else None


def _together(fields: list[np.ndarray]) -> np.ndarray:
    """Numbers of all times, (n, L) each, beside each other; times of less noise weigh more."""
    noise = [np.sqrt(np.sum(np.cov(x.T) ** 2)) for x in fields]
    return np.concatenate([x / max(float(v), 1e-300) for x, v in zip(fields, noise, strict=True)], axis=1)


def _look(
    process: Process, score, other, fresh: Fresh, i: int, t: float, rng, rates: bool, *, key: PRNGKey
) -> tuple[Look, np.ndarray]:
    """What is seen at one time, and the numbers whose means are all zero for the exact score."""
    y = fresh.y[i]
    n, shape = len(y), y.shape[1:]
    flat, s = y.reshape(n, -1).astype(np.float64), scores_at(score, y, t)
    target = None if fresh.target is None else fresh.target[i].reshape(n, -1)
    white = Whitened.of(flat)

    g, sources = noise_columns(process, t, shape, rng, OUTPUTS)
    functions = functions_of(white, max(2, min(FIELDS, n // FEW) // len(g)), rng)
    stein = by_stein(functions, s @ g.T, g)
    x = stein
    if target is not None:
        pairs = by_target(functions, (s - target) @ g.T), stein
        x = least_noise(*(each.reshape(n, -1) for each in pairs)).reshape(stein.shape)
    x = orthonormal(functions, x)
    every = sources / len(g)  # of the directions of the noise
    size = squared_mean(x, level=LEVEL).scaled(1.0 / every)

    found = None
    squares = np.mean(np.sum((s @ g.T) ** 2, axis=1)) * every
    if rates and not fresh.jumps:
        found = rates_of(process, score, y, s, t, target, size, key=key)
        gain = found.gain
    elif target is not None:
        gain = np.mean(np.sum(((s - target) @ g.T) * (s @ g.T), axis=1)) * every
    else:
        gain = 0.0
    if gain != 0.0:
        squares = squares - 2.0 * gain + max(size.value, 0.0)  # of the exact score
    wide, _ = noise_columns(process, t, shape, rng, MATRIX)
    bound = np.sum(white.directions_of(wide) ** 2) * sources / len(wide)  # Cramér's and Rao's
    unit = float(max(squares, bound))
    first = 1 + functions.linear
    look = Look(
        t,
        size.scaled(unit),
        squared_mean(stein[:, 0], level=LEVEL).p_value,
        squared_mean(stein_matrix(white, s @ wide.T, wide, rng), level=LEVEL).p_value,
        squared_mean(stein[:, first:].reshape(n, -1), level=LEVEL).p_value,
        diagonal(flat, s, g if len(g) == sources else wide),
        cramer_rao(white, s @ wide.T, wide),
        found,
        _reaches_all(wide, sources),
        None if other is None else _difference(s, scores_at(other, y, t), target, wide, unit * len(wide) / sources),
    )
    return look, x / math.sqrt(unit)


def _reaches_all(g: np.ndarray, sources: int) -> bool:
    """Whether Q has an inverse, from rows of g; where there are too many, from their number."""
    if len(g) < sources:
        return sources >= g.shape[1]
    return bool(np.linalg.matrix_rank(g / np.maximum(np.linalg.norm(g, axis=0), 1e-300)) == g.shape[1])


def _difference(s: np.ndarray, other: np.ndarray, target, g: np.ndarray, unit: float) -> Estimate | None:
    """`E‖s_A − s‖²_Q − E‖s_B − s‖²_Q`, over the unit; needs a target."""
    if target is None:
        return None
    a, b, aim = s @ g.T, other @ g.T, target @ g.T
    return estimate(np.sum(a**2 - b**2 - 2.0 * (a - b) * aim, axis=1) / unit)
