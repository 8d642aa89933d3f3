"""What `fit` returns: a trained score, and how it came about."""

import dataclasses
from typing import Any

from ..base.types import PRNGKey
from ..use.diagnose import diagnose
from ..use.findings import Report
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
    y0: Any = None
    """The start that it was trained from."""

    def diagnose(self, y0=None, *, key: PRNGKey, **options) -> Report:
        """Whether the score is any good, on fresh states: see `autodsm.diagnose`.

            print(model.diagnose(key=key))

        `y0`: another start than that of the training.
        """
        y0 = self.y0 if y0 is None else y0
        if y0 is None:
            raise ValueError("the model does not know the start that it was trained from: give y0=... .")
        return diagnose(self.objective.process, self.score, y0, key=key, **options)
