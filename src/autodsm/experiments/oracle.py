"""What each objective is worth: trained scores against the same network, trained on the exact score itself.

A network of finite size, trained for finitely many steps, has an error even where its target is the exact score
("oracle"). What exceeds it is the noise of the target. "default" is what `fit` chooses from f, g and samples of y_0;
"known start" the same with the density of y_0; ISM has one Hutchinson probe, and is trained once for as many steps, and
once for as long as the default took. All have the network of `fit`, and 1,024 evaluations of it in a step. Trainings of
a system and seed follow each other, and the milliseconds of a step are medians over their rounds.

Errors are averages over 8,192 states, of coordinates that noise enters. The φ⁴ ring is in equilibrium and is learned
without the drift as a base, which there is the score. The wells of "rotated wells" are seen in sheared coordinates,
with a matrix g; "spiral" is linear, and learned as if it were not. Exact scores are −∇V, products of solutions in one
dimension, Gaussian moments, and solutions of the Fokker–Planck equation on a grid.
"""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from ..learn.fit import fit
from ..learn.ism import ISM
from ..learn.objective import DSM
from ..paths.initial import initial_states
from ..process.noise import apply_Q
from ..targets import Oracle
from .shared.experiment import Experiment, Grid, Trials, curve, over_seeds, written
from .shared.learning import BATCH, ScoreError, simulated
from .shared.references import REFERENCES, Reference, reference

STATES = 8192
"""Over which errors are averaged."""
EQUAL_TIME = "ISM, equal time"


def methods_of(case: Reference, *, quick: bool) -> tuple[str, ...]:
    if quick:
        return ("default", "oracle")
    return ("default", *(("known start",) if case.law is not None else ()), "oracle", "ISM", EQUAL_TIME)


def trial(part: str, *, quick: bool, seed: int) -> dict:
    case = reference(part, quick)
    steps, n = (32, 256) if quick else (3_000, STATES)
    key = jax.random.key(seed)
    times = np.array(case.times)
    states = simulated(case.process, case.y0, times, n, key=jax.random.fold_in(key, 1))
    at = jax.jit(jax.vmap(jax.vmap(case.score, (0, None)), (0, 0)))
    exact = np.array(at(jnp.asarray(states), jnp.asarray(times, states.dtype)))
    exact[..., list(case.noiseless)] = np.nan
    error_of = ScoreError.at(states, exact, times)
    still = bool(np.max(np.abs(_velocities(case, error_of))) < 1e-4 * np.max(np.abs(states)))
    found = {}
    for method in methods_of(case, quick=quick):
        count = steps
        if method == EQUAL_TIME:
            count = max(16, round(steps * found["default"]["ms"] / found["ISM"]["ms"]))
        found[method] = _train(case, method, steps=count, n=n, key=key, error_of=error_of, still=still, quick=quick)
    return {"times": times, "methods": found}


def _velocities(case: Reference, error_of: ScoreError) -> np.ndarray:
    """Exact ones, where noise enters."""

    def one(y, s, t):
        known = ~jnp.isnan(s)
        s = jnp.where(known, s, 0.0)
        return jnp.where(known, case.process.f(y, t) - 0.5 * apply_Q(case.process, t, s), 0.0)

    every = jax.jit(jax.vmap(jax.vmap(one, (0, 0, None)), (0, 0, 0)))
    return np.asarray(every(error_of.y, error_of.exact, error_of.times.astype(error_of.y.dtype)))


def _train(
    case: Reference, method: str, *, steps: int, n: int, key, error_of: ScoreError, still: bool, quick: bool
) -> dict:
    options = {**case.options, **({"width": 32, "depth": 2} if quick else {})}
    if method == "oracle":
        options["objective"] = DSM(case.process, Oracle(case.process, case.score))
    elif method.startswith("ISM"):
        options["objective"] = ISM(case.process, divergence="hutchinson", probes=1)
    y0 = case.law if method == "known start" else case.y0
    model = fit(case.process, y0, key=key, steps=steps, batch_size=BATCH, progress=False, **options)
    rates = [row["steps_per_s"] for row in model.history]
    found = {
        "steps": steps,
        "ms": 1e3 / float(np.median(rates[1:] or rates)),
        "objective": type(getattr(model.objective, "target", model.objective)).__name__,
        "error": error_of(model.score),
    }
    if not still:
        found["velocity"] = error_of.of_velocity(case.process, model.score)
    if isinstance(model.objective, DSM) and method in ("default", "known start"):
        found["noise"] = _noise(case, model.objective, y0, n, key=jax.random.fold_in(key, 2))
    return found


