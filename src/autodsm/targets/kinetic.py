"""The kinetic target: for noise in some coordinates v only, which reaches the others, x, through one derivative.

A path is a chain `y⁻_{i+1} = Φ_i(y_i)`, `y_i = y⁻_i + w_i`, with Gaussian w_i of covariance q_i, in v alone. Shift each
w_i by `ε u_i`, where u_i may depend on the whole path. The end then moves by `ε K`, with

    K ← K + (0, u_i) at each kick,    K ← DΦ_i(y_i) K in each drift,    K = 0 at the start,

and if K = (0, e) at the end, Gaussian integration by parts gives

    E[ŝ | y_t] = e·∂_v log q(y_t),    ŝ = −Σ_i (u_iᵀ q_i⁻¹ w_i − div_{w_i} u_i),

exactly for the chain, however coarse, and for any window [s, t]: how K is steered changes the target's variance only.
A u_i that depends on what was before w_i has no divergence, and `E|ŝ|² = Σ E|u_i|²_{q⁻¹}`. The least of that for a
linear chain, here the one whose Jacobian F is the last one that the path met, is

    u_i = q_i c,   c = (FᵐB)ᵀ P⁻¹ ((0, e) − Fᵐ K),   P = Σ_{j ≥ i} F^(n−j) B q_j Bᵀ F^(n−j)ᵀ,   m = n − i,

B = (0, 1): for a linear drift it is the score of the chain's own Gaussian kernel. It is planned again at each kick; the
path is not linear, so what is planned is not quite what comes. Two ends are left. The last kick sets the v-part of K;
and that its x-part be zero is up to the kick before, which is corrected, by the Jacobian after it:

    K_v ← K_v − R (DΦ_xx K_x + DΦ_xv K_v),    R = q DΦ_xvᵀ (DΦ_xv q DΦ_xvᵀ)⁻¹,

the only u that depends on its own w, with a divergence by automatic differentiation. There `∂f_x/∂v` must have full row
rank, at every state. Noiseless coordinates have no score here: a loss weighs them with their noise, which is none.

Steps are those of `pathwise` (weak order two; for a linear drift Simpson's rule for the covariance), with the kicks
between two steps in one.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import SMALL, jit_once
from ..base.linalg import MAX_UNROLLED, inverse_and_log_det
from ..base.modules import replace
from ..paths.initial import LOOK, initial_states
from ..paths.schemes import kutta
from ..process.clock import Clock
from ..process.process import Process
from ..process.structure import AbstractStructure, Elementwise
from .base import AbstractTarget, Draw
from .paths import Paths
from .pathwise import TOL_WEIGHTED

MAX_STEPS, LEAST_STEPS = 24, 6
"""Steps of a window. A plan costs matrix products in proportion to the steps that are left."""
EARLIEST_START = 1 / 16
"""Of the window's end, in the process' own time: before it rare far starts of a heavy law may need shorter steps than
the window has, which `Paths` takes. It costs a sixteenth of the window."""
PER_PATH = 8
"""Draws from one path: two thirds of the cost of a draw are then its own window, for the swimmer."""
ENOUGH = 1.1
"""The shortest window is taken whose `E|ŝ|²` is within this factor of the least: shorter ones take fewer steps."""
LEAST_RANK = 1e-2
"""Smallest singular value of `∂f_x/∂v` over pilot states, in units of the size of its rows and of the noise, below
which it is taken to vanish somewhere: of 4,096 Gaussian values of v, the least is below 10⁻³."""


class Kinds(NamedTuple):
    """Which coordinates of a site are noiseless (x), and which are noisy (v)."""

    x: np.ndarray
    v: np.ndarray


class Kinetic(AbstractTarget):
    """Targets from paths over windows of their own, for noise in some coordinates.

        target = Kinetic(process, Paths(process), window=0.2)

    **Arguments:**

    - `forward`: paths to the window's start.
    - `window`: its length, a share of the process' own time `½ t/t1 + ½ G(t)/G(t1)`; until `prepared` chooses it, 0.1.
    - `count`: steps of a window; until `prepared` chooses it, 12.
    """

    process: Process
    forward: Paths
    window: Array | None
    count: int | None = eqx.field(static=True)
    elapsed: Float[Array, " points"]
    """The process' own time, at even times."""

    def __init__(
        self,
        process: Process,
        forward: Paths,
        *,
        window: float | None = None,
        count: int | None = None,
        clock: Clock | None = None,
    ):
        if window is not None and not 0 < window <= 1:
            raise ValueError(f"window={window} must be a share of the process' time, above 0 and at most 1.")
        if count is not None and count < 2:
            raise ValueError(f"count={count} must be at least two steps.")
        self.process, self.forward, self.count = process, forward, count
        self.window = None if window is None else jnp.asarray(window, float)
        even = np.linspace(0.0, 1.0, 4097)
        with jax.ensure_compile_time_eval():
            share = np.asarray((clock or Clock(process)).share(jnp.asarray(process.t1 * even[1:])), float)
        self.elapsed = jnp.asarray(0.5 * even + 0.5 * np.concatenate([[0.0], share]), float)

    def draw(self, x, times, *, key):
        start_key, noise_key = jax.random.split(key)
        times, n = jnp.asarray(times, x.dtype), 2 * self.window_steps + 1
        kinds = kinds_of(self.process, x.shape)
        if isinstance(kinds, str):
            raise ValueError(f"the kinetic target cannot be used: {kinds}. Use LocalDSM instead.")
        knots = jax.vmap(self._knots)(times)
        starts = self.forward.states(x, knots[:, 0], key=start_key)
        xi = jax.random.normal(noise_key, (len(times), n, *self.process.noise_shape(x.shape)), x.dtype)
        y, score, scale = jax.vmap(lambda *each: _follow(self.process, kinds, *each))(starts, knots, xi)
        return jax.lax.stop_gradient(Draw(times, y[:, None], score[:, None], scale, None))

    def states(self, x, times, *, key):
        return self.forward.states(x, times, key=key)

    def draws_per_path(self, shape):
        return PER_PATH

    @property
    def window_steps(self) -> int:
        return 12 if self.count is None else self.count

    def prepared(self, pilot):
        if (problem := kinetic_problem(pilot)) is not None:
            raise ValueError(f"the kinetic target cannot be used: {problem}. Use LocalDSM instead.")
        ready = replace(self, forward=self.forward.prepared(pilot))
        whole = pilot.paths(TOL_WEIGHTED).steps  # that a path to t1 needs
        if self.window is None:
            pilot.report("pilot: length of the windows …")
            ready = replace(ready, window=jnp.asarray(choose_window(ready, pilot, whole), float))
        if self.count is None:
            assert ready.window is not None
            count = int(np.clip(math.ceil(float(ready.window) * whole), LEAST_STEPS, MAX_STEPS))
            ready = replace(ready, count=count)
        return ready

    def _knots(self, t) -> Array:
        """Ends of the steps of the window that ends at t, even in the process' own time."""
        even = self.process.t1 * jnp.linspace(0.0, 1.0, len(self.elapsed))
        end = jnp.interp(t, even, self.elapsed)
        start = jnp.maximum(end - (0.1 if self.window is None else self.window), EARLIEST_START * end)
        knots = jnp.interp(jnp.linspace(start, end, self.window_steps + 1), self.elapsed, even)
        share = (knots - knots[0]) / (knots[-1] - knots[0])  # the end is t, whatever rounding makes of it
        return (knots[0] + (t - knots[0]) * share).astype(t.dtype)


