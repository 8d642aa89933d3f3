"""Variance of the gradient that each objective trains with, at equal numbers of network evaluations.

By Lemma 1 of the paper all objectives have the same expected gradient: ISM, local-DSM for any λ, the pathwise and the
tabulated target. They differ in its noise. Local-DSM's target varies as 1/λ, and the gradient with it; an antithetic
pair ±ε, or a control variate, cancels that term, and what is left is bounded as λ → 0. The pathwise and the tabulated
target have no λ.

Shown is `(evaluations of a draw) · tr Cov(∂loss/∂θ)` over all parameters θ of a small network, after a short training.
Only evaluations of the network are counted: ISM's derivatives of it, which cost more than the network itself, are not.

That the expected gradients do agree is tested with the same draws. Let Δ_b be the difference to ISM's in batch b. If
its mean is zero, its sign is arbitrary: p is the share of random signs σ_b with `|Σ σ_b Δ_b| ≥ |Σ Δ_b|`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import plot
from ..clock import Clock
from ..data import checkerboard
from ..fit import fit
from ..ism import ISM
from ..network import MLP, Score, trainable
from ..objective import AbstractObjective, LocalDSM, PathwiseDSM, TabulatedDSM
from ..priors import langevin
from ..process import Process
from ..run import RunFolder

LAMBDAS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
REDUCTIONS = ("none", "control", "antithetic")
REFERENCE = "ISM, exact divergence"
_FLIPS = 4095


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
    return {
        "logistic Langevin, checkerboard": Case(langevin(dist.Logistic(0.0, 0.5)), checkerboard, True),
        "swirl, correlated noise": Case(swirl, lambda key, n: 0.5 + 0.5 * jax.random.normal(key, (n, 2)), False),
    }


def objectives(case: Case, *, steps: int, key) -> dict[str, AbstractObjective]:
    """Objectives by name. Each draws one state from a path, at times common to all; λ is set by `measure`."""
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


def measure(
    objective: AbstractObjective, network, y0, lambdas: Sequence[float] | None, *, batches: int, batch: int, key
) -> list[Gradient]:
    """Variance of the gradient of one draw, with its jackknife error over batches, for each λ or, without, once."""
    params, static = eqx.partition(network, trainable(network))

    @eqx.filter_jit
    def sums(params, lam, key):  # mean gradient, (batches, parameters), and mean square of its norm, (batches,)
        trial: Any = objective  # λ is an argument: one compilation serves all
        trial = trial if lam is None else eqx.tree_at(lambda o: o.target.schedule.lam, trial, lam)

        def gradient(x, key):
            grads = jax.grad(lambda params: trial(eqx.combine(params, static), x, key=key))(params)
            return jax.flatten_util.ravel_pytree(grads)[0]

        def one(key):
            start_key, draw_key = jax.random.split(key)
            grads = jax.vmap(gradient)(y0(start_key, batch), jax.random.split(draw_key, batch))
            return jnp.mean(grads, axis=0), jnp.mean(jnp.sum(grads**2, axis=1))

        return jax.lax.map(one, jax.random.split(key, batches))

    def variance(mean, square, n):
        return objective.evaluations * (square - np.sum(mean**2, axis=-1)) * n / (n - 1)

    def gradient_at(lam) -> Gradient:
        means, squares = (np.asarray(v, float) for v in sums(params, lam, key))
        others = (batches * means.mean(axis=0) - means) / (batches - 1)  # means without one of the batches
        other_squares = (batches * squares.mean() - squares) / (batches - 1)
        left_out = variance(others, other_squares, (batches - 1) * batch)
        stderr = np.sqrt((batches - 1) * np.var(left_out))
        return Gradient(float(variance(means.mean(axis=0), squares.mean(), batches * batch)), float(stderr), means)

    return [gradient_at(lam) for lam in ([None] if lambdas is None else map(jnp.asarray, lambdas))]


def same_mean(first: Gradient, second: Gradient, *, seed: int = 0) -> float:
    """p-value of equal expected gradients, by random signs of the batches' differences."""
    differences = first.batch_means - second.batch_means
    products = differences @ differences.T
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(_FLIPS, len(products)))
    flipped = np.sum(signs @ products * signs, axis=1)
    return float((1 + np.sum(flipped >= products.sum())) / (1 + _FLIPS))


