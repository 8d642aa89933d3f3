"""What `diagnose` found, and the verdict: three-way, by the size of the error and its interval.

With enough states every trained score fails a sharp test, and so no test decides. The relative squared error of the
score, as far as test fields see it, has an interval at each time:

| the interval                              | the verdict         |
|-------------------------------------------|---------------------|
| lies below the tolerance, at all times    | "consistent"        |
| lies above it, at some time               | "inconsistent"      |
| anything else                             | "cannot tell"       |

The flow is a second judge: means or variances that differ by surely more than `DRIFT` are "inconsistent" too. What a
sharp test rejects all the same is in `flags`: an exact score has any in at most `LEVEL` of cases. The velocity has a
verdict of its own, as it may be a small difference of two large vectors, of which a small error of the score is large.
"""

import math
from typing import NamedTuple

from ..base.estimate import Estimate
from .carried import Carried
from .projections import Size
from .rates import Rates
from .stein import LEAST

CONSISTENT, INCONSISTENT, CANNOT_TELL = "consistent", "inconsistent", "cannot tell"
LEVEL = 0.05
"""How often an exact score has flags, at most, by all checks together."""
PARTS = {"error": 0.5, "Stein": 0.2, "balance": 0.1, "flow": 0.15, "Cramér–Rao": 0.05}
"""Shares of it. The error has most, as it sees what the others see and more."""
DRIFT = 0.05
"""Of means, in deviations, and of variances, relative: what the flow may differ by."""
VELOCITY = 0.1
"""Tolerance of the relative squared error of the velocity."""


class Look(NamedTuple):
    """One time."""

    t: float
    error: Size
    """`E‖s_θ − s‖²_Q/E‖s‖²_Q`, as far as fields see it."""
    mean: float
    """How often chance gives as large an `E[s]`; so for the others."""
    matrix: float
    """The full Stein matrix."""
    waves: float
    """Random features."""
    diagonal: float
    """The largest deviation of the diagonal of the Stein matrix, in standard errors."""
    cramer_rao: Estimate | None
    """The smallest eigenvalue of `C^½ E[s sᵀ] C^½`; its error counts the covariance's."""
    rates: Rates | None
    complete: bool
    """Whether noise enters all coordinates, so that production and heat exist."""
    difference: Estimate | None
    """By how much the relative error is larger than that of the other score."""

    def p_of(self, name: str) -> float:
        """How often chance alone gives as much, for a check of this time."""
        if name == "error":
            return self.error.p_value
        if name == "Stein":
            return min(1.0, 3.0 * min(self.mean, self.matrix, self.waves))
        if name == "balance":
            return 1.0 if self.rates is None else _two_sided(self.rates.balance)
        return 1.0 if self.cramer_rao is None else _below(self.cramer_rao, LEAST)


