"""The command line: `autodsm list | reproduce | train | fit | resume`."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from .errors import check_name
from .experiments import EXPERIMENTS
from .problems import PROBLEMS
from .run import RunFolder, check_free, free_path
from .training import Options, dry_run, train_problem


@dataclasses.dataclass(frozen=True)
class List:
    """Show the experiments that can be reproduced, and the problems that can be trained on."""


@dataclasses.dataclass(frozen=True)
class Reproduce:
    """Run one experiment, or all, and write a run folder with figures and numbers."""

    name: tyro.conf.Positional[str]
    """An experiment (see `autodsm list`), or "all"."""
    quick: bool = False
    """A small version of the same computation, in seconds."""
    seed: int = 0
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/NAME, or the first free of runs/NAME-2, …"""


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a score on a named problem."""

    problem: tyro.conf.Positional[str]
    """One of the problems that `autodsm list` shows."""
    options: tyro.conf.OmitArgPrefixes[Options] = dataclasses.field(default_factory=Options)
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/PROBLEM, or the first free of runs/PROBLEM-2, …"""
    dry_run: bool = False
    """Say what would be done, and stop before training."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """Train a score for a process of your own: a Python file that defines `process` and `y0`.

    `process` is an autodsm.Process, `y0` a sampler y0(key, n) or an array of samples. The file may also define
    `prior`, `objective` and `network`.
    """

    file: tyro.conf.Positional[Path]
    options: tyro.conf.OmitArgPrefixes[Options] = dataclasses.field(default_factory=Options)
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/NAME, or the first free of runs/NAME-2, …"""
    dry_run: bool = False
    """Say what would be done, and stop before training."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on with a run of `train` or `fit` that was interrupted, to the same result."""

    run: tyro.conf.Positional[Path]
    """Its folder."""


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
)


def show_list(console: Console) -> None:
    table = Table("experiment", "what it shows")
    for name, experiment in EXPERIMENTS.items():
        summary = (sys.modules[experiment.__module__].__doc__ or "").strip().splitlines()[0]
        table.add_row(name, summary)
    console.print(table)
    console.print(f"Problems to train on: {', '.join(PROBLEMS)}.", soft_wrap=True)


def reproduce(command: Reproduce, console: Console) -> None:
    check_name("name", command.name, [*EXPERIMENTS, "all"])
    everything = command.name == "all"
    names = list(EXPERIMENTS) if everything else [command.name]
    if command.out is None:
        paths = [free_path(Path("runs") / name) for name in names]
    else:
        paths = [command.out / name if everything else command.out for name in names]
    for path in paths:  # before any work, not when its turn comes
        check_free(path)
    for name, path in zip(names, paths, strict=True):
        config = dataclasses.replace(command, name=name, out=None)
        folder = RunFolder.create(path, config)
        console.rule(name)
        began = time.monotonic()
        numbers = EXPERIMENTS[name](folder, quick=command.quick, seed=command.seed)
        folder.save_result(numbers, seed=command.seed)
        console.print(f"{name}: done in {time.monotonic() - began:.0f} s, written to {path}", soft_wrap=True)


def start(command: Train | Fit, console: Console) -> None:
    if isinstance(command, Train):
        source, name = {"problem": command.problem}, command.problem
    else:
        source, name = {"file": str(command.file)}, command.file.stem
    if command.dry_run:
        dry_run(source, command.options, console)
        return
    out = free_path(Path("runs") / name) if command.out is None else command.out
    check_free(out)
    train_problem(source, command.options, out, console)


def resume(command: Resume, console: Console) -> None:
    recorded = command.run / "config.json"
    if not recorded.is_file():
        raise ValueError(f"{command.run} is not the folder of a run: it has no config.json.")
    made_by = json.loads(recorded.read_text()).get("command")
    if not isinstance(made_by, dict) or "options" not in made_by:
        raise ValueError(
            f"{command.run} was not made by `autodsm train` or `autodsm fit`. A run of ad.fit in Python is resumed by "
            "calling it again with the same arguments and the same out=... ."
        )
    options = Options(**made_by["options"])
    train_problem({k: v for k, v in made_by.items() if k != "options"}, options, command.run, console)


def main() -> None:
    command = tyro.cli(Command, prog="autodsm", description="Learn the score of any diffusion.")  # pyright: ignore
    console = Console()
    try:
        if isinstance(command, List):
            show_list(console)
        elif isinstance(command, Reproduce):
            reproduce(command, console)
        elif isinstance(command, Resume):
            resume(command, console)
        else:
            start(command, console)
    except (ValueError, FileExistsError, FloatingPointError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        Console(stderr=True).print(str(stop) or "stopped.", soft_wrap=True)
        sys.exit(130)
