"""What the commands do. Training and what uses its models are imported when they are called for: they take longest."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..base.errors import check_count, check_name
from ..data import cifar10_files as cifar10
from ..experiments import EXPERIMENTS
from ..run.folder import RunFolder, check_free, free_path, read_json
from . import report as results
from .arguments import Command, Data, Evaluate, Export, Fit, List, Report, Reproduce, Resume, Sample, Train
from .problems import PROBLEMS


def carry_out(command: Command, console: Console) -> None:
    match command:
        case List():
            show_list(console)
        case Reproduce():
            reproduce(command, console)
        case Report():
            console.print(f"Written: {results.publish(command.docs, command.add)}", soft_wrap=True)
        case Data():
            import_data(command, console)
        case Train() | Fit():
            start(command, console)
        case Resume():
            resume(command, console)
        case Sample():
            draw(command, console)
        case Evaluate():
            evaluate(command, console)
        case Export():
            write_export(command, console)


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
    from .training import dry_run, train_problem

    if isinstance(command, Train):
        source, name = {"problem": command.problem}, command.problem
    else:
        source, name = {"file": str(command.file)}, command.file.stem
    out = free_path(Path("runs") / name) if command.out is None else command.out
    check_free(out)
    if command.dry_run:
        dry_run(source, command.options, out, console)
        return
    train_problem(source, command.options, out, console)


def resume(command: Resume, console: Console) -> None:
    recorded = command.run / "config.json"
    if recorded.is_file() and "experiment" in (config := read_json(recorded)):
        run_experiment(config["experiment"], RunFolder(command.run), console)
        return
    from .runs import recorded_command
    from .training import train_problem

    source, options = recorded_command(command.run)
    if "file" in source:
        source = source if command.file is None else {"file": str(command.file)}
        console.print(f"{command.run} executes the code of {source['file']}.", soft_wrap=True)
    elif command.file is not None:
        raise ValueError(f"file={str(command.file)!r}: {command.run} is of the problem {source['problem']!r}.")
    train_problem(source, options, command.run, console)


def draw(command: Sample, console: Console) -> None:
    from .runs import open_run, sample_run, to_sample

    check_count("n", command.n)
    run = open_run(command.run, console, file=command.file, needs=to_sample(command.run))
    method = command.method or ("ode" if run.problem.prior is None else "sde")
    sample_run(run, console, n=command.n, method=method, steps=command.steps, seed=command.seed)


def evaluate(command: Evaluate, console: Console) -> None:
    from .evaluate import evaluate_run
    from .runs import EVERYTHING, open_run

    check_count("n", command.n)
    run = open_run(command.run, console, file=command.file, needs=EVERYTHING)
    evaluate_run(run, console, n=command.n, seed=command.seed)


def write_export(command: Export, console: Console) -> None:
    from .runs import open_run

    folder = command.run if command.run.is_dir() else command.run.parent
    out = free_path(folder / f"{command.what}.stablehlo") if command.out is None else command.out
    if out.exists():
        raise FileExistsError(f"{out} already exists. Nothing is overwritten: remove it, or name another file.")
    needs = frozenset({"process"}) if command.what == "sampler" else None
    run = open_run(command.run, console, file=command.file, needs=needs)
    run.model.export(out, sampler=command.what == "sampler", steps=command.steps)
    console.print(f"The {command.what}, states of shape {run.shape}, written to {out}", soft_wrap=True)
