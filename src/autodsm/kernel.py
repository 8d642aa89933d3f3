"""The Gaussian transition kernel of a linearized process, from y_s at time s to time t.

With `u = y − y_s` and `u' = A(τ) u + b(τ)`, noise covariance `Q(τ)`:

    mean      m = y_s + ∫ Φ(t,τ) b(τ) dτ
    cov       P = ∫ Φ(t,τ) Q(τ) Φ(t,τ)ᵀ dτ,        ∂Φ/∂t = A Φ
    sample    y_t = m + L ε,  P = L Lᵀ             score  ∇log q̂(y_t|y_s) = −L⁻ᵀ ε

**Moments.** [s, t] is cut into steps that resolve the coefficients. On a step, A, b and Q are replaced by their
interpolants at the four Gauss–Legendre nodes (error of order 8 at the step's end, exact for constants) and the
resulting linear equations for Φ, u and P are summed as power series. A is never inverted, so it may be singular;
`P` is built from `P' = AP + PAᵀ + Q` alone, so it keeps its relative accuracy when its entries differ by many
orders (the swimmer: h³ against h) and nothing overflows for stiff contraction. A short interval takes one step.

**Local order** for a nonlinear drift, in h = t − s, the same for both expansions: the mean is wrong by O(h²), and by
O(h³) with the Itô term; the covariance by O(h³). Where the drift is linear in the coordinates that carry noise (the
swimmer) the Itô term is zero, and the errors are O(h³) and O(h⁴). When the drift is linear all of this is exact:
with `expand="s"` for constant A and b at most linear in time, with `expand="t"` always.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._types import Expand, State
from .errors import check_interval
from .linearize import Affine, linearize
from .process import Process
from .structure import MAX_DENSE, AbstractStructure, Elementwise

_NODES = 0.5 * (np.polynomial.legendre.leggauss(4)[0] + 1.0)
_TO_MONOMIAL = np.linalg.inv(np.vander(_NODES, increasing=True))
_REACH = 0.5  # largest ‖δA‖ of a step: the series then converges like 1/n!
_ROUGH = 1e-3  # largest share of the cubic term in a coefficient that counts as resolved


class Gaussian(eqx.Module):
    """`N(mean, P)` over one state. `P = D C D` with deviations D and the correlation factored as `C = K Kᵀ`.

    Scaling before factoring keeps hypoelliptic kernels well conditioned. A coordinate that no noise reaches has
    D = 0: it is sampled at its mean, its score is reported as 0 and `log_prob` is the density of the others.
    """

    mean: State
    deviation: Array
    """D, in vector layout."""
    correlation_factor: Array | None
    """K, lower triangular, in matrix layout; None when the coordinates are independent."""
    structure: AbstractStructure = eqx.field(static=True)

    def sample(self, eps: State) -> State:
        """`m + L ε`."""
        return self.mean + self.structure.join(self.deviation * self._correlate(self.structure.split(eps)))

    def score(self, eps: State) -> State:
        """`−L⁻ᵀ ε`, the score at `sample(eps)`."""
        z = self.structure.split(eps)
        if self.correlation_factor is not None:
            z = _solve(self.correlation_factor, z, transpose=True)
        return -self.structure.join(z * self._precision())

    def log_prob(self, y: State) -> Float[Array, ""]:
        z = self.structure.split(y - self.mean) * self._precision()
        noisy = self.deviation > 0
        log_det = jnp.sum(jnp.where(noisy, jnp.log(jnp.where(noisy, self.deviation, 1.0)), 0.0))
        if self.correlation_factor is not None:
            z = _solve(self.correlation_factor, z, transpose=False)
            diagonal = jnp.diagonal(self.correlation_factor, axis1=-2, axis2=-1)
            log_det = log_det + jnp.sum(jnp.log(diagonal))
        return -0.5 * jnp.sum(z**2) - log_det - 0.5 * jnp.sum(noisy) * math.log(2 * math.pi)

    def variance(self) -> State:
        """Variance of each coordinate, in the state's shape."""
        return self.structure.join(self.deviation**2)

    def cov(self) -> Float[Array, "d d"]:
        """The full covariance of the raveled state. For large states use `variance`."""
        shape = self.structure.shape
        if (d := math.prod(shape)) > MAX_DENSE:
            raise ValueError(f"cov() of a state of shape {shape} would be {d}×{d}; use variance() instead.")
        units = jnp.eye(d, dtype=self.mean.dtype).reshape(d, *shape)
        factor = jax.vmap(lambda e: (self.sample(e) - self.mean).reshape(-1), out_axes=1)(units)
        return factor @ factor.T

    def _correlate(self, z: Array) -> Array:
        k = self.correlation_factor
        return z if k is None else self.structure.matvec(k, z)

    def _precision(self) -> Array:
        noisy = self.deviation > 0
        return jnp.where(noisy, 1.0 / jnp.where(noisy, self.deviation, 1.0), 0.0)


