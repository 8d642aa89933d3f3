"""Verdicts: how often they are wrong is what their level says, and one seed decides nothing."""

import numpy as np
import pytest

from autodsm.experiments.shared.verdict import AGREES, CANNOT_TELL, DIFFERS, jointly, verdict

POSITIVE, SMALL = (0.0, np.inf), (-0.1, 0.1)


@pytest.mark.parametrize(
    ("value", "stderr", "seeds", "claim", "expected"),
    [
        (0.9, 0.1, 3, POSITIVE, AGREES),
        (-0.9, 0.1, 3, POSITIVE, DIFFERS),
        (0.2, 0.1, 100, POSITIVE, AGREES),
        (0.4, 0.1, 3, POSITIVE, CANNOT_TELL),  # with two degrees of freedom 95 % are 4.3 standard errors
        (-0.0035, 0.0022, 3, POSITIVE, CANNOT_TELL),
        (0.0, 0.01, 3, SMALL, AGREES),
        (0.0, 0.1, 3, SMALL, CANNOT_TELL),  # that no difference is seen does not show that there is none
        (0.0, 10.0, 3, SMALL, CANNOT_TELL),
        (0.2, 0.01, 3, SMALL, DIFFERS),
        (0.12, 0.01, 3, SMALL, CANNOT_TELL),
        (0.12, 0.0, 3, SMALL, DIFFERS),
        (5.0, 0.1, 1, POSITIVE, CANNOT_TELL),
        (5.0, np.nan, 1, POSITIVE, CANNOT_TELL),
        (5.0, None, 3, POSITIVE, CANNOT_TELL),
        (np.nan, 0.1, 3, POSITIVE, CANNOT_TELL),
    ],
)
def test_an_interval_within_beside_or_across_the_claim(value, stderr, seeds, claim, expected):
    assert verdict(value, stderr, seeds, claim=claim) == expected


@pytest.mark.parametrize(("seeds", "comparisons"), [(3, 1), (3, 4), (8, 2)])
def test_wrong_verdicts_are_as_rare_as_the_level_says(seeds, comparisons):
    """A truth at the edge of its claim: an interval that leaves it out, on either side, decides, and a report of k
    comparisons does so for at most the level of all reports."""
    draws = np.random.default_rng(0).normal(size=(4000, comparisons, seeds))
    means, stderrs = draws.mean(axis=-1), draws.std(axis=-1, ddof=1) / np.sqrt(seeds)
    decided = [
        any(verdict(m, e, seeds, claim=POSITIVE, comparisons=comparisons, level=0.1) != CANNOT_TELL for m, e in pairs)
        for pairs in np.stack([means, stderrs], axis=-1)
    ]
    union = 1 - (1 - 0.1 / comparisons) ** comparisons
    assert abs(np.mean(decided) - union) < 4 * np.sqrt(union * (1 - union) / len(decided))
    assert union <= 0.1


@pytest.mark.parametrize(
    "wrong", [dict(claim=(0.1, 0.1)), dict(comparisons=0), dict(level=0.0), dict(level=1.0), dict(claim=(np.nan, 1.0))]
)
def test_a_claim_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        verdict(0.2, 0.1, 3, **{"claim": POSITIVE, **wrong})


def test_a_claim_of_several_parts():
    assert jointly([AGREES, AGREES]) == AGREES
    assert jointly([AGREES, CANNOT_TELL]) == CANNOT_TELL
    assert jointly([AGREES, CANNOT_TELL, DIFFERS]) == DIFFERS
