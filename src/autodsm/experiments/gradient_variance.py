"""Variance of the gradient that each objective trains with, at equal numbers of network evaluations.

By Lemma 1 of the paper all objectives have the same expected gradient: ISM, local-DSM as far as its linearized kernel
is exact, the pathwise and the tabulated target. They differ in its noise. Local-DSM's target varies as 1/λ, and the
gradient with it; an antithetic pair ±ε, or a control variate, cancels that term, and what is left is bounded as λ → 0.
The pathwise and the tabulated target have no λ.

Shown is `(evaluations of a draw) · tr Cov(∂loss/∂θ)` over all parameters θ of a small network, after a short training.
Only evaluations of the network are counted: ISM's derivatives of it, which cost as much again or more, are not.

That the expected gradients do agree is tested with the same draws. Let Δ_b be the difference to ISM's in batch b. If
its mean is zero, its sign is arbitrary: p is the share of random signs σ_b with `|Σ σ_b Δ_b| ≥ |Σ Δ_b|`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from matplotlib.figure import Figure

from ..base import plot
from ..data import checkerboard
from ..learn.builders import LocalDSM, PathwiseDSM, TabulatedDSM
from ..learn.ism import ISM
from ..learn.objective import AbstractObjective
from ..learn.train import Rounds, initial_state, make_step, optimizer_for
from ..network import MLP, Score, trainable
from ..process.clock import Clock
from ..process.priors import langevin
from ..process.process import Process
from .shared.experiment import Experiment, Grid, Trials

LAMBDAS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
PROCESSES = ("logistic Langevin, checkerboard", "swirl, correlated noise")
REDUCTIONS = ("none", "control", "antithetic")
REFERENCE = "ISM, exact divergence"
STYLES: dict[str, dict[str, Any]] = {
    "local-DSM, none": {"color": "C0", "marker": "o"},
    "local-DSM, control": {"color": "C1", "marker": "s"},
    "local-DSM, antithetic": {"color": "C2", "marker": "^"},
    "pathwise": {"color": "C3", "ls": "-"},
    "tabulated": {"color": "C4", "ls": "-"},
    REFERENCE: {"color": "0.3", "ls": "--"},
    "ISM, Hutchinson": {"color": "0.3", "ls": ":"},
}
_TRAINING = {"steps": 200, "batch_size": 256}
_FLIPS = 4095
# Every function is run a few times only, so that compiling it is what takes time.
_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Case(NamedTuple):
    process: Process
    y0: Callable[..., Array]
    elementwise: bool


class Gradient(NamedTuple):
    """What was measured of one objective's gradient."""

    variance: float
    """Of one draw, times its evaluations of the network."""
    stderr: float
    batch_means: np.ndarray
    """(batches, parameters)."""


def cases() -> dict[str, Case]:
    """An elementwise process, and a coupled one: a ring-shaped well that turns, with correlated noise."""

    def drift(y, t):
        return (1.0 - jnp.sum(y**2)) * y + jnp.stack([-y[1], y[0]])

    swirl = Process(drift, np.array([[0.8, 0.0], [0.4, 0.6]]), 2.0)
    board = Case(langevin(dist.Logistic(0.0, 0.5)), checkerboard, True)
    swirling = Case(swirl, lambda key, n: 0.5 + 0.5 * jax.random.normal(key, (n, 2)), False)
    return dict(zip(PROCESSES, (board, swirling), strict=True))


def objectives(case: Case, *, steps: int, key) -> dict[str, AbstractObjective]:
    """Objectives by name. Each takes one draw from a path, at times common to all; λ is set in `make_draws`."""
    process = case.process
    times = {"times": "uniform", "t0": 0.05 * process.t1, "pairs_per_path": 1}
    weighted = {"weighting": "likelihood", **times}
    found: dict[str, AbstractObjective] = {
        f"local-DSM, {reduction}": LocalDSM(process, variance_reduction=reduction, steps=steps, **weighted)
        for reduction in REDUCTIONS
    }
    found["pathwise"] = PathwiseDSM(process, steps=steps, **weighted)
    if case.elementwise:
        found["tabulated"] = TabulatedDSM(process, **weighted)
    found[REFERENCE] = ISM(process, divergence="exact", steps=steps, **times)
    found["ISM, Hutchinson"] = ISM(process, divergence="hutchinson", steps=steps, **times)
    return {name: objective.prepare(case.y0, key=key) for name, objective in found.items()}


def make_draws(objective: Any, y0, *, batches: int, batch: int) -> Callable:
    """The compiled function `(key, λ) -> draws`, of shape (batches, batch, …); λ = None for objectives without."""

    @_jit
    def draws(key, lam):
        trial = objective if lam is None else eqx.tree_at(lambda o: o.target.schedule.lam, objective, lam)

        def one(key):
            start_key, draw_key = jax.random.split(key)
            return jax.vmap(lambda x, k: trial.draws(x, key=k))(y0(start_key, batch), jax.random.split(draw_key, batch))

        return jax.tree.map(lambda leaf: leaf[:, :, 0], jax.lax.map(one, jax.random.split(key, batches)))

    return draws