def transition(
    process: Process, y_s: State, s, t, *, expand: Expand = "t", ito: bool = False
) -> Gaussian:
    """The Gaussian kernel `q̂(y_t | y_s)` of the process linearized at y_s.

        kernel = transition(process, y_s, 0.50, 0.51)
        y_t, target = kernel.sample(eps), kernel.score(eps)

    One state; batch by `jax.vmap` over `y_s`, `s` and `t`. `expand="s"` linearizes the drift in state and time,
    `"t"` in the state only; `ito` adds the second-order term. See `linearize`. Forward-mode differentiable.
    """
    y_s = jnp.asarray(y_s, dtype=jnp.result_type(y_s, float))
    check_interval(s, t, process.t1)
    process.check(y_s, s)
    affine = linearize(process, y_s, s, expand=expand, ito=ito)
    moments = affine_moments(process, affine, s, t, dtype=y_s.dtype)
    deviation, factor = _factor(affine.structure, moments.cov)
    return Gaussian(y_s + affine.structure.join(moments.shift), deviation, factor, affine.structure)


class Moments(NamedTuple):
    """What an affine process does on an interval, in layout: `u ↦ Φ u + shift`, plus noise of covariance cov."""

    flow: Array
    shift: Array
    cov: Array


def affine_moments(process: Process, affine: Affine, s, t, *, dtype) -> Moments:
    """Φ, ∫Φb and ∫ΦQΦᵀ over [s, t], in as many steps as the coefficients need."""
    structure = affine.structure
    s, t = jnp.asarray(s, dtype), jnp.asarray(t, dtype)
    span = t - s
    terms = 16 if dtype == jnp.float64 else 10

    def noise_cov(tau):
        return structure.noise_cov(process.g(tau).astype(dtype))

    def step(start, width) -> tuple[Moments, Array]:
        nodes = start + width * jnp.asarray(_NODES, dtype)
        A, b = jax.vmap(affine.coefficients)(nodes)
        size = width * jnp.max(jax.vmap(structure.norm)(A))
        rough = jnp.zeros((), dtype)
        if affine.constant_matrix:
            A = A[:1]
        else:
            rough = jnp.minimum(size, 1.0) * _roughness(A)
            A = _polynomial(A)
        if process.constant_noise:
            Q = noise_cov(start)[None]
        else:
            Q = jax.vmap(noise_cov)(nodes)
            rough = jnp.maximum(rough, _roughness(Q))
            Q = _polynomial(Q)
        rough = jnp.maximum(rough, _roughness(b))
        # Above 1 the step is too long: for the series (linear in the width) or the interpolants (cubic).
        excess = jnp.maximum(size / _REACH, jnp.cbrt(rough / _ROUGH))
        return _series(structure, width * A, width * _polynomial(b), width * Q, terms), excess

    shortest = jnp.maximum(1e-6 * span, 8 * jnp.finfo(dtype).eps * t)

    def body(carry):
        start, width, done, total = carry
        remaining = t - start
        last = width >= remaining
        width = jnp.minimum(width, remaining)
        moments, excess = step(start, width)
        accept = (excess <= 1.0) | (width <= shortest)
        total = jax.tree.map(lambda new, old: jnp.where(accept, new, old), _after(structure, moments, total), total)
        start = jnp.where(accept, start + width, start)
        factor = jnp.clip(0.9 / jnp.maximum(excess, 1e-3), 0.05, 4.0)
        return start, jnp.maximum(width * factor, shortest), done | (accept & last), total

    zero = Moments(
        structure.identity(dtype),
        jnp.zeros_like(structure.split(jnp.zeros(structure.shape, dtype))),
        jnp.zeros_like(structure.identity(dtype)),
    )
    *_, total = jax.lax.while_loop(lambda c: ~c[2], body, (s, span, jnp.asarray(False), zero))
    return total


