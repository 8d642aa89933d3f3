"""The pathwise target: a weight carried along the path, whose mean given y_t is the score, with no linearization.

Let (Z, Ω) satisfy `E[Z ψ(y)] = Ω E[∇ψ(y)]` for all ψ, as (0, 0) does; then `E[−Z/Ω | y] = ∇ log q(y)`. It stays so

- under a smooth map `y⁺ = Φ(y)` with Jacobian J, when `Z⁺ = J⁻ᵀ (Z + Ω ∇ log det J)`, Ω unchanged;
- under noise `y⁺ = y + √h g ξ`, when `Z⁺ = Z + ω√h Q⁻¹g ξ`, `Ω⁺ = Ω + ω h`, for any ω ≥ 0;
- when both are multiplied by the same number, e.g. `exp(−ρ ω h)`: the target forgets.

A path is a chain of such steps: in each, a sixth of its noise, half of its drift, two thirds of the noise, the other
half of the drift, and the last sixth of the noise. That is of weak order two as Strang's splitting is, but for a linear
drift the variance of a step is Simpson's rule for `∫ exp(uA) Q exp(uA)ᵀ du`, so that steps may be longer (the shares
are Chin's, Phys. Lett. A 226, 1997). Small errors matter: the flow of a learned score follows the true drift, and if
the states it was learned from follow another, the difference adds up with time. Drift alone is followed to order three,
by Kutta's method: a force that turns with time moves many coordinates together, and a shift that is small against the
deviation of each is not small against that of their mean. Steps end at all times that are asked for. With Gaussian
noise and Jacobians the target is *exact* for the chain itself, however coarse. ρ and the window over which (Z, Ω) is
built up change only the target's variance.

For elementwise drifts J is its diagonal, for small coupled states it is formed and solved with. For large ones no
matrix is formed: Z follows `Ż = −AᵀZ + Ω ∇(∇·f)` beside y, to order three as well; the divergence is estimated with one
random probe (`E vᵀA v = tr A`), in which Z is linear.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import SMALL, jit_once
from ..base.linalg import inverse_and_log_det
from ..base.modules import replace
from ..base.types import PRNGKey, State
from ..kernels.schedule import ScheduledPairs
from ..paths.initial import LOOK, initial_states
from ..paths.schemes import four_point, kutta, signs
from ..process.clock import Clock
from ..process.noise import check_invertible
from ..process.process import Process
from ..process.structure import Elementwise, expand_noise, noise_diagonal, noise_kind
from .base import AbstractTarget, Draw
from .paths import Paths

TOL_WEIGHTED = 0.08
"""The tolerance of `choose_steps` for these paths: the drift changes by a quarter of itself in a step."""
MAX_EXACT = 8
"""Largest number of coupled coordinates for which Jacobians are formed, unless asked for by `exact=True`."""


class Weighted(NamedTuple):
    """A state with the weight carried along its path."""

    y: State
    Z: State
    omega: Array


class Pathwise(AbstractTarget):
    """Targets from weights along simulated paths. Needs invertible noise.

        target = Pathwise(process, Paths(process, 100), forgetting=0.5)

    **Arguments:**

    - `forward`: the grid of steps, and the paths to the window's start.
    - `forgetting`: ρ (0 until `prepared` chooses it), for each unit of `∫ω`. With the totals `T_i = ∫_0^t1 Q_ii`,
      `ω = T̄ mean_i Q_ii/T_i`, where T̄ is their mean; for constant noise that is tr Q/d. Units change it by a factor
      only, which the target does not have.
    - `window`: build the weight up over `∫g² = window` before t; by default from t = 0.
    - `exact`: form Jacobians; by default for elementwise drifts and up to MAX_EXACT coupled coordinates.
    - `gaussian`: Gaussian noise, with which the identity is exact; else noise with the same five moments, cheaper.
    """

    process: Process
    forward: Paths
    schedule: ScheduledPairs | None
    forgetting: Array | None
    """None: chosen by `prepared`, and 0 before."""
    clock: Clock
    share: float = eqx.field(static=True)
    exact: bool | None = eqx.field(static=True)
    gaussian: bool = eqx.field(static=True)

    def __init__(
        self,
        process: Process,
        forward: Paths,
        *,
        forgetting: float | None = None,
        window: float | None = None,
        exact: bool | None = None,
        gaussian: bool = False,
        clock: Clock | None = None,
    ):
        if forgetting is not None and not (np.isfinite(forgetting) and forgetting >= 0):
            raise ValueError(f"forgetting={forgetting} must be a finite rate of at least 0.")
        self.process = process
        self.forward = forward
        self.clock = Clock(process) if clock is None else clock
        self.forgetting = None if forgetting is None else jnp.asarray(forgetting, float)
        self.schedule = None if window is None else ScheduledPairs(process, window)
        share = 1.0 if self.schedule is None else float(self.schedule.lam / jnp.max(self.schedule.totals[-1]))
        self.share = min(share, 1.0)
        self.exact = exact
        self.gaussian = gaussian

    def draw(self, x, times, *, key):
        check_invertible(self.process, x.shape, what="the pathwise target", remedy="Use LocalDSM instead.")
        times = jnp.asarray(times, x.dtype)
        drawn = self._along(x, times, key) if self.schedule is None else self._windows(x, times, key)
        target = -drawn.Z / _per_state(drawn.omega, drawn.Z)
        received = _per_state(drawn.omega, drawn.Z) * self._shares(x.shape).astype(x.dtype)
        scale = jnp.broadcast_to(jnp.sqrt(received), drawn.Z.shape)
        return Draw(times, drawn.y[:, None], target[:, None], scale, None)

    def states(self, x, times, *, key):
        if self.schedule is not None:
            return self.forward.states(x, times, key=key)
        return self.draw(x, times, key=key).y[:, 0]  # those of the targets: what is made of them has the same errors

    def _shares(self, shape: tuple[int, ...]) -> Array:
        """`T_i/T̄`, the noise of each coordinate relative to ω; 1 for a scalar g."""
        return self.clock.totals_of(shape) / jnp.mean(self.clock.totals)

    @property
    def window_steps(self) -> int:
        return max(4, math.ceil(self.share * self.forward.steps))

    def prepared(self, pilot):
        ready = replace(self, forward=self.forward.prepared(pilot, tol=TOL_WEIGHTED))
        if self.forgetting is not None or self.schedule is not None:
            return ready
        pilot.report("pilot: rate at which weights forget …")
        rate = choose_forgetting(ready, pilot.y0, key=pilot.key)
        return replace(ready, forgetting=jnp.asarray(rate, float))

    def draws_per_path(self, shape):
        """Few, as they are alike; more where a path costs more than a draw's use by the network."""
        return 32 if self._forms_jacobian(shape) else 128

    def _along(self, x, times, key) -> Weighted:
        """Weights from t = 0 at all times: one path, whose steps end at the points of the grid and at the times."""
        knots = jnp.sort(jnp.concatenate([self.forward.grid.astype(x.dtype), times]))
        path = self._path(x, knots, key)
        at = jnp.searchsorted(knots[1:], times)
        return jax.tree.map(lambda leaf: leaf[at], path)

    def _windows(self, x, times, key) -> Weighted:
        """Weights from s(t) on: a path of its own for each time."""
        assert self.schedule is not None
        start_key, path_key = jax.random.split(key)
        s = self.schedule(times).astype(x.dtype)
        starts = self.forward.states(x, s, key=start_key)
        shares = jnp.linspace(0.0, 1.0, self.window_steps + 1, dtype=x.dtype)

        def one(y, s, t, key):
            return jax.tree.map(lambda leaf: leaf[-1], self._path(y, s + (t - s) * shares, key))

        return jax.vmap(one)(starts, s, times, jax.random.split(path_key, len(times)))

    def _path(self, x, knots, key) -> Weighted:
        """The path from x, and the weight along it, at all knots but the first."""

        def step(state, inputs):
            a, b, xi, probes = inputs
            middle = 0.5 * (a + b)
            state = self._kick(state, a, b, xi[0], 1 / 6)
            state = self._drift(state, a, middle, probes[0])
            state = self._kick(state, a, b, xi[1], 4 / 6)
            state = self._drift(state, middle, b, probes[1])
            state = self._kick(state, a, b, xi[2], 1 / 6)
            return state, state

        start = Weighted(x, jnp.zeros_like(x), jnp.zeros((), x.dtype))
        return jax.lax.scan(step, start, (knots[:-1], knots[1:], *self._noise(key, len(knots) - 1, x)))[1]

    def _noise(self, key, n: int, x) -> tuple[Array, Array]:
        """Noise and probes for n steps, drawn together, which is much cheaper than one by one."""
        noise_key, probe_key = jax.random.split(key)
        draw = jax.random.normal if self.gaussian else four_point
        xi = draw(noise_key, (n, 3, *self.process.noise_shape(x.shape)), x.dtype)
        return xi, jnp.zeros((n, 2)) if self._forms_jacobian(x.shape) else signs(probe_key, (n, 2, *x.shape), x.dtype)

    def _forms_jacobian(self, shape: tuple[int, ...]) -> bool:
        structure = self.process.structure_for(shape)
        if isinstance(structure, Elementwise):
            return True
        return structure.rows <= MAX_EXACT if self.exact is None else self.exact

    def _kick(self, state: Weighted, a, b, xi, share: float) -> Weighted:
        """A share of the noise of the step from a to b."""
        h, shape = share * (b - a), state.y.shape
        g = self.process.g(0.5 * (a + b)).astype(state.y.dtype)
        noise = jnp.sqrt(h) * self.process.diffuse(0.5 * (a + b), xi, shape)
        shares = (self.clock.totals / jnp.mean(self.clock.totals)).astype(g.dtype)
        omega = jnp.mean(noise_diagonal(g) / shares)
        if noise_kind(g.shape, shape) == "matrix":
            structure = self.process.structure_for(shape)
            inverse, _ = inverse_and_log_det(structure.noise_cov(g))
            weight = structure.join(structure.matvec(inverse, structure.split(noise)))
        else:
            weight = noise / expand_noise(g, shape) ** 2
        rate = 0.0 if self.forgetting is None else self.forgetting.astype(g.dtype)
        kept = jnp.exp(-rate * omega * h)
        return Weighted(state.y + noise, kept * state.Z + omega * weight, kept * state.omega + omega * h)

    def _drift(self, state: Weighted, a, b, probe) -> Weighted:
        y, Z, omega = state
        f = self.process.f

        def phi(y):
            return kutta(f, y, a, b - a)

        structure = self.process.structure_for(y.shape)
        if isinstance(structure, Elementwise):
            ones = jnp.ones_like(y)
            (y, J), (_, curvature) = jax.jvp(lambda y: jax.jvp(phi, (y,), (ones,)), (y,), (ones,))
            return Weighted(y, (Z + omega * curvature / J) / J, omega)
        if self._forms_jacobian(y.shape):
            end, J = structure.jacobian(phi, y)
            slope = jax.grad(lambda y: jnp.sum(inverse_and_log_det(structure.jacobian(phi, y)[1])[1]))(y)
            Z = structure.matvec(inverse_and_log_det(structure.transpose(J))[0], structure.split(Z + omega * slope))
            return Weighted(structure.join(end), structure.join(Z), omega)

        # In units of its noise for each coordinate, in which no entry of the Jacobian drowns the others.
        unit = jnp.sqrt(self._shares(y.shape)).astype(y.dtype)

        def rates(pair, t):
            def change(y):
                slope, bend = jax.jvp(lambda y: f(y, t), (y,), (unit * probe,))
                return jnp.sum(omega * probe / unit * bend - pair[1] * slope), slope

            change_of_weight, slope = jax.grad(change, has_aux=True)(pair[0])
            return slope, change_of_weight

        y, Z = kutta(rates, (y, Z), a, b - a)
        return Weighted(y, Z, omega)