class _Chain(NamedTuple):
    """Kicks, of which the first and the last are those of half a pair, and drifts from each to the next."""

    times: Float[Array, " n"]
    cov: Float[Array, "n ..."]
    """q_i, (n, *sites, v, v)"""
    kicks: Float[Array, "n ..."]
    """w_i, (n, *shape)"""

    @classmethod
    def make(cls, process: Process, structure: AbstractStructure, v, knots, xi) -> "_Chain":
        h = jnp.diff(knots)
        times = jnp.zeros(len(xi), knots.dtype).at[::2].set(knots).at[1::2].set(0.5 * (knots[1:] + knots[:-1]))
        weights = jnp.zeros_like(times).at[1::2].set(4 / 6 * h).at[:-1:2].add(h / 6).at[2::2].add(h / 6)

        def one(t, weight, xi):
            cov = weight * structure.noise_cov(process.g(t).astype(knots.dtype))
            return cov[..., v[:, None], v], jnp.sqrt(weight) * process.diffuse(t, xi, structure.shape)

        return cls(times, *jax.vmap(one)(times, weights, xi))


def _follow(process: Process, kinds: Kinds, y, knots, xi):
    """The state at the end of a window, its target, and the deviation of the noise received."""
    structure, v = process.structure_for(y.shape), kinds.v
    chain = _Chain.make(process, structure, v, knots, xi)
    sites, n = chain.cov.shape[1:-2], len(chain.times)
    goal = jnp.broadcast_to(jnp.eye(structure.rows, dtype=y.dtype)[:, v], (*sites, structure.rows, len(v)))

    def drift(i, y):  # and its Jacobian
        return structure.jacobian(lambda y: kutta(process.f, y, chain.times[i], chain.times[i + 1] - chain.times[i]), y)

    def noise(i):
        return structure.split(chain.kicks[i])[..., v]

    def kick(state, i):
        y, K, F, score = state
        c = _plan(chain.cov, goal, F, K, i)
        K = K.at[..., v, :].add(_product(chain.cov[i], c))
        end, F = drift(i, y + chain.kicks[i])
        return (structure.join(end), _product(F, K), F, score - _applied(c, noise(i))), None

    start = (y, jnp.zeros_like(goal), drift(0, y)[1], jnp.zeros((*sites, len(v)), y.dtype))
    (y, K, F, score), _ = jax.lax.scan(kick, start, jnp.arange(n - 2))

    i = n - 2  # the last but one
    y, before = y + chain.kicks[i], K[..., v, :]
    planned = K.at[..., v, :].add(_product(chain.cov[i], _plan(chain.cov, goal, F, K, i)))
    K_v, divergence = _steered(lambda y: drift(i, y)[1], structure, kinds, y, planned, chain.cov[i])
    score = score - _applied(_solve(chain.cov[i], K_v - before), noise(i)) + divergence
    end, F = drift(i, y)
    K = _product(F, planned.at[..., v, :].set(K_v))

    missing = (goal - K)[..., v, :]
    score = score - _applied(_solve(chain.cov[-1], missing), noise(n - 1))
    received = jnp.sqrt(jnp.sum(jnp.diagonal(chain.cov, axis1=-2, axis2=-1), axis=0))
    none = jnp.zeros(goal.shape[:-1], y.dtype)
    score, received = (structure.join(none.at[..., v].set(values)) for values in (score, received))
    return structure.join(end) + chain.kicks[-1], score, received


