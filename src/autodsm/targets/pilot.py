"""The pilot of a training: what is looked at once, before it, to choose what was not given.

Examples of the data, the clock of the noise, and, for what asks for them, paths of a sufficient number of steps and the
moments of the states along them. Each is made when it is first asked for, and kept.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ..base.types import PRNGKey
from ..paths.initial import LOOK, Law, as_start, initial_states
from ..process.clock import Clock
from ..process.jumps import Jump, find_jump
from ..process.process import Process
from ..process.structure import AbstractStructure
from .base import AbstractForward
from .marginals import POINTS, Marginals
from .paths import Paths, choose_steps

MOST_STATES, LEAST_STATES = 4096, 64
"""Paths that moments are taken from: a deviation to a percent, or, for the largest states, to a tenth."""
_NUMBERS = 1 << 24  # in all states of these paths, at most


class Pilot:
    """Of one process and its data.

    pilot = Pilot(process, y0, key=key, report=print)
    pilot.x, pilot.paths(), pilot.marginals(pilot.paths())
    """

    def __init__(
        self,
        process: Process,
        y0,
        *,
        key: PRNGKey,
        clock: Clock | None = None,
        report: Callable[[str], object] = lambda text: None,
    ):
        example_key, self._steps_key, self._moments_key, self._ends_key, self.key = jax.random.split(key, 5)
        self._law_key = jax.random.fold_in(key, 5)
        self.process, self.y0, self.report = process, as_start(y0), report
        self.x = np.asarray(initial_states(y0, LOOK, key=example_key))
        """A few examples."""
        self.clock = Clock(process) if clock is None else clock
        self._paths: dict[float | None, Paths] = {}
        self._moments: list[tuple[AbstractForward, Marginals]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    @functools.cached_property
    def structure(self) -> AbstractStructure:
        return self.process.structure_for(self.shape)

    @functools.cached_property
    def start_score(self) -> Callable | None:
        """`∇ log q_0`, where y0 is a law with a density; refused if its samples do not have it."""
        if not isinstance(self.y0, Law):
            return None
        self.y0.check(key=self._law_key)
        return self.y0.score

    @functools.cached_property
    def jump(self) -> Jump | None:
        """Where the drift jumps, if it does."""
        return find_jump(self.process, self.x, clock=self.clock)

    def paths(self, tol: float | None = None) -> Paths:
        """Paths of as many steps as the data need, to a tolerance of `choose_steps`."""
        if tol not in self._paths:
            self.report("pilot: steps of the paths …")
            steps = choose_steps(self.process, self.y0, key=self._steps_key, tol=tol, clock=self.clock)
            self._paths[tol] = Paths(self.process, steps, clock=self.clock)
        return self._paths[tol]

    @property
    def count(self) -> int:
        """How many states moments and laws are taken from."""
        return int(np.clip(_NUMBERS // (POINTS * max(1, math.prod(self.shape))), LEAST_STATES, MOST_STATES))

    def ends(self, forward: AbstractForward) -> np.ndarray:
        """States at t1 that `forward` draws, (n, *shape)."""
        start_key, key = jax.random.split(self._ends_key)
        x = initial_states(self.y0, self.count, key=start_key)
        last = jnp.asarray([self.process.t1], x.dtype)
        draw = jax.jit(lambda every: jax.lax.map(lambda each: forward.states(each[0], last, key=each[1])[0], every))
        return np.asarray(draw((x, jax.random.split(key, len(x)))))

    def marginals(self, forward: AbstractForward) -> Marginals:
        """Moments of the states that `forward` draws."""
        for known, moments in self._moments:
            if known is forward:
                return moments
        self.report("pilot: mean and deviation of the states over time …")
        moments = Marginals.estimate(self.process, self.y0, forward, key=self._moments_key, n=self.count)
        self._moments.append((forward, moments))
        return moments
