"""The command line: `autodsm list | reproduce | report | data | train | fit | resume | sample | evaluate`."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from . import cifar10, results
from .errors import check_count, check_name
from .experiments import EXPERIMENTS
from .problems import PROBLEMS
from .run import RunFolder, check_free, free_path
from .training import Options, dry_run, train_problem
from .using import evaluate_run, open_finished, recorded_command, sample_run


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
    seeds: int | None = None
    """How many seeds to average over; by default as many as the results page shows, and one for a quick run."""
    seed: int = 0
    """The first of them."""
    scale: str | None = None
    """Of experiments on images: "digits" (default), "longer", "small" or "paper"."""
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/NAME, or the first free of runs/NAME-2, …"""


@dataclasses.dataclass(frozen=True)
class Report:
    """Take numbers and figures of finished experiments into a folder of documentation, and write its results.md."""

    docs: tyro.conf.Positional[Path]
    """The folder; it keeps results/*.json and figures/*.png, and what it had of the same experiments is replaced."""
    add: tuple[Path, ...] = ()
    """Run folders of `autodsm reproduce`. Without any, the page alone is written again."""


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
    """Go on with a run of `train`, `fit` or `reproduce` that was interrupted, to the same result."""

    run: tyro.conf.Positional[Path]
    """Its folder."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draw samples from a finished run and write them into its folder, as samples.npz and a figure.

    A run with a prior is sampled backwards from it. One without is a physical system: its initial states are carried
    forwards by the probability flow.
    """

    run: tyro.conf.Positional[Path]
    """Its folder."""
    n: int = 10_000
    method: Literal["sde", "ode"] | None = None
    """The reversed process (default, with a prior), or the probability flow."""
    steps: int | None = None
    """Of the reversed process (default 250)."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure a finished run: distances with their noise floors, likelihoods, entropy rates, errors of the score.

    What applies is shown as a table and added to result.json.
    """

    run: tyro.conf.Positional[Path]
    """Its folder."""
    n: int = 4_000
    """Samples."""
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Data:
    """Import a data set, verified, so that experiments find it.

    It is kept in the folder that the variable AUTODSM_DATA names, or else in the user's cache.
    """

    name: tyro.conf.Positional[Literal["cifar10"]]
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A folder, or an archive (.tar.gz, .tgz), with the binary version of CIFAR-10."""
    download: bool = False
    """Fetch the official archive instead."""


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
)


def show_list(console: Console) -> None:
    table = Table("experiment", "what it shows")
    for name in EXPERIMENTS:
        table.add_row(name, results.summary(name))
    console.print(table)
    console.print(f"Problems to train on: {', '.join(PROBLEMS)}.", soft_wrap=True)


def reproduce(command: Reproduce, console: Console) -> None:
    check_name("name", command.name, [*EXPERIMENTS, "all"])
    if command.seeds is not None:
        check_count("seeds", command.seeds)
    everything = command.name == "all"
    names = list(EXPERIMENTS) if everything else [command.name]
    if command.out is None:
        paths = [free_path(Path("runs") / name) for name in names]
    else:
        paths = [command.out / name if everything else command.out for name in names]
    for name, path in zip(names, paths, strict=True):  # before any work, not when its turn comes
        check_free(path)
        seeds_of(name, command)
        scale = scale_of(name, command)
        if scale is not None and (check := EXPERIMENTS[name].check) is not None:
            check(scale)
    for i, (name, path) in enumerate(zip(names, paths, strict=True)):
        count = seeds_of(name, command)
        seeds = range(command.seed, command.seed + count)
        folder = results.begin(name, path, quick=command.quick, seeds=seeds, scale=scale_of(name, command))
        run_experiment(name, folder, console, rest=names[i + 1 :])


def seeds_of(name: str, command: Reproduce) -> int:
    experiment = EXPERIMENTS[name]
    if command.seeds is None:
        return 1 if command.quick else experiment.seeds
    if experiment.one_seed and command.name != "all" and command.seeds > 1:
        raise ValueError(f"seeds={command.seeds}: {name} has errors over the draws of one seed, and takes one.")
    return 1 if experiment.one_seed else command.seeds


def scale_of(name: str, command: Reproduce) -> str | None:
    scales = EXPERIMENTS[name].scales
    if command.scale is None or (not scales and command.name == "all"):
        return next(iter(scales), None)
    if not scales:
        raise ValueError(f"scale={command.scale}: {name} has one scale only.")
    check_name("scale", command.scale, scales)
    return command.scale


def run_experiment(name: str, folder: RunFolder, console: Console, rest: Sequence[str] = ()) -> None:
    console.rule(name)
    began = time.monotonic()
    try:
        results.reproduce(folder, console)
    except KeyboardInterrupt:
        more = f" Not begun: {', '.join(rest)}." if rest else ""
        told = f"stopped; finished trials are kept. Go on: autodsm resume {folder.path}.{more}"
        raise KeyboardInterrupt(told) from None
    took = time.monotonic() - began
    console.print(f"{name}: done in {took:.0f} s, written to {folder.path}", soft_wrap=True)


def import_data(command: Data, console: Console) -> None:
    if (command.source is None) == (not command.download):
        raise ValueError("give either --from PATH, a folder or an archive, or --download.")
    out = cifar10.default_folder()
    if command.source is None:
        cifar10.download(out, console.print)
    else:
        cifar10.import_from(command.source, out, console.print)
    console.print(f"CIFAR-10: 50,000 + 10,000 images, verified, in {out}", soft_wrap=True)


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
    if recorded.is_file() and "experiment" in (config := json.loads(recorded.read_text())):
        run_experiment(config["experiment"], RunFolder(command.run), console)
        return
    source, options = recorded_command(command.run)
    train_problem(source, options, command.run, console)


def draw(command: Sample, console: Console) -> None:
    check_count("n", command.n)
    run = open_finished(command.run)
    method = command.method or ("ode" if run.problem.prior is None else "sde")
    sample_run(run, console, n=command.n, method=method, steps=command.steps, seed=command.seed)


def main() -> None:
    command = tyro.cli(Command, prog="autodsm", description="Learn the score of any diffusion.")  # pyright: ignore
    console = Console()
    try:
        if isinstance(command, List):
            show_list(console)
        elif isinstance(command, Reproduce):
            reproduce(command, console)
        elif isinstance(command, Data):
            import_data(command, console)
        elif isinstance(command, Report):
            console.print(f"Written: {results.publish(command.docs, command.add)}", soft_wrap=True)
        elif isinstance(command, Resume):
            resume(command, console)
        elif isinstance(command, Sample):
            draw(command, console)
        elif isinstance(command, Evaluate):
            check_count("n", command.n)
            evaluate_run(open_finished(command.run), console, n=command.n, seed=command.seed)
        else:
            start(command, console)
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        Console(stderr=True).print(str(stop) or "stopped.", soft_wrap=True)
        sys.exit(130)
