"""The pathwise target: a weight carried along the path, whose mean given y_t is the score, with no linearization.

Let (Z, Ω) satisfy `E[Z ψ(y)] = Ω E[∇ψ(y)]` for all ψ, as (0, 0) does; then `E[−Z/Ω | y] = ∇ log q(y)`. It stays so

- under a smooth map `y⁺ = Φ(y)` with Jacobian J, when `Z⁺ = J⁻ᵀ (Z + Ω ∇ log det J)`, Ω unchanged;
- under noise `y⁺ = y + √h g ξ`, when `Z⁺ = Z + ω√h Q⁻¹g ξ`, `Ω⁺ = Ω + ω h`, for any ω ≥ 0;
- when both are multiplied by the same number, e.g. `exp(−ρ ω h)`: the target forgets.

A path is a chain of such steps (Strang's splitting: half a step of drift, the noise, half a step of drift; two half
steps in a row are taken as one), which is of weak order two. Drift alone is followed to order three, by Kutta's method:
a force that turns with time moves many coordinates together, and a shift that is small against the deviation of each
is not small against that of their mean. With Gaussian noise and Jacobians the target is *exact* for the chain itself,
however coarse. ρ and the window over which (Z, Ω) is built up change only the target's variance.

For elementwise drifts J is its diagonal, for small coupled states it is formed and solved with. For large ones no
matrix is formed: to second order Z follows `Ż = −AᵀZ + Ω ∇(∇·f)`, A and ∇·f at the midpoint, which is a series of
vector–Jacobian products; the divergence is estimated with one random probe (`E vᵀA v = tr A`). That step is known
within it too (`Taylor`), so that a branch costs no more than what the drift does to its own noise.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._types import PRNGKey, State
from ..clock import Clock
from ..linalg import inverse_and_log_det
from ..process import Process, check_invertible
from ..schedule import ScheduledPairs
from ..simulate import four_point, initial_states, signs
from ..structure import Elementwise, expand_noise, noise_diagonal, noise_kind
from .base import AbstractTarget, Draw
from .paths import TOL, Paths

MAX_EXACT = 8
"""Largest number of coupled coordinates for which Jacobians are formed, unless asked for by `exact=True`."""
_ORDER = 3


class Weighted(NamedTuple):
    """A state with the weight carried along its path."""

    y: State
    Z: State
    omega: Array


class Taylor(NamedTuple):
    """A step of drift as a polynomial in the share of it that is done."""

    start: Weighted
    first: Weighted
    second: Weighted
    third: Weighted

    def at(self, share) -> Weighted:
        return jax.tree.map(lambda a, b, c, d: a + share * (b + share * (c + share * d)), *self)


class Pathwise(AbstractTarget):
    """Targets from weights along simulated paths. Needs invertible noise.

        target = Pathwise(process, Paths(process, 100), forgetting=0.5)

    **Arguments:**

    - `forward`: the grid of steps, and the paths to the window's start.
    - `forgetting`: ρ, for each unit of `∫ω`, `ω = tr Q/d`.
    - `window`: build the weight up over `∫g² = window` before t; by default from t = 0.
    - `exact`: form Jacobians; by default for elementwise drifts and up to MAX_EXACT coupled coordinates.
    - `gaussian`: Gaussian noise, with which the identity is exact; else noise with the same five moments, cheaper.
    """

    process: Process
    forward: Paths
    schedule: ScheduledPairs | None
    forgetting: Array
    share: float = eqx.field(static=True)
    exact: bool | None = eqx.field(static=True)
    gaussian: bool = eqx.field(static=True)

    def __init__(
        self,
        process: Process,
        forward: Paths,
        *,
        forgetting: float = 0.0,
        window: float | None = None,
        exact: bool | None = None,
        gaussian: bool = False,
    ):
        if not (np.isfinite(forgetting) and forgetting >= 0):
            raise ValueError(f"forgetting={forgetting} must be a finite rate of at least 0.")
        self.process = process
        self.forward = forward
        self.forgetting = jnp.asarray(forgetting, float)
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
        scale = jnp.broadcast_to(_per_state(jnp.sqrt(drawn.omega), drawn.Z), drawn.Z.shape)
        return jax.lax.stop_gradient(Draw(times, drawn.y[:, None], target[:, None], scale, None))

    def states(self, x, times, *, key):
        if self.schedule is not None:
            return self.forward.states(x, times, key=key)
        return self.draw(x, times, key=key).y[:, 0]  # those of the targets: what is made of them has the same errors

    @property
    def window_steps(self) -> int:
        return max(4, math.ceil(self.share * self.forward.steps))

    def default_pairs(self, shape: tuple[int, ...]) -> int:
        """Draws from one path that train soonest: few, as they are alike; more where a path costs more than a draw's
        use by the network."""
        return 32 if self._forms_jacobian(shape) else 128

    def tolerance(self, shape: tuple[int, ...]) -> float:
        """Of the steps: Strang's splitting needs fewer than `Paths`, fewest where each step is whole."""
        return (16.0 if self._forms_jacobian(shape) else 8.0) * TOL

    def _along(self, x, times, key) -> Weighted:
        """Weights from t = 0: one chain on the grid, and a branch from it to each time."""
        grid = self.forward.grid.astype(x.dtype)
        middles = jnp.concatenate([grid[:1], 0.5 * (grid[1:] + grid[:-1])])  # the drift has acted up to these
        chain_key, branch_key = jax.random.split(key)
        n = len(grid) - 1

        exact = self._forms_jacobian(x.shape)

        def step(state, inputs):
            i, xi, probe = inputs
            a, b = middles[i], middles[i + 1]
            passed = state if exact else _taylor(self.process.f, state, a, b - a, probe)
            state = self._drift(state, a, b) if exact else passed.at(1.0)
            return self._kick(state, grid[i], grid[i + 1], xi), passed

        start = Weighted(x, jnp.zeros_like(x), jnp.zeros((), x.dtype))
        xi, probes = self._noise(chain_key, n, x)
        _, chain = jax.lax.scan(step, start, (jnp.arange(n), xi, probes))

        index = jnp.clip(jnp.searchsorted(grid, times, side="right") - 1, 0, n - 1)
        xi, _ = self._noise(branch_key, len(times), x)

        def branch(i, t, xi):
            passed, a = jax.tree.map(lambda leaf: leaf[i], chain), middles[i]
            if exact:
                middle = 0.5 * (grid[i] + t)
                return self._drift(self._kick(self._drift(passed, a, middle), grid[i], t, xi), middle, t)
            return self._kick(passed.at((t - a) / (middles[i + 1] - a)), grid[i], t, xi, aged=True)

        return jax.vmap(branch)(index, times, xi)

    def _windows(self, x, times, key) -> Weighted:
        """Weights from s(t) on: a chain of its own for each time."""
        assert self.schedule is not None
        path_key, chain_key = jax.random.split(key)
        s = self.schedule(times).astype(x.dtype)
        starts = self.forward.states(x, s, key=path_key)
        n = self.window_steps

        def one(y, s, t, key):
            xi, probes = self._noise(key, n + 1, y)
            h = (t - s) / n

            def step(state, inputs):
                i, xi, probe = inputs
                state = self._drift(state, s + jnp.maximum(i - 0.5, 0.0) * h, s + (i + 0.5) * h, probe)
                return self._kick(state, s + i * h, s + (i + 1) * h, xi), None

            start = Weighted(y, jnp.zeros_like(y), jnp.zeros((), y.dtype))
            state, _ = jax.lax.scan(step, start, (jnp.arange(n, dtype=y.dtype), xi[:-1], probes[:-1]))
            return self._drift(state, t - 0.5 * h, t, probes[-1])

        return jax.vmap(one)(starts, s, times, jax.random.split(chain_key, len(times)))

    def _noise(self, key, n: int, x) -> tuple[Array, Array]:
        """Noise and probes for n steps, drawn together, which is much cheaper than one by one."""
        noise_key, probe_key = jax.random.split(key)
        draw = jax.random.normal if self.gaussian else four_point
        xi = draw(noise_key, (n, *self.process.noise_shape(x.shape)), x.dtype)
        return xi, jnp.zeros((n, 0)) if self._forms_jacobian(x.shape) else signs(probe_key, (n, *x.shape), x.dtype)

    def _forms_jacobian(self, shape: tuple[int, ...]) -> bool:
        structure = self.process.structure_for(shape)
        if isinstance(structure, Elementwise):
            return True
        return structure.rows <= MAX_EXACT if self.exact is None else self.exact

    def _kick(self, state: Weighted, a, b, xi, *, aged: bool = False) -> Weighted:
        """Noise of the step from a to b. `aged`, it came at the middle of the step: the drift has acted on it for the
        half of it. New at the end, it would leave the variance `−½h² (AQ + QAᵀ)` off: too large in a contraction."""
        h, shape = b - a, state.y.shape
        g = self.process.g(0.5 * (a + b)).astype(state.y.dtype)
        noise = jnp.sqrt(h) * self.process.diffuse(0.5 * (a + b), xi, shape)
        omega = jnp.mean(noise_diagonal(g))
        if noise_kind(g.shape, shape) == "matrix":
            structure = self.process.structure_for(shape)
            inverse, _ = inverse_and_log_det(structure.noise_cov(g))
            weight = structure.join(structure.matvec(inverse, structure.split(noise)))
        else:
            weight = noise / expand_noise(g, shape) ** 2
        if aged:
            push = jax.jvp(lambda y: self.process.f(y, b), (state.y,), (noise,))[1]
            pull = jax.vjp(lambda y: self.process.f(y, b), state.y)[1]
            # To first order both, one the inverse of the other: what bends the noise would have to bend the weight too.
            noise, weight = noise + 0.5 * h * push, weight - 0.5 * h * pull(weight)[0]
        kept = jnp.exp(-self.forgetting.astype(g.dtype) * omega * h)
        return Weighted(state.y + noise, kept * state.Z + omega * weight, kept * state.omega + omega * h)

    def _drift(self, state: Weighted, a, b, probe=None) -> Weighted:
        y, Z, omega = state
        h, f = b - a, self.process.f

        def phi(y):
            return y + _kutta(f, y, a, h)[-1]

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
        return _taylor(self.process.f, state, a, h, probe).at(1.0)


