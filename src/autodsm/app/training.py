"""Training from the command line: options by name, and what a run writes.

A run folder holds `config.json` (what was asked for, and the command that made it), `model.autodsm`, `metrics.jsonl`,
`checkpoints/`, `figures/loss.png` and `result.json`.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from ..base.errors import unknown_name
from ..kernels.schedule import FromZero
from ..learn.builders import KineticDSM, LocalDSM, PathwiseDSM, TabulatedDSM
from ..learn.fit import fit, set_up
from ..learn.ism import ISM
from ..learn.model import Model
from ..process.process import Process
from ..run.folder import RunFolder, locked, read_numbers
from .arguments import Options
from .page import page
from .problems import Problem, problem_of

_USES = {
    "auto": set(),
    "dsm": {"weighting", "variance_reduction"},
    "local": {"lam", "weighting", "variance_reduction"},
    "pathwise": {"profile", "weighting"},
    "kinetic": {"weighting"},
    "tabulated": {"weighting", "variance_reduction"},
    "ism": {"divergence"},
}


def build_objective(process: Process, options: Options):
    """The objective that the options name; None for "auto"."""
    if options.objective not in _USES:
        raise unknown_name("objective", options.objective, _USES)
    specific = ("lam", "profile", "weighting", "variance_reduction", "divergence")
    given = {name: getattr(options, name) for name in specific if getattr(options, name) is not None}
    if unused := sorted(set(given) - _USES[options.objective]):
        name = unused[0].replace("_", "-")
        raise ValueError(
            f"--{name} {given[unused[0]]} has no meaning for --objective {options.objective}. Name an objective that "
            "uses it, or leave it out."
        )
    if options.objective == "dsm":
        return LocalDSM(process, schedule=FromZero(), **given)
    builders = {
        "local": LocalDSM,
        "pathwise": PathwiseDSM,
        "kinetic": KineticDSM,
        "tabulated": TabulatedDSM,
        "ism": ISM,
    }
    return None if options.objective == "auto" else builders[options.objective](process, **given)


def arguments(source: dict, options: Options, problem: Problem) -> dict:
    """What `fit` is called with."""
    objective = build_objective(problem.process, options)
    if problem.objective is not None:
        if objective is not None:
            raise ValueError(f"--objective {options.objective}: {source['file']} defines its own objective.")
        objective = problem.objective
    record = {**source, "options": dataclasses.asdict(options)}
    if "file" in source:
        record["file"] = str(Path(source["file"]).resolve())
    return dict(
        process=problem.process,
        y0=problem.y0,
        prior=problem.prior,
        objective=objective,
        network=problem.network,
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        ema=options.ema,
        width=options.width,
        depth=options.depth,
        activation=options.activation,
        key=jax.random.key(options.seed),
        command=record,
    )


def dry_run(source: dict, options: Options, out: Path, console: Console) -> None:
    """Everything but the training, and what it found."""
    problem = problem_of(source)
    given = arguments(source, options, problem)
    setup = set_up(given.pop("process"), given.pop("y0"), progress=True, **given)
    console.print(page(source.get("problem") or source["file"], problem, setup, options, out))
    console.print("Nothing was written.")


def train_problem(source: dict, options: Options, out: Path, console: Console) -> Model:
    """Train, or go on training, in the folder `out`."""
    from ..base import plot

    before = read_numbers(out) if (out / "result.json").is_file() else {}  # of a finished run, perhaps evaluated
    if out.exists():
        with locked(out, patience=0.0):  # a folder in use is refused before any work
            pass
    given = arguments(source, options, problem_of(source))
    model = fit(given.pop("process"), given.pop("y0"), out=out, checkpoint_every=options.checkpoint_every, **given)
    folder = RunFolder(out)
    history = np.array([[row["step"], row["loss"]] for row in model.history])
    folder.save_figure("loss", plot.loss_curve(history))
    last = float(history[-max(1, len(history) // 10) :, 1].mean())
    rates = [row["steps_per_s"] for row in model.history]
    numbers: dict = {"loss": last, "steps": options.steps, "ms_per_step": 1e3 / float(np.median(rates))}
    numbers |= {name: before[name] for name in ("evaluation", "diagnostics") if name in before}
    with locked(out):
        folder.save_result(numbers, seed=options.seed)
    console.print(f"done: loss {last:.4g} (mean of the last tenth), written to {out}", soft_wrap=True)
    return model
