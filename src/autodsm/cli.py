"""The command line: `autodsm list`, `autodsm reproduce NAME`."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from .errors import check_name
from .experiments import EXPERIMENTS
from .run import RunFolder, check_free, free_path


@dataclasses.dataclass(frozen=True)
class List:
    """Show the experiments that can be reproduced."""


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


Command = Annotated[List, tyro.conf.subcommand("list")] | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]


def list_experiments(console: Console) -> None:
    table = Table("name", "what it shows")
    for name, experiment in EXPERIMENTS.items():
        summary = (sys.modules[experiment.__module__].__doc__ or "").strip().splitlines()[0]
        table.add_row(name, summary)
    console.print(table)


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


def main() -> None:
    command = tyro.cli(Command, prog="autodsm", description="Learn the score of any diffusion.")  # pyright: ignore
    console = Console()
    try:
        if isinstance(command, List):
            list_experiments(console)
        else:
            reproduce(command, console)
    except (ValueError, FileExistsError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped.")
        sys.exit(130)