def _per_state(value: Float[Array, " k"], like: Array) -> Array:
    return value.reshape(-1, *(1 for _ in like.shape[1:]))


def choose_forgetting(target: Pathwise, y0, *, key: PRNGKey, n: int = 128) -> float:
    """The ρ for which the target varies least, over sixteen times and n paths from `y0`, in units of the noise.

    `E|target|² = E|score|² + variance`, so the least variance is where the second moment is least.
    """
    start_key, path_key = jax.random.split(key)
    process = target.process
    x = initial_states(y0, LOOK, key=start_key)[:n]
    # Early targets vary as 1/G whatever ρ is, and would drown the others.
    times = process.t1 * jnp.linspace(0.1, 1.0, 16, dtype=x.dtype)
    rates = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-2, 1e4, 17)]) / jnp.mean(target.clock.totals)
    weights = target._shares(x.shape[1:])

    def moment(rate):
        trial = replace(target, forgetting=rate)
        keys = jax.random.split(path_key, n)
        draws = jax.vmap(lambda x, k: trial.draw(x, times, key=k).score)(x, keys)
        return jnp.sum(weights * jnp.mean(draws**2, axis=0)[:, 0])

    moment = jit_once(moment, optimize=x[0].size > SMALL)
    moments = np.array([float(moment(r)) for r in rates])
    if not np.isfinite(moments).any():
        raise ValueError("the pathwise target is not finite on pilot paths; give more steps=..., or a shorter window.")
    return float(rates[np.nanargmin(np.where(np.isfinite(moments), moments, np.nan))])
