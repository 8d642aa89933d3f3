"""How far is a trained score from what its network could learn? Every objective against the exact score as target.

    python benchmarks/oracle.py                                  # all systems, hours
    python benchmarks/oracle.py --systems ring --seeds 1 --steps 3000
    python benchmarks/oracle.py --quick --out oracle.json

For each system, at a few times t: noise over signal of the default target, `E|ŝ − s|²/E|s|²`; the error of a score,
`E|s_θ − s|²/E|s|²`, over coordinates that noise enters, of a training with the default objective, with the exact score
as target ("oracle"), and with implicit score matching by one probe, at equal steps and, with fewer steps, at equal
time. All have the network of `fit`. Where the score is that of an equilibrium, its law is given as samples, and once
more with its density ("known start").

Trainings of a seed follow each other; the milliseconds of a step are medians over rounds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import tyro
from rich.console import Console
from rich.table import Table
from scipy.stats import ortho_group

import autodsm as ad
from autodsm.learn.objective import DSM
from autodsm.paths.initial import initial_states
from autodsm.process.noise import noisy
from autodsm.targets import Oracle

STATES = 8192
"""Over which errors are averaged."""
TARGETS = 8192
"""Draws over which the noise of a target is."""


class Case(NamedTuple):
    """A process whose score is known at all times that training sees."""

    process: ad.Process
    y0: Any
    known: Any
    """The law of y0, with its density; None where it is not to be told apart."""
    score: Callable
    """`score(y, t)`, exact."""
    times: tuple[float, ...]
    options: dict
    """Of `fit`."""


class Equilibrium(eqx.Module):
    """Samples of `exp(−V)`, with that density."""

    samples: jax.Array
    energy: Callable = eqx.field(static=True)

    def sample(self, key, sample_shape=()):
        return self.samples[jax.random.randint(key, sample_shape, 0, len(self.samples))]

    def log_prob(self, y):
        return -self.energy(y)


def equilibrium(energy: Callable, d: int, *, n: int = 1 << 16, sweeps: int = 400, h: float = 0.02) -> Equilibrium:
    """By Metropolis-adjusted Langevin steps."""

    def move(key, y):
        noise_key, accept_key = jax.random.split(key)
        value, slope = jax.vmap(jax.value_and_grad(energy))(y)
        new = y - h * slope + jnp.sqrt(2.0 * h) * jax.random.normal(noise_key, y.shape)
        new_value, new_slope = jax.vmap(jax.value_and_grad(energy))(new)
        there, back = new - y + h * slope, y - new + h * new_slope
        log_ratio = value - new_value + (jnp.sum(there**2, 1) - jnp.sum(back**2, 1)) / (4.0 * h)
        accepted = jnp.log(jax.random.uniform(accept_key, (len(y),))) < log_ratio
        return jnp.where(accepted[:, None], new, y)

    first, steps = jax.random.split(jax.random.key(7))
    y = jax.random.normal(first, (n, d))
    y = jax.jit(lambda y: jax.lax.scan(lambda y, k: (move(k, y), None), y, jax.random.split(steps, sweeps))[0])(y)
    return Equilibrium(y, energy)


def ring() -> Case:
    """The φ⁴ ring of sixteen coordinates, in equilibrium: its score is −∇V at all times."""

    def energy(y):
        return jnp.sum(0.25 * y**4 - 0.5 * y**2 + 0.25 * (y - jnp.roll(y, 1)) ** 2)

    law = equilibrium(energy, 16)
    process = ad.Process(lambda y, t: -jax.grad(energy)(y), np.sqrt(2.0), 1.0)
    return Case(process, law.samples, law, lambda y, t: -jax.grad(energy)(y), (0.03, 0.1, 0.5, 1.0), {})


def rotated() -> Case:
    """Two double wells, out of equilibrium, seen in turned and sheared coordinates: g is a matrix."""
    matrix = jnp.asarray(np.array([[1.0, 0.6], [-0.3, 0.8]]))
    inverse, times = jnp.linalg.inv(matrix), np.geomspace(1e-3, 2.0, 160)
    wells = ad.Process(lambda z, t: z - z**3, 0.7, 2.0)
    parts = [lambda x, m=m: np.exp(-((x - m) ** 2) / 0.18) for m in (-0.5, 0.8)]
    exact = ad.products.solve_products(wells, [1.0], [parts], times, x_range=(-5.0, 5.0), cells=4000)
    process = ad.Process(lambda y, t: matrix @ wells.f(inverse @ y, t), 0.7 * matrix, 2.0)
    mean = matrix @ jnp.array([-0.5, 0.8])
    law = dist.MultivariateNormal(mean, 0.09 * matrix @ matrix.T)
    score = lambda y, t: inverse.T @ exact.score_at(inverse @ y, t)  # noqa: E731
    return Case(process, lambda key, n: law.sample(key, (n,)), law, score, (0.02, 0.1, 0.5, 1.0, 2.0), {})


def spiral() -> Case:
    """Three coordinates that turn and relax, each at its own rate: linear, so that the score is known."""
    turn = ortho_group.rvs(3, random_state=0)
    matrix = turn @ np.array([[-0.5, 3.0, 0.0], [-3.0, -0.5, 0.0], [0.0, 0.0, -2.0]]) @ turn.T
    process = ad.linear(jnp.asarray(matrix), jnp.array([1.0, 0.5, 0.8]), t1=2.0)
    mean, cov = np.array([1.0, -1.0, 0.5]), np.diag([0.1, 0.5, 0.2])
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    law = dist.MultivariateNormal(jnp.asarray(mean), jnp.asarray(cov))
    options = dict(objective=ad.PathwiseDSM(process))
    return Case(process, lambda key, n: law.sample(key, (n,)), law, exact.score, (0.02, 0.1, 0.5, 1.0, 2.0), options)


def checkerboard() -> Case:
    """Langevin dynamics towards the logistic law: an elementwise drift."""
    prior = dist.Logistic(0.0, 1.0)
    process = ad.langevin(prior)
    exact = ad.products.checkerboard(process, np.geomspace(1e-3, 1.0, 160), cells=4000)
    return Case(process, ad.data.checkerboard, None, exact.score_at, (0.01, 0.03, 0.1, 0.2, 0.5), dict(prior=prior))


class OnGrid(eqx.Module):
    """A score on a grid, at many times, and linear in log t between them."""

    grid: Any
    log_times: jax.Array

    def __call__(self, y, t):
        place = jnp.interp(jnp.log(t), self.log_times, jnp.arange(len(self.log_times)))
        left = jnp.clip(jnp.floor(place).astype(int), 0, len(self.log_times) - 2)
        part = (place - left).astype(y.dtype)
        low, high = self.grid.score_at(y, left), self.grid.score_at(y, left + 1)
        return ((1.0 - part) * low + part * high).astype(y.dtype)


def mueller_brown() -> Case:
    """Müller and Brown's potential (1979), a twentieth of it, at unit temperature."""
    A, a, b = (
        np.array([-200.0, -100.0, -170.0, 15.0]),
        np.array([-1.0, -1.0, -6.5, 0.7]),
        np.array([0.0, 0.0, 11.0, 0.6]),
    )
    c, X, Y = np.array([-10.0, -10.0, -6.5, 0.7]), np.array([1.0, 0.0, -0.5, -1.0]), np.array([0.0, 0.5, 1.5, 1.0])

    def energy(y):
        dx, dy = y[0] - X, y[1] - Y
        return 0.05 * jnp.sum(A * jnp.exp(a * dx**2 + b * dx * dy + c * dy**2))

    process = ad.Process(lambda y, t: -jax.grad(energy)(y), np.sqrt(2.0), 1.0)
    times = np.geomspace(1e-3, 1.0, 60)
    start = lambda x, y: np.exp(-((x - 0.6) ** 2 + (y - 0.05) ** 2) / 0.02)  # noqa: E731
    ranges = ((-2.6, 2.0), (-1.4, 2.8))
    grid = ad.fokker_planck_2d.solve_2d(process, start, times, ranges=ranges, cells=(320, 300), steps=400)
    law = dist.Normal(jnp.array([0.6, 0.05]), 0.1)
    score = OnGrid(grid, jnp.log(jnp.asarray(times)))
    return Case(process, lambda key, n: law.sample(key, (n,)), law, score, (0.03, 0.1, 0.3, 1.0), {})