def _kutta(f, y: State, t, h) -> tuple[State, State, State, State]:
    """Kutta's method of order three: the drift at the start, middle and end of a step h, and how far y moves in it."""
    first = f(y, t)
    second = f(y + 0.5 * h * first, t + 0.5 * h)
    third = f(y + h * (2.0 * second - first), t + h)
    return first, second, third, h / 6.0 * (first + 4.0 * second + third)


def _taylor(f, state: Weighted, t, h, probe) -> Taylor:
    """The drift of a step h without matrices. Kutta's method of order three gives the state at its end and middle, and
    with the slope there a cubic for y, good to O(h⁴) at any share. With `Z′ = −AᵀZ + Ω ∇(∇·f)` at that middle, Z is
    `Z + φ₁(−hAᵀ) h Z′`, where `φ₁(x) = (eˣ − 1)/x` is a short series: good to O(h³), at a share to O(h²)."""
    y, Z, omega = state
    half = t + 0.5 * h
    first, second, third, moved = _kutta(f, y, t, h)
    middle = y + h / 24.0 * (5.0 * first + 8.0 * second - third)

    def change(y):
        slope, bend = jax.jvp(lambda y: f(y, half), (y,), (probe,))
        return jnp.sum(omega * probe * bend - Z * slope), slope

    rate, slope = jax.grad(change, has_aux=True)(middle)
    pull = jax.vjp(lambda y: f(y, half), middle)[1]
    term, rest = h * rate, jnp.zeros_like(Z)
    for k in range(2, _ORDER + 1):
        term = -h / k * pull(term)[0]
        rest = rest + term
    cubic = 4.0 * (moved - h * slope)  # so that the polynomial ends at `moved`, with this slope halfway
    none, zero = jnp.zeros_like(Z), jnp.zeros_like(omega)
    return Taylor(
        state,
        Weighted(h * first, h * rate, zero),
        Weighted(moved - h * first - cubic, rest, zero),
        Weighted(cubic, none, zero),
    )


