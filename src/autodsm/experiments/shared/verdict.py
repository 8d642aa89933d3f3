"""Verdicts on what the paper claims: it agrees, it differs, or it cannot be told at this number of seeds.

A claim is a range in which a quantity lies: (0, ∞), that a difference is positive; (−δ, δ), that it is smaller than the
size δ that matters. A mean m over n seeds, of standard error e, gives the interval

    m ± e · T⁻¹(1 − α/2k; n − 1),

T the distribution function of Student's t: for all k comparisons of a report at once the intervals hold the quantities
with probability 1 − α (Bonferroni). An interval within the claim agrees, one beside it differs, any other cannot tell;
neither can one seed, whose error is not known. A difference of two independent means, of n seeds each, has between
n − 1 and 2n − 2 degrees of freedom; the fewer are taken.
"""

from collections.abc import Iterable

import numpy as np

AGREES, DIFFERS, CANNOT_TELL = "**As in the paper**", "**Differs from the paper**", "**Cannot tell**"
"""How a paragraph of a report begins that compares with the paper; the page of results lists these at its top."""
VERDICTS = (AGREES, DIFFERS, CANNOT_TELL)
POSITIVE, NEGATIVE = (0.0, np.inf), (-np.inf, 0.0)
"""The claims that one thing is larger than another, or smaller, by whatever amount."""
LEVEL = 0.05
"""The probability α that a report has a wrong verdict, the usual one."""


def verdict(
    value: float,
    stderr: float | None,
    seeds: int,
    *,
    claim: tuple[float, float],
    comparisons: int = 1,
    level: float = LEVEL,
) -> str:
    """Whether a mean over seeds lies in the range of a claim, where its report makes that many comparisons."""
    if not claim[0] < claim[1]:
        raise ValueError(f"claim={claim} is no range: it must be (low, high) with low < high.")
    if comparisons < 1:
        raise ValueError(f"comparisons={comparisons} must be at least 1: count those of the whole report.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1.")
    if seeds < 2 or stderr is None or not np.isfinite([value, stderr]).all():
        return CANNOT_TELL
    from scipy.special import stdtrit  # here: `autodsm list` needs no scipy

    reach = stderr * stdtrit(seeds - 1, 1 - level / (2 * comparisons))
    low, high = value - reach, value + reach
    if claim[0] < low and high < claim[1]:
        return AGREES
    return DIFFERS if high < claim[0] or low > claim[1] else CANNOT_TELL


def jointly(verdicts: Iterable[str]) -> str:
    """The verdict on a claim of several parts: one that differs is enough, and all must agree."""
    found = set(verdicts)
    return next((one for one in (DIFFERS, CANNOT_TELL) if one in found), AGREES)


def opening(found: str, seeds: int, claim: str, *, about: str = "") -> str:
    """The first words of a paragraph: a verdict, what it is about, and of how many seeds it is if it is open."""
    counted = [f"{seeds} seed{'s' * (seeds > 1)}"] * (found == CANNOT_TELL)
    bracket = ", ".join([about] * bool(about) + counted)
    comma = "" if found == CANNOT_TELL else ","
    return f"{found}{f' ({bracket})' * bool(bracket)}{comma} {claim}"
