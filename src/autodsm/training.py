"""Training from the command line: options by name, and what a run writes.

A run folder holds `config.json` (everything resolved, and the command that made it), `metrics.jsonl`, `checkpoints/`,
`figures/loss.png` and `result.json`.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from rich.console import Console

from . import plot
from .errors import unknown_name
from .fit import Model, Setup, fit, set_up
from .ism import ISM
from .objective import LocalDSM, PathwiseDSM, TabulatedDSM
from .problems import Problem, file_digest, from_file, named
from .process import Process
from .run import RunFolder
from .schedule import FromZero

ObjectiveName = Literal["auto", "dsm", "local", "pathwise", "tabulated", "ism"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of training."""

    objective: ObjectiveName = "auto"
    """"auto" follows the process; "dsm" is exact for linear drifts only."""
    lam: float | None = None
    """λ = ∫g² from s to t, for the objective "local" (default 0.01)."""
    window: float | None = None
    """Over how much ∫g² the weights of "pathwise" are built up (default: from t = 0)."""
    forgetting: float | None = None
    """Rate at which the weights of "pathwise" forget (default: chosen from the process)."""
    weighting: Literal["likelihood", "perceptual", "score"] | None = None
    """Of the denoising objectives (default "perceptual")."""
    variance_reduction: Literal["antithetic", "control", "none"] | None = None
    """For "local", "tabulated" (not "control") and "dsm" (default "antithetic")."""
    divergence: Literal["exact", "hutchinson"] | None = None
    """For "ism" (default "exact")."""
    steps: int = 5000
    batch_size: int = 1024
    """Evaluations of the network in a step."""
    learning_rate: float = 3e-3
    ema: float = 0.999
    width: int | None = None
    """Of the default network (default 256)."""
    depth: int | None = None
    """Hidden layers of the default network (default 3)."""
    activation: str | None = None
    """Of the default network (default "gelu")."""
    checkpoint_every: int = 1000
    seed: int = 0


_USES = {
    "auto": set(),
    "dsm": {"weighting", "variance_reduction"},
    "local": {"lam", "weighting", "variance_reduction"},
    "pathwise": {"window", "forgetting", "weighting"},
    "tabulated": {"weighting", "variance_reduction"},
    "ism": {"divergence"},
}


def build_objective(process: Process, options: Options):
    """The objective that the options name; None for "auto"."""
    if options.objective not in _USES:
        raise unknown_name("objective", options.objective, _USES)
    specific = ("lam", "window", "forgetting", "weighting", "variance_reduction", "divergence")
    given = {name: getattr(options, name) for name in specific if getattr(options, name) is not None}
    if unused := sorted(set(given) - _USES[options.objective]):
        name = unused[0].replace("_", "-")
        raise ValueError(
            f"--{name} {given[unused[0]]} has no meaning for --objective {options.objective}. Name an objective that "
            "uses it, or leave it out."
        )
    if options.objective == "dsm":
        return LocalDSM(process, schedule=FromZero(), **given)
    builders = {"local": LocalDSM, "pathwise": PathwiseDSM, "tabulated": TabulatedDSM, "ism": ISM}
    return None if options.objective == "auto" else builders[options.objective](process, **given)


def load(source: dict) -> Problem:
    return named(source["problem"]) if "problem" in source else from_file(Path(source["file"]))


def arguments(source: dict, options: Options) -> dict:
    """What `fit` is called with."""
    problem = load(source)
    objective = build_objective(problem.process, options)
    if problem.objective is not None:
        if objective is not None:
            raise ValueError(f"--objective {options.objective}: {source['file']} defines its own objective.")
        objective = problem.objective
    record = {**source, "options": dataclasses.asdict(options)}
    if "file" in source:
        record["digest"] = file_digest(Path(source["file"]))
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


def dry_run(source: dict, options: Options, console: Console) -> None:
    """Everything but the training, and what it found."""
    given = arguments(source, options)
    setup: Setup = set_up(given.pop("process"), given.pop("y0"), **given)
    plan = setup.plan
    console.print(f"objective: {setup.reason}", soft_wrap=True)
    console.print(f"network: {type(setup.network).__name__} with {setup.parameters:,} trained numbers")
    console.print(
        f"{plan.steps} steps, rounds of {plan.round_steps}; a step has {plan.paths} paths of {plan.pairs} draws, "
        f"{plan.paths * plan.pairs * setup.objective.evaluations} evaluations of the network",
        soft_wrap=True,
    )
    console.print_json(data=setup.config)
    console.print("dry run: nothing was written.")


def train_problem(source: dict, options: Options, out: Path, console: Console) -> Model:
    """Train, or go on training, in the folder `out`."""
    given = arguments(source, options)
    model = fit(given.pop("process"), given.pop("y0"), out=out, checkpoint_every=options.checkpoint_every, **given)
    folder = RunFolder(out)
    history = np.array([[row["step"], row["loss"]] for row in model.history])
    folder.save_figure("loss", plot.loss_curve(history))
    last = float(history[-max(1, len(history) // 10) :, 1].mean())
    rates = [row["steps_per_s"] for row in model.history]
    numbers: dict = {"loss": last, "steps": options.steps, "ms_per_step": 1e3 / float(np.median(rates))}
    if (out / "result.json").is_file():  # a finished run, perhaps evaluated
        before = json.loads((out / "result.json").read_text())["numbers"]
        numbers |= {"evaluation": before["evaluation"]} if "evaluation" in before else {}
    folder.save_result(numbers, seed=options.seed)
    console.print(f"done: loss {last:.4g} (mean of the last tenth), written to {out}", soft_wrap=True)
    return model
