"""Implicit score matching (Hyvärinen, 2005): `½‖s_θ‖²_Q + ∇·(Q s_θ)`: no target, at the price of a divergence."""

import math
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .clock import TimeLaw
from .errors import check_count
from .network import non_smooth_activation
from .noise import check_derivatives, check_divergence, implicit, noisy, unit_directions
from .objective import DEFAULT_STEPS, AbstractObjective, replace
from .process import Process
from .simulate import initial_states
from .targets import AbstractForward, Paths
from .targets.paths import choose_steps


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
    pairs_per_path: int = eqx.field(static=True)
    noisy: tuple[int, ...] | None = eqx.field(static=True)
    """Coordinates of the raveled state whose derivatives the exact divergence takes; None: all."""
    open: tuple[str, ...] = eqx.field(static=True)

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
        check_divergence(divergence, probes)
        pairs = 32 if pairs_per_path is None else pairs_per_path
        check_count("pairs_per_path", pairs)
        self.process = process
        self.open = ("steps",) if forward is None and steps is None else ()
        self.open += ("pairs",) if pairs_per_path is None else ()
        self.forward = Paths(process, DEFAULT_STEPS if steps is None else steps) if forward is None else forward
        self.times = TimeLaw(process, times, t0)
        self.divergence = divergence
        self.probes = 1 if probes is None else probes
        self.pairs_per_path = pairs
        self.noisy = None

    @property
    def evaluations(self) -> int:
        return 1

    def draws(self, x, *, key, u=None):
        state_key, probe_key, u_key = jax.random.split(key, 3)
        k = self.pairs_per_path
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

    def prepare(self, y0, *, key):
        ready: ISM = self
        if self.divergence == "exact":
            shape = initial_states(y0, 1, key=key).shape[1:]
            if self.process.constant_noise:
                entered = np.asarray(noisy(self.process, 0.0, shape)).ravel()
                ready = replace(ready, noisy=None if entered.all() else tuple(np.flatnonzero(entered).tolist()))
            check_derivatives(shape, None if ready.noisy is None else len(ready.noisy))
        if "steps" in self.open:
            forward = Paths(self.process, choose_steps(self.process, y0, key=key))
            ready = replace(ready, forward=forward, open=tuple(name for name in self.open if name == "pairs"))
        return ready

    def covers(self, x):
        return self.forward.covers(x)
