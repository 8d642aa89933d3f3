"""What is done with a finished run: samples drawn from it, and everything about it that can be measured.

A run with a prior is a generative model: it is sampled backwards from the prior. One without is a physical system: its
initial states are carried forwards by the probability flow, beside simulated paths.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from ..base import plot
from ..base.estimate import estimate, over_samples
from ..exact.gaussian import HarmonicParticles, gaussian_marginals
from ..exact.products import checkerboard as exact_checkerboard
from ..learn.fit import fit
from ..learn.model import Model
from ..paths.initial import initial_states
from ..paths.simulate import simulate
from ..process.clock import EARLIEST
from ..run.folder import RESTORE, RunFolder, free_path, locked, read_json, read_numbers
from ..use import metrics
from ..use.elbo import ELBO
from ..use.findings import Report
from ..use.flow import flow_with_density, lost
from ..use.likelihood import log_likelihood
from ..use.sample import sample
from .arguments import Options
from .html import page
from .judge import LARGE, SHARES, Row, diagnosed, errors_seen, rates, row_of
from .problems import Problem, check_unchanged
from .training import arguments, load

_AGAINST = "against the exact score"


class Run(NamedTuple):
    """A finished run: what it was about, and the trained model."""

    path: Path
    source: dict
    options: Options
    problem: Problem
    model: Model
    shape: tuple[int, ...]


def recorded_command(path: Path) -> tuple[dict, Options]:
    """The source and the options of the `train` or `fit` that made a run folder."""
    recorded = path / "config.json"
    if not recorded.is_file():
        raise ValueError(f"{path} is not the folder of a run: it has no config.json.")
    config = read_json(recorded)
    made_by = config.get("command")
    if "experiment" in config:
        raise ValueError(f"{path} is a run of `autodsm reproduce`, not of a training: it holds no model to use.")
    if not isinstance(made_by, dict):
        raise ValueError(
            f"{path} was not made by `autodsm train` or `autodsm fit`. A run of ad.fit in Python is resumed by calling "
            "it again with the same arguments and the same out=... ."
        )
    options = made_by.get("options")
    if not isinstance(options, dict):
        raise ValueError(f"{recorded} is damaged: its command has no options. {RESTORE}")
    source = {name: made_by[name] for name in ("problem", "file", "digest") if name in made_by}
    known = {field.name: field.default for field in dataclasses.fields(Options)}
    remedy = "Use the version that made the run, or start the run anew in another folder."
    if unknown := sorted({*options} - {*known}):
        raise ValueError(f"{recorded} holds options that this version does not have: {', '.join(unknown)}. {remedy}")
    if wrong := [name for name, value in options.items() if not _fits(value, known[name])]:
        raise ValueError(f"{recorded} is damaged: the option {wrong[0]} is {options[wrong[0]]!r}. {RESTORE}")
    if any(not isinstance(value, str) for value in source.values()):
        raise ValueError(f"{recorded} is damaged: its problem, file and digest must be text. {RESTORE}")
    if "problem" not in source and not {"file", "digest"} <= {*source}:
        raise ValueError(f"{recorded} names neither a problem nor a file with its digest. {remedy}")
    return source, Options(**options)


def _fits(value, default) -> bool:
    """True for the value of an option that is of the type of its default; one without may be any number or name."""
    if default is None:
        return value is None or isinstance(value, int | float | str)
    return isinstance(value, int | float if isinstance(default, float) else type(default))


def announce_code(path: Path, source: dict, console: Console) -> None:
    """Say that a run executes code of a file, and refuse a file that has changed since the run was made."""
    if "file" in source:
        check_unchanged(Path(source["file"]), source["digest"])
        console.print(f"{path} executes the code of {source['file']}.", soft_wrap=True)


def open_finished(path: Path, console: Console) -> Run:
    """A run, with its trained score."""
    source, options = recorded_command(path)
    if not (path / "result.json").is_file():
        raise ValueError(f"{path} is not finished. Go on with it first: autodsm resume {path}")
    read_numbers(path)
    announce_code(path, source, console)
    problem = load(source)
    given = arguments(source, options, problem)
    model = fit(
        given.pop("process"),
        given.pop("y0"),
        out=path,
        checkpoint_every=options.checkpoint_every,
        progress=False,
        check=False,
        **given,
    )
    shape = initial_states(problem.y0, 1, key=jax.random.key(0)).shape[1:]
    return Run(path, source, options, problem, model, shape)


def sample_run(run: Run, console: Console, *, n: int, method: str, steps: int | None, seed: int) -> Path:
    """Draw n samples and write them to samples.npz; nothing is overwritten."""
    key, problem = jax.random.key(seed), run.problem
    if problem.prior is None:
        if method != "ode" or steps is not None:
            raise ValueError(
                "this run has no prior: it is sampled forwards from y0 by the probability flow, --method ode, without "
                "--steps."
            )
        times = problem.process.t1 * np.array(SHARES)
        y = carry(run, n, times, key=key)
        arrays = {"y": y, "times": times}
        points, at = list(y), list(times)
    else:
        y = sample(
            problem.process, run.model.score, problem.prior, n, shape=run.shape, method=method, steps=steps, key=key,
            progress=True,
        )  # fmt: skip
        assert isinstance(y, np.ndarray)
        arrays, points, at = {"y": y}, [y], [EARLIEST * problem.process.t1]
    with locked(run.path):
        path = free_path(run.path / "samples.npz")
        np.savez(path, allow_pickle=False, **arrays)
    console.print(f"{n} samples, written to {path}", soft_wrap=True)
    if (flat := _in_the_plane(points)) is not None:
        figure = plot.samples_over_time({"samples": flat}, at)
        console.print(f"Figure: {RunFolder(run.path).save_figure(path.stem, figure)}", soft_wrap=True)
    return path


def carry(run: Run, n: int, times: np.ndarray, *, key) -> np.ndarray:
    """States at each of the times, (times, n, *shape): simulated up to where training starts, then by the flow."""
    start_key, path_key = jax.random.split(key)
    y0 = initial_states(run.problem.y0, n, key=start_key)
    process, score, start = run.problem.process, run.model.score, EARLIEST * run.problem.process.t1

    def one(y, k):
        y = simulate(process, y, jnp.asarray([start], y.dtype), key=k)[0]
        at = jnp.asarray([start, *times], y.dtype)
        return flow_with_density(process, score, y, at, divergence=None).y

    found = over_samples(one, y0, key=path_key)
    if not np.all(np.isfinite(found)):
        raise lost(process, score, y0[:256], np.array([start, *times]))
    return np.moveaxis(found, 1, 0)[1:]


def evaluate_run(run: Run, console: Console, *, n: int, seed: int) -> dict:
    """All that applies, as a table, in result.json, and as a figure."""
    problem, key = run.problem, jax.random.key(seed)
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
        numbers = read_numbers(run.path)
        kept = {**numbers.get("evaluation", {}), f"n={n}, seed={seed}": found}
        about = {"verdict": report.verdict, "sentence": report.sentence, "flags": list(report.flags)}
        judged = {**numbers.get("diagnostics", {}), f"n={n}, seed={seed}": about}
        folder.save_result({**numbers, "evaluation": kept, "diagnostics": judged}, seed=run.options.seed)
    return found


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
    flat = {name: _in_the_plane(ys) for name, ys in points.items()}
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
    flat = {"paths": _in_the_plane(list(simulated)), "flow": _in_the_plane(list(carried))}
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


def _in_the_plane(points: list[np.ndarray]) -> list[np.ndarray] | None:
    """States that can be drawn as points: vectors of two, or the first of several particles in the plane."""
    if points[0].ndim == 2 and points[0].shape[1] == 2:
        return points
    if points[0].ndim == 3 and points[0].shape[2] == 2:
        return [y[:, 0] for y in points]
    return None
