"""What `autodsm evaluate` shows of the diagnostics of a run: rows of its table."""

from typing import NamedTuple

import numpy as np

from ..base.estimate import Estimate
from ..process.noise import is_invertible
from ..use import observables
from ..use.diagnose import FEWEST, diagnose
from ..use.findings import Report
from .problems import Problem
from .runs import SHARES

DIAGNOSED = (0.02, 0.6)
"""Of t1, where diagnostics look besides."""
LARGE = 64
"""Coordinates above which divergences are not exact, and no flow is compared with paths."""
_SAMPLING = "± is of sampling only, without the score's own error: the drift jumps"


class Row(NamedTuple):
    """What was measured."""

    name: str
    value: float
    error: float
    """Its standard error, of sampling only unless the remark says otherwise; for a distance its noise floor."""
    remark: str = ""


def row_of(name: str, found: Estimate, remark: str = "") -> Row:
    return Row(name, found.value, found.stderr, remark)


def diagnosed(problem: Problem, score, shape: tuple[int, ...], n: int, *, key) -> Report:
    """The diagnostics of a run, also at the times where rates are shown."""
    times = problem.process.t1 * np.union1d(SHARES, DIAGNOSED)
    small = int(np.prod(shape)) <= LARGE
    return diagnose(problem.process, score, problem.y0, key=key, times=times, n=max(n, FEWEST), flow=small)


def errors_seen(report: Report) -> list[Row]:
    rows = []
    for look in report.looks:
        remark = f"of E‖s‖²_Q, seen by test fields; 95 %: {look.error.low:.2g} to {look.error.high:.2g}"
        reach = 0.25 * (look.error.high - look.error.low)
        rows.append(Row(f"score error seen, t = {look.t:.3g}", look.error.value, reach, remark))
    return rows


def rates(report: Report, process, score, ys: np.ndarray, t: float, *, key) -> list[Row]:
    """Entropy rates, with the score's own error where it could be measured."""
    look = min(report.looks, key=lambda look: abs(look.t - t))
    if look.rates is not None:
        names = ("system", "medium", "total") if look.complete else ("system",)
        found = {name: getattr(look.rates, name) for name in names}
        return [
            Row(f"entropy rate, {name}, t = {t:g}", rate.value, rate.error,
                f"the score's own error is included; sampling only: {rate.stderr:.2g}")
            for name, rate in found.items()
        ]  # fmt: skip
    if all(is_invertible(process, ys.shape[1:], t) for t in process.t1 * np.array(SHARES)):
        found = observables.entropy_production(process, score, ys, t)
        return [row_of(f"entropy rate, {name}, t = {t:g}", rate, _SAMPLING) for name, rate in found._asdict().items()]
    kind = "hutchinson" if ys[0].size > LARGE else "exact"
    rate = observables.entropy_rate(process, score, ys, t, divergence=kind, key=key)
    return [row_of(f"entropy rate, system, t = {t:g}", rate, _SAMPLING)]