def _per_state(value: Float[Array, " k"], like: Array) -> Array:
    return value.reshape(-1, *(1 for _ in like.shape[1:]))


def choose_forgetting(target: Pathwise, y0, *, key: PRNGKey, n: int = 128) -> float:
    """The ρ for which the target varies least, over sixteen times and n paths from `y0`.

    `E|target|² = E|score|² + variance`, so the least variance is where the second moment is least.
    """
    start_key, path_key = jax.random.split(key)
    process = target.process
    x = initial_states(y0, n, key=start_key)
    # Early targets vary as 1/G whatever ρ is, and would drown the others.
    times = process.t1 * jnp.linspace(0.1, 1.0, 16, dtype=x.dtype)
    rates = jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-2, 1e4, 17)]) / Clock(process).total

    @eqx.filter_jit
    def moment(rate):
        trial = eqx.tree_at(lambda p: p.forgetting, target, rate)
        keys = jax.random.split(path_key, n)
        draws = jax.vmap(lambda x, k: trial.draw(x, times, key=k).score)(x, keys)
        return jnp.sum(jnp.mean(draws**2, axis=0)[:, 0].reshape(len(times), -1))

    moments = np.array([float(moment(r)) for r in rates])
    if not np.isfinite(moments).any():
        raise ValueError("the pathwise target is not finite on pilot paths; give more steps=..., or a shorter window.")
    return float(rates[np.nanargmin(np.where(np.isfinite(moments), moments, np.nan))])
