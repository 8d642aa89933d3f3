"""Experiments run, resumed, and put together on one page of results.

A run folder holds `config.json`, `trials/*.json` (one for each part and seed, kept as soon as it is there),
`result.json` and `figures/*.png`. The page is written from `result.json` files alone, so that nothing in it is typed.
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .errors import check_name
from .experiments import EXPERIMENTS, Experiment, Grid
from .run import RunFolder


def reproduce(name: str, folder: RunFolder, *, quick: bool, seeds: Sequence[int], console: Console) -> None:
    """Run all trials that the folder does not have yet, and write numbers and figures."""
    experiment = EXPERIMENTS[name]
    (folder.path / "trials").mkdir(exist_ok=True)
    parts = experiment.quick_parts if quick and experiment.quick_parts else experiment.parts
    trials: dict[str, list[dict]] = {part: [] for part in parts}
    for seed in seeds:
        for part in parts:
            trials[part].append(_trial(experiment, part, seed, folder, quick=quick, console=console))
    seconds = sum(trial.pop("trial_seconds") for each in trials.values() for trial in each)
    numbers = experiment.combine(trials)
    figures = experiment.figures(trials, numbers)
    for figure_name, figure in figures.items():
        console.print(f"Figure: {folder.save_figure(figure_name, figure)}", soft_wrap=True)
    folder.save_result(
        numbers,
        experiment=name,
        command=command_line(name, quick=quick, seeds=seeds),
        quick=quick,
        seeds=list(seeds),
        seconds=round(seconds),
        cores=os.cpu_count(),
        figures=list(figures),
    )
    for item in experiment.report(json.loads((folder.path / "result.json").read_text())["numbers"]):
        if isinstance(item, Grid):
            console.print(_rich(item))
        elif not quick:  # the numbers of a quick run say nothing
            console.print(item.replace("**", ""), soft_wrap=True)


def command_line(name: str, *, quick: bool, seeds: Sequence[int]) -> str:
    """The command that makes this run."""
    usual = 1 if quick else EXPERIMENTS[name].seeds
    words = ["autodsm reproduce", name]
    words += ["--quick"] * quick
    words += [f"--seeds {len(seeds)}"] * (len(seeds) != usual)
    words += [f"--seed {seeds[0]}"] * (seeds[0] != 0)
    return " ".join(words)


def _trial(experiment: Experiment, part: str, seed: int, folder: RunFolder, *, quick: bool, console: Console) -> dict:
    slug = re.sub(r"[^\w.]+", "-", part).strip("-")
    path = folder.path / "trials" / f"{slug}-seed-{seed}.json"
    if not path.exists():
        if len(experiment.parts) > 1:
            console.print(f"[bold]{part}[/], seed {seed}")
        began = time.monotonic()
        numbers = experiment.trial(part, quick=quick, seed=seed)
        folder.write(f"trials/{path.name}", {**numbers, "trial_seconds": time.monotonic() - began})
    return json.loads(path.read_text())


def publish(docs: Path, runs: Iterable[Path]) -> Path:
    """Take numbers and figures of finished runs into a folder of documentation, and write its page of results."""
    runs = list(runs)
    for run in runs:
        if not (run / "result.json").is_file():
            raise ValueError(f"{run} is not a finished run of `autodsm reproduce`: it has no result.json.")
        if "experiment" not in json.loads((run / "result.json").read_text()):
            raise ValueError(f"{run} was not made by `autodsm reproduce`; the page shows experiments only.")
    for folder in ("results", "figures"):
        (docs / folder).mkdir(parents=True, exist_ok=True)
    for run in runs:
        result = json.loads((run / "result.json").read_text())
        shutil.copyfile(run / "result.json", docs / "results" / f"{result['experiment']}.json")
        for name in result["figures"]:
            shutil.copyfile(run / "figures" / f"{name}.png", docs / "figures" / f"{name}.png")
    path = docs / "results.md"
    path.write_text(page(docs))
    return path


def page(docs: Path) -> str:
    """The page of results, from the numbers in docs/results."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((docs / "results").glob("*.json"))}
    for name in found:
        check_name("experiment", name, EXPERIMENTS)
    lines = ["# Results", "", _INTRODUCTION, ""]
    for name, experiment in EXPERIMENTS.items():
        if name in found:
            lines += _section(name, experiment, found[name])
    return "\n".join(lines).rstrip() + "\n"


_INTRODUCTION = """\
Written by `autodsm report docs` from the numbers in [results](results), which the command above each section made; the
same command makes them again. Errors after ± are standard errors over seeds unless a section says otherwise. Times are
medians over the rounds of a training, on a machine that did other work beside it: they compare methods within an
experiment to about a fifth; `benchmarks` measure ratios side by side."""


def summary(name: str) -> str:
    """The first line of what an experiment's file says about itself."""
    text = sys.modules[EXPERIMENTS[name].trial.__module__].__doc__ or ""
    return text.strip().splitlines()[0]


def _section(name: str, experiment: Experiment, result: dict) -> list[str]:
    about = (sys.modules[experiment.trial.__module__].__doc__ or "").strip()
    first, _, rest = about.partition("\n\n")
    seeds = len(result["seeds"])
    told = f"`{result['command']}` · {seeds} seed{'s' * (seeds > 1)} · {_duration(result['seconds'])} on "
    told += f"{result['cores']} cores · jax {result['versions']['jax']}"
    lines = [f"## {name}", "", f"**{first}**", "", told + (" · **a quick run, for a look only**" * result["quick"]), ""]
    lines += [rest, ""] if rest else []
    for item in experiment.report(result["numbers"]):
        lines += [*(_markdown(item) if isinstance(item, Grid) else [item]), ""]
    for figure in result["figures"]:
        lines += [f"![{name}: {figure}](figures/{figure}.png)", ""]
    return lines


def _duration(seconds: int) -> str:
    return f"{seconds} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _markdown(grid: Grid) -> list[str]:
    rows = ["| " + " | ".join(row) + " |" for row in (grid.columns, *grid.rows)]
    return [f"{grid.title}:", "", rows[0], "|" + "---|" * len(grid.columns), *rows[1:]]


def _rich(grid: Grid) -> Table:
    table = Table(title=grid.title)
    for i, column in enumerate(grid.columns):
        table.add_column(column, justify="right" if i else "left")
    for row in grid.rows:
        table.add_row(*row)
    return table
