"""A nonlinear diffusion towards a logistic prior, learned on the checkerboard, against its exact score.

Langevin dynamics with β from 0.1 to 10. The process acts on each coordinate alone, so the exact density and score are
known at all times (see `products`). `fit` trains with its defaults; samples are drawn by running time backwards, from
the prior to t = 0.01.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from ..base.estimate import over_samples
from ..data import checkerboard
from ..exact.products import ProductMixture
from ..exact.products import checkerboard as exact_checkerboard
from ..learn.fit import fit
from ..learn.model import Model
from ..paths.simulate import simulate
from ..process.process import Process
from ..use.metrics import relative_score_error
from ..use.sample import sample
from .shared.experiment import Experiment, Grid, Trials, over_seeds, row_of, written
from .shared.learning import ExactScore, logistic_langevin

TIMES = (0.01, 0.03, 0.1, 0.2, 0.5, 1.0)
EDGES = np.linspace(-3.0, 3.0, 61)


def score_errors(process: Process, exact: ProductMixture, score, *, n: int, key) -> tuple[np.ndarray, np.ndarray]:
    """`E|s_θ − s|² / E|s|²` at every time of the exact solution, and its standard error, over n simulated states."""
    start_key, path_key = jax.random.split(key)
    x = checkerboard(start_key, n)
    times = jnp.asarray(exact.times, float)
    paths = jax.jit(jax.vmap(lambda x, k: simulate(process, x, times, key=k, tol=1e-4)))
    states = paths(x, jax.random.split(path_key, n))

    found = []
    for index, t in enumerate(np.asarray(exact.times, float)):
        truth = ExactScore(exact, jnp.asarray(index))
        known = np.all(np.isfinite(over_samples(truth, states[:, index])), axis=1)
        y = states[known, index]  # about all: the others are beyond the grid
        found.append(relative_score_error(score, truth, y, float(t)))
    return np.array([each.value for each in found]), np.array([each.stderr for each in found])


def trial(part: str, *, quick: bool, seed: int) -> dict:
    steps, n, shown = (300, 2_000, 2_000) if quick else (8_000, 20_000, 40_000)
    process, prior = logistic_langevin()
    exact = exact_checkerboard(process, TIMES, **(dict(cells=2000, steps=20) if quick else {}))
    fit_key, error_key, sample_key, data_key = jax.random.split(jax.random.key(seed), 4)
    began = time.monotonic()
    model: Model = fit(process, checkerboard, prior=prior, key=fit_key, steps=steps)
    seconds = time.monotonic() - began
    values, stderrs = score_errors(process, exact, model.score, n=n, key=error_key)
    samples = sample(
        process, model.score, prior, shown, shape=(2,), t0=TIMES[0], steps=50 if quick else 200, key=sample_key
    )
    assert isinstance(samples, np.ndarray)
    centres = 0.5 * (EDGES[1:] + EDGES[:-1])
    lattice = jnp.asarray(np.stack(np.meshgrid(centres, centres, indexing="ij"), axis=-1))
    truth = jax.jit(jax.vmap(jax.vmap(lambda y: exact.density(y, 0))))(lattice)
    few = min(shown, 5_000)
    return {
        "steps": steps,
        "seconds": seconds,
        "ms_per_step": 1e3 / float(np.median([row["steps_per_s"] for row in model.history])),
        "relative_score_error": values,
        "stderr": stderrs,
        "data": np.asarray(checkerboard(data_key, few)).round(4),
        "samples": samples[:few].round(4),
        "truth": np.nan_to_num(np.asarray(truth)).round(6),
        "learned": np.histogram2d(*samples.T, bins=[EDGES, EDGES], density=True)[0].round(6),
        "history": [[row["step"], row["loss"]] for row in model.history],
    }


def combine(trials: Trials) -> dict:
    found = trials["all"]
    numbers = {name: over_seeds([each[name] for each in found]) for name in ("seconds", "ms_per_step")}
    errors = over_seeds([each["relative_score_error"] for each in found])
    if len(found) == 1:
        errors["stderr"] = found[0]["stderr"]  # over the states
    return {"steps": found[0]["steps"], "times": list(TIMES), "relative_score_error": errors, **numbers}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    first = trials["all"][0]
    names = ("data", "samples", "truth", "learned", "history")
    return {"demo": plot.generative_summary(EDGES, *(np.asarray(first[name], float) for name in names))}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    title = f"Relative score error E|s_θ − s|² / E|s|², after {numbers['steps']} steps, in all "
    title += f"{numbers['seconds']['value']:.0f} s with compilation (errors of a single seed are over states)"
    columns = [*(f"t = {t:g}" for t in numbers["times"]), "ms a step"]
    return [
        Grid(title, columns, [[*row_of(numbers["relative_score_error"]), written(numbers["ms_per_step"]["value"])]])
    ]


EXPERIMENT = Experiment(trial, combine, figures, report)
