"""A nonlinear diffusion towards a logistic prior, learned on the checkerboard, against its exact score.

Langevin dynamics with β from 0.1 to 10. The process acts on each coordinate alone, so the exact density and score are
known at all times (see `products`). `fit` trains with its defaults; samples are drawn by running time backwards, from
the prior to t = 0.01.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from rich.console import Console
from rich.table import Table

from .. import plot
from ..data import checkerboard
from ..estimate import over_samples
from ..fit import Model, fit
from ..metrics import relative_score_error
from ..priors import LinearBeta, langevin
from ..process import Process
from ..products import ProductMixture
from ..products import checkerboard as exact_checkerboard
from ..run import RunFolder
from ..sample import sample
from ..simulate import simulate

TIMES = (0.01, 0.03, 0.1, 0.2, 0.5, 1.0)


def problem() -> tuple[Process, dist.Distribution]:
    prior = dist.Logistic(0.0, 1.0)
    return langevin(prior, LinearBeta(0.1, 10.0)), prior


def score_errors(process: Process, exact: ProductMixture, score, *, n: int, key) -> tuple[np.ndarray, np.ndarray]:
    """`E|s_θ − s|² / E|s|²` at every time of the exact solution, and its standard error, over n simulated states."""
    start_key, path_key = jax.random.split(key)
    x = checkerboard(start_key, n)
    times = jnp.asarray(exact.times, float)
    paths = jax.jit(jax.vmap(lambda x, k: simulate(process, x, times, key=k, tol=1e-4)))
    states = paths(x, jax.random.split(path_key, n))

    found = []
    for index, t in enumerate(np.asarray(exact.times, float)):
        truth = over_samples(lambda y, index=index: exact.score(y, index), states[:, index])
        y = states[np.all(np.isfinite(truth), axis=1), index]  # about all: the others are beyond the grid
        found.append(relative_score_error(score, lambda y, t, index=index: exact.score(y, index), y, float(t)))
    return np.array([each.value for each in found]), np.array([each.stderr for each in found])


def run(folder: RunFolder, *, quick: bool = False, seed: int = 0) -> dict:
    console = Console()
    steps, n, shown = (300, 2_000, 2_000) if quick else (12_000, 20_000, 40_000)
    process, prior = problem()
    exact = exact_checkerboard(process, TIMES, **(dict(cells=2000, steps=20) if quick else {}))
    fit_key, error_key, sample_key, data_key = jax.random.split(jax.random.key(seed), 4)
    began = time.monotonic()
    model: Model = fit(process, checkerboard, prior=prior, key=fit_key, steps=steps)
    seconds = time.monotonic() - began
    rate = 1e3 / float(np.median([row["steps_per_s"] for row in model.history]))
    values, stderrs = score_errors(process, exact, model.score, n=n, key=error_key)

    table = Table(title=f"Relative score error E|s_θ − s|² / E|s|², after {steps} steps in {seconds:.0f} s")
    for t in TIMES:
        table.add_column(f"t = {t:g}", justify="right")
    table.add_column("ms a step", justify="right")
    table.add_row(*(f"{v:.4f} ± {e:.4f}" for v, e in zip(values, stderrs, strict=True)), f"{rate:.1f}")
    console.print(table)

    samples = sample(
        process, model.score, prior, shown, shape=(2,), t0=TIMES[0], steps=50 if quick else 200, key=sample_key
    )
    assert isinstance(samples, np.ndarray)
    axis = np.linspace(-3.0, 3.0, 61)
    centres = 0.5 * (axis[1:] + axis[:-1])
    lattice = jnp.asarray(np.stack(np.meshgrid(centres, centres, indexing="ij"), axis=-1))
    truth = np.asarray(jax.jit(jax.vmap(jax.vmap(lambda y: exact.density(y, 0))))(lattice))
    learned = np.histogram2d(*samples.T, bins=[axis, axis], density=True)[0]
    data = np.asarray(checkerboard(data_key, min(shown, 5_000)))
    history = np.array([[row["step"], row["loss"]] for row in model.history])
    figure = plot.generative_summary(axis, data, samples[: len(data)], np.nan_to_num(truth), learned, history)
    path = folder.save_figure("demo", figure)
    console.print(f"Figure: {path}", soft_wrap=True)
    return {
        "steps": steps,
        "seconds": seconds,
        "ms_per_step": rate,
        "times": list(TIMES),
        "relative_score_error": values.tolist(),
        "stderr": stderrs.tolist(),
    }
