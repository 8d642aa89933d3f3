"""How often does `ad.diagnose` flag a wrong score, and how often an exact one?

    python benchmarks/diagnostics.py --out benchmarks/results/diagnostics.json   # resumable
    python benchmarks/diagnostics.py --quick

Five systems whose score is known: Ornstein–Uhlenbeck out of equilibrium with a full matrix of noise, Langevin dynamics
towards a logistic law, three harmonic particles, a mixture of two Gaussians under VP diffusion, and an oscillator with
noise in its velocity alone. Exact scores should have no flags in 95 of 100 runs. Wrong ones are

- the exact score with one smooth mode added, `E‖δ‖²_Q = ε² E‖s‖²_Q` for ε = 3, 10 and 30 %: the relative squared error,
  which a report states, is .0009, .01 and .09;
- the exact score of another process: a drift that is wrong by 10 %, noise wrong by 10 %, a chain of a few Euler steps.

A run takes fresh states and new test fields. Nothing is trained. From 2,000 states on the rates are those of the level;
with 500 the laws of the sums have longer tails than is assumed.
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
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

import autodsm as ad
from autodsm.app.report import code
from autodsm.exact.gaussian import HarmonicParticles
from autodsm.paths.initial import initial_states
from autodsm.process.noise import apply_Q, noisy
from autodsm.targets import Kinetic
from autodsm.targets.pilot import Pilot
from autodsm.use.fresh import unbiased_target

SHARES = np.array([0.05, 0.1, 0.25, 0.5, 0.75, 1.0])
"""Of t1: times that a chain of twenty steps meets."""
STEPS = 20
"""Of the chain that is too coarse."""
WRONG = 1.1
"""Of a drift or a noise that is wrong by 10 %."""
MODES = (0.03, 0.1, 0.3)


class Case(NamedTuple):
    """A process with its exact score, and exact scores of others."""

    process: ad.Process
    y0: Any
    exact: Callable
    wrong: dict[str, Callable]
    kinetic: bool = False


class Mode(eqx.Module):
    """A score with a wave of one coordinate added, of a size given relative to it at all times."""

    score: Callable
    direction: Array
    mean: Array
    width: Array
    size: Array
    times: Array
    share: float

    @classmethod
    def of(cls, case: Case, share: float) -> "Mode":
        process, key = case.process, jax.random.key(99)
        times = process.t1 * np.concatenate([[1e-4, 1e-3, 0.01], SHARES])
        x = initial_states(case.y0, 4000, key=key)
        run = jax.vmap(lambda x, k: ad.simulate(process, x, jnp.asarray(times), key=k))
        y = jax.jit(run)(x, jax.random.split(key, len(x)))
        mask = jnp.broadcast_to(noisy(process, process.t1, x.shape[1:]), x.shape[1:]).reshape(-1)
        first = int(jnp.argmax(mask))
        direction = jnp.zeros(mask.shape).at[first].set(1.0).reshape(x.shape[1:])
        along = jnp.sum(y * direction, axis=tuple(range(2, y.ndim)))
        mean, width = along.mean(0), along.std(0)
        wave = jnp.mean(jnp.sin(1.3 * (along - mean) / width + 0.4) ** 2, axis=0)

        def norms(y, t):
            norm = lambda v: jnp.sum(v * apply_Q(process, t, v))  # noqa: E731
            return jnp.mean(jax.vmap(lambda y: norm(case.exact(y, t)))(y)), norm(direction)

        squares, own = jax.jit(jax.vmap(norms, (1, 0)))(y, jnp.asarray(times))
        return cls(case.exact, direction, mean, width, jnp.sqrt(squares / own / wave), jnp.asarray(times), share)

    def __call__(self, y, t):
        at = lambda table: jnp.interp(t, self.times, table).astype(y.dtype)  # noqa: E731
        z = (jnp.sum(y * self.direction) - at(self.mean)) / at(self.width)
        return self.score(y, t) + self.share * at(self.size) * jnp.sin(1.3 * z + 0.4) * self.direction


class GaussianTable(eqx.Module):
    """The score of Gaussians whose moments are known at some times, and linear in between."""

    times: Array
    mean: Array
    cov: Array

    @classmethod
    def euler(cls, process: ad.Process, mean: np.ndarray, cov: np.ndarray) -> "GaussianTable":
        """Those of Euler's steps of a linear process."""
        h, d, shape = process.t1 / STEPS, mean.size, mean.shape
        means, covs = [mean.reshape(-1).astype(float)], [cov.astype(float)]
        for t in h * np.arange(STEPS):
            slope = np.asarray(jax.jacfwd(lambda y, t=t: process.f(y, t))(jnp.zeros(shape)), float).reshape(d, d)
            step = np.eye(d) + h * slope
            noise = np.asarray(jax.vmap(lambda v: apply_Q(process, t, v))(jnp.eye(d).reshape(d, *shape)), float)  # noqa: B023
            means.append(step @ means[-1] + h * np.asarray(process.f(jnp.zeros(shape), t), float).reshape(-1))
            covs.append(step @ covs[-1] @ step.T + h * noise.reshape(d, d))
        return cls(*(jnp.asarray(np.array(v), float) for v in (h * np.arange(STEPS + 1), means, covs)))

    def __call__(self, y, t):
        place = jnp.clip(t / self.times[-1] * STEPS, 0.0, STEPS)
        left = jnp.clip(place.astype(int), 0, STEPS - 1)
        part = (place - left).astype(y.dtype)
        mean, cov = ((1 - part) * table[left] + part * table[left + 1] for table in (self.mean, self.cov))
        return -jnp.linalg.solve(cov, y.reshape(-1) - mean).reshape(y.shape).astype(y.dtype)