def _noise(case: Reference, objective: DSM, y0, n: int, *, key) -> list[float]:
    """`E|ŝ − s|²/E|s|²` at each time."""
    x_key, draw_key = jax.random.split(key)
    x = initial_states(y0, n, key=x_key)
    times = jnp.asarray(case.times, x.dtype)
    noisy = np.array([i for i in range(x[0].size) if i not in case.noiseless])

    def one(x, k):
        draw = objective.target.draw(x, times, key=k)
        exact = jax.vmap(case.score)(draw.y[:, 0], times)
        flat = [v.reshape(len(times), -1)[:, noisy] for v in (draw.score[:, 0] - exact, exact)]
        return [jnp.sum(v**2, axis=1) for v in flat]

    off, size = (np.asarray(v, float) for v in jax.jit(jax.vmap(one))(x, jax.random.split(draw_key, n)))
    known = np.isfinite(off) & np.isfinite(size)  # a grid ends
    return (np.sum(np.where(known, off, 0), 0) / np.sum(np.where(known, size, 0), 0)).tolist()


def combine(trials: Trials) -> dict:
    return {"batch": BATCH, "systems": {name: _combine(each) for name, each in trials.items()}}


def _combine(trials: list[dict]) -> dict:
    methods = {}
    for name, first in trials[0]["methods"].items():
        every = [trial["methods"][name] for trial in trials]
        kept = [key for key in ("error", "velocity", "noise", "ms") if key in first]
        methods[name] = {key: over_seeds([each[key] for each in every]) for key in kept}
        methods[name] |= {"steps": [each["steps"] for each in every], "objective": first["objective"]}
    return {"times": trials[0]["times"], "methods": methods}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    systems = numbers["systems"]
    rows = {name: {m: curve(each["error"]) for m, each in found["methods"].items()} for name, found in systems.items()}
    times = {name: np.array(found["times"]) for name, found in systems.items()}
    return {"oracle": plot.errors_over_time(times, rows, ylabels=dict.fromkeys(rows, "relative score error"))}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    return [grid for name, found in numbers["systems"].items() for grid in _grids(name, found)]


def _grids(name: str, found: dict) -> list[str | Grid]:
    methods, times = found["methods"], [f"t = {t:g}" for t in found["times"]]
    least = np.array(methods["oracle"]["error"]["value"], float)
    rows = []
    for method, each in methods.items():
        cells = [
            f"{written(value, stderr)} (× {written(value / limit)})"
            for value, stderr, limit in zip(*(each["error"][k] for k in ("value", "stderr")), least, strict=True)
        ]
        ratio = each["ms"]["value"] / methods["oracle"]["ms"]["value"]
        rows.append([method, *cells, f"{np.mean(each['steps']):.0f}", f"{each['ms']['value']:.1f} ({ratio:.2f})"])
    objective = methods["default"]["objective"]
    title = (
        f"{name} ({objective}): E|s_θ − s|²/E|s|² (multiple of the oracle's), and the step (multiple of the oracle's)"
    )
    grids: list[str | Grid] = [Grid(title, ["training", *times, "steps", "ms a step"], rows)]
    second = [[f"velocity error, {m}", *_cells(each["velocity"])] for m, each in methods.items() if "velocity" in each]
    second += [[f"noise over signal, {m}", *_cells(each["noise"])] for m, each in methods.items() if "noise" in each]
    return [*grids, Grid(f"{name}: relative error of the velocity, noise of the target", ["", *times], second)]


def _cells(found: dict) -> list[str]:
    return [written(value, stderr) for value, stderr in zip(found["value"], found["stderr"], strict=True)]


EXPERIMENT = Experiment(
    trial, combine, figures, report, parts=tuple(REFERENCES), quick_parts=("rotated wells",), seeds=3
)
