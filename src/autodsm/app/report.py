"""Experiments run, resumed, and put together on one page of results.

A run folder holds `config.json`, `trials/*.json` (one for each part and seed, kept as soon as it is there; beside them
the checkpoints of trials that take hours), `result.json` and `figures/*.png`. The page is written from `result.json`
files alone, so that nothing in it is typed.
"""

import ast
import hashlib
import importlib.resources
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import experiments
from ..base.errors import check_name
from ..experiments import EXPERIMENTS, VERDICTS, Experiment, Grid
from ..run.folder import RunFolder, locked, read_json, read_numbers, versions


def begin(name: str, path: Path, *, quick: bool, seeds: Sequence[int], scale: str | None = None) -> RunFolder:
    """A new run folder for an experiment, which records by what code it was begun."""
    config = {"experiment": name, "scale": scale, "quick": quick, "seeds": list(seeds)}
    config |= {"code": code(), "versions": versions()}
    folder = RunFolder.create(path, config)
    (path / "trials").mkdir()
    return folder


def code() -> str:
    """A digest of this package's sources."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def reproduce(folder: RunFolder, console: Console) -> None:
    """Run all trials that the folder of an experiment does not have yet, and write numbers and figures.

    Trials of different code are not put together: a folder that other code has begun is shown as it is, or refused.
    """
    with locked(folder.path, patience=0.0):
        _reproduce(folder, console)


def _reproduce(folder: RunFolder, console: Console) -> None:
    config = read_json(folder.path / "config.json", needs=("experiment", "quick", "seeds", "code", "versions"))
    name, scale, quick, seeds = config["experiment"], config.get("scale"), config["quick"], config["seeds"]
    check_name("experiment", name, EXPERIMENTS)
    experiment = EXPERIMENTS[name]
    parts = experiment.parts_of(scale, quick=quick)
    wanted = [(part, seed) for seed in seeds for part in parts]
    missing = [one for one in wanted if not _trial_path(folder, *one).exists()]
    if missing and config["code"] != code():
        raise ValueError(
            f"{folder.path} was begun by another version of autodsm's code, and {len(missing)} of its {len(wanted)} "
            f"trials are missing. Results of the two must not be mixed: run `autodsm reproduce {name}` anew."
        )
    trials: dict[str, list[dict]] = {part: [] for part in parts}
    for part, seed in wanted:
        trials[part].append(_trial(experiment, part, seed, folder, scale, quick=quick, console=console))
    seconds = sum(trial.pop("trial_seconds") for each in trials.values() for trial in each)
    numbers = experiment.combine(trials)
    figures = {_label(key, scale): figure for key, figure in experiment.figures(trials, numbers).items()}
    for figure_name, figure in figures.items():
        console.print(f"Figure: {folder.save_figure(figure_name, figure)}", soft_wrap=True)
    command = command_line(name, quick=quick, seeds=seeds, scale=scale)
    about = {"experiment": name, "scale": scale, "command": command, "quick": quick}
    about |= {"seeds": seeds, "seconds": round(seconds), "cores": os.cpu_count(), "figures": list(figures)}
    folder.save_result(numbers, **about, code=config["code"], versions=config["versions"])
    said = experiment.report(read_numbers(folder.path), len(seeds))
    show([item for item in said if isinstance(item, Grid) or not quick], console)  # words on a quick run say nothing


def show(report: Iterable[str | Grid], console: Console) -> None:
    """The tables and sentences of an experiment, on a terminal."""
    for item in report:
        if isinstance(item, Grid):
            console.print(_rich(item))
        else:
            console.print(item.replace("**", ""), soft_wrap=True)


def command_line(name: str, *, quick: bool, seeds: Sequence[int], scale: str | None = None) -> str:
    """The command that makes this run."""
    usual = 1 if quick else EXPERIMENTS[name].seeds
    words = ["autodsm reproduce", name]
    words += [f"--scale {scale}"] * (scale is not None)
    words += ["--quick"] * quick
    words += [f"--seeds {len(seeds)}"] * (len(seeds) != usual)
    words += [f"--seed {seeds[0]}"] * (seeds[0] != 0)
    return " ".join(words)


def _label(name: str, scale: str | None) -> str:
    """What results and figures of an experiment are called."""
    return name if scale is None else f"{name}-{scale}"


def _trial_path(folder: RunFolder, part: str, seed: int) -> Path:
    slug = re.sub(r"[^\w.]+", "-", part).strip("-")
    return folder.path / "trials" / f"{slug}-seed-{seed}.json"


def _trial(
    experiment: Experiment, part: str, seed: int, folder: RunFolder, scale: str | None, *, quick: bool, console: Console
) -> dict:
    path = _trial_path(folder, part, seed)
    if not path.exists():
        if part != "all":
            console.print(Text.assemble((part, "bold"), f", seed {seed}"))
        began = time.monotonic()
        more = {} if scale is None else {"scale": scale, "folder": path.with_suffix("")}
        numbers = experiment.trial(part, quick=quick, seed=seed, **more)
        folder.write(f"trials/{path.name}", {**numbers, "trial_seconds": time.monotonic() - began})
    return read_json(path, "Remove it; `autodsm resume` then computes it again.", needs=("trial_seconds",))


def publish(docs: Path, runs: Iterable[Path]) -> Path:
    """Take numbers and figures of finished runs into a folder of documentation, and write its page of results."""
    target = docs / "results.md"
    if target.exists() and not target.read_text(encoding="utf-8").startswith(_HEAD):
        raise ValueError(f"{target} is not a page of `autodsm report`, and is not replaced. Name another folder.")
    found, sources = _committed(docs), {}
    for run in runs:
        if not (run / "result.json").is_file():
            raise ValueError(f"{run} is not a finished run of `autodsm reproduce`: it has no result.json.")
        result = read_json(run / "result.json")
        if "experiment" not in result:
            raise ValueError(f"{run} was not made by `autodsm reproduce`; the page shows experiments only.")
        read_json(run / "result.json", needs=_SHOWN)
        name = _label(result["experiment"], result.get("scale"))
        if result["quick"] and name in found and not found[name]["quick"]:
            raise ValueError(f"{run} is a quick run; {docs} has a full one of {name}, which it does not replace.")
        found[name], sources[name] = result, run
    text = _page(found)
    for folder in ("results", "figures"):
        (docs / folder).mkdir(parents=True, exist_ok=True)
    for name, run in sources.items():
        shutil.copyfile(run / "result.json", docs / "results" / f"{name}.json")
        for figure in found[name]["figures"]:
            shutil.copyfile(run / "figures" / f"{figure}.png", docs / "figures" / f"{figure}.png")
    target.write_text(text, encoding="utf-8")
    return target


def page(docs: Path) -> str:
    """The page of results, from the numbers in docs/results."""
    return _page(_committed(docs))


def _committed(docs: Path) -> dict[str, dict]:
    paths = sorted((docs / "results").glob("*.json"))
    found = {path.stem: read_json(path, "Restore or remove it.", needs=_SHOWN) for path in paths}
    for name, result in found.items():
        if _label(result.get("experiment", ""), result.get("scale")) != name:
            raise ValueError(f"{docs / 'results' / name}.json is not a result of the experiment {name!r}: remove it.")
    return found


def _page(found: dict[str, dict]) -> str:
    known = {_label(name, s): one for name, one in EXPERIMENTS.items() for s in one.scales or (None,)}
    for name in found:
        check_name("experiment", name, known)
    shown = {name: experiment for name, experiment in known.items() if name in found}
    verdicts = [
        f"- [{name}](#{name}): {item}"
        for name, experiment in shown.items()
        if not found[name]["quick"]
        for item in experiment.report(found[name]["numbers"], len(found[name]["seeds"]))
        if isinstance(item, str) and item.startswith(VERDICTS)
    ]
    lines = [_HEAD, "", _INTRODUCTION, "", *(["## Against the paper", "", *verdicts, ""] if verdicts else [])]
    for name, experiment in shown.items():
        lines += _section(name, experiment, found[name])
    return "\n".join(lines).rstrip() + "\n"


_HEAD = "# Results"
_SHOWN = ("experiment", "quick", "numbers", "command", "seeds", "seconds", "cores", "versions", "figures")
_INTRODUCTION = """\
Written by `autodsm report` from the numbers in [results](results), which the command above each section made; the same
command makes them again. Errors after ± are standard errors over seeds unless a section says otherwise; those of three
seeds are themselves known to a factor of two. MMD² is unbiased: zero on average for equal laws, and at times below it.
Its noise floor is the 95 % quantile for equal laws, by permutations of the two samples. Times are medians over the
rounds of a training, and depend on what else a machine did; `benchmarks` measure ratios in one run.

