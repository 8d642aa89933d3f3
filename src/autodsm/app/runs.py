"""Runs, opened: the model of a folder, what it was trained on, and samples of it. Nothing is trained again.

Code of a user's file is executed only where a model holds something of the user's own that is asked for: a drift, a
prior, a network, or a sampler of y0. Its drift is compared with that of the training; all else in it may change.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from ..base.estimate import over_samples
from ..learn.model import Model
from ..learn.saved import lacking, load
from ..paths.initial import initial_states
from ..process.clock import EARLIEST
from ..run.config import Config
from ..run.folder import RESTORE, RunFolder, free_path, locked, read_json
from .arguments import Options
from .problems import Problem, problem_of

SHARES = (0.1, 0.3, 1.0)  # of t1, where physical systems are looked at


class Run(NamedTuple):
    """A run: what it was about, and its model."""

    path: Path
    source: dict
    problem: Problem
    model: Model
    shape: tuple[int, ...]


EVERYTHING = frozenset({"process", "network", "prior", "y0"})


def open_run(path: Path, console: Console, *, file: Path | None = None, needs: frozenset[str] | None = None) -> Run:
    """A run with its model. What it `needs`, by default for its score alone, and a model's file does not hold, because
    it is the user's own, is defined by `file`, or else by the file that the run was made from."""
    needed = lacking(path, score_alone=True) | (set() if needs is None else lacking(path) & needs)
    source = load_source(path)
    problem = None
    if needed:
        if file is not None:
            source = {"file": str(file)}
        if not source:
            names = " and ".join(sorted(needed)) + (" are" if len(needed) > 1 else " is")
            given = ", ".join(f"{name}={name}" for name in sorted(needed))
            raise ValueError(
                f"{path} was made in Python, and its {names} your own. In Python, ad.load({str(path)!r}, {given}) "
                "opens it; or name a file that defines what is missing, --file FILE.py."
            )
        if "file" in source:
            console.print(f"{path} executes the code of {source['file']}.", soft_wrap=True)
        problem = problem_of(source)
        if absent := [name for name in sorted(needed) if getattr(problem, name) is None]:
            raise ValueError(f"{source.get('file')} must define {absent[0]}: the run has one of your own.")
    elif file is not None:
        raise ValueError(f"file={str(file)!r}: {path} holds all that is asked for. Leave --file out.")
    model = load(path, **{} if problem is None else {name: getattr(problem, name) for name in needed})
    if model.step < model.config.steps:
        console.print(f"{path}: interrupted after {model.step} of {model.config.steps} steps.", soft_wrap=True)
    opened: dict = {name: getattr(model, name) for name in ("process", "y0", "prior")}
    return Run(path, source, Problem(**opened), model, model.shape)


def _config(path: Path) -> Config | None:
    """That of a training; what else a folder is, opening it says."""
    recorded = path / "config.json"
    found = read_json(recorded) if recorded.is_file() else {"experiment": None}
    return None if "experiment" in found else Config.from_json(found, recorded)


def to_sample(path: Path) -> frozenset[str]:
    """What samples of a run need: those of a physical system start from y0."""
    config = _config(path)
    return EVERYTHING if config is None or config.prior is None else EVERYTHING - {"y0"}


def load_source(path: Path) -> dict:
    """The problem or the file of the command that made a run; nothing for one made in Python."""
    config = _config(path)
    command = {} if config is None or config.command is None else config.command
    return {name: command[name] for name in ("problem", "file") if isinstance(command.get(name), str)}


def recorded_command(path: Path) -> tuple[dict, Options]:
    """The source and the options of the `train` or `fit` that made a run folder."""
    recorded = path / "config.json"
    if not recorded.is_file():
        raise ValueError(f"{path} is not the folder of a run: it has no config.json.")
    config = read_json(recorded)
    made_by = config.get("command")
    if not isinstance(made_by, dict):
        raise ValueError(
            f"{path} was not made by `autodsm train` or `autodsm fit`. A run of ad.fit in Python is resumed by calling "
            "it again with the same arguments and the same out=... ."
        )
    options = made_by.get("options")
    if not isinstance(options, dict):
        raise ValueError(f"{recorded} is damaged: its command has no options. {RESTORE}")
    known = {field.name: field.default for field in dataclasses.fields(Options)}
    remedy = "Use the version that made the run, or start the run anew in another folder."
    if unknown := sorted({*options} - {*known}):
        raise ValueError(f"{recorded} holds options that this version does not have: {', '.join(unknown)}. {remedy}")
    if wrong := [name for name, value in options.items() if not _fits(value, known[name])]:
        raise ValueError(f"{recorded} is damaged: the option {wrong[0]} is {options[wrong[0]]!r}. {RESTORE}")
    source = {name: made_by[name] for name in ("problem", "file") if name in made_by}
    if any(not isinstance(value, str) for value in source.values()):
        raise ValueError(f"{recorded} is damaged: its problem and file must be text. {RESTORE}")
    if not source:
        raise ValueError(f"{recorded} names neither a problem nor a file. {remedy}")
    return source, Options(**options)


def _fits(value, default) -> bool:
    """True for the value of an option that is of the type of its default; one without may be any number or name."""
    if default is None:
        return value is None or isinstance(value, int | float | str)
    return isinstance(value, int | float if isinstance(default, float) else type(default))


def sample_run(run: Run, console: Console, *, n: int, method: str, steps: int | None, seed: int) -> Path:
    """Draw n samples and write them to samples.npz; nothing is overwritten."""
    from ..use.sample import sample

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
    if (flat := in_the_plane(points)) is not None:
        from ..base import plot

        figure = plot.samples_over_time({"samples": flat}, at)
        console.print(f"Figure: {RunFolder(run.path).save_figure(path.stem, figure)}", soft_wrap=True)
    return path


def carry(run: Run, n: int, times: np.ndarray, *, key) -> np.ndarray:
    """States at each of the times, (times, n, *shape): simulated up to where training starts, then by the flow."""
    from ..paths.simulate import simulate
    from ..use.flow import flow_with_density, lost

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


def in_the_plane(points: list[np.ndarray]) -> list[np.ndarray] | None:
    """States that can be drawn as points: vectors of two, or the first of several particles in the plane."""
    if points[0].ndim == 2 and points[0].shape[1] == 2:
        return points
    if points[0].ndim == 3 and points[0].shape[2] == 2:
        return [y[:, 0] for y in points]
    return None
