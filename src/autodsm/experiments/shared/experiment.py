"""What an experiment is: trials for each of its parts and seeds, numbers made of them, figures, and what they say.

A trial is the unit of work that is kept: a run that was stopped goes on with the first trial it does not have. What a
trial returns is written as JSON and read again before it is used, so that a resumed run sees what the first one saw.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Trials = dict[str, list[dict]]
"""For each part of an experiment its trials, one for each seed."""


class Grid(NamedTuple):
    """A table of text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Experiment(NamedTuple):
    """One figure or table."""

    trial: Callable[..., dict]
    """`trial(part, quick=, seed=)`: the numbers of one part, for one seed."""
    combine: Callable[[Trials], dict]
    """Numbers over all seeds, for result.json."""
    figures: "Callable[[Trials, dict], dict[str, Figure]]"
    """Figures by name, of trials and numbers."""
    report: Callable[[dict, int], list[str | Grid]]
    """`report(numbers, seeds)`: what numbers of that many seeds say, in paragraphs and tables, for the terminal and for
    the page of results."""
    parts: tuple[str, ...] = ("all",)
    quick_parts: tuple[str, ...] | None = None
    """Those of a quick run, if it leaves some out."""
    seeds: int = 1
    """How many, unless the user says; a quick run has one."""
    one_seed: bool = False
    """Errors are over draws within a trial, so that more seeds are not taken."""
    scales: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Sizes to choose from, the first unless the user says, and the parts of each. A trial then also takes `scale=`,
    and `folder=`, where it keeps what it needs to go on with after a stop."""
    check: Callable[[str], None] | None = None
    """`check(scale)` raises if what a trial needs, such as a data set, is not there."""

    def parts_of(self, scale: str | None, *, quick: bool) -> tuple[str, ...]:
        """Those that a run has."""
        if quick and self.quick_parts:
            return self.quick_parts
        return self.parts if scale is None else self.scales[scale]


def over_seeds(values) -> dict:
    """Mean over the first axis and its standard error, which a single seed does not have."""
    values = np.asarray(values, float)
    several = len(values) > 1
    stderr = np.std(values, axis=0, ddof=1) / np.sqrt(len(values)) if several else np.full(values.shape[1:], np.nan)
    return {"value": np.mean(values, axis=0).tolist(), "stderr": stderr.tolist()}


def curve(found: dict) -> tuple[np.ndarray, np.ndarray]:
    """Value and standard error of what `over_seeds` made, as arrays; no error is zero."""
    value, stderr = (np.asarray(found[name], float) for name in ("value", "stderr"))
    return value, np.asarray(np.nan_to_num(stderr))


def above_zero(found: dict, least: float) -> tuple[np.ndarray, np.ndarray]:
    """The same for a logarithmic axis: an unbiased distance may be below zero, and is shown at `least`."""
    value, stderr = curve(found)
    return np.asarray(np.maximum(value, least)), stderr


def written(value: float | None, stderr: float | None = None, *, digits: int = 2) -> str:
    """A number as text, with its error if it has one: to `digits` significant digits, or to those of the error."""
    if value is None or not np.isfinite(value):
        return "–"
    if not stderr or not np.isfinite(stderr):
        return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
    power = int(np.floor(np.log10(max(abs(value), stderr))))
    power = power if power < -3 else 0
    value, stderr = value / 10.0**power, stderr / 10.0**power
    places = int(np.clip(1 - np.floor(np.log10(stderr)), 0, 5))
    text = f"{value:.{places}f} ± {stderr:.{places}f}"
    return f"({text})·10^{power}" if power else text


def row_of(found: dict, *, unit: float = 1.0) -> list[str]:
    """The entries of what `over_seeds` made of lists, as text, in that unit."""
    pairs = zip(*(np.array(found[name], float) / unit for name in ("value", "stderr")), strict=True)
    return [written(value, stderr) for value, stderr in pairs]


def last_of(found: dict) -> dict:
    """The last entries of what `over_seeds` made of lists."""
    return {name: found[name][-1] for name in ("value", "stderr")}


def difference(a: dict, b: dict) -> tuple[float, float]:
    """`a − b` of two single values that `over_seeds` made, and its standard error: NaN, if there was one seed."""
    value, stderr = (np.array([each[name] for each in (a, b)], float) for name in ("value", "stderr"))
    return float(value[0] - value[1]), float(np.hypot(*stderr))


def lost_of(methods: dict) -> list[str]:
    """A sentence about methods that lost samples, if there are any."""
    lost = {name: found["lost"]["value"] for name, found in methods.items() if found["lost"]["value"]}
    told = ", ".join(f"{name} {100 * share:.2g} %" for name, share in lost.items())
    return (
        [f"Samples that left the finite numbers, at the worst of all times, and are left out: {told}."] if lost else []
    )