def swimmer() -> Case:
    """Noise in the velocity alone; errors are of the velocity's part of the score."""
    system, times = ad.systems.swimmer(), np.geomspace(0.02, 5.0, 48)
    normal = lambda x, v: np.exp(-(x**2 + v**2) / 2)  # noqa: E731
    ranges = ((-4.8, 4.8), (-6.0, 6.0))
    grid = ad.fokker_planck_2d.solve_2d(system.process, normal, times, ranges=ranges, cells=(384, 300), steps=400)
    score = OnGrid(grid, jnp.log(jnp.asarray(times)))
    return Case(system.process, system.y0, None, score, (0.3, 1.0, 3.0, 5.0), {})


CASES: dict[str, Callable[[], Case]] = {
    "ring": ring,
    "rotated": rotated,
    "spiral": spiral,
    "checkerboard": checkerboard,
    "mueller-brown": mueller_brown,
    "swimmer": swimmer,
}


def states(case: Case, *, key) -> jax.Array:
    """Fresh states at the times of a case, (n, times, *shape)."""
    start_key, path_key = jax.random.split(key)
    x = initial_states(case.y0, STATES, key=start_key)
    paths = jax.vmap(lambda x, k: ad.simulate(case.process, x, jnp.asarray(case.times), key=k))
    return jax.jit(paths)(x, jax.random.split(path_key, STATES))