def _polynomial(values: Array) -> Array:
    """Monomial coefficients on [0, 1] of the interpolant through values at the nodes (leading axis)."""
    return jnp.tensordot(jnp.asarray(_TO_MONOMIAL, values.dtype), values, 1)


def _roughness(values: Array) -> Array:
    """Size of the interpolant's cubic term, relative to the largest value."""
    cubic = jnp.tensordot(jnp.asarray(_TO_MONOMIAL[-1], values.dtype), values, 1)
    return jnp.max(jnp.abs(cubic)) / jnp.maximum(jnp.max(jnp.abs(values)), jnp.finfo(values.dtype).tiny)


def _series(structure: AbstractStructure, A: Array, b: Array, Q: Array, terms: int) -> Moments:
    """Solve `Φ' = AΦ`, `u' = Au + b`, `P' = AP + PAᵀ + Q` on [0, 1] for polynomial A, b, Q, as power series."""

    def symmetric(x):
        return x + structure.transpose(x)

    flow = [structure.identity(A.dtype)]
    shift = [jnp.zeros_like(b[0])]
    cov = [jnp.zeros_like(Q[0])]
    for n in range(terms):
        back = range(min(len(A), n + 1))
        next_flow = sum(structure.matmul(A[j], flow[n - j]) for j in back)
        next_shift = sum((structure.matvec(A[j], shift[n - j]) for j in back), b[n] if n < len(b) else 0.0)
        next_cov = sum((symmetric(structure.matmul(A[j], cov[n - j])) for j in back), Q[n] if n < len(Q) else 0.0)
        flow.append(next_flow / (n + 1))
        shift.append(next_shift / (n + 1))
        cov.append(next_cov / (n + 1))
    # Small terms first, so that they are not lost in the large.
    return Moments(sum(reversed(flow)), sum(reversed(shift)), sum(reversed(cov)))  # pyright: ignore


def _after(structure: AbstractStructure, step: Moments, before: Moments) -> Moments:
    """`before`, then `step`."""
    flow = structure.matmul(step.flow, before.flow)
    shift = structure.matvec(step.flow, before.shift) + step.shift
    carried = structure.matmul(structure.matmul(step.flow, before.cov), structure.transpose(step.flow))
    return Moments(flow, shift, carried + step.cov)


def _factor(structure: AbstractStructure, cov: Array) -> tuple[Array, Array | None]:
    """Deviations, and the Cholesky factor of the correlation matrix."""
    if isinstance(structure, Elementwise):
        return jnp.sqrt(jnp.maximum(cov, 0.0)), None
    deviation = jnp.sqrt(jnp.maximum(jnp.diagonal(cov, axis1=-2, axis2=-1), 0.0))
    inverse = jnp.where(deviation > 0, 1.0 / jnp.where(deviation > 0, deviation, 1.0), 0.0)
    correlation = cov * inverse[..., :, None] * inverse[..., None, :]
    # Rounding may leave a singular P (fewer noises than coordinates) slightly indefinite. The shift moves only
    # directions that g cannot see; elsewhere it is of the size of the rounding error.
    n = correlation.shape[-1]
    unit = jnp.where(deviation > 0, 2.0 * n * jnp.finfo(cov.dtype).eps, 1.0)
    return deviation, jnp.linalg.cholesky(correlation + unit[..., None] * jnp.eye(n, dtype=cov.dtype))


def _solve(factor: Array, z: Array, *, transpose: bool) -> Array:
    return jax.lax.linalg.triangular_solve(
        factor, z[..., None], left_side=True, lower=True, transpose_a=transpose
    )[..., 0]
