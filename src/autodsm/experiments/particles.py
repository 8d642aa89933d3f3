"""Five repelling particles in a moving trap: the flow of a learned score against simulated paths, in ten dimensions.

The paper's system, to T = 10. All objectives train the network that `fit` chooses, three layers of 256 (GELU), as a
residual on the Gaussian of the marginals, with 1,024 evaluations in a step. "local-DSM (paper)" expands around
(y_s, s), λ = 0.01, without variance reduction; ISM has one Hutchinson probe, and draws its times uniformly, where the
others have more of them early. Particles are exchangeable: variances are of one particle's two components, averaged
over all five. 2,000 states are carried by the flow of a score; "paths" are 10,000, simulated from other starts, and
MMD² is to 2,000 of them.
"""

from functools import lru_cache

import jax
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from ..learn.builders import LocalDSM, PathwiseDSM
from ..learn.ism import ISM
from ..process.clock import EARLIEST
from ..process.process import Process
from ..process.systems import System
from ..process.systems import particles as make_particles
from .shared.experiment import (
    Experiment,
    Grid,
    Trials,
    above_zero,
    curve,
    difference,
    lost_of,
    over_seeds,
    row_of,
    written,
)
from .shared.learning import BATCH, Recipe, carried, distances, kept, learn, simulated
from .shared.verdict import AGREES, CANNOT_TELL, DIFFERS, POSITIVE, opening, verdict

TIMES = np.linspace(0.5, 10.0, 20)
LAM = 0.01
METHODS = ("local-DSM (paper)", "local-DSM, antithetic", "pathwise (default)", "ISM")


def recipe(method: str, process: Process) -> Recipe:
    if method == "ISM":
        return Recipe(ISM(process, divergence="hutchinson"))
    if method == "local-DSM (paper)":
        return Recipe(LocalDSM(process, LAM, expand="s", variance_reduction="none"))
    return Recipe(PathwiseDSM(process) if method.startswith("pathwise") else LocalDSM(process, LAM))


@lru_cache
def problem() -> System:
    return make_particles()


def variances(ys: np.ndarray) -> np.ndarray:
    """Of a particle's two components, (times, 2), over states (times, n, particles, 2)."""
    return np.stack([np.mean(np.var(y, axis=0, ddof=1), axis=0) for y in kept(ys)])


def trial(part: str, *, quick: bool, seed: int) -> dict:
    steps, n, many = (64, 300, 600) if quick else (10_000, 2_000, 10_000)
    process, y0, _ = problem()
    fit_key, start_key, path_key, mmd_key = jax.random.split(jax.random.key(seed), 4)
    times = np.concatenate([[EARLIEST * process.t1], TIMES])
    starts = simulated(process, y0, times[:1], n, key=start_key, steps=8)[0]
    simulations = simulated(process, y0, TIMES, many + n, key=path_key, steps=20)
    paths, others = simulations[:, :many], simulations[:, many:]

    def evaluate(score) -> dict:
        ys = carried(process, score, starts, times)[1:]
        found = distances(ys, paths[:, :n], key=mmd_key)
        return {**found, "variance": variances(ys)}

    _, rows = learn(
        process,
        y0,
        recipe(part, process),
        steps=steps,
        marks=[] if quick else [500, 2_000],
        evaluate=evaluate,
        key=fit_key,
    )
    return {"rows": rows, "path_variance": variances(paths), "other_variance": variances(others)}


def _error(found, paths) -> float:
    """Relative error of variances, averaged over t and the two components."""
    return float(np.mean(np.abs(np.array(found, float) / np.array(paths) - 1.0)))