def without_mirror(draws):
    """The first of each antithetic pair."""
    draw, constant = draws
    return draw._replace(y=draw.y[:, :, :1], score=draw.score[:, :, :1]), constant


def make_measure(objective: AbstractObjective, network) -> Callable[..., Gradient]:
    """The function `draws -> Gradient`, compiled for one objective; errors by the jackknife over batches."""
    params, static = eqx.partition(network, trainable(network))

    def gradient(params, draw):
        grads = jax.grad(lambda params: objective.at(eqx.combine(params, static), draw))(params)
        return jax.flatten_util.ravel_pytree(grads)[0]

    @_jit
    def moments(params, draws):
        def one(batch):
            grads = jax.vmap(lambda draw: gradient(params, draw))(batch)
            return jnp.mean(grads, axis=0), jnp.mean(jnp.sum(grads**2, axis=1))

        return jax.lax.map(one, draws)

    def variance(mean, square, n):
        return objective.evaluations * (square - np.sum(mean**2, axis=-1)) * n / (n - 1)

    def measure(draws) -> Gradient:
        batches, batch = jax.tree.leaves(draws)[0].shape[:2]
        means, squares = (np.asarray(v, float) for v in moments(params, draws))
        others = (batches * means.mean(axis=0) - means) / (batches - 1)  # means without one of the batches
        other_squares = (batches * squares.mean() - squares) / (batches - 1)
        left_out = variance(others, other_squares, (batches - 1) * batch)
        stderr = np.sqrt((batches - 1) * np.var(left_out))
        return Gradient(float(variance(means.mean(axis=0), squares.mean(), batches * batch)), float(stderr), means)

    return measure


def trained(objective: AbstractObjective, network, draws: Callable, *, key):
    """The network after a short training: variance matters most near the end of one, not at its start."""
    rounds = Rounds.make(objective, 2, ema=0.0, **_TRAINING)
    optimizer = optimizer_for(rounds.steps)
    needed, parts = rounds.steps * rounds.paths, []
    while sum(len(jax.tree.leaves(part)[0]) for part in parts) < needed:
        drawn = draws(jax.random.fold_in(key, len(parts)), None)
        parts.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), drawn))
    cut = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves)[:needed].reshape(rounds.steps, rounds.paths, *leaves[0].shape[1:]),
        *parts,
    )
    step = make_step(objective, network, optimizer, rounds)
    state, _ = jax.jit(lambda state, cut: jax.lax.scan(step, state, cut))(initial_state(network, optimizer), cut)
    return eqx.combine(state.params, eqx.partition(network, trainable(network))[1])


def compare(case: Case, *, steps: int, batches: int, batch: int, key) -> dict[str, list[Gradient]]:
    """Gradients of every objective at one network; for local-DSM a list over LAMBDAS, else of one."""
    keys = jax.random.split(key, 4)
    trials = objectives(case, steps=steps, key=keys[0])
    best = "tabulated" if case.elementwise else "pathwise"
    # Objectives with the same target are compared on the same draws.
    sources = {"local": "local-DSM, antithetic", "ISM": "ISM, Hutchinson", "pathwise": "pathwise", best: best}
    draws = {name: make_draws(trials[name], case.y0, batches=batches, batch=batch) for name in sources.values()}
    network = Score(MLP((2,), Clock(case.process), key=keys[1], width=64, depth=2), Clock(case.process))
    network = trained(trials[best], network, draws[best], key=keys[2])
    measures = {name: make_measure(objective, network) for name, objective in trials.items()}
    found: dict[str, list[Gradient]] = {name: [] for name in trials}
    for family, source in sources.items():
        for lam in LAMBDAS if family == "local" else (None,):
            drawn = draws[source](keys[3], None if lam is None else jnp.asarray(lam))
            for name in (name for name in trials if name.startswith(family)):
                single = name in ("local-DSM, none", "local-DSM, control")
                found[name].append(measures[name](without_mirror(drawn) if single else drawn))
    return found


def same_mean(first: Gradient, second: Gradient, *, seed: int = 0) -> float:
    """p-value of equal expected gradients, by random signs of the batches' differences."""
    differences = first.batch_means - second.batch_means
    products = differences @ differences.T
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(_FLIPS, len(products)))
    flipped = np.sum(signs @ products * signs, axis=1)
    return float((1 + np.sum(flipped >= products.sum())) / (1 + _FLIPS))


def record_of(found: Mapping[str, list[Gradient]]) -> dict:
    """Numbers of one process, as plain data."""
    variance = {
        name: {
            "value": [g.variance for g in each],
            "stderr": [g.stderr for g in each],
            "p": [same_mean(g, found[REFERENCE][0]) for g in each],
        }
        for name, each in found.items()
    }
    first, last = found["local-DSM, none"][-2:]
    width = np.log(LAMBDAS[-1] / LAMBDAS[-2])
    error = np.hypot(first.stderr / first.variance, last.stderr / last.variance) / abs(width)
    values = {name: rows["value"] for name, rows in variance.items()}
    at = LAMBDAS.index(1e-2)
    plain = values["local-DSM, none"][at]
    return {
        "variance": variance,
        "slope_none": {"value": float(np.log(last.variance / first.variance) / width), "stderr": float(error)},
        "growth": {name: v[-1] / v[0] for name, v in values.items() if len(v) > 1},
        "none_at_0.01_over": {name: plain / v[at if len(v) > 1 else 0] for name, v in values.items()},
    }


