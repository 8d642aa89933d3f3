"""Objectives: what a score network minimizes. `loss(score, x, key=key)` is the loss of one example.

With `‖v‖²_Q = vᵀ Q v`, a target ŝ whose mean given y_t is the score, its scale σ, and t drawn with density p(t):

| weighting    | loss of a draw                                                          | integral over t |
|--------------|-------------------------------------------------------------------------|-----------------|
| "likelihood" | `½‖s_θ − ŝ‖²_Q − ½‖ŝ‖²_Q − ∇·f`, and `−log π(y_T)` for each example       | weight 1/p(t)   |
| "score"      | `½‖s_θ − ŝ‖²_Q`                                                         | mean over (t0, t1]  |
| "perceptual" | `½ mean_i σ_i² (s_θ − ŝ)_i²`, over coordinates that noise enters          | as drawn        |

The first is the negative of a lower bound on log p(x) (up to the piece before t0) in nats; the last asks the network
for the noise that was added, and is what trains best.

Every objective is in two halves: `draws(x, key)` makes states and targets, without the network, and `at(score, draw)`
is the loss at one of them. A trainer can so make draws for many steps at once, and spread those of one path over them.
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.errors import as_floating, check_count, check_key, check_name
from ..base.modules import replace
from ..base.types import PRNGKey, State, StateLike
from ..network.shape import check_one
from ..process.clock import Clock, TimeLaw
from ..process.noise import divergence, inner, noisy, squared
from ..process.process import Process
from ..targets import AbstractForward, AbstractTarget, Draw
from ..targets.averaging import Averaging
from ..targets.pilot import Pilot

WEIGHTINGS = ("likelihood", "perceptual", "score")
_NOT_FINITE = (
    "states or targets of the loss are not finite: the example is not, or its path exploded, as with too few steps for "
    "the drift. objective.prepare(y0, key=key) chooses what was not given."
)


class AbstractObjective(eqx.Module):
    """A loss for score networks."""

    process: eqx.AbstractVar[Process]
    times: eqx.AbstractVar[TimeLaw]
    forward: eqx.AbstractVar[AbstractForward]
    """How states are drawn."""
    pairs_per_path: eqx.AbstractVar[int | None]
    """Draws from one path. None: as many as suit the states and the batch, which `prepare` decides."""

    @abc.abstractmethod
    def draws(self, x: State, *, key: PRNGKey, u: Float[Array, ""] | None = None) -> Any:
        """What the loss is evaluated at, a pytree with a leading axis of `draws_per_path`.

        Times are stratified: u ∈ [0, 1) is where in each stratum they lie; a trainer stratifies u over its batch.
        """

    @property
    def averaging(self) -> Averaging | None:
        """Over which starts a trainer averages targets: it draws from some starts of a group together."""
        return None

    def draws_together(
        self, pool: Float[Array, "n ..."], index, groups: int, members: int, *, key: PRNGKey, u: Float[Array, ""]
    ) -> Any:
        """`draws` from members of one of the groups that an arranged pool splits into, (members, draws, …)."""
        return jax.tree.map(lambda leaf: leaf[None], self.draws(pool[index], key=key, u=u))

    @abc.abstractmethod
    def at(self, score, draw) -> Float[Array, ""]:
        """The loss at one draw."""

    @property
    @abc.abstractmethod
    def evaluations(self) -> int:
        """Evaluations of the network at each draw."""

    @abc.abstractmethod
    def prepared(self, pilot: Pilot) -> "AbstractObjective":
        """The same objective, with what was not given chosen for the data of a pilot; but for `pairs_per_path`."""

    @abc.abstractmethod
    def draws_per_path(self, shape: tuple[int, ...]) -> int:
        """`pairs_per_path`, or what suits states of this shape."""

    def prepare(self, y0, *, key: PRNGKey, batch_size: int | None = None) -> "AbstractObjective":
        """The same objective, with what was not given (steps, ranges, rates, pairs) chosen for its data.

        `batch_size` counts evaluations of the network in a step; no more pairs than fit into it are chosen.
        """
        check_key(key)
        return self.prepare_by(Pilot(self.process, y0, key=key, clock=self.times.clock), batch_size)

    def prepare_by(self, pilot: Pilot, batch_size: int | None = None) -> "AbstractObjective":
        """The same by a pilot that may have other uses."""
        ready = self.prepared(pilot)
        pairs = ready.draws_per_path(pilot.shape)
        if self.pairs_per_path is None and batch_size is not None:
            pairs = min(pairs, max(1, batch_size // self.evaluations))
        return replace(ready, pairs_per_path=pairs)

    @abc.abstractmethod
    def covers(self, x) -> str | None:
        """Why the examples cannot be used, or None."""

    def __call__(self, score, x: StateLike, *, key: PRNGKey, u: Float[Array, ""] | None = None) -> Float[Array, ""]:
        """The loss of one example; an error, under `jit` too, where its states or targets are not finite."""
        check_key(key)
        x = as_floating(x, "x")
        mean = "jax.vmap(lambda x, key: objective(score, x, key=key))(xs, jax.random.split(key, len(xs)))"
        check_one(score, x, f"The loss takes one example; for a batch xs take the mean of {mean}.")
        self.process.check(x)
        draws = self.draws(x, key=key, u=u)
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(draws)]
        draws = eqx.error_if(draws, ~jnp.all(jnp.stack(finite)), _NOT_FINITE)
        return jnp.mean(jax.vmap(lambda draw: self.at(score, draw))(draws))


class DSM(AbstractObjective):
    """Denoising score matching of any target. `LocalDSM`, `PathwiseDSM`, `KineticDSM`, `TabulatedDSM` build it.

    objective = DSM(process, target, weighting="perceptual")
    loss = objective(score, x, key=key)
    """

    process: Process
    target: AbstractTarget
    times: TimeLaw
    prior: Any
    weighting: str = eqx.field(static=True)
    control: bool = eqx.field(static=True)
    pairs_per_path: int | None = eqx.field(static=True)

    def __init__(
        self,
        process: Process,
        target: AbstractTarget,
        *,
        weighting: str = "perceptual",
        control: bool = False,
        prior=None,
        times: str = "mixed",
        t0: float | None = None,
        pairs_per_path: int | None = None,
        clock: Clock | None = None,
    ):
        check_name("weighting", weighting, WEIGHTINGS)
        if pairs_per_path is not None:
            check_count("pairs_per_path", pairs_per_path)
        if prior is not None and weighting != "likelihood":
            raise ValueError(f'prior is only used by weighting="likelihood", not by weighting={weighting!r}.')
        self.process = process
        self.target = target
        self.times = TimeLaw(process, times, t0, clock=clock)
        self.prior = prior
        self.weighting = weighting
        self.control = control
        self.pairs_per_path = pairs_per_path

    @property
    def forward(self) -> AbstractTarget:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.target

    @property
    def evaluations(self) -> int:
        return 2 if self.control or getattr(self.target, "antithetic", False) else 1

    def draws(self, x, *, key, u=None):
        draw_key, end_key, u_key = jax.random.split(key, 3)
        u = jax.random.uniform(u_key, (), x.dtype) if u is None else u
        k = self.draws_per_path(x.shape)
        t = self.times.at((jnp.arange(k, dtype=x.dtype) + u) / k)
        draw = self.target.draw(x, t, key=draw_key)
        if self.prior is None:
            return draw, jnp.zeros(k, x.dtype)
        end = self.target.states(x, jnp.asarray([self.process.t1], x.dtype), key=end_key)[0]
        return draw, jnp.full(k, -jnp.sum(self.prior.log_prob(end)))

    @property
    def averaging(self):
        """That of the target; none for a bound of each example, which asks for the score given it."""
        return None if self.weighting == "likelihood" else self.target.averaging

    def draws_together(self, pool, index, groups, members, *, key, u):
        averaging, k = self.averaging, self.draws_per_path(pool.shape[1:])
        if averaging is None:
            return super().draws_together(pool, index, groups, members, key=key, u=u)

        def one(t, key):
            place_key, draw_key = jax.random.split(key)
            starts = pool[averaging.group(index, groups, t, key=place_key)]
            return self.target.together(starts, t, members, key=draw_key)

        t = self.times.at((jnp.arange(k, dtype=pool.dtype) + u) / k)
        draw = jax.vmap(one, out_axes=1)(t, jax.random.split(key, k))
        return draw, jnp.zeros((members, k), pool.dtype)

    def at(self, score, draw):
        draw, constant = draw
        # A loop over the pair: a vmap inside the trainer's costs a fifth of a step on CPU.
        values = [self._one(score, draw, y, target) for y, target in zip(draw.y, draw.score, strict=True)]
        loss = sum(values) / len(values)
        if self.control:
            loss = loss + self._control(score, draw)
        if self.weighting == "perceptual":
            return loss
        if self.weighting == "score":
            return loss / (self.times.density(draw.t) * (self.times.t1 - self.times.t0))
        return loss / self.times.density(draw.t) + constant

    def _one(self, score, draw: Draw, y, target):
        found = score(y, draw.t)
        if self.weighting == "perceptual":
            mask = noisy(self.process, draw.t, y.shape)
            return 0.5 * jnp.sum(mask * (draw.scale * (found - target)) ** 2) / jnp.sum(mask * jnp.ones_like(y))
        if self.weighting == "score":
            return 0.5 * squared(self.process, draw.t, found - target)
        # ½‖s − ŝ‖² − ½‖ŝ‖², without the difference of two large numbers
        quadratic = 0.5 * inner(self.process, draw.t, found, found - 2.0 * target)
        return quadratic - jax.lax.stop_gradient(divergence(self.process, y, draw.t))

    def _control(self, score, draw: Draw):
        """`s_θ(m)ᵀ Q ŝ`, of mean zero: it takes away the part of the noise that an even network would not average."""
        found = score(draw.anchor, draw.t)
        if self.weighting == "perceptual":
            mask = noisy(self.process, draw.t, found.shape)
            return jnp.sum(mask * draw.scale**2 * found * draw.score[0]) / jnp.sum(mask * jnp.ones_like(found))
        return inner(self.process, draw.t, found, draw.score[0])

    def prepared(self, pilot):
        return replace(self, target=self.target.prepared(pilot))

    def draws_per_path(self, shape):
        return self.target.draws_per_path(shape) if self.pairs_per_path is None else self.pairs_per_path

    def covers(self, x):
        return self.target.covers(x)