def figure_of(records: Mapping[str, Mapping]) -> Figure:
    """A panel for each process: variances over λ, with horizontal lines for what has no λ; two standard errors."""
    figure, axes = plot.panels(len(records), width=4.2, height=3.9)
    handles = {}
    for axis, (process, record) in zip(axes, records.items(), strict=True):
        for name, rows in record["variance"].items():
            j = list(record["variance"]).index(name) if name.startswith("local") else None
            value, stderr = np.array(rows["value"]), np.array(rows["stderr"])
            if j is not None:
                style = {"marker": "os^"[j], "ms": 4, "lw": 1.2, "capsize": 2, "color": f"C{j}"}
                handles[name] = axis.errorbar(LAMBDAS, value, 2 * stderr, **style)
            else:
                color, dashes = _LINES[name]
                handles[name] = axis.axhline(value[0], color=color, ls=dashes, lw=1.3)
                axis.axhspan(*(value[0] + 2 * stderr[0] * np.array([-1, 1])), color=color, alpha=0.15, lw=0)
        axis.set(xscale="log", yscale="log", title=process, xlabel="λ = ∫g² over [s, t]")
    axes[0].set_ylabel("gradient variance × evaluations")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


_LINES = {
    "pathwise": ("C3", "-"),
    "tabulated": ("C4", "-"),
    REFERENCE: ("0.3", "--"),
    "ISM, Hutchinson": ("0.3", ":"),
}


def table_of(process: str, record: Mapping) -> Table:
    table = Table(title=f"Gradient variance × evaluations: {process}", caption=f"p: mean gradient as of {REFERENCE}")
    for column in ("objective", *(f"λ = {lam:g}" for lam in LAMBDAS), "smallest p"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    for name, rows in record["variance"].items():
        cells = [f"{v:.3g} ± {e:.1g}" for v, e in zip(rows["value"], rows["stderr"], strict=True)]
        cells = cells if len(cells) > 1 else ["", "", *cells, "", ""]
        p = "" if name == REFERENCE else f"{min(rows['p']):.3f}"
        table.add_row(name, *cells, p)
    return table


def run(folder: RunFolder, *, quick: bool = False, seed: int = 0) -> dict:
    steps, batches, batch = (48, 32, 128) if quick else (128, 64, 1024)
    console, records = Console(), {}
    for index, (name, case) in enumerate(cases().items()):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), index), 4)
        trials = objectives(case, steps=steps, key=keys[0])
        network = Score(MLP((2,), Clock(case.process), key=keys[1], width=64, depth=2), Clock(case.process))
        best = trials["tabulated" if case.elementwise else "pathwise"][None]
        network = fit(
            case.process, case.y0, key=keys[2], objective=best, network=network, steps=200, progress=False
        ).last  # nearly trained: where variance matters
        size = {"batches": batches, "batch": batch, "key": keys[3]}
        found = {
            (label, lam): measure(objective, network, case.y0, **size)
            for label, each in track(trials.items(), description=name)
            for lam, objective in each.items()
        }
        records[name] = _record(trials, found)
        console.print(table_of(name, records[name]))
        console.print(
            f"From λ = {LAMBDAS[0]:g} to {LAMBDAS[-1]:g}: without variance reduction × "
            f"{records[name]['growth']['none']:.0f} (slope {records[name]['slope']['value']:.2f} at the end), with "
            f"antithetic pairs × {records[name]['growth']['antithetic']:.2f}.",
            soft_wrap=True,
        )
    path = folder.save_figure("gradient-variance", figure_of(records))
    console.print(f"Figure: {path}", soft_wrap=True)
    return {"lambdas": list(LAMBDAS), "draws": batches * batch, "steps_of_a_path": steps, "processes": records}


def _record(trials: Mapping, found: Mapping[tuple[str, float | None], Gradient]) -> dict:
    """Numbers of one process, as plain data."""
    variance = {
        label: {
            "value": [found[label, lam].variance for lam in each],
            "stderr": [found[label, lam].stderr for lam in each],
            "p": [same_mean(found[label, lam], found[REFERENCE, None]) for lam in each],
        }
        for label, each in trials.items()
    }
    first, last = (found["local-DSM, none", lam] for lam in LAMBDAS[-2:])
    width = np.log(LAMBDAS[-1] / LAMBDAS[-2])
    errors = [g.stderr / g.variance for g in (first, last)]
    slope = {"value": np.log(last.variance / first.variance) / width, "stderr": np.hypot(*errors) / abs(width)}
    at = LAMBDAS.index(1e-2)
    plain = variance["local-DSM, none"]["value"][at]
    return {
        "variance": variance,
        "slope": {k: float(v) for k, v in slope.items()},
        "growth": {r: v["value"][-1] / v["value"][0] for r in REDUCTIONS for v in [variance[f"local-DSM, {r}"]]},
        "none_at_0.01_over": {
            label: plain / rows["value"][at if len(rows["value"]) > 1 else 0] for label, rows in variance.items()
        },
    }