def _plan(cov, goal, F, K, i):
    """c at the kick i, were F the Jacobian of all drifts to come."""
    noisy = goal.shape[-1]

    def spread(q):
        return _product(_product(goal, q), jnp.swapaxes(goal, -1, -2))

    def on(j, carried):
        P, ends = carried
        return _product(_product(F, P), jnp.swapaxes(F, -1, -2)) + spread(cov[j]), _product(F, ends)

    first = (spread(cov[i]), jnp.concatenate([goal, K], axis=-1))
    P, ends = jax.lax.fori_loop(i + 1, len(cov), on, first)
    # Correlations: entries of P differ by powers of the step. What is added keeps pivots above rounding.
    size = jnp.sqrt(jnp.diagonal(P, axis1=-2, axis2=-1))
    least = 100 * jnp.finfo(P.dtype).eps * jnp.eye(P.shape[-1], dtype=P.dtype)
    inverse = inverse_and_log_det(P / (size[..., :, None] * size[..., None, :]) + least)[0]
    left = (goal - ends[..., noisy:]) / size[..., None]
    return _product(jnp.swapaxes(ends[..., :noisy] / size[..., None], -1, -2), _product(inverse, left))


def _steered(jacobian, structure: AbstractStructure, kinds: Kinds, y, K, cov):
    """The v-part of K for which the next drift takes the x-part to zero, next to that of K; and its divergence in v."""
    x, v = kinds

    def steer(y):
        F = jacobian(y)
        missed, across = _product(F, K)[..., x, :], F[..., x[:, None], v]
        towards = _product(cov, jnp.swapaxes(across, -1, -2))
        return K[..., v, :] - _product(towards, _solve(_product(across, towards), missed))

    units = structure.basis(y.dtype)[v]
    K_v, slopes = jax.vmap(lambda unit: jax.jvp(steer, (y,), (unit,)), out_axes=(None, 0))(units)
    return K_v, sum(slopes[k][..., k, :] for k in range(len(v)))


def _product(a, b):
    """`a @ b` of many small matrices, in array operations."""
    if a.shape[-1] > MAX_UNROLLED:
        return a @ b
    return sum(a[..., :, k, None] * b[..., None, k, :] for k in range(a.shape[-1]))


def _solve(a, b):
    return _product(inverse_and_log_det(a)[0], b)


def _applied(c, w):
    """`cᵀ w`"""
    return jnp.sum(c * w[..., :, None], axis=-2)


