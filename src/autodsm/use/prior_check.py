"""Whether a process has reached its prior at t1, where sampling starts and the bounds of likelihoods end.

For each coordinate, samples of q(t1) and of the prior are compared by the largest difference of their distribution
functions (Kolmogorov and Smirnov's D), which needs no moments: a heavy tail may have none. It has no units.
"""

import numpy as np

from ..base.types import PRNGKey
from ..process.priors import draw_prior

SMALL = 0.05
"""A D that does not matter: a Gaussian shifted by an eighth of its deviation, or wider by a quarter."""
_DOUBT = 1e-3  # how often samples of one law may exceed the bound in any coordinate


def prior_mismatch(prior, ends, *, key: PRNGKey) -> str | None:
    """How far states at t1, (n, *shape), are from the prior, in words; None when they agree.

        message = prior_mismatch(prior, ends, key=key)

    Agreement is a D that may be below `SMALL`, by n samples of each law: with a few hundred samples only gross
    differences show.
    """
    ends = np.asarray(ends, float)
    n, shape = len(ends), ends.shape[1:]
    drawn = np.asarray(draw_prior(prior, n, shape, key=key), float).reshape(n, -1)
    ends = ends.reshape(n, -1)
    apart = distances(ends, drawn)
    worst = int(np.argmax(apart))
    chance = np.sqrt(np.log(2.0 * len(apart) / _DOUBT) / n)
    if apart[worst] <= SMALL + chance:
        return None
    where = "" if len(apart) == 1 else f" of coordinate {tuple(int(i) for i in np.unravel_index(worst, shape))}"
    (low, middle, high), (left, centre, right) = (np.quantile(y[:, worst], [0.16, 0.5, 0.84]) for y in (ends, drawn))
    return (
        f"the process has not reached the prior at t1: the distribution{where} differs by {apart[worst]:.2g} "
        f"(samples of one law by up to {chance:.1g}). Two thirds of it lie in [{low:.3g}, {high:.3g}] "
        f"around {middle:.3g}, of the prior in [{left:.3g}, {right:.3g}] around {centre:.3g}. What starts from the "
        "prior is off by as much: give the process more noise or a later t1, or a prior that fits."
    )


def distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """D of each column of x, (n, d), and of y, (n, d)."""
    order = np.argsort(np.concatenate([x, y]), axis=0, kind="stable")
    return np.max(np.abs(np.cumsum(np.where(order < len(x), 1.0, -1.0), axis=0)), axis=0) / len(x)
