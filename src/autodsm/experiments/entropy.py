"""Entropy and its production, from learned scores: fifty harmonic particles and the swimmer, against exact curves.

The particles (Boffi & Vanden-Eijnden, 2023) are dragged by a rotating trap; their law is Gaussian, in a hundred
dimensions, and all rates are known. The swimmer has no noise in x: of its rates only that of the system's entropy
exists, and its exact curve is that of the Fokker–Planck equation on a grid. Both scores are trained by `fit` with
nothing but process and initial states given. Entropies are `−E[log q]` along the probability flow, rates are averages
over other, simulated states. With three seeds one of twenty deviations is beyond 4.3 standard errors.
"""

import jax
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from ..base.estimate import Estimate
from ..exact.gaussian import HarmonicParticles
from ..exact.gaussian import harmonic_particles as harmonic_moments
from ..learn.fit import fit
from ..process.clock import EARLIEST
from ..process.systems import System, harmonic_particles
from ..process.systems import swimmer as make_swimmer
from ..use.observables import entropy, entropy_production, entropy_rate, log_density
from .shared.experiment import Experiment, Grid, Trials, curve, over_seeds, row_of, written
from .shared.learning import simulated
from .swimmer import density_on_grid, places

TIMES = np.array([0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0])
PARTS = ("harmonic particles", "swimmer")


def trial(part: str, *, quick: bool, seed: int) -> dict:
    fit_key, start_key, state_key, probe_key = jax.random.split(jax.random.key(seed), 4)
    harmonic = part == "harmonic particles"
    system = harmonic_particles(10 if quick else 50) if harmonic else make_swimmer()
    steps, n = (128, 200) if quick else (5_000, 2_000)
    score = fit(system.process, system.y0, key=fit_key, steps=steps).score
    found = _entropies(system, score, n=n, key=start_key, probe_key=probe_key, harmonic=harmonic)
    states = simulated(*system[:2], TIMES, n, key=state_key, steps=16)
    rates = [_rates(system, score, y, float(t), harmonic) for y, t in zip(states, TIMES, strict=True)]
    found |= {name: _split([rate[name] for rate in rates]) for name in rates[0]}
    return {"steps": steps, "samples": n, "learned": found, "exact": _exact(system, quick, harmonic)}


def _split(estimates: list[Estimate]) -> dict:
    return {"value": [e.value for e in estimates], "stderr": [e.stderr for e in estimates]}


def _start(system: System, n: int, *, key, harmonic: bool):
    """States at the earliest time, where learned scores begin, with their log-densities."""
    earliest = EARLIEST * system.process.t1
    if harmonic:
        exact = HarmonicParticles(system.shape[0])
        ys = exact.sample(key, n, earliest)
        return ys, jax.vmap(lambda y: exact.log_density(y, earliest))(ys)
    # The swimmer starts from a normal law; over so short a time its score is that of the start.
    ys = system.y0(key, n)
    first = -0.5 * np.sum(np.asarray(ys) ** 2, axis=1) - np.log(2 * np.pi)
    found = log_density(system.process, lambda y, t: -y, ys, first, [0.0, earliest])
    return found.y[-1], found.log_density[-1]


def _entropies(system: System, score, *, n: int, key, probe_key, harmonic: bool) -> dict:
    times = np.concatenate([[EARLIEST * system.process.t1], TIMES])
    starts, first = _start(system, n, key=key, harmonic=harmonic)
    options: dict = dict(divergence="hutchinson", key=probe_key) if harmonic else {}
    found = log_density(system.process, score, starts, first, times, tol=1e-4, chunk=500, **options)
    return {"entropy": _split([entropy(each) for each in found.log_density[1:]])}


def _rates(system: System, score, ys, t: float, harmonic: bool) -> dict[str, Estimate]:
    if not harmonic:
        return {"system": entropy_rate(system.process, score, ys, t)}
    return entropy_production(system.process, score, ys, t)._asdict()


def _exact(system: System, quick: bool, harmonic: bool) -> dict:
    if harmonic:
        n = system.shape[0]
        values = [harmonic_moments(float(t)).entropy(n) for t in TIMES]
        rates = np.array([HarmonicParticles(n).production(t) for t in TIMES])
        return {"entropy": values, "system": rates[:, 0], "total": rates[:, 1], "medium": rates[:, 1] - rates[:, 0]}
    grid = density_on_grid(system, quick=quick)
    values, at = grid.entropy(), places(grid, TIMES)
    return {"entropy": values[at], "system": np.gradient(values, grid.times, edge_order=2)[at]}


def combine(trials: Trials) -> dict:
    found = {}
    for part, each in trials.items():
        learned = {name: over_seeds([t["learned"][name]["value"] for t in each]) for name in each[0]["learned"]}
        if len(each) == 1:
            learned = each[0]["learned"]  # errors over samples
        about = {name: each[0][name] for name in ("steps", "samples")}
        found[part] = {**about, "learned": learned, "exact": each[0]["exact"]}
    return {"times": TIMES, "systems": found}


_TITLES = {"entropy": "entropy S", "system": "dS/dt", "total": "total production", "medium": "given to the medium"}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    times = np.array(numbers["times"])
    quantities: dict = {}
    for part, each in numbers["systems"].items():
        for name in [name for name in ("entropy", "system", "total") if name in each["learned"]]:
            exact = (np.array(each["exact"][name], float), np.zeros(len(times)))
            quantities[f"{part}: {_TITLES[name]}"] = {"learned": curve(each["learned"][name]), "exact": exact}
            if name == "system":
                value, stderr = curve(each["learned"][name])
                quantities[f"{part}: dS/dt, off by"] = {
                    "learned": (value - exact[0], stderr), "exact": (0 * exact[0], exact[1])
                }  # fmt: skip
    return {"entropy": plot.over_time(times, quantities)}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    times, items = numbers["times"], []
    for part, each in numbers["systems"].items():
        rows = []
        for name, learned in each["learned"].items():
            exact = each["exact"][name]
            rows.append([f"{_TITLES[name]}, learned", *row_of(learned)])
            rows.append(["exact", *(written(value, digits=5) for value in exact)])
        title = f"{part}, {each['steps']} steps, {each['samples']} samples"
        items += [Grid(title, ["", *(f"t = {t:g}" for t in times)], rows), _deviations(times, each)]
    return [*items, _meaning(seeds)]


def _deviations(times: list[float], each: dict) -> str:
    """Of every quantity the largest, counted in errors."""
    told = []
    for name, learned in each["learned"].items():
        value, stderr = curve(learned)
        off = (value - np.array(each["exact"][name], float)) / np.where(stderr > 0, stderr, np.inf)
        worst = int(np.argmax(np.abs(off)))
        told.append(f"{_TITLES[name]} {off[worst]:+.1f} (t = {times[worst]:g})")
    return f"Learned − exact, where it is largest, in standard errors: {', '.join(told)}."


def _meaning(seeds: int) -> str:
    if seeds == 1:
        return "Errors are of sampling only, of one training: the error of its score is not in them."
    return (
        f"Errors are over {seeds} trainings, each with samples of its own: they include what the score of a training "
        "is off by chance, not what all trainings have in common."
    )


EXPERIMENT = Experiment(trial, combine, figures, report, parts=PARTS, seeds=3)
