"""Where the starts of a table lie: a range of y_0, with most starts where most of the data are.

Starts are even in `u = asinh((y − c)/w)`: nearly even within w of the centre c, and in proportion to the distance from
it beyond, so that rare far states of a heavy-tailed law cost few starts.

A sampler will draw beyond any states that were drawn to look at. How far follows from its tails: beyond a high
quantile, the excess of any common law is nearly a generalized Pareto law,

    P(excess > e) = (1 + ξ e/σ)^(−1/ξ),

ξ < 0 for a bounded law, 0 for a Gaussian or an exponential tail, above 0 for a heavy one. ξ and σ are estimated by
probability-weighted moments (Hosking & Wallis, 1987), and the range ends where a draw in 10¹² falls outside.
"""

import math
from typing import NamedTuple

import numpy as np

_OUTSIDE = 1e-12
"""Share of draws beyond either end of the range. A long training makes 10⁷ draws of some hundred coordinates."""
_TAIL = 1e-2  # share of the draws from which a tail is estimated
_LEAST_TAIL = 64  # draws of it: fewer do not tell one tail from another
_BOUNDED = -0.25  # ξ, surely below which a tail ends: at the end that it points to, instead of an exponential one's
_CORE = (0.05, 0.95)  # quantiles between which starts are even
_UNSEEN = 0.1
"""Weight of errors where none of the data were seen."""
_MARGIN = 1e-3  # of the range, beyond data that are given as they are
_GRAIN = 1024  # ends are rounded to this part of the core, so that other draws of a law find the same table


class Span(NamedTuple):
    """A range of starts: its ends, the centre c and width w that place starts in it, and where data were seen."""

    low: float
    high: float
    centre: float
    width: float
    seen_low: float
    seen_high: float

    def place(self, y, np=np):
        """Where y lies, from 0 at the low end to 1 at the high one."""
        low, high = (np.arcsinh((end - self.centre) / self.width) for end in (self.low, self.high))
        return (np.arcsinh((y - self.centre) / self.width) - low) / (high - low)

    def starts(self, count: int) -> np.ndarray:
        """Starts at even places, the ends among them."""
        low, high = (math.asinh((end - self.centre) / self.width) for end in (self.low, self.high))
        starts = self.centre + self.width * np.sinh(np.linspace(low, high, count))
        starts[0], starts[-1] = self.low, self.high
        return starts

    def weight(self, starts: np.ndarray) -> np.ndarray:
        """What an error of a table at these starts counts."""
        return np.where((starts >= self.seen_low) & (starts <= self.seen_high), 1.0, _UNSEEN)


def even_span(low: float, high: float) -> Span:
    """A range that was given."""
    low, high = float(low), float(high)
    return Span(low, high, 0.5 * (low + high), 2.0 * (high - low), low, high)  # starts are even to three percent


def span_of(values: np.ndarray, *, sampled: bool, least: float) -> Span:
    """A range that contains the values, or, if they were sampled, all that their law may draw; `least` is a width below
    which it makes no difference where states start."""
    values = np.asarray(values, float).ravel()
    low, high = float(values.min()), float(values.max())
    core_low, core_high = (float(v) for v in np.quantile(values, _CORE))
    core = max(core_high - core_low, _MARGIN * (high - low), least) or 1.0  # without data and noise: any width
    if sampled:
        below, above = -_end(-values, core), _end(values, core)
    else:
        margin = _MARGIN * max(high - low, least)
        below, above = low - margin, high + margin
    unit = 2.0 ** np.ceil(np.log2(core / _GRAIN))
    width = 2.0 ** np.round(np.log2(core))
    centre = float(np.round(0.5 * (core_low + core_high) / (0.25 * width)) * 0.25 * width)
    ends = (float(np.floor(below / unit) * unit), float(np.ceil(above / unit) * unit))
    # Rounded outwards, by a tenth at most, so that other draws of the law have the same.
    reach = (max(abs(end - centre) / width, 1e-3) for end in (low, high))
    seen = [width * 2.0 ** (np.ceil(8.0 * np.log2(share)) / 8.0) for share in reach]
    return Span(*ends, centre, float(width), float(centre - seen[0]), float(centre + seen[1]))


def _end(values: np.ndarray, core: float) -> float:
    """The value that a share `_OUTSIDE` of draws exceeds."""
    n, largest = len(values), float(values.max())
    count = int(min(max(_LEAST_TAIL, _TAIL * n), n // 2))
    tail = np.sort(np.partition(values, n - count - 1)[n - count - 1 :])
    threshold, excess = tail[0], tail[1:] - tail[0]
    if count < _LEAST_TAIL or not excess.mean() > 0:  # too few to tell, or all at one value
        return largest + 0.5 * core
    rising = 1.0 - (np.arange(1, count + 1) - 0.35) / count
    first, second = float(excess.mean()), float(np.mean(rising * excess))
    shape = 2.0 - first / (first - 2.0 * second)
    scale = 2.0 * first * second / (first - 2.0 * second)
    error = (1.0 + abs(shape)) / math.sqrt(count)
    times = count / (n * _OUTSIDE)
    if shape + 2.0 * error < _BOUNDED:
        end = threshold - scale / (shape + 2.0 * error)
    elif shape - 2.0 * error < 0:
        end = threshold + scale * math.log(times)
    else:
        end = threshold + scale / (shape + error) * (times ** (shape + error) - 1.0)
    return max(end, largest + _MARGIN * core)
