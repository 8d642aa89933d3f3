"""The exact score as the target: what the noise of every other target is measured against.

A network trained on it is limited by itself alone, by its size, its steps and the states that it has seen. So the error
of any training is given as a multiple of the one with this target, at as many steps.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.modules import replace
from ..paths.initial import initial_states
from ..process.clock import EARLIEST
from ..process.process import Process
from .base import AbstractForward, AbstractTarget, Draw
from .marginals import SHARES, Marginals
from .paths import PER_PATH, Paths

_STATES = 4096
"""Over which the size of the score is taken: right to a percent."""


class Oracle(AbstractTarget):
    """Draws of `forward`, each with its exact `score(y, t)`. A loss weighs it by its own size, `(E s_i²)^(−½)`.

    exact = ad.reference.gaussian_marginals(process, mean, cov)
    objective = ad.DSM(process, Oracle(process, exact.score))
    """

    process: Process
    score: Callable
    forward: AbstractForward
    marginals: Marginals | None
    scale: Float[Array, "points ..."] | None
    """Over the times of the marginals; chosen by `prepared`."""

    def __init__(self, process: Process, score: Callable, forward: AbstractForward | None = None):
        self.process, self.score, self.marginals, self.scale = process, score, None, None
        self.forward = Paths(process) if forward is None else forward

    def draw(self, x, times, *, key):
        times = jnp.asarray(times, x.dtype)
        y = self.forward.states(x, times, key=key)
        score = jax.vmap(self.score)(y, times)
        scale, marginals, table = jnp.ones_like(y), self.marginals, self.scale
        if marginals is not None and table is not None:
            scale = jax.vmap(lambda t: marginals.between(table, t))(times)
        return jax.lax.stop_gradient(Draw(times, y[:, None], score[:, None], scale.astype(x.dtype), None))

    def states(self, x, times, *, key):
        return self.forward.states(x, times, key=key)

    def prepared(self, pilot):
        forward = self.forward.prepared(pilot)
        x = initial_states(pilot.y0, _STATES, key=pilot.key)
        times = jnp.asarray(self.process.t1 * np.maximum(SHARES, EARLIEST)).astype(x.dtype)

        def scores(given):
            x, key = given
            return jax.vmap(self.score)(forward.states(x, times, key=key), times)

        every = jax.jit(lambda given: jax.lax.map(scores, given, batch_size=64))
        found = np.asarray(every((x, jax.random.split(pilot.key, len(x)))), float)
        marginals = pilot.marginals(forward)
        known = np.isfinite(found)
        size = np.sqrt(np.sum(np.where(known, found, 0.0) ** 2, axis=0) / np.maximum(known.sum(axis=0), 1))
        # Where no score is known, or there is none, the scale is that of the states.
        scale = np.where(size > 0, 1.0 / np.where(size > 0, size, 1.0), np.asarray(marginals.std))
        return replace(self, forward=forward, marginals=marginals, scale=jnp.asarray(scale, float))

    def draws_per_path(self, shape):
        return PER_PATH
