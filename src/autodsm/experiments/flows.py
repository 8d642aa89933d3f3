"""Systems whose score nobody knows: states carried by the flow of a learned score, against simulated paths.

`fit` with its defaults, 3,000 steps of 1,024 evaluations, from f, g and y_0 alone. At each time 4,096 states that the
probability flow carried are compared with as many simulated from other starts: KS is the largest Kolmogorov–Smirnov
distance of all coordinates' marginals, relative to the 95 % quantile that equal laws would have. On 16,384 more
simulated states, with mean m and covariance C, over coordinates that noise enters: Stein's identity,
`E[s (y − m)ᵀ] = −I`, as the largest singular value of the difference, in units in which C = I; and Cramér and Rao's
bound, `E[s sᵀ] ≥ C⁻¹`, as the least eigenvalue of the left side where the right is I. Of d coordinates and n states, an
exact Gaussian score is off by about 2 √(d/n) in the first, .02 for two coordinates and .1 for forty, and by twice as
much in the second.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import kstwobign

from ..base import plot
from ..learn.fit import fit
from ..process.clock import EARLIEST
from ..process.noise import noisy
from ..process.systems import System, fitzhugh_nagumo, lorenz96, mueller_brown, particles
from .shared.experiment import Experiment, Grid, Trials, curve, over_seeds, row_of, written
from .shared.learning import BATCH, carried, kept, simulated

SYSTEMS: dict[str, Callable[[], System]] = {
    "Müller–Brown": mueller_brown,
    "FitzHugh–Nagumo": fitzhugh_nagumo,
    "Lorenz-96, d = 20": lambda: lorenz96(20),
    "Lorenz-96, d = 40": lambda: lorenz96(40),
    "five particles": particles,
}
SHARES = np.array([0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
"""Of t1, at which states are compared."""
LEVEL = 0.05
"""At which equal laws are taken to differ, with all coordinates of a time together."""
KEPT = ("ks", "stein", "least", "lost", "seconds")


def trial(part: str, *, quick: bool, seed: int) -> dict:
    process, y0, _ = SYSTEMS[part]()
    steps, n, many = (64, 256, 512) if quick else (3_000, 4_096, 16_384)
    fit_key, start_key, path_key, look_key = jax.random.split(jax.random.key(seed), 4)
    times = process.t1 * SHARES
    options: dict = {"width": 32, "depth": 2} if quick else {}
    model = fit(process, y0, key=fit_key, steps=steps, batch_size=BATCH, progress=False, **options)
    first = EARLIEST * process.t1
    starts = simulated(process, y0, [first], n, key=start_key)[0]
    flown = carried(process, model.score, starts, np.concatenate([[first], times]))[1:]
    paths = simulated(process, y0, times, n, key=path_key)
    states = simulated(process, y0, times, many, key=look_key)
    left = kept(flown)
    score = jax.jit(jax.vmap(model.score, (0, None)))
    checks = [stein(process, y, np.asarray(score(jnp.asarray(y), t)), t) for y, t in zip(states, times, strict=True)]
    return {
        "times": times,
        "objective": type(getattr(model.objective, "target", model.objective)).__name__,
        "ks": [kolmogorov(a, b) for a, b in zip(left, paths, strict=True)],
        "stein": [off for off, _ in checks],
        "least": [least for _, least in checks],
        "lost": 1.0 - min(map(len, left)) / n,
        "seconds": steps / float(np.median([row["steps_per_s"] for row in model.history])),
    }


def kolmogorov(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance of the marginals of two samples, (n, *shape), over that of equal laws."""
    a, b = (y.reshape(len(y), -1) for y in (a, b))
    d = a.shape[1]
    if len(a) < len(b) / 2:
        return np.nan
    found = max(_distance(a[:, i], b[:, i]) for i in range(d))
    return float(found / (kstwobign.isf(LEVEL / d) * np.sqrt(1.0 / len(a) + 1.0 / len(b))))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two empirical distribution functions."""
    every = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(y), every, side="right") / len(y) for y in (a, b)]
    return float(np.max(np.abs(shares[0] - shares[1])))


def stein(process, y: np.ndarray, s: np.ndarray, t: float) -> tuple[float, float]:
    """How far Stein's matrix is from −I, and the least eigenvalue of Cramér and Rao's."""
    mask = np.broadcast_to(np.asarray(noisy(process, t, y.shape[1:])), y.shape[1:]).ravel() > 0
    y, s = (v.reshape(len(v), -1).astype(float) for v in (y, s))
    cov = np.cov(y.T)
    units = np.sqrt(np.diag(cov))
    precision = np.linalg.inv(cov / np.outer(units, units))[np.ix_(mask, mask)]
    # C⁻¹ of noisy coordinates, as L Lᵀ: L⁻¹ s has E[L⁻¹ s sᵀ L⁻ᵀ] ≥ I.
    turned = np.linalg.solve(np.linalg.cholesky(precision), (s * units)[:, mask].T)
    second = turned @ turned.T / len(s)
    # Against the linear part of the score that the covariance asks for, −C⁻¹ (y − m).
    wanted = np.linalg.solve(cov / np.outer(units, units), ((y - y.mean(0)) / units).T)[mask]
    wanted = np.linalg.solve(np.linalg.cholesky(precision), wanted)
    off = turned @ wanted.T / len(s) + np.eye(mask.sum())
    return float(np.linalg.norm(off, 2)), float(np.linalg.eigvalsh(second)[0])


def combine(trials: Trials) -> dict:
    return {
        name: {
            "times": each[0]["times"],
            "objective": each[0]["objective"],
            **{key: over_seeds([trial[key] for trial in each]) for key in KEPT},
        }
        for name, each in trials.items()
    }


_QUANTITIES = {
    "ks": "KS, over that of equal laws",
    "stein": "off Stein's identity",
    "least": "least eigenvalue of E[s sᵀ], C = I",
}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    quantities = {
        title: {name: curve(found[key]) for name, found in numbers.items()} for key, title in _QUANTITIES.items()
    }
    return {"flows": plot.over_time(SHARES, quantities)}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    columns = ["system (objective)", *(f"{share:g} t1" for share in SHARES), "seconds of training"]
    rows = {
        key: [
            [f"{name} ({found['objective']})", *row_of(found[key]), written(found["seconds"]["value"])]
            for name, found in numbers.items()
        ]
        for key in _QUANTITIES
    }
    return [Grid(title[0].upper() + title[1:], columns, rows[key]) for key, title in _QUANTITIES.items()]


EXPERIMENT = Experiment(
    trial, combine, figures, report, parts=tuple(SYSTEMS), quick_parts=("FitzHugh–Nagumo",), seeds=3
)