class Report(NamedTuple):
    """All that was found. `print(report)` shows it."""

    looks: tuple[Look, ...]
    pooled: float
    """How often an exact score gives fields of all times together as much."""
    flow: tuple[Carried, ...] | None
    n: int
    tolerance: float
    steady: bool
    about: str

    @property
    def p_values(self) -> dict[str, float]:
        """Of each check, over all times."""
        found = {name: self._least([look.p_of(name) for look in self.looks]) for name in PARTS if name != "flow"}
        found["error"] = min(1.0, 2.0 * min(found["error"], self.pooled))
        return {**found, "flow": self._least([c.p_value for c in self.flow or ()])}

    @staticmethod
    def _least(p_values: list[float]) -> float:
        return min(1.0, len(p_values) * min(p_values)) if p_values else 1.0

    @property
    def flags(self) -> tuple[str, ...]:
        """Checks that a score without any error would hardly fail."""
        return tuple(name for name, p in self.p_values.items() if p < PARTS[name] * LEVEL)

    @property
    def error(self) -> Size:
        """The relative error where it is largest for sure, or else where it may be largest."""
        return max((look.error for look in self.looks), key=lambda size: (size.low, size.high))

    @property
    def verdict(self) -> str:
        if self.drifts:
            return INCONSISTENT
        return _worst([judged(look.error, self.tolerance) for look in self.looks])

    @property
    def velocity_verdict(self) -> str | None:
        """That of velocities, which currents and productions are made of; None where they were not looked at."""
        found = [judged(look.rates.velocity, VELOCITY) for look in self.looks if look.rates is not None]
        return _worst(found) if found else None

    @property
    def drifts(self) -> tuple[Carried, ...]:
        """Where the flow surely differs from the paths by more than `DRIFT`."""
        sure = 4.0  # standard errors: over many coordinates and times
        beyond = lambda e: abs(e.value) - sure * e.stderr > DRIFT  # noqa: E731
        return tuple(c for c in self.flow or () if beyond(c.mean) or beyond(c.variance))

    @property
    def sentence(self) -> str:
        """The verdict, to be quoted."""
        return " ".join([self._opening(), *self._of_flow(), *self._of_velocity(), *self._of_flags()])

    def _opening(self) -> str:
        percent = lambda x: "∞" if math.isinf(x) else f"{100 * x:.2g} %"  # noqa: E731
        good = [look for look in self.looks if judged(look.error, self.tolerance) == CONSISTENT]
        bad = [look for look in self.looks if judged(look.error, self.tolerance) == INCONSISTENT]
        last = max(self.looks, key=lambda look: look.error.high)
        most = "of the score's squared norm"
        if bad:
            worst = max(bad, key=lambda look: look.error.low)
            until = [look for look in good if look.t < bad[0].t]
            first = ""
            if until:
                first = f"consistent to {percent(max(x.error.high for x in until))} up to t = {until[-1].t:.3g}; "
            return (
                f"Inconsistent: {first}at t = {worst.t:.3g} the squared error is {percent(worst.error.value)} {most}, "
                f"at least {percent(worst.error.low)}, beyond the tolerance of {percent(self.tolerance)}. Train "
                "longer, or check that drift, noise and start are those of the training."
            )
        if len(good) == len(self.looks):
            verb = "Consistent" if not self.drifts else "Inconsistent, though the score is consistent"
            return (
                f"{verb} to {percent(last.error.high)} {most} up to t = {self.looks[-1].t:.3g}, as far as test fields "
                f"see ({self.n} states, {self.about})."
            )
        need = self.n * last.error.high / self.tolerance
        return (
            f"Cannot tell: at t = {last.t:.3g} the squared error lies between {percent(last.error.low)} and "
            f"{percent(last.error.high)} {most}, the tolerance is {percent(self.tolerance)}; n = {need:.1g} states "
            "may tell."
        )

    def _of_flow(self) -> list[str]:
        if self.flow is None:
            return []
        if not self.drifts:
            worst = max((c.variance for c in self.flow), key=lambda e: abs(e.value))
            return [f"The flow's variances are right to {100 * (abs(worst.value) + 2 * worst.stderr):.2g} %."]
        worst = max(self.drifts, key=lambda c: max(abs(c.mean.value), abs(c.variance.value)))
        which, e, unit = "variance", worst.variance, " %"
        if abs(worst.mean.value) > abs(worst.variance.value):
            which, e, unit = "mean", worst.mean, " % of a deviation"
        return [f"The flow drifts by {100 * e.value:.2g} ± {100 * e.stderr:.1g}{unit} in {which} at t = {worst.t:.3g}."]

    def _of_velocity(self) -> list[str]:
        bad = [x for x in self.looks if x.rates is not None and judged(x.rates.velocity, VELOCITY) == INCONSISTENT]
        if not bad:
            return []
        worst = max(bad, key=lambda x: x.rates.velocity.low if x.rates is not None else 0.0)
        assert worst.rates is not None
        low = worst.rates.velocity.low
        least = "more than itself" if low > 1 else f"at least {100 * low:.2g} % of its squared norm"
        return [
            f"The velocity f − ½Qs is wrong by {least} at t = {worst.t:.3g}: currents and entropy production are to be "
            "quoted with their full errors only."
        ]

    def _of_flags(self) -> list[str]:
        if not self.flags:
            return []
        return [f"Some error is certain ({', '.join(self.flags)}), whatever its size."]

    def __str__(self) -> str:
        lines = [self.sentence, ""]
        heads, rows = self.table()
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
        lines += ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [heads, *rows]]
        return "\n".join(lines)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows, a row for each time."""
        heads = ["t", "score error, %", "velocity error, %", "Stein: mean p", "matrix p", "waves p", "Cramér–Rao"]
        heads += ["dS/dt", "production", "forms differ by"] if any(x.rates for x in self.looks) else []
        heads += ["flow: mean, σ", "variance, %", "MMD² (floor)", "outside, %"] if self.flow else []
        heads += ["steady residual"] * self.steady
        heads += ["error − other's, %"] * any(x.difference is not None for x in self.looks)
        rows = []
        for i, look in enumerate(self.looks):
            rates = look.rates
            row = [f"{look.t:.3g}", _of(look.error), "–" if rates is None else _of(rates.velocity)]
            row += [f"{p:.2g}" for p in (look.mean, look.matrix, look.waves)]
            row += ["–" if look.cramer_rao is None else str(look.cramer_rao)]
            if "dS/dt" in heads:
                row += ["–"] * 3 if rates is None else _of_rates(rates, look.complete)
            if self.flow is not None:
                c = self.flow[i]
                row += [f"{c.mean.value:+.3f} ± {c.mean.stderr:.3f}"]
                row += [f"{100 * c.variance.value:+.1f} ± {100 * c.variance.stderr:.1f}"]
                row += [f"{c.mmd.value:.1e} ({c.mmd.floor:.0e})", f"{100 * c.outside:.2g}"]
            if self.steady:
                row += ["–" if rates is None else f"{rates.still:.2g}"]
            if heads[-1].startswith("error −"):
                e = look.difference
                row += ["–" if e is None else f"{100 * e.value:+.2g} ± {100 * e.stderr:.1g}"]
            rows.append(row)
        return heads, rows


def judged(size: Size, tolerance: float) -> str:
    """One interval against a tolerance."""
    if size.high <= tolerance:
        return CONSISTENT
    return INCONSISTENT if size.low > tolerance else CANNOT_TELL


def _worst(verdicts: list[str]) -> str:
    return next(v for v in (INCONSISTENT, CANNOT_TELL, CONSISTENT) if v in verdicts)


def _of(size: Size) -> str:
    return f"{100 * size.value:.2g} [{100 * size.low:.2g}, {100 * size.high:.2g}]"


def _of_rates(rates: Rates, complete: bool) -> list[str]:
    balance = f"{rates.balance.value:.2g} ± {rates.balance.stderr:.1g}"
    return [str(rates.system), str(rates.total) if complete else "–", balance]


def _two_sided(e: Estimate) -> float:
    return math.erfc(abs(e.value) / max(e.stderr, 1e-300) / math.sqrt(2.0))


def _below(e: Estimate, least: float) -> float:
    """How often a number that is at least `least` is estimated as low as this."""
    return 0.5 * math.erfc((least - e.value) / max(e.stderr, 1e-300) / math.sqrt(2.0))
