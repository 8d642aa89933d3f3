"""A table that waits for its data: the shape of a state, and the range of its coordinates."""

import equinox as eqx
import numpy as np

from .._types import PRNGKey
from ..process import Process
from ..simulate import initial_states
from .base import AbstractTarget
from .tabulated import Tabulated


class Untabulated(AbstractTarget):
    """What `Tabulated` will be. With a range it can be drawn from: the table is then built when a shape is met."""

    process: Process
    y_range: tuple[float, float] | None = eqx.field(static=True)
    antithetic: bool = eqx.field(static=True)

    def build(self, y0, shape: tuple[int, ...], *, key: PRNGKey) -> Tabulated:
        """The table for data or a sampler `y0`, with states of this shape."""
        if self.y_range is not None:
            return self._of_shape(shape)
        pilot = int(np.clip((1 << 24) // max(1, np.prod(shape)), 1 << 10, 1 << 16))
        x = np.asarray(initial_states(y0, pilot, key=key) if callable(y0) else y0)
        return Tabulated(self.process, shape, y_range=range_of(x, sampled=callable(y0)), antithetic=self.antithetic)

    def draw(self, x, times, *, key):
        return self._of_shape(x.shape).draw(x, times, key=key)

    def states(self, x, times, *, key):
        return self._of_shape(x.shape).states(x, times, key=key)

    def _of_shape(self, shape: tuple[int, ...]) -> Tabulated:
        if self.y_range is None:
            raise ValueError(
                "the range of the tabulated kernel is not known yet. Give y_range=(low, high), or call "
                "objective.prepare(y0, key=key); fit does that."
            )
        return Tabulated(self.process, shape, y_range=self.y_range, antithetic=self.antithetic)


def range_of(x: np.ndarray, *, sampled: bool) -> tuple[float, float]:
    """A range that contains data `x`, or, if it was sampled, what else its law may draw."""
    low, high = float(x.min()), float(x.max())
    # A sampler may draw beyond the pilot: half as much again is beyond six deviations of a Gaussian.
    margin = 0.25 * (high - low) if sampled and not _fills_its_range(x) else 1e-3 * (high - low)
    margin = margin if high > low else 1.0
    # Rounded outwards, so that other draws of the same law find the same table.
    unit = 2.0 ** np.ceil(np.log2((high - low + 2 * margin) / 1024))
    return float(np.floor((low - margin) / unit) * unit), float(np.ceil((high + margin) / unit) * unit)


def _fills_its_range(x: np.ndarray) -> bool:
    """True when the extremes of many draws are those of a bounded law, with mass at its ends."""
    low, high = x.min(), x.max()
    edge = 0.01 * (high - low)
    return bool(min(np.mean(x < low + edge), np.mean(x > high - edge)) > 1e-3)