def linear(matrix, g, mean, cov, t1: float, *, kinetic: bool = False) -> Case:
    process = ad.linear(matrix, g, t1=t1)
    exact = lambda process: ad.reference.gaussian_marginals(process, mean, cov).score  # noqa: E731
    wrong = {
        "drift": exact(ad.linear(np.where(np.eye(len(matrix)), WRONG, 1.0) * matrix, g, t1=t1)),
        "noise": exact(ad.linear(matrix, WRONG * g, t1=t1)),
        "few steps": GaussianTable.euler(process, mean, cov),
    }
    law = dist.MultivariateNormal(jnp.asarray(mean), jnp.asarray(cov))
    return Case(process, law, exact(process), wrong, kinetic)


def ornstein_uhlenbeck() -> Case:
    A, g = np.array([[-1.0, 0.8], [-0.5, -0.7]]), np.array([[0.8, 0.0], [0.4, 0.6]])
    return linear(A, g, np.array([1.0, 0.0]), np.diag([0.3, 0.1]), 3.0)


def oscillator() -> Case:
    A, g = np.array([[0.0, 1.0], [-1.0, -0.5]]), np.array([[0.0], [0.7]])
    return linear(A, g, np.array([1.0, 0.0]), np.diag([0.2, 0.2]), 3.0, kinetic=True)


def particles() -> Case:
    system, n = ad.systems.harmonic_particles(3), 3
    mean = np.tile([2.0, 0.0], (n, 1))
    wrong = {
        "drift": HarmonicParticles(n, omega=WRONG * np.pi).score,
        "noise": HarmonicParticles(n, D=WRONG**2 * 0.25).score,
        "few steps": GaussianTable.euler(system.process, mean, 0.0625 * np.eye(2 * n)),
    }
    return Case(system.process, system.y0, HarmonicParticles(n).score, wrong)


