"""The local target: the score of the Gaussian kernel from y_s to y_t of the process linearized at y_s.

`y_t = m + L ε`, target `−L⁻ᵀ ε`. Exact for a linear drift from s = 0 (denoising score matching); for any other it is
as exact as the kernel is over [s(t), t]. An antithetic pair is `m ± L ε`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from ..base.errors import check_flag, check_name
from ..base.modules import replace
from ..kernels.gaussian import transition
from ..kernels.schedule import AbstractSchedule, FromZero, ScheduledPairs
from ..process.process import Process
from ..process.structure import Elementwise
from .base import AbstractForward, AbstractTarget, Draw
from .paths import PER_PATH


class Local(AbstractTarget):
    """Kernel scores over [s(t), t]; y_s is drawn by `forward`, and is x itself where the schedule is `FromZero`."""

    process: Process
    schedule: AbstractSchedule
    forward: AbstractForward
    expand: str = eqx.field(static=True)
    ito: bool = eqx.field(static=True)
    antithetic: bool = eqx.field(static=True)
    relative: bool = eqx.field(static=True)
    """Whether λ of the schedule is still to be related to the deviations of the data."""

    def __init__(
        self,
        process: Process,
        schedule: AbstractSchedule,
        forward: AbstractForward,
        *,
        expand: str = "t",
        ito: bool = False,
        antithetic: bool = False,
        relative: bool = False,
    ):
        check_name("expand", expand, ("s", "t"))
        check_flag("ito", ito)
        self.process = process
        self.schedule = schedule
        self.forward = forward
        self.expand = expand
        self.ito = ito
        self.antithetic = antithetic
        self.relative = relative

    def draw(self, x, times, *, key):
        path_key, noise_key = jax.random.split(key)
        times = jnp.asarray(times, x.dtype)
        s = self.schedule(times).astype(x.dtype)
        if isinstance(self.schedule, FromZero):
            y_s = jnp.broadcast_to(x, (len(times), *x.shape))
        else:
            y_s = self.forward.states(x, s, key=path_key)
        signs = jnp.array([1.0, -1.0] if self.antithetic else [1.0], x.dtype)
        eps = jax.random.normal(noise_key, y_s.shape, x.dtype)

        def one(y, s, t, eps):
            kernel = transition(self.process, y, s, t, expand=self.expand, ito=self.ito)
            ends = jax.vmap(lambda sign: kernel.sample(sign * eps))(signs)
            scores = jax.vmap(lambda sign: kernel.score(sign * eps))(signs)
            return Draw(t, ends, scores, kernel.structure.join(kernel.deviation), kernel.mean)

        drawn = (y_s, s, times, eps)
        if isinstance(self.process.structure_for(x.shape), Elementwise):
            return jax.lax.stop_gradient(jax.vmap(one)(*drawn))
        # One time after the other: the matrices of all at once would not fit into caches.
        return jax.lax.stop_gradient(jax.lax.map(lambda each: one(*each), drawn))

    def prepared(self, pilot):
        """With a relative λ: `∫ Q_ii = λ` of the mean square deviation of each coordinate over time, which tells what
        lengths the drift acts on."""
        if isinstance(self.schedule, FromZero):
            return self
        forward, schedule = self.forward.prepared(pilot), self.schedule
        if self.relative:
            assert isinstance(schedule, ScheduledPairs)
            scales = jnp.sqrt(jnp.mean(pilot.marginals(forward).std ** 2, axis=0))
            schedule = ScheduledPairs(self.process, float(schedule.lam), scales=scales)
        return replace(self, forward=forward, schedule=schedule, relative=False)

    def draws_per_path(self, shape):
        return 1 if isinstance(self.schedule, FromZero) else PER_PATH

    def states(self, x, times, *, key):
        if isinstance(self.schedule, FromZero):
            return self.draw(x, times, key=key).y[:, 0]
        return self.forward.states(x, times, key=key)

    def covers(self, x):
        return self.forward.covers(x)