A comparison with the paper agrees if the interval of Student's t over seeds lies within what the paper claims, differs
if it lies outside, and otherwise cannot tell: at 95 % for all comparisons of a section together. One seed has no such
interval; errors over images or samples do not replace it."""


def summary(name: str) -> str:
    """The first line of what an experiment's file says about itself; read, not imported, since that takes long."""
    file = importlib.resources.files(experiments) / f"{name.replace('-', '_')}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0]


def _section(name: str, experiment: Experiment, result: dict) -> list[str]:
    about = (sys.modules[experiment.trial.__module__].__doc__ or "").strip()
    first, _, rest = about.partition("\n\n")
    seeds = len(result["seeds"])
    told = f"`{result['command']}` · {seeds} seed{'s' * (seeds > 1)} · {_duration(result['seconds'])} on "
    told += f"{result['cores']} cores · jax {result['versions']['jax']}"
    lines = [f"## {name}", "", f"**{first}**", "", told + (" · **a quick run, for a look only**" * result["quick"]), ""]
    lines += [f"**{result['caveat']}**", ""] if "caveat" in result else []  # written into the file by hand
    lines += [rest, ""] if rest else []
    said = experiment.report(result["numbers"], seeds)
    for item in [one for one in said if isinstance(one, Grid) or not result["quick"]]:
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
    table = Table(title=Text(grid.title))  # E[x²] is no markup
    for i, column in enumerate(grid.columns):
        table.add_column(Text(column), justify="right" if i else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table