class Mixture(eqx.Module):
    """Two Gaussians whose mean shrinks and whose variance grows as in a table over time."""

    times: Array
    factor: Array
    added: Array
    std: float = 0.4

    def __call__(self, y, t):
        at = lambda table: jnp.interp(t, self.times, table).astype(y.dtype)  # noqa: E731
        factor = at(self.factor)
        variance = factor**2 * self.std**2 + at(self.added)

        def log_density(y):
            off = jnp.stack([jnp.sum((y - factor * m) ** 2) for m in (jnp.array([1.5, 0.5]), jnp.array([-1.0, -0.5]))])
            return jax.nn.logsumexp(-0.5 * off / variance)

        return jax.grad(log_density)(y)


def mixture() -> Case:
    process = ad.vp(ad.LinearBeta(0.1, 10.0))
    times = np.concatenate([[0.0], np.geomspace(1e-5, 1.0, 4000)])
    beta, total = lambda t: 0.1 + 9.9 * t, 0.1 * times + 0.5 * 9.9 * times**2

    def known(drift: float = 1.0, noise: float = 1.0) -> Mixture:
        factor = np.exp(-0.5 * drift * total)
        added = noise**2 * (1.0 - factor**2) / drift
        return Mixture(jnp.asarray(times), jnp.asarray(factor), jnp.asarray(added))

    h, factor, added = 1.0 / STEPS, [1.0], [0.0]
    for t in h * np.arange(STEPS):
        factor.append((1.0 - 0.5 * h * beta(t)) * factor[-1])
        added.append((1.0 - 0.5 * h * beta(t)) ** 2 * added[-1] + h * beta(t))
    coarse = Mixture(jnp.asarray(h * np.arange(STEPS + 1.0)), jnp.asarray(factor), jnp.asarray(added))

    def y0(key, n):
        side, noise = jax.random.split(key)
        means = jnp.where(jax.random.bernoulli(side, 0.5, (n, 1)), jnp.array([1.5, 0.5]), jnp.array([-1.0, -0.5]))
        return means + 0.4 * jax.random.normal(noise, (n, 2))

    return Case(process, y0, known(), {"drift": known(WRONG), "noise": known(1.0, WRONG), "few steps": coarse})


class OnGrid(eqx.Module):
    """The score of a density on the line, linear in x and t."""

    x: Array
    score: Array

    def __call__(self, y, t):
        place = jnp.clip(t * STEPS, 0.0, STEPS)
        left = jnp.clip(place.astype(int), 0, STEPS - 1)
        part = place - left
        rows = (1 - part) * self.score[left] + part * self.score[left + 1]
        return jnp.interp(y, self.x, rows).astype(y.dtype)


def logistic() -> Case:
    prior, start = dist.Logistic(0.0, 1.0), lambda x: np.exp(-((x - 0.5) ** 2) / 0.32)
    process = ad.langevin(prior, ad.LinearBeta(0.5, 8.0))
    times = np.geomspace(1e-4, 1.0, 200)

    def known(process: ad.Process) -> Callable:
        return ad.products.solve_products(process, [1.0], [[start]], times, x_range=(-30.0, 30.0)).score_at

    x, h = np.linspace(-30.0, 30.0, 2401), 1.0 / STEPS
    q = start(x) / np.sum(start(x))
    scores = [-(x - 0.5) / 0.16]
    for t in h * np.arange(STEPS):
        rate = 0.5 + 7.5 * t
        mean, variance = x - h * rate * np.tanh(x / 2.0), 2.0 * h * rate
        weights = np.exp(-0.5 * (x[:, None] - mean) ** 2 / variance)
        total = np.maximum(weights @ q, 1e-300)
        scores.append(((weights * ((mean - x[:, None]) / variance)) @ q) / total)
        q = total / total.sum()
    coarse = OnGrid(jnp.asarray(x), jnp.asarray(np.array(scores)))
    wrong = {
        "drift": known(ad.Process(lambda y, t: WRONG * process.f(y, t), process.diffusion, 1.0)),
        "noise": known(ad.Process(process.drift, lambda t: WRONG * process.g(t), 1.0)),
        "few steps": coarse,
    }
    y0 = dist.Normal(jnp.array([0.5]), 0.4)
    return Case(process, y0, known(process), wrong)


