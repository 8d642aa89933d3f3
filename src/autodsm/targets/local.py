"""The local target: the score of the Gaussian kernel from y_s to y_t of the process linearized at y_s.

`y_t = m + L ε`, target `−L⁻ᵀ ε`. Exact for a linear drift from s = 0 (denoising score matching); for any other it is
as exact as the kernel is over [s(t), t]. An antithetic pair is `m ± L ε`.

Exact targets from s = 0 can be averaged over starts: their kernels differ in the mean alone, so that with
`z_j = L⁻¹(y − m_j)` a target is `−L⁻ᵀ Σ_j w_j z_j`, `w_j ∝ exp(−½|z_j|²)`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import check_flag, check_name
from ..base.modules import replace
from ..kernels.gaussian import transition
from ..kernels.schedule import AbstractSchedule, FromZero, ScheduledPairs
from ..process.clock import EARLIEST
from ..process.probes import is_linear
from ..process.process import Process
from ..process.structure import Elementwise
from .averaging import Averaging, average, check_references, find_averaging
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
    references: int | None = eqx.field(static=True)
    averaging: Averaging | None

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
        references: int | None = 1,
    ):
        check_name("expand", expand, ("s", "t"))
        check_flag("ito", ito)
        check_references(references)
        self.process = process
        self.schedule = schedule
        self.forward = forward
        self.expand = expand
        self.ito = ito
        self.antithetic = antithetic
        self.relative = relative
        self.references = references
        self.averaging = None

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
            return self._averaged(pilot)
        forward, schedule = self.forward.prepared(pilot), self.schedule
        if self.relative:
            assert isinstance(schedule, ScheduledPairs)
            scales = jnp.sqrt(jnp.mean(pilot.marginals(forward).std ** 2, axis=0))
            schedule = ScheduledPairs(self.process, float(schedule.lam), scales=scales)
        return replace(self, forward=forward, schedule=schedule, relative=False)

    def together(self, xs, t, members, *, key):
        t = jnp.asarray(t, xs.dtype)
        eps = jax.random.normal(key, (members, *xs.shape[1:]), xs.dtype)
        kernels = jax.vmap(lambda x: transition(self.process, x, 0.0, t, expand=self.expand, ito=self.ito))(xs)
        signs = jnp.array([1.0, -1.0] if self.antithetic else [1.0], xs.dtype)

        def one(kernel, eps):
            apart = jax.vmap(lambda mean: kernel.whiten(kernel.mean - mean))(kernels.mean)

            def mean_score(eps):
                z = eps + apart
                return kernel.score(average(-0.5 * jnp.sum(z.reshape(len(z), -1) ** 2, axis=-1), z))

            noise = signs.reshape(-1, *(1 for _ in eps.shape)) * eps
            return jax.vmap(kernel.sample)(noise), jax.vmap(mean_score)(noise), kernel.structure.join(kernel.deviation)

        own = jax.tree.map(lambda leaf: leaf[:members], kernels)
        y, score, scale = jax.vmap(one)(own, eps)
        return jax.lax.stop_gradient(Draw(jnp.broadcast_to(t, members), y, score, scale, own.mean))

    def _averaged(self, pilot) -> "Local":
        """With an `Averaging`, if there is to be one."""
        if self.references == 1 or self.averaging is not None:
            return self
        if (problem := self._not_averaged(pilot)) is None:
            return replace(self, averaging=find_averaging(pilot, self.together, self.references))
        if self.references is None:
            return self
        raise ValueError(f"references={self.references} needs exact kernels with a density, but {problem}.")

    def _not_averaged(self, pilot) -> str | None:
        """Why targets of this process cannot be averaged over starts, or None."""
        if not is_linear(self.process, pilot.x, clock=pilot.clock):
            return "the drift is not linear. Give references=1"
        x = jnp.asarray(pilot.x[0], float)
        for share in (EARLIEST, 0.5, 1.0):
            if not np.all(np.asarray(transition(self.process, x, 0.0, share * self.process.t1).deviation) > 0):
                return "noise does not reach all coordinates. Give references=1"
        return None

    def draws_per_path(self, shape):
        return 1 if isinstance(self.schedule, FromZero) else PER_PATH

    def states(self, x, times, *, key):
        if isinstance(self.schedule, FromZero):
            return self.draw(x, times, key=key).y[:, 0]
        return self.forward.states(x, times, key=key)

    def covers(self, x):
        return self.forward.covers(x)
