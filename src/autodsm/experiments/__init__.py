"""Experiments: one file for each figure or table, run by `autodsm reproduce NAME`.

Each file has a `trial`, what is made of the trials, and an `EXPERIMENT` that holds them; see `experiment`. `quick`
makes a trial small enough for continuous integration without changing what it does.
"""

import importlib
from collections.abc import Iterator, MutableMapping

from .shared.experiment import Experiment as Experiment
from .shared.experiment import Grid as Grid
from .shared.verdict import VERDICTS as VERDICTS


class Experiments(MutableMapping[str, Experiment]):
    """Experiments by name, each imported when it is looked up: their names alone need none of them."""

    def __init__(self, *names: str):
        self._found: dict[str, Experiment | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Experiment:
        found = self._found[name]
        if found is None:
            found = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").EXPERIMENT
            self._found[name] = found
        return found

    def __setitem__(self, name: str, experiment: Experiment) -> None:
        self._found[name] = experiment

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:  # that of Mapping would import it
        return name in self._found


EXPERIMENTS = Experiments(
    "demo",
    "mean-error",
    "local-kernels",
    "gradient-variance",
    "checkerboard",
    "swimmer",
    "particles",
    "lambda-sweep",
    "entropy",
    "oracle",
    "flows",
    "cifar10-bpd",
    "cifar10-lambda",
    "cifar10-samples",
)
