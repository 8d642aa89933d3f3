"""Objectives on the checkerboard with a logistic prior, against the exact score and the data.

Langevin dynamics, β from 0.1 to 10. All objectives train the paper's network, three layers of 256 with ReLU that see
the raw time and predict noise, with AdamW and 1,024 evaluations of the network in a step; but "ISM, SiLU" has a smooth
activation, and "default" is what `fit` chooses: the tabulated target and a network that learns the difference to the
prior's score, at its learning rate of 0.003 (the others: 0.001). The noise is that of the paper, received since s(t),
for local-DSM and ISM, and all noise received for the targets that start at t = 0. Trainings have the paper's 20,000
steps, over which the rate falls to zero; but for one of ISM, in as many as take about the time of local-DSM's. Seconds
are of training alone, by the median time of a step.

Errors are over 8,000 states at each t; samples are 2,000, drawn by running time backwards to t = 0.01. "Off the
squares" is the share of them outside of the dark squares, which sees blurred edges where MMD² does not.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ..base import plot
from ..base.estimate import over_samples
from ..data import checkerboard
from ..exact.products import checkerboard as exact_checkerboard
from ..learn.builders import LocalDSM, PathwiseDSM, TabulatedDSM
from ..learn.ism import ISM
from ..network import MLP, Frozen, Score
from ..process.clock import Clock
from ..process.process import Process
from ..use.metrics import mmd2
from ..use.sample import sample
from .shared.experiment import (
    Experiment,
    Grid,
    Trials,
    above_zero,
    curve,
    difference,
    last_of,
    over_seeds,
    row_of,
    written,
)
from .shared.learning import BATCH, ExactScore, LocalNoise, Recipe, ScoreError, learn, logistic_langevin, simulated
from .shared.verdict import AGREES, CANNOT_TELL, DIFFERS, POSITIVE, opening, verdict

TIMES = (0.03, 0.1, 0.2, 0.5, 1.0)
T0 = 0.01
"""Where sampling stops."""
LAM = 0.01
STEPS, FEWER_STEPS = 20_000, 7_000
FEWER = f"ISM, SiLU, {FEWER_STEPS:,} steps"
METHODS = (
    "local-DSM (paper)",
    "local-DSM, antithetic",
    "pathwise",
    "tabulated",
    "ISM, ReLU (paper)",
    "ISM, SiLU",
    FEWER,
    "default",
)


def recipe(method: str, process: Process, *, key) -> Recipe:
    """Objective and network of a method."""
    clock = Clock(process)
    smooth = method.startswith("ISM, SiLU")
    net = MLP((2,), clock, key=key, activation="silu" if smooth else "relu", time="raw")
    if method == "default":
        return Recipe()
    if method.startswith("ISM"):
        return Recipe(ISM(process, divergence="hutchinson"), LocalNoise(net, Frozen(clock), LAM))
    objectives = {
        "local-DSM (paper)": lambda: LocalDSM(process, LAM, variance_reduction="none", times="uniform"),
        "local-DSM, antithetic": lambda: LocalDSM(process, LAM, times="uniform"),
        "pathwise": lambda: PathwiseDSM(process, times="uniform"),
        "tabulated": lambda: TabulatedDSM(process, times="uniform"),
    }
    local = method.startswith("local")
    return Recipe(objectives[method](), LocalNoise(net, Frozen(clock), LAM) if local else Score(net, clock))


@lru_cache
def problem(quick: bool) -> tuple[Process, dist.Distribution, ScoreError]:
    """The process, its prior, and the exact score at fixed states."""
    process, prior = logistic_langevin()
    exact = exact_checkerboard(process, TIMES, **(dict(cells=2000, steps=20) if quick else {}))
    states = simulated(process, checkerboard, TIMES, 1_000 if quick else 8_000, key=jax.random.key(10_000), tol=1e-4)
    scores = [over_samples(ExactScore(exact, jnp.asarray(i)), states[i]) for i in range(len(TIMES))]
    return process, prior, ScoreError.at(states, np.stack(scores), TIMES)


def trial(part: str, *, quick: bool, seed: int) -> dict:
    steps, n = (128, 500) if quick else (FEWER_STEPS if part == FEWER else STEPS, 2_000)
    process, prior, error_of = problem(quick)
    net_key, fit_key, data_key, sample_key, mmd_key = jax.random.split(jax.random.key(seed), 5)
    data = np.asarray(checkerboard(data_key, n))

    def evaluate(score) -> dict:
        error = {"error": error_of(score), "velocity": error_of.of_velocity(process, score)}
        try:
            found = sample(process, score, prior, n, shape=(2,), t0=T0, steps=50 if quick else 200, key=sample_key)
        except FloatingPointError:  # a score so wrong that samples leave the finite numbers
            return {**error, "mmd2": np.nan, "floor": np.nan, "samples": np.zeros((0, 2))}
        assert isinstance(found, np.ndarray)
        distance = mmd2(found, data, key=mmd_key)
        return {**error, "mmd2": distance.value, "floor": distance.floor, "samples": found.round(3)}

    marks = [64] if quick else [250, 500, 1_000, 2_000, 5_000, 10_000]
    options: dict = {"prior": prior} if part == "default" else {"learning_rate": 1e-3}
    _, rows = learn(
        process, checkerboard, recipe(part, process, key=net_key), steps=steps, marks=marks, evaluate=evaluate,
        key=fit_key, **options,
    )  # fmt: skip
    return {"rows": rows}


def off_squares(y: np.ndarray) -> float:
    """The share of states that are not on a dark square; of none it is not known."""
    square = np.floor(y + 2.0)
    on = np.all((square >= 0) & (square < 4), axis=1) & (square.sum(axis=1) % 2 == 0)
    return 1.0 - float(np.mean(on)) if len(y) else np.nan


def combine(trials: Trials) -> dict:
    process, _ = logistic_langevin()
    exact = simulated(process, checkerboard, [T0], 50_000, key=jax.random.key(10_001), tol=1e-4)[0]
    found = {}
    for name, each in trials.items():
        rows = [trial["rows"] for trial in each]
        found[name] = {"steps": [row["step"] for row in rows[0]]}
        for quantity in ("seconds", "error", "velocity", "mmd2", "floor"):
            found[name][quantity] = over_seeds([[row[quantity] for row in one] for one in rows])
        last = [[one[-1]["seconds"] / one[-1]["step"] * 1e3] for one in rows]
        found[name]["ms_per_step"] = over_seeds(last)
        shares = [[off_squares(np.array(row["samples"]).reshape(-1, 2)) for row in one] for one in rows]
        found[name]["off_squares"] = over_seeds(shares)
        # A score of zero has the error 1.
        found[name]["seeds_at_zero"] = sum(min(one[-1]["error"]) > 0.99 for one in rows if one[-1]["error"][0])
    about = {"times": list(TIMES), "lambda": LAM, "batch": BATCH, "seeds": len(rows)}
    return {**about, "methods": found, "off_squares": off_squares(exact)}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    figure, axes = plot.panels(6, width=3.5, height=3.1, rows=2)
    at = TIMES.index(0.1)
    for j, (name, found) in enumerate(numbers["methods"].items()):
        style = {"color": f"C{j}", "marker": "o", "ms": 3, "lw": 1.3, "label": name}
        steps, (seconds, _) = np.array(found["steps"]), curve(found["seconds"])
        (error, spread), (off, off_spread) = curve(found["error"]), curve(found["off_squares"])
        mmd, mmd_spread = above_zero(found["mmd2"], 1e-4)
        axes[0].errorbar(steps, error[:, at], 2 * spread[:, at], **style)
        axes[1].errorbar(seconds, error[:, at], 2 * spread[:, at], **style)
        axes[2].errorbar(TIMES, error[-1], 2 * spread[-1], **style)
        axes[3].errorbar(steps, off, 2 * off_spread, **style)
        axes[4].errorbar(seconds, off, 2 * off_spread, **style)
        axes[5].errorbar(seconds, mmd, 2 * mmd_spread, **style)
    for axis in axes[3:5]:
        axis.axhline(numbers["off_squares"], color="k", lw=0.8, ls=":")
        axis.annotate(
            "exact", (0.02, numbers["off_squares"]), xycoords=("axes fraction", "data"), va="bottom", fontsize=8
        )
    axes[5].axhline(_floor(numbers), color="k", lw=0.8, ls=":")
    axes[5].annotate("noise floor", (0.02, _floor(numbers)), xycoords=("axes fraction", "data"), va="top", fontsize=8)
    labels = {0: "relative score error, t = 0.1", 1: "relative score error, t = 0.1", 2: "relative error at the end"}
    labels |= {3: "samples off the squares", 4: "samples off the squares", 5: "MMD² to data (below 10⁻⁴: there)"}
    for i, axis in enumerate(axes):
        axis.set(xlabel=("step", "seconds of training")[i % 3 != 0], ylabel=labels[i], xscale="log", yscale="log")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[2].set_xlabel("t")
    for axis in (axes[0], axes[3]):
        marks = next(iter(numbers["methods"].values()))["steps"][::2]
        axis.set_xticks(marks, [f"{step}" for step in marks])
    for axis in axes[3:5]:
        axis.set_yticks([0.1, 0.2, 0.5, 1.0], ["0.1", "0.2", "0.5", "1"])
        axis.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

    first = {name: each[0]["rows"] for name, each in trials.items() if name != FEWER}
    one = next(iter(first.values()))
    shown = [1, 3, -1] if len(one) > 3 else [0, -1]
    rows = {name: [np.array(each[i]["samples"]) for i in shown] for name, each in first.items()}
    titles = [f"{one[i]['step']} steps" for i in shown]
    panels = plot.samples_in_panels(rows, titles, limits=((-2.6, 2.6), (-2.6, 2.6)), sideways=True)
    return {"checkerboard": figure, "checkerboard-samples": panels}


_MATTERS = 0.1
"""Relative score errors closer than this tell of the same failure; a score of zero is off by 1."""


def _floor(numbers: dict) -> float:
    """The noise floor of MMD², averaged over all there are."""
    return float(np.nanmean(np.concatenate([curve(found["floor"])[0] for found in numbers["methods"].values()])))


def _behind(methods: dict, quantity: str, *place: int) -> tuple[float, float]:
    """By how much ISM ends above local-DSM, both trained for the same time, and the standard error."""

    def end(name):
        return {key: np.array(methods[name][quantity][key][-1])[place] for key in ("value", "stderr")}

    return difference(end(FEWER), end(METHODS[0]))


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    methods = numbers["methods"]
    steps = next(iter(methods.values()))["steps"][-1]
    rows = []
    for name, found in methods.items():
        last = last_of(found["error"])
        distance = row_of(found["mmd2"], unit=1e-3)[-1]
        off = row_of(found["off_squares"])[-1]
        rows.append([name, *row_of(last), distance, off, *row_of(found["ms_per_step"])])
    rows.append(["exact", *[""] * (len(numbers["times"]) + 1), written(numbers["off_squares"]), ""])
    floor = _floor(numbers)
    columns = ["objective", *(f"t = {t:g}" for t in numbers["times"]), "10³ MMD²", "off the squares", "ms a step"]
    title = f"Relative score error E|s_θ − s|² / E|s|² after {steps} steps, and samples against data (noise floor of "
    grids: list[str | Grid] = [Grid(f"{title}10³ MMD²: {1e3 * floor:.2g})", columns, rows)]
    title = f"Relative velocity error E|v_θ − v|² / E|v|², v = f − ½ Q s, after {steps} steps"
    rows = [[name, *row_of(last_of(found["velocity"]))] for name, found in methods.items() if "velocity" in found]
    if rows:  # numbers of earlier versions have none
        grids.append(Grid(title, columns[: len(numbers["times"]) + 1], rows))
    if set(methods) != set(METHODS):
        return grids
    at = TIMES.index(0.1)
    final = {name: found["error"]["value"][-1][at] for name, found in methods.items()}
    seconds = {name: found["seconds"]["value"] for name, found in methods.items()}

    def reached(name: str, wanted: float) -> float | None:
        """Seconds until the error at t = 0.1 was at most `wanted`."""
        errors = [values[at] for values in methods[name]["error"]["value"]]
        return next((s for s, e in zip(seconds[name], errors, strict=True) if e <= wanted), None)

    paper, best = "local-DSM (paper)", "default"
    at_best = reached(best, final[paper])
    kinked, fair = "ISM, ReLU (paper)", "ISM, SiLU"
    per_step = {name: found["ms_per_step"]["value"][0] for name, found in methods.items()}
    off, early, later = _behind(methods, "off_squares"), _behind(methods, "error", 0), _behind(methods, "error", at)
    at_equal_time = (
        f"at about equal time, after {seconds[paper][-1]:.0f} s and after {seconds[FEWER][-1]:.0f} s, the share of "
        f"samples off the squares is larger by {written(*off)} for ISM with SiLU, and its error by {written(*early)} "
        f"at t = {TIMES[0]:g}, by {written(*later)} at t = 0.1 (local-DSM with SiLU was not trained)."
    )
    said = [
        f"ISM with the paper's ReLU network ends at a score of zero for {methods[kinked]['seeds_at_zero']} of "
        f"{numbers['seeds']} seeds. With SiLU in place of ReLU, and nothing else changed, its error at t = 0.1 ends at "
        f"{final[fair]:.2g} (local-DSM, ReLU: {final[paper]:.2g}). With ReLU for both, a step of ISM takes "
        f"{per_step[kinked] / per_step[paper]:.1f} times one of local-DSM; SiLU itself costs more than ReLU.",
    ]
    ends = [
        {key: found["error"][key][-1][at] for key in ("value", "stderr")} for found in map(methods.get, (kinked, fair))
    ]
    activation = verdict(*difference(*ends), seeds, claim=(-_MATTERS, _MATTERS), comparisons=2)
    claim = {
        AGREES: "ISM's failure is one of convergence: with a smooth activation its error is as large",
        DIFFERS: "which takes ISM's failure for one of convergence: the derivative of a ReLU network jumps, ISM's "
        "gradient does not see the jumps, and is wrong. That failure is the activation's; what is ISM's own is the "
        "cost of a step",
        CANNOT_TELL: "whether ISM's failure is one of convergence, as the paper says, or of the activation",
    }[activation]
    said.append(f"{opening(activation, seeds, claim)}.")
    sooner = verdict(*off, seeds, claim=POSITIVE, comparisons=2)
    claim = {
        AGREES: "local-DSM learns sooner than ISM even so",
        DIFFERS: "whose local-DSM learns sooner than ISM",
        CANNOT_TELL: "whether local-DSM learns sooner than ISM, as the paper says",
    }[sooner]
    said.append(f"{opening(sooner, seeds, claim)}: {at_equal_time}")
    if at_best:
        said.append(
            f"The default has the final error of the paper's recipe (t = 0.1), {final[paper]:.2g}, after {at_best:.0f} "
            f"s instead of {seconds[paper][-1]:.0f} s, and ends at {final[best]:.2g}."
        )
    return [*grids, *said]


EXPERIMENT = Experiment(
    trial, combine, figures, report, parts=METHODS, quick_parts=("local-DSM (paper)", "ISM, SiLU", "default"), seeds=3
)
