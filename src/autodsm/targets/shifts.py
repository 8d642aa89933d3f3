"""Shifts of the noise along a path that move its end in the noisy coordinates alone.

The noise is in some coordinates v only, and reaches the others, x, through one derivative: `∂f_x/∂v` has full row rank.
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
rank, at every state. Where it depends on v, plans miss by as much in every octave of the time to go, and the noise
grows with the logarithm of the number of steps (`x' = v/√(1 + v²/2)`: `E|ŝ|²` is 11, 19 and 31 at 3, 6 and 24 of them);
elsewhere it does not.

Steps are those of `chain` (weak order two; for a linear drift Simpson's rule for the covariance), with the kicks
between two steps in one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.linalg import MAX_UNROLLED, inverse_and_log_det
from ..paths.schemes import ENDS, MIDDLE, kutta
from ..process.process import Process
from ..process.structure import AbstractStructure


class Kinds(NamedTuple):
    """Which coordinates of a site are noiseless (x), and which are noisy (v)."""

    x: np.ndarray
    v: np.ndarray


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
        weights = jnp.zeros_like(times).at[1::2].set(MIDDLE * h).at[:-1:2].add(ENDS * h).at[2::2].add(ENDS * h)

        def one(t, weight, xi):
            cov = weight * structure.noise_cov(process.g(t).astype(knots.dtype))
            return cov[..., v[:, None], v], jnp.sqrt(weight) * process.diffuse(t, xi, structure.shape)

        return cls(times, *jax.vmap(one)(times, weights, xi))


def follow(process: Process, kinds: Kinds, y, knots, xi):
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
    deviation = jnp.sqrt(jnp.diagonal(cov, axis1=-2, axis2=-1))[..., None]
    correlations = cov / (deviation * jnp.swapaxes(deviation, -1, -2))

    def steer(y):
        F = jacobian(y)
        missed, across = _product(F, K)[..., x, :], F[..., x[:, None], v] * jnp.swapaxes(deviation, -1, -2)
        # Rows in units of their own: the derivative of an inverse has the square of what is inverted as a divisor.
        size = jax.lax.stop_gradient(jnp.max(jnp.abs(across), axis=-1, keepdims=True))
        towards = _product(correlations, jnp.swapaxes(across / size, -1, -2))
        return K[..., v, :] - deviation * _product(towards, _solve(_product(across / size, towards), missed / size))

    rows = jnp.eye(structure.rows, dtype=y.dtype)[v]
    units = jax.vmap(lambda row: structure.join(jnp.broadcast_to(row, K.shape[:-1])))(rows)
    K_v, slopes = jax.vmap(lambda unit: jax.jvp(steer, (y,), (unit,)), out_axes=(None, 0))(units)
    return K_v, sum(slopes[k][..., k, :] for k in range(len(v)))


def _product(a, b) -> Array:
    """`a @ b` of many small matrices, in array operations."""
    if a.shape[-1] > MAX_UNROLLED:
        return a @ b
    terms = [a[..., :, k, None] * b[..., None, k, :] for k in range(a.shape[-1])]
    return functools.reduce(jnp.add, terms)


def _solve(a, b) -> Array:
    return _product(inverse_and_log_det(a)[0], b)


def _applied(c, w) -> Array:
    """`cᵀ w`"""
    return jnp.sum(c * w[..., :, None], axis=-2)