def kinds_of(process: Process, shape: tuple[int, ...]) -> Kinds | str:
    """Which coordinates are noisy; or why the noise is not of the kind that this target is for."""
    structure = process.structure_for(shape)
    if isinstance(structure, Elementwise):
        return "the drift couples no coordinates, so noise reaches none but its own"
    if structure.rows > MAX_UNROLLED:
        return f"{structure.rows} coordinates are coupled to each other (limit {MAX_UNROLLED})"
    with jax.ensure_compile_time_eval():
        # Both ends of the span, where a schedule may begin or end without noise, are left out.
        covs = [np.asarray(structure.noise_cov(process.g(share * process.t1)), float) for share in _SHARES]
    covs = np.stack(covs).reshape(-1, structure.rows, structure.rows)
    marks = np.diagonal(covs, axis1=1, axis2=2) > 0
    if (marks != marks[0]).any():
        return "which coordinates have noise is not the same at all times and pixels"
    if not marks[0].any() or marks[0].all():
        return "noise enters all coordinates" if marks[0].any() else "there is no noise"
    kinds = Kinds(np.flatnonzero(~marks[0]), np.flatnonzero(marks[0]))
    among = covs[:, kinds.v[:, None], kinds.v]
    deviation = np.sqrt(np.diagonal(among, axis1=1, axis2=2))
    correlations = among / (deviation[:, :, None] * deviation[:, None, :])
    if np.linalg.eigvalsh(correlations)[:, 0].min() < LEAST_RANK**2:
        return "the noise of coordinates that have some is singular: fewer sources than coordinates"
    return kinds


_SHARES = (np.arange(16) + 0.5) / 16
"""Of t1, at which pilots look."""


def kinetic_problem(pilot) -> str | None:
    """Why this target does not apply to the process of a `Pilot`, or None where it does."""
    process, structure = pilot.process, pilot.structure
    kinds = kinds_of(process, pilot.shape)
    if isinstance(kinds, str):
        return kinds
    times = jnp.asarray(process.t1 * _SHARES, float)
    paths = pilot.paths()

    def slopes(x, key):  # ∂f_x/∂v along a path, in units of the noise
        states = paths.states(x, times.astype(x.dtype), key=key)
        found = jax.vmap(lambda y, t: structure.jacobian(lambda y: process.f(y, t), y)[1])(states, times)
        return found[..., kinds.x[:, None], kinds.v]

    x = jnp.asarray(pilot.x)
    found = jit_once(jax.vmap(slopes), optimize=False)(x, jax.random.split(pilot.key, len(x)))
    noise = jnp.broadcast_to(pilot.clock.totals_of(pilot.shape), pilot.shape)
    units = np.sqrt(np.asarray(structure.split(noise), float)[..., None, kinds.v])
    found = np.moveaxis(np.asarray(found, float) * units, 1, 0)  # (times, paths, *sites, x, v)
    found = found.reshape(len(times), -1, len(kinds.x), len(kinds.v))
    sizes = np.sqrt(np.mean(np.sum(found**2, axis=-1), axis=1))  # of each row, at each time
    if not sizes.all():
        which = tuple(int(i) for i in kinds.x[~sizes.all(axis=0)])
        return f"noise reaches noiseless coordinates {which} of a site through more than one derivative, or not at all"
    scaled = found / sizes[:, None, :, None]
    smallest = np.linalg.svd(scaled, compute_uv=False)[..., -1] if len(kinds.v) >= len(kinds.x) else np.zeros(1)
    turns = len(kinds.v) == len(kinds.x) and (np.ptp(np.sign(np.linalg.det(scaled)), axis=1) > 0).any()
    if turns or smallest.min() < LEAST_RANK:
        return "the derivative of the noiseless coordinates' drift by the noisy ones has no full rank at some states"
    return None


def choose_window(target: Kinetic, pilot, whole: int, *, n: int = LOOK) -> float:
    """The shortest window whose `E|ŝ|²` is near the least, over twelve times and n paths, in units of the noise.

    `E|ŝ|² = E|score|² + noise`. `whole` are steps that a path to t1 needs: no window has more than MAX_STEPS of them.
    """
    process, x = target.process, initial_states(pilot.y0, n, key=pilot.key)
    # Early windows reach back to the start, however long they may be.
    times = process.t1 * jnp.linspace(0.1, 1.0, 12, dtype=x.dtype)
    units = pilot.clock.totals_of(x.shape[1:]) / jnp.max(pilot.clock.totals)

    def moment(window):
        trial = replace(target, window=window, count=MAX_STEPS)
        found = jax.vmap(lambda x, k: trial.draw(x, times, key=k).score)(x, jax.random.split(pilot.key, n))
        return jnp.mean(units * found**2)

    moment = jit_once(moment, optimize=x[0].size > SMALL)
    windows = min(1.0, MAX_STEPS / whole) * 0.5 ** np.arange(6.0)
    moments = np.array([float(moment(jnp.asarray(window, float))) for window in windows])
    if not np.isfinite(moments).any():
        raise ValueError("kinetic targets are not finite on pilot paths; give more steps=..., or a shorter window.")
    moments = np.where(np.isfinite(moments), moments, np.inf)
    return float(windows[moments <= ENOUGH * moments.min()].min())
