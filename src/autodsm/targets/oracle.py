"""The exact score as the target: what the noise of every other target is measured against.

A network trained on it is limited by itself alone, by its size, its steps and the states that it has seen. So the error
of any training is given as a multiple of the one with this target, at as many steps.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..base.modules import replace
from ..process.process import Process
from .base import AbstractForward, AbstractTarget, Draw
from .marginals import Marginals
from .paths import PER_PATH, Paths


class Oracle(AbstractTarget):
    """Draws of `forward`, each with its exact `score(y, t)`.

    exact = ad.reference.gaussian_marginals(process, mean, cov)
    objective = ad.DSM(process, Oracle(process, exact.score))
    """

    process: Process
    score: Callable
    forward: AbstractForward
    marginals: Marginals | None

    def __init__(self, process: Process, score: Callable, forward: AbstractForward | None = None):
        self.process, self.score, self.marginals = process, score, None
        self.forward = Paths(process) if forward is None else forward

    def draw(self, x, times, *, key):
        times = jnp.asarray(times, x.dtype)
        y = self.forward.states(x, times, key=key)
        score = jax.vmap(self.score)(y, times)
        # A score is no smaller than the inverse deviation of its states.
        marginals = self.marginals
        scale = jnp.ones_like(y) if marginals is None else jax.vmap(lambda t: marginals.at(t)[1])(times)
        return jax.lax.stop_gradient(Draw(times, y[:, None], score[:, None], scale.astype(x.dtype), None))

    def states(self, x, times, *, key):
        return self.forward.states(x, times, key=key)

    def prepared(self, pilot):
        forward = self.forward.prepared(pilot)
        return replace(self, forward=forward, marginals=pilot.marginals(forward))

    def draws_per_path(self, shape):
        return PER_PATH