CASES: dict[str, Callable[[], Case]] = {
    "Ornstein–Uhlenbeck": ornstein_uhlenbeck,
    "logistic": logistic,
    "particles": particles,
    "mixture": mixture,
    "oscillator": oscillator,
}


def scores_of(case: Case) -> dict[str, Callable]:
    modes = {f"mode {100 * share:.0f} %": Mode.of(case, share) for share in MODES}
    return {"exact": case.exact, **modes, **case.wrong}


def trial(case: Case, target, score: Callable, *, n: int, flow: bool, seed: int) -> dict:
    """What one report says."""
    options: dict = dict(times=case.process.t1 * SHARES, n=n, flow=flow, forward=target)
    report = ad.diagnose(case.process, score, case.y0, key=jax.random.key(seed), **options)
    errors = [[float(v) for v in look.error[:3]] for look in report.looks]
    return {"flags": list(report.flags), "verdict": report.verdict, "errors": errors, "p": report.p_values}


def summary(results: dict) -> Table:
    table = Table(title="flagged, of runs; in brackets the verdicts: consistent / cannot tell / inconsistent")
    names = list(next(iter(results.values())))
    for column in ("system", *names):
        table.add_column(column)
    for system, found in results.items():
        cells = []
        for name in names:
            runs = found.get(name, [])
            counts = [sum(r["verdict"] == v for r in runs) for v in ("consistent", "cannot tell", "inconsistent")]
            cells.append(f"{sum(bool(r['flags']) for r in runs)}/{len(runs)} ({'/'.join(map(str, counts))})")
        table.add_row(system, *cells)
    return table


def main(
    systems: tuple[str, ...] = tuple(CASES),
    exact: int = 100,
    wrong: int = 10,
    n: int = 2000,
    flow: bool = True,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Rates of false alarms and of detections.

    Args:
        systems: which of the systems.
        exact: runs of each exact score.
        wrong: runs of each wrong one.
        n: states at each time.
        flow: carry states by the flow of each score, which takes most of the time.
        quick: two runs of one system, to see that it works.
        out: a JSON file; runs that it has are not done again.
    """
    if quick:
        systems, exact, wrong, n, flow = systems[:1], 2, 1, 500, False
    console = Console(width=170)
    results: dict = {}
    if out is not None and out.exists():
        kept = json.loads(out.read_text())
        if (kept["n"], kept["flow"]) != (n, flow):
            has = f"n={kept['n']} and flow={kept['flow']}"
            raise ValueError(f"{out} has runs of {has}, not of n={n} and flow={flow}: give another file.")
        if kept["code"] != code():
            raise ValueError(f"{out} has runs of other code: give another file.")
        results = kept["systems"]
    about = {"n": n, "flow": flow, "code": code(), "times": SHARES.tolist()}
    for system in systems:
        case = CASES[system]()
        pilot = Pilot(case.process, case.y0, key=jax.random.key(0))
        target = unbiased_target(pilot)[0]
        if case.kinetic:  # what a process of its kind that is not linear has
            target = Kinetic(case.process, pilot.paths(), clock=pilot.clock).prepared(pilot)
        found = results.setdefault(system, {})
        scores = scores_of(case)
        for name in ("exact", "mode 30 %") if quick else scores:
            score = scores[name]
            runs = found.setdefault(name, [])
            for seed in range(len(runs), exact if name == "exact" else wrong):
                runs.append(trial(case, target, score, n=n, flow=flow, seed=seed))
                if out is not None:
                    out.write_text(json.dumps({**about, "systems": results}) + "\n")
            console.print(f"{system}, {name}: {sum(bool(r['flags']) for r in runs)} of {len(runs)} flagged")
    console.print(summary(results))


if __name__ == "__main__":
    tyro.cli(main)
