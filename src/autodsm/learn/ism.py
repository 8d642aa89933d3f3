"""Implicit score matching (Hyvärinen, 2005): `½‖s_θ‖²_Q + ∇·(Q s_θ)`: no target, at the price of a divergence."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import check_count, suggest_options
from ..base.modules import replace
from ..network import non_smooth_activation
from ..process.clock import Clock, TimeLaw
from ..process.noise import check_derivatives, check_divergence, implicit, noisy, unit_directions
from ..process.process import Process, check_process
from ..targets import AbstractForward, Paths
from ..targets.paths import PER_PATH
from .objective import AbstractObjective


class ISM(AbstractObjective):
    """Implicit score matching: `½‖s_θ‖²_Q + ∇·(Q s_θ)`, with an exact divergence or Hutchinson's estimate of it.

        objective = ISM(process, divergence="hutchinson", probes=1)

    The network needs a smooth activation: the divergence of a network of kinks (ReLU) jumps where a unit switches,
    automatic differentiation does not see the jumps, and training stalls. `y_t` comes from `forward`, by default paths.
    Times as for the "likelihood" weighting of `DSM`: the loss is an integral over (t0, t1]. An exact divergence takes
    a derivative for each coordinate; after `prepare`, for each that noise enters, where the noise is constant.
    """

    process: Process
    forward: AbstractForward
    times: TimeLaw
    divergence: str = eqx.field(static=True)
    probes: int = eqx.field(static=True)
    pairs_per_path: int | None = eqx.field(static=True)
    noisy: tuple[int, ...] | None = eqx.field(static=True)
    """Coordinates of the raveled state whose derivatives the exact divergence takes; None: all."""

    @suggest_options()
    def __init__(
        self,
        process: Process,
        *,
        divergence: str = "exact",
        probes: int | None = None,
        forward: AbstractForward | None = None,
        steps: int | None = None,
        times: str = "uniform",
        t0: float | None = None,
        pairs_per_path: int | None = None,
    ):
        check_process(process)
        check_divergence(divergence, probes)
        if pairs_per_path is not None:
            check_count("pairs_per_path", pairs_per_path)
        clock = Clock(process)
        self.process = process
        self.forward = Paths(process, steps, clock=clock) if forward is None else forward
        self.times = TimeLaw(process, times, t0, clock=clock)
        self.divergence = divergence
        self.probes = 1 if probes is None else probes
        self.pairs_per_path = pairs_per_path
        self.noisy = None

    @property
    def evaluations(self) -> int:
        return 1

    def draws(self, x, *, key, u=None):
        state_key, probe_key, u_key = jax.random.split(key, 3)
        k = self.draws_per_path(x.shape)
        u = jax.random.uniform(u_key, (), x.dtype) if u is None else u
        t = self.times.at((jnp.arange(k, dtype=x.dtype) + u) / k)
        y = jax.lax.stop_gradient(self.forward.states(x, t, key=state_key))
        if self.divergence == "exact":
            return t, y, jnp.zeros((k, 0, *x.shape), x.dtype)
        return t, y, jax.random.rademacher(probe_key, (k, self.probes, *x.shape), x.dtype) / math.sqrt(self.probes)

    def at(self, score, draw):
        t, y, probes = draw
        if (name := non_smooth_activation(score)) is not None:
            warnings.warn(
                f"implicit score matching with the activation {name!r}: its divergence jumps where a unit switches, "
                'and the gradient is biased. Use a smooth one, e.g. activation="silu".',
                stacklevel=2,
            )

        along = unit_directions(y, self.noisy) if self.divergence == "exact" else probes
        return implicit(self.process, score, y, t, along)[0] / self.times.density(t)

    def prepared(self, pilot):
        entered = None
        if self.divergence == "exact":
            if self.process.constant_noise:
                every = np.asarray(noisy(self.process, 0.0, pilot.shape)).ravel()
                entered = None if every.all() else tuple(np.flatnonzero(every).tolist())
            check_derivatives(pilot.shape, None if entered is None else len(entered))
        return replace(self, noisy=entered, forward=self.forward.prepared(pilot))

    def draws_per_path(self, shape):
        return PER_PATH if self.pairs_per_path is None else self.pairs_per_path

    def covers(self, x):
        return self.forward.covers(x)