def relative(case: Case, found: np.ndarray, exact: np.ndarray) -> list[float]:
    """`E|found − exact|²/E|exact|²` at each time, over coordinates that noise enters; NaN of the exact is left out."""
    mask = np.broadcast_to(np.asarray(noisy(case.process, case.process.t1, exact.shape[2:])), exact.shape[2:])
    off, size = mask * (found - exact) ** 2, mask * exact**2
    axes = (0, *range(2, exact.ndim))
    good = np.isfinite(off) & np.isfinite(size)
    return (np.sum(np.where(good, off, 0), axes) / np.sum(np.where(good, size, 0), axes)).tolist()


def scores_at(score: Callable, y: jax.Array, times) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(lambda y: jax.vmap(score)(y, jnp.asarray(times, y.dtype))))(y), np.float64)


def noise_of(case: Case, objective: DSM, y0, *, key) -> list[float]:
    """Noise over signal of a target."""
    x_key, draw_key = jax.random.split(key)
    x = initial_states(y0, TARGETS, key=x_key)
    times = jnp.asarray(case.times, x.dtype)
    draw = jax.jit(jax.vmap(lambda x, k: objective.target.draw(x, times, key=k)))(
        x, jax.random.split(draw_key, TARGETS)
    )
    exact = np.asarray(jax.jit(jax.vmap(jax.vmap(case.score, (0, 0)), (0, None)))(draw.y[:, :, 0], times), np.float64)
    return relative(case, np.asarray(draw.score[:, :, 0], np.float64), exact)


def trial(case: Case, method: str, *, steps: int, seed: int, console: Console) -> dict:
    """One training: its errors, and the milliseconds of a step."""
    key = jax.random.key(seed)
    options = dict(case.options)
    y0 = case.known if method == "known start" else case.y0
    if method == "oracle":
        options["objective"] = DSM(case.process, Oracle(case.process, case.score))
    elif method.startswith("ISM"):
        options["objective"] = ad.ISM(case.process, divergence="hutchinson", probes=1)
    console.print(f"  {method}, seed {seed}, {steps} steps …")
    model = ad.fit(case.process, y0, key=key, steps=steps, progress=False, **options)
    y = states(case, key=jax.random.key(1000 + seed))
    errors = relative(case, scores_at(model.score, y, case.times), scores_at(case.score, y, case.times))
    rates = [row["steps_per_s"] for row in model.history]
    found = {"errors": errors, "ms": 1e3 / float(np.median(rates[1:] or rates)), "steps": steps}
    if method in ("default", "known start") and isinstance(model.objective, DSM):
        found["noise"] = noise_of(case, model.objective, y0, key=jax.random.key(2000 + seed))
    return found


def measure(case: Case, *, steps: int, seeds: int, console: Console) -> dict[str, list[dict]]:
    methods = ["default", *(["known start"] if case.known is not None else []), "oracle", "ISM"]
    found: dict[str, list[dict]] = {name: [] for name in [*methods, "ISM, equal time"]}
    for seed in range(seeds):
        for method in methods:
            found[method].append(trial(case, method, steps=steps, seed=seed, console=console))
        ratio = found["default"][-1]["ms"] / found["ISM"][-1]["ms"]
        fewer = max(1, round(steps * ratio))
        found["ISM, equal time"].append(trial(case, "ISM", steps=fewer, seed=seed, console=console))
    return found


def table(name: str, case: Case, found: dict[str, list[dict]]) -> Table:
    shown = Table(title=f"{name}: E|s_θ − s|²/E|s|², (multiple of the oracle's), [noise over signal of the target]")
    for column in ("training", *(f"t = {t:g}" for t in case.times), "ms a step"):
        shown.add_column(column, justify="left" if column == "training" else "right")
    limit = np.mean([each["errors"] for each in found["oracle"]], axis=0)
    for method, trials in found.items():
        errors = np.mean([each["errors"] for each in trials], axis=0)
        noise = np.mean([each["noise"] for each in trials], axis=0) if "noise" in trials[0] else [None] * len(errors)
        cells = [
            f"{error:.2g} ({error / least:.1f})" + (f" [{n:.2g}]" if n is not None else "")
            for error, least, n in zip(errors, limit, noise, strict=True)
        ]
        shown.add_row(method, *cells, f"{np.median([each['ms'] for each in trials]):.1f}")
    return shown


def main(
    systems: tuple[str, ...] = tuple(CASES), steps: int = 3000, seeds: int = 3, quick: bool = False, out: str = ""
) -> None:
    """Trained errors as multiples of those of training on the exact score.

    Args:
        systems: which of the systems.
        steps: of a training.
        seeds: trainings of each method.
        quick: a few steps only, to see that it runs.
        out: a JSON file for the numbers.
    """
    steps, seeds = (64, 1) if quick else (steps, seeds)
    console = Console(width=150)
    results = {}
    for name in systems:
        console.print(f"[bold]{name}")
        case = CASES[name]()
        results[name] = {"times": case.times, **measure(case, steps=steps, seeds=seeds, console=console)}
        console.print(table(name, case, {k: v for k, v in results[name].items() if k != "times"}))
        if out:
            Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
