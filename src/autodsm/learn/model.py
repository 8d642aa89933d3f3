"""What `fit` returns: a trained score, and how it came about."""

import dataclasses
from typing import Any

from .objective import AbstractObjective


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained score, with how it came about."""

    score: Any
    """`score(y, t)`, the network with averaged weights."""
    last: Any
    """The same with the weights of the last step."""
    objective: AbstractObjective
    history: list[dict]
    """Metrics of every round: step, loss, grad_norm, steps_per_s."""
    config: dict
