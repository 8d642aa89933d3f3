"""What the command line trains on: named problems, and problems that a user's file defines."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..base.errors import check_name
from ..data import checkerboard
from ..process.priors import LinearBeta, langevin
from ..process.process import Process
from ..process.systems import SYSTEMS, System


class Problem(NamedTuple):
    """A process with samples of y_0; a prior where the process tends to one; perhaps an objective and a network."""

    process: Process
    y0: Any
    prior: Any = None
    objective: Any = None
    network: Any = None


def _checkerboard() -> Problem:
    """The checkerboard under Langevin dynamics towards a logistic prior, β from 0.1 to 10."""
    import numpyro.distributions as dist

    prior = dist.Logistic(0.0, 1.0)
    return Problem(langevin(prior, LinearBeta(0.1, 10.0)), checkerboard, prior)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "checkerboard": _checkerboard,
    **{name: lambda build=build: Problem(*build()[:2]) for name, build in SYSTEMS.items()},
}


def named(name: str) -> Problem:
    check_name("problem", name, PROBLEMS)
    return PROBLEMS[name]()


def from_file(path: Path) -> Problem:
    """The problem that a Python file defines: `process` and `y0`, optionally `prior`, `objective` and `network`.

    The file is run, with its folder as the place to import from.
    """
    _check_file(path)
    found = runpy.run_path(str(path))
    # `from autodsm import network` makes a module of that name, not a network.
    found = {name: value for name, value in found.items() if not isinstance(value, ModuleType)}
    process, y0 = found.get("process"), found.get("y0")
    if isinstance(process, System):
        process, y0 = process.process, process.y0 if y0 is None else y0
    if not isinstance(process, Process):
        raise ValueError(f"{path} must define `process`, an autodsm.Process; found {process!r}.")
    if y0 is None:
        raise ValueError(f"{path} must define `y0`, a sampler y0(key, n) or an array of samples of the initial state.")
    return Problem(process, y0, *(found.get(name) for name in ("prior", "objective", "network")))


def problem_of(source: dict) -> Problem:
    """What a command was about."""
    return named(source["problem"]) if "problem" in source else from_file(Path(source["file"]))


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"file={str(path)!r} does not exist. Name the file where it is now, such as --file FILE.py.")