def combine(trials: Trials) -> dict:
    found = {}
    for name, each in trials.items():
        last = [trial["rows"][-1] for trial in each]
        errors = [[_error(row["variance"], trial["path_variance"]) for row in trial["rows"]] for trial in each]
        found[name] = {
            "steps": [row["step"] for row in each[0]["rows"]],
            "variance_error": over_seeds(errors),
            "mean_mmd2": over_seeds([[np.mean(np.array(r["mmd2"], float)) for r in trial["rows"]] for trial in each]),
            "ms_per_step": over_seeds([1e3 * row["seconds"] / row["step"] for row in last]),
            **{key: over_seeds([row[key] for row in last]) for key in ("variance", "mmd2", "floor", "lost", "seconds")},
        }
    each = next(iter(trials.values()))  # the same paths for all methods
    return {
        "times": TIMES,
        "lambda": LAM,
        "batch": BATCH,
        "methods": found,
        "path_variance": over_seeds([trial["path_variance"] for trial in each]),
        "floor_of_error": over_seeds([_error(trial["other_variance"], trial["path_variance"]) for trial in each]),
    }


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    methods, times = numbers["methods"], np.array(numbers["times"])
    quantities: dict = {}
    every = {"paths": curve(numbers["path_variance"])} | {m: curve(each["variance"]) for m, each in methods.items()}
    unit = every["paths"][0]
    for i, name in enumerate(("variance of $y_1$, over that of paths", "variance of $y_2$, over that of paths")):
        quantities[name] = {method: tuple(c[:, i] / unit[:, i] for c in found) for method, found in every.items()}
    floor = (curve(methods["pathwise (default)"]["floor"])[0], np.zeros(len(times)))
    # The noise floor is first, as paths are in the other panels, so that colours are the same.
    mmd = "MMD² to paths (below 10⁻⁴: there)"
    quantities[mmd] = {"noise floor": floor} | {m: above_zero(each["mmd2"], 1e-4) for m, each in methods.items()}
    return {"particles": plot.over_time(times, quantities, log=(mmd,))}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    methods = numbers["methods"]
    steps = methods["pathwise (default)"]["steps"]
    rows = []
    for name, found in methods.items():
        distance = row_of(found["mean_mmd2"], unit=1e-3)[-1]
        per_step = written(found["ms_per_step"]["value"], found["ms_per_step"]["stderr"])
        rows.append([name, *row_of(found["variance_error"]), distance, per_step])
    least = written(numbers["floor_of_error"]["value"], numbers["floor_of_error"]["stderr"])
    rows.append(["other paths, as many", *[least] * len(steps), "", ""])
    floor = 1e3 * np.nanmean([np.array(found["floor"]["value"], float) for found in methods.values()])
    columns = ["objective", *(f"variance error, {step} steps" for step in steps), "10³ MMD²", "ms a step"]
    title = "Relative error of the variance, and MMD² to paths, averaged over t (noise floor of single values "
    grid = Grid(f"{title}{floor:.1f}·10⁻³)", columns, rows)
    if set(methods) != set(METHODS):
        return [grid]
    last = {name: {k: found["variance_error"][k][-1] for k in ("value", "stderr")} for name, found in methods.items()}
    told = ", ".join(f"{name} {written(each['value'], each['stderr'])}" for name, each in last.items())
    said = [*lost_of(methods), f"Relative errors of the variance after {steps[-1]} steps, the paper's number: {told}."]
    by, error = difference(last["ISM"], last["local-DSM (paper)"])
    lower = np.mean(np.array(methods["local-DSM (paper)"]["mmd2"]["value"]) < np.array(methods["ISM"]["mmd2"]["value"]))
    found = verdict(by, error, seeds, claim=POSITIVE)
    claim = {
        AGREES: "local-DSM is closer to the paths than ISM",
        DIFFERS: "whose local-DSM is closer to the paths than ISM at all times",
        CANNOT_TELL: "whether local-DSM is closer to the paths than ISM, as the paper says",
    }[found]
    compared = (
        f"its error of the variance is less by {written(by, error)}, and its MMD² the lower one at {100 * lower:.0f} % "
        "of all times, with one smooth network for both"
    )
    return [grid, *said, f"{opening(found, seeds, claim)}: {compared}."]


EXPERIMENT = Experiment(trial, combine, figures, report, parts=METHODS, quick_parts=("pathwise (default)",), seeds=3)