def figure_of(records: Mapping[str, Mapping]) -> Figure:
    """A panel for each process: variances over λ, with horizontal lines for what has no λ; two standard errors."""
    figure, axes = plot.panels(len(records), width=4.2, height=3.9)
    handles = {}
    for axis, (process, record) in zip(axes, records.items(), strict=True):
        for name, rows in record["variance"].items():
            value, error, style = np.array(rows["value"]), 2 * np.array(rows["stderr"]), STYLES[name]
            if len(value) > 1:
                handles[name] = axis.errorbar(LAMBDAS, value, error, ms=4, lw=1.2, capsize=2, **style)
            else:
                handles[name] = axis.axhline(value[0], lw=1.3, **style)
                axis.axhspan(value[0] - error[0], value[0] + error[0], color=style["color"], alpha=0.15, lw=0)
        axis.set(xscale="log", yscale="log", title=process, xlabel="λ = ∫g² over [s, t]")
    axes[0].set_ylabel("gradient variance × evaluations")
    figure.legend([handles[name] for name in STYLES], list(STYLES), loc="outside lower center", ncols=3)
    return figure


def trial(part: str, *, quick: bool, seed: int) -> dict:
    steps, batches, batch = (48, 32, 128) if quick else (128, 64, 1024)
    everything = cases()
    key = jax.random.fold_in(jax.random.key(seed), list(everything).index(part))
    found = record_of(compare(everything[part], steps=steps, batches=batches, batch=batch, key=key))
    return {"draws": batches * batch, "steps_of_a_path": steps, "record": found}


def combine(trials: Trials) -> dict:
    first = {part: found[0] for part, found in trials.items()}
    about = next(iter(first.values()))
    records = {part: each["record"] for part, each in first.items()}
    sizes = {name: about[name] for name in ("draws", "steps_of_a_path")}
    return {"lambdas": list(LAMBDAS), **sizes, "processes": records}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    return {"gradient-variance": figure_of(numbers["processes"])}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    found: list[str | Grid] = []
    for process, record in numbers["processes"].items():
        found.append(_grid_of(process, record))
        found.append(_means_of(record))
        growth, slope = record["growth"], record["slope_none"]
        found.append(
            f"From λ = {LAMBDAS[0]:g} to {LAMBDAS[-1]:g}: without variance reduction × "
            f"{growth['local-DSM, none']:.0f} (slope {slope['value']:.2f} ± {slope['stderr']:.2f} at the end), with "
            f"antithetic pairs × {growth['local-DSM, antithetic']:.2f}."
        )
    return found


def _means_of(record: Mapping) -> str:
    """Where expected gradients differ, and how noisy the target is that `fit` takes."""
    off = [
        f"{name}, λ = {lam:g}"
        for name, found in record["variance"].items()
        if len(found["p"]) > 1
        for lam, p in zip(LAMBDAS, found["p"], strict=True)
        if p < 0.01
    ]
    bias = f"for {'; '.join(off)}: that is the bias of linearizing over so long a time" if off else "for no λ"
    least = {name: min(found["value"]) for name, found in record["variance"].items()}
    default = "tabulated" if "tabulated" in least else "pathwise"
    order = sorted(least, key=lambda name: least[name])
    place = "the least" if order[0] == default else f"{least[default] / least[order[0]]:.2g} times that of {order[0]}"
    return (
        f"The mean gradient of local-DSM differs from ISM's (p < 0.01) {bias}. The variance of the target that `fit` "
        f"takes here, {default}, is {place}."
    )


def _grid_of(process: str, record: Mapping) -> Grid:
    unit = record["variance"][REFERENCE]["value"][0]
    title = f"Gradient variance × evaluations over λ, {process}; in units of {unit:.3g}, that of {REFERENCE}"
    worst = max(max(np.array(f["stderr"]) / np.array(f["value"])) for f in record["variance"].values())
    title += f" (standard errors over draws, of one seed: at most {100 * worst:.2g} %); p of the same mean gradient"
    rows = []
    for name, found in record["variance"].items():
        cells = [f"{v / unit:.3g}" for v in found["value"]]
        cells = cells if len(cells) > 1 else cells * len(LAMBDAS)
        p = ["", ""] if name == REFERENCE else [_p(found["p"][0]), _p(found["p"][-1])]
        rows.append([name, *cells, *(p if len(found["p"]) > 1 else ["", p[1]])])
    ends = (f"p, λ = {lam:g}" for lam in (LAMBDAS[0], LAMBDAS[-1]))
    return Grid(title, ("objective", *(f"λ = {lam:g}" for lam in LAMBDAS), *ends), rows)


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


EXPERIMENT = Experiment(trial, combine, figures, report, parts=PROCESSES, one_seed=True)
