"""Everything about a run that can be measured.

A run with a prior is a generative model: it is sampled backwards from the prior. One without is a physical system: its
initial states are carried forwards by the probability flow, beside simulated paths.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from ..base import plot
from ..base.estimate import estimate, over_samples
from ..exact.gaussian import HarmonicParticles, gaussian_marginals
from ..exact.products import checkerboard as exact_checkerboard
from ..paths.initial import initial_states
from ..paths.simulate import simulate
from ..process.clock import EARLIEST
from ..run.folder import RunFolder, free_path, locked, read_json, read_numbers
from ..use import metrics
from ..use.elbo import ELBO
from ..use.findings import Report
from ..use.likelihood import log_likelihood
from ..use.sample import sample
from .html import page
from .judge import LARGE, Row, diagnosed, errors_seen, rates, row_of
from .runs import SHARES, Run, carry, in_the_plane

_AGAINST = "against the exact score"


def evaluate_run(run: Run, console: Console, *, n: int, seed: int) -> dict:
    """All that applies, as a table, in result.json, and as a figure."""
    problem, key = run.problem, jax.random.key(seed)
    numbers_of(run)  # a damaged file is named before the work
    report = diagnosed(problem, run.model.score, run.shape, n, key=jax.random.fold_in(key, 1))
    rows, figure = _physical(run, n, key, report) if problem.prior is None else _generative(run, n, key)
    rows += errors_seen(report)
    if (exact := exact_score(run)) is not None:
        rows += _score_errors(run, exact, n, jax.random.key(seed + 1))
    table = Table("quantity", "value", "± / floor", "remark", title=f"{run.path}: {n} samples")
    for name, value, error, remark in rows:
        table.add_row(name, f"{value:.4g}", f"{error:.2g}", remark)
    console.print(table)
    console.print(report.sentence, soft_wrap=True)
    folder = RunFolder(run.path)
    figures = {}
    if figure is not None:
        name = free_path(folder.path / "figures" / "evaluation.png").stem
        console.print(f"Figure: {folder.save_figure(name, figure)}", soft_wrap=True)
        figures["Samples"] = figure
    if history := run.model.history:
        figures["Loss"] = plot.loss_curve(np.array([[row["step"], row["loss"]] for row in history]))
    shown = [(name, f"{value:.4g}", f"{error:.2g}", remark) for name, value, error, remark in rows]
    written = free_path(run.path / "report.html")
    written.write_text(page(f"{run.path.name}: {n} samples", report, shown, figures), encoding="utf-8")
    console.print(f"Report: {written}", soft_wrap=True)
    found = {name: {"value": value, "error": error, "remark": remark} for name, value, error, remark in rows}
    with locked(run.path):
        numbers, about = numbers_of(run)
        kept = {**numbers.get("evaluation", {}), f"n={n}, seed={seed}": found}
        judged = {"verdict": report.verdict, "sentence": report.sentence, "flags": list(report.flags)}
        judged = {**numbers.get("diagnostics", {}), f"n={n}, seed={seed}": judged}
        folder.save_result({**numbers, "evaluation": kept, "diagnostics": judged}, **about)
    return found


def numbers_of(run: Run) -> tuple[dict, dict]:
    """What the result.json of a run has: numbers, and its seed. A run made in Python, or interrupted, has none yet."""
    if not (run.path / "result.json").is_file():
        return {}, {}
    seed = read_json(run.path / "result.json").get("seed")
    return read_numbers(run.path), {} if seed is None else {"seed": seed}


def _generative(run: Run, n: int, key):
    problem, score = run.problem, run.model.score
    process, prior, d = problem.process, problem.prior, int(np.prod(run.shape))
    keys = jax.random.split(key, 6)
    data = np.asarray(initial_states(problem.y0, n, key=keys[0]))
    rows: list[Row] = []
    points = {"data": [data]}
    for method in ("sde", "ode"):
        y = sample(process, score, prior, n, shape=run.shape, method=method, key=keys[1])
        assert isinstance(y, np.ndarray)
        rows += _distances(y, data, keys[2], f"{method} samples to data")
        points[method] = [y]
    divergence = "exact" if d <= LARGE else "hutchinson"
    bound = ELBO(process, prior, kind="ism", divergence=divergence).average(score, data, key=keys[3])
    rows.append(row_of("log-likelihood, ISM bound", bound, "nats"))
    local = ELBO(process, prior, kind="local-dsm").average(score, data, key=keys[5])
    rows.append(row_of("log-likelihood, local-DSM bound", local, "nats, λ = 0.001"))
    few = data[: max(2, n // 4)]

    def exactly(x, k):
        return log_likelihood(process, score, prior, x, divergence=divergence, key=k)

    values = over_samples(exactly, few, key=keys[4])
    rows.append(row_of("log-likelihood, flow", estimate(values), f"nats, divergence {divergence}"))
    flat = {name: in_the_plane(ys) for name, ys in points.items()}
    shown = {name: ys for name, ys in flat.items() if ys is not None}
    return rows, plot.samples_over_time(shown, [EARLIEST * process.t1]) if shown else None


def _physical(run: Run, n: int, key, report: Report):
    process, score = run.problem.process, run.model.score
    times = process.t1 * np.array(SHARES)
    keys = jax.random.split(key, 4)
    carried = carry(run, n, times, key=keys[0])
    simulated = _simulated(run, n, times, key=keys[1])
    rows: list[Row] = []
    for i, t in enumerate(times):
        rows += _distances(carried[i], simulated[i], keys[2], f"flow to paths, t = {t:g}")
        rows += rates(report, process, score, simulated[i], float(t), key=keys[3])
    flat = {"paths": in_the_plane(list(simulated)), "flow": in_the_plane(list(carried))}
    shown = {name: ys for name, ys in flat.items() if ys is not None}
    return rows, plot.samples_over_time(shown, list(times)) if shown else None


def exact_score(run: Run) -> Callable | None:
    """`(y, t) -> score` where the problem has one in closed form."""
    process = run.problem.process
    name = run.source.get("problem")
    if name == "checkerboard":
        return exact_checkerboard(process, np.geomspace(0.01, 1.0, 60)).score_at
    if name == "harmonic-particles":
        return HarmonicParticles(run.shape[0]).score
    if name == "ornstein-uhlenbeck":
        return gaussian_marginals(process, np.zeros(run.shape), np.eye(int(np.prod(run.shape)))).score
    return None


def _score_errors(run: Run, exact: Callable, n: int, key) -> list[Row]:
    times = run.problem.process.t1 * np.array(SHARES)
    states = _simulated(run, n, times, key=key)
    rows = []
    for i, t in enumerate(times):
        at = float(t)
        truth = over_samples(lambda y, at=at: exact(y, jnp.asarray(at)), states[i])
        known = np.all(np.isfinite(truth.reshape(n, -1)), axis=1)
        given = (run.model.score, exact, states[i][known], at)
        rows.append(row_of(f"relative score error, t = {t:g}", metrics.relative_score_error(*given), _AGAINST))
        error = metrics.relative_velocity_error(run.problem.process, *given)
        rows.append(row_of(f"relative velocity error, t = {t:g}", error, f"{_AGAINST}; v = f − ½ Q s"))
    return rows


def _simulated(run: Run, n: int, times: np.ndarray, *, key) -> np.ndarray:
    start_key, path_key = jax.random.split(key)
    y0 = initial_states(run.problem.y0, n, key=start_key)
    paths = over_samples(
        lambda y, k: simulate(run.problem.process, y, jnp.asarray(times, y.dtype), key=k), y0, key=path_key
    )
    return np.moveaxis(paths, 1, 0)


def _distances(y: np.ndarray, reference: np.ndarray, key, what: str) -> list[Row]:
    one, two = jax.random.split(key)
    few = slice(0, 4000)
    mmd = metrics.mmd2(y[few], reference[few], key=one)
    sliced = metrics.sliced_wasserstein(y[few], reference[few], key=two)
    return [
        Row(f"MMD², {what}", mmd.value, mmd.floor, f"p = {mmd.p_value:.2g}"),
        Row(f"sliced W2, {what}", sliced.value, sliced.floor, "floor: 95 % under equal laws"),
    ]
