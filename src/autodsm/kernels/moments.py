"""Moments of an affine process `u' = A(τ) u + b(τ)` with noise covariance `Q(τ)`, from u(s) = 0 to time t.

    flow   Φ(t,s),  ∂Φ/∂t = A Φ
    shift  ∫ Φ(t,τ) b(τ) dτ
    cov    P = ∫ Φ(t,τ) Q(τ) Φ(t,τ)ᵀ dτ

[s, t] is cut into steps that resolve the coefficients; a short interval takes one. On a step, A, b and Q
are known at n Gauss–Legendre nodes, which leaves an error of order 2n at the step's end and none for polynomials.
Elementwise drifts (n = 8) use the integrals above with `Φ = exp ∫A`. For matrices (n = 4) the interpolated linear
equations for Φ, u and P are summed as power series. A is never inverted, so it may be singular; P is built from
`P' = AP + PAᵀ + Q` alone, so it keeps its relative accuracy when its entries differ by many orders (the swimmer:
h³ against h), and nothing overflows for stiff contraction. Where nothing depends on time the steps are alike: one is
taken and doubled, `Φ(2h) = Φ(h)²` and so on, so that stiff systems cost no more than the logarithm of their stiffness.

Derivatives of any kind, also those of reverse mode in what A, b and Q depend on, are those of the steps taken; their
lengths are held.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.quadrature import gauss
from ..process.process import Process
from ..process.structure import AbstractStructure, Elementwise
from .linearize import Affine

_ROUGH = 1e-4  # largest share of the interpolant's last Legendre terms that counts as resolved


class _Rule(NamedTuple):
    """Gauss–Legendre nodes on [0, 1], and what is derived from values at them."""

    nodes: np.ndarray
    weights: np.ndarray
    to_end: np.ndarray
    """`to_end @ values` is the integral of the interpolant from each node to 1."""
    to_monomials: np.ndarray
    last_terms: np.ndarray
    """`last_terms @ values` are the interpolant's last two Legendre coefficients, one even and one odd. The first is
    scaled so that for an exponential both reach `_ROUGH` together: `c_k ≈ κᵏ/(2k−1)!!`."""

    @classmethod
    def of(cls, n: int) -> "_Rule":
        nodes, weights = gauss(n)
        to_monomials = np.linalg.inv(np.vander(nodes, increasing=True))
        powers = np.arange(1, n + 1)
        to_end = (1.0 - nodes[:, None] ** powers) / powers @ to_monomials
        terms = (
            np.polynomial.legendre.legval(2.0 * nodes - 1.0, np.eye(n)[-2:].T)
            * weights
            * np.array([[2 * n - 3], [2 * n - 1]])
        )
        kappa = (_ROUGH * np.prod(np.arange(1, 2 * n - 2, 2.0))) ** (1 / (n - 1))
        return cls(nodes, weights, to_end, to_monomials, terms * np.array([[kappa / (2 * n - 3)], [1.0]]))


_SCALAR_RULE, _MATRIX_RULE = _Rule.of(8), _Rule.of(4)
_SCALAR_REACH, _MATRIX_REACH = 2.0, 2.0  # largest ‖δA‖ of a step
_MAX_STEPS, _NESTED = 4096, 64  # of a derivative, in loops of 64; three loops of 16 run as fast, but compile for longer
_HOPS = 3  # by which noise reaches a coordinate through others; farther ones are in units of the last
_VARYING = 4.0  # how much more a power of time in A counts: its series converges as that of e^{x²/2}, not of eˣ


class AffineMoments(NamedTuple):
    """What an affine process does on an interval, in layout: `u ↦ Φ u + shift`, plus noise of covariance cov."""

    flow: Array
    shift: Array
    cov: Array


def affine_moments(process: Process, affine: Affine, s: Array, t: Array) -> AffineMoments:
    """Φ, ∫Φb and ∫ΦQΦᵀ over [s, t], in as many steps as the coefficients need.

    NaN where there is no answer: t ≤ s, coefficients that are not finite, or, where they depend on time, more than
    5·10⁴ e-folds of contraction.
    """
    structure, dtype = affine.structure, s.dtype
    scalar = isinstance(structure, Elementwise)
    rule, reach = (_SCALAR_RULE, _SCALAR_REACH) if scalar else (_MATRIX_RULE, _MATRIX_REACH)
    span = t - s
    # Coefficients that vary are looked at in 32 places over the time span at least, lest a pulse be missed.
    varying = not (affine.constant_matrix and process.constant_noise)
    longest = jnp.asarray(process.t1 * len(rule.nodes) / 32 if varying else jnp.inf, dtype)

    def noise_cov(tau):
        return structure.noise_cov(process.g(tau).astype(dtype))

    if affine.constant and process.constant_noise:
        A, b = affine.coefficients(s)
        total = _doubled(structure, A, b, noise_cov(s), span)
        return jax.tree.map(lambda x: jnp.where(span > 0, x, jnp.nan), total)

    def step(start, width) -> tuple[AffineMoments, Array, Array]:
        nodes = s + (start + width * jnp.asarray(rule.nodes, dtype))
        A, b = jax.vmap(affine.coefficients)(nodes)
        if process.constant_noise:
            Q = noise_cov(s)[None]
            rough = jnp.zeros((), dtype)
        else:
            Q = jax.vmap(noise_cov)(nodes)
            rough = _roughness(rule, Q, _noise_scale(structure, Q))
        rough = jnp.maximum(rough, _roughness(rule, b, _drift_scale(structure, b, Q, width)))
        if affine.constant_matrix:
            A = A[:1]
        sizes = _sizes(structure, width * A, width * Q)
        size = jnp.max(sizes(width * A))
        if not affine.constant_matrix:
            if not scalar:
                first, *others = sizes(width * _polynomial(A))
                size = first + _VARYING * sum(others)
            rough = jnp.maximum(rough, jnp.minimum(size, 1.0) * _roughness(rule, A, jnp.max(jnp.abs(A))))
        solve = _quadrature if scalar else _series
        moments = solve(structure, width * A, width * b, width * Q)
        # Above 1 the step is too long: for the reach, or (by a power of the width) for the interpolants.
        return moments, size / reach, (rough / _ROUGH) ** (1.0 / (len(rule.nodes) - 1))

    def body(carry):
        start, width, done, total = carry
        width = jnp.minimum(width, longest)
        last = ~(width < span - start)
        width = jnp.minimum(width, span - start)
        moments, too_far, too_rough = step(start, width)
        # Held in derivatives: the result does not depend on how long steps are, and a root has no slope at zero.
        too_far, too_rough = jax.lax.stop_gradient((too_far, too_rough))
        excess = jnp.maximum(too_far, too_rough)
        # A NaN is accepted, or the loop would never end. So is a step that cannot be shortened further, across a jump
        # of the coefficients; but if it is out of reach its result is wrong, and must not look right.
        shortest = jnp.where(too_far > 1.0, 1e-5, 1e-4) * span
        accept = ~(excess > 1.0) | ~(width > shortest)
        moments = jax.tree.map(lambda x: jnp.where(accept & (too_far > 1.0), jnp.nan, x), moments)
        combined = _after(structure, moments, total)
        total = jax.tree.map(lambda new, old: jnp.where(accept, new, old), combined, total)
        start = jnp.where(accept, start + width, start)
        factor = jnp.nan_to_num(jnp.clip(0.9 / jnp.maximum(excess, 1e-3), 0.05, 4.0), nan=1.0)
        return start, jnp.maximum(width * factor, shortest), done | (accept & last), total

    unit = structure.identity(dtype)
    nothing = AffineMoments(unit, structure.split(jnp.zeros(structure.shape, dtype)), jnp.zeros_like(unit))
    total = _until_done(body, (jnp.zeros_like(s), span, ~(span > 0), nothing))
    return jax.tree.map(lambda x: jnp.where(span > 0, x, jnp.nan), total)


def _doubled(structure: AbstractStructure, A: Array, b: Array, Q: Array, span: Array) -> AffineMoments:
    """The moments of constant coefficients over the span: those of its 2⁻ⁿ-th part, doubled n times."""
    scalar = isinstance(structure, Elementwise)
    reach = _SCALAR_REACH if scalar else _MATRIX_REACH

    def halvings(width):
        size = jnp.max(_sizes(structure, width * A[None], width * Q[None])(width * A[None]))
        excess = jnp.where(jnp.isfinite(size), size, 0.0) / reach
        return jax.lax.stop_gradient(jnp.ceil(jnp.log2(jnp.maximum(excess, 1.0))))

    count = halvings(span)
    count = count + halvings(span * 2.0**-count)  # the units of the noise depend on the width a little
    width = span * 2.0**-count
    solve = _quadrature if scalar else _series
    steady = jnp.broadcast_to(width * b, (len(_SCALAR_RULE.nodes) if scalar else 1, *b.shape))
    first = solve(structure, width * A[None], steady, width * Q[None])

    def double(carry):
        left, _, _, total = carry
        return left - 1.0, width, ~(left > 1.0), _after(structure, total, total)

    return _until_done(double, (count, width, ~(count > 0), first))


def _until_done(body: Callable, start: tuple) -> AffineMoments:
    """`body` again and again until the third part of what it carries is true; the last part of that.

    A loop of unknown length cannot be derived backwards. One of bounded length, which nests short ones, can: it is used
    for derivatives alone, which are NaN beyond it.
    """
    body, held = jax.closure_convert(body, start)

    @jax.custom_jvp
    def run(start, held):
        return jax.lax.while_loop(lambda c: ~c[2], lambda c: body(c, *held), start)[3]

    def bounded(start, held):
        advance = lambda c: body(c, *held)  # noqa: E731
        options: dict = dict(max_steps=_MAX_STEPS, base=_NESTED, kind="bounded")
        *_, done, total = eqxi.while_loop(lambda c: ~c[2], advance, start, **options)
        return jax.tree.map(lambda x: jnp.where(done, x, jnp.nan), total)

    run.defjvp(lambda values, slopes: jax.jvp(bounded, values, slopes))
    return run(start, held)


def _sizes(structure: AbstractStructure, A: Array, Q: Array) -> Callable[[Array], Array]:
    """How the norms of matrices over a step are taken: as they are or, where that is less, in units of the noise.

    Where coordinates have different units, a row sum has none. Coordinate i counts in units of the noise that it
    receives in the step, `√Q_ii`, and from others by A; where none arrives, nothing does from those that have some.
    """
    if isinstance(structure, Elementwise):
        return jax.vmap(structure.norm)
    own = jnp.sqrt(jnp.max(jnp.diagonal(Q, axis1=-2, axis2=-1), axis=0))
    unit, through = own, jnp.max(jnp.abs(A), axis=0)
    for _ in range(_HOPS):
        unit = own + structure.matvec(through, unit)
    noisy = unit > 0
    ratio = jnp.where(noisy, unit, 1.0)[..., None, :] / jnp.where(noisy, unit, 1.0)[..., :, None]
    ratio = jnp.where(noisy[..., None, :] & ~noisy[..., :, None], 0.0, ratio)
    return jax.vmap(lambda a: jnp.minimum(structure.norm(a), structure.norm(a * ratio)))


def _roughness(rule: _Rule, values: Array, floor: Array) -> Array:
    """Size of the interpolant's last two terms, relative to the values, entry by entry."""
    last = jnp.max(jnp.abs(jnp.tensordot(jnp.asarray(rule.last_terms, values.dtype), values, 1)), axis=0)
    scale = jnp.maximum(jnp.max(jnp.abs(values), axis=0), floor)
    return jnp.max(last / jnp.maximum(scale, jnp.finfo(values.dtype).tiny))


def _noise_scale(structure: AbstractStructure, Q: Array) -> Array:
    """The size against which an entry of the noise covariance is judged: `√(Q_ii Q_jj)`."""
    if isinstance(structure, Elementwise):
        return jnp.zeros((), Q.dtype)
    deviation = jnp.sqrt(jnp.max(jnp.diagonal(Q, axis1=-2, axis2=-1), axis=0))
    return deviation[..., :, None] * deviation[..., None, :]


def _drift_scale(structure: AbstractStructure, b: Array, Q: Array, width: Array) -> Array:
    """The size against which an entry of the drift is judged: what moves the state as far as the noise does.

    Without it, a drift that is zero but for rounding would be resolved. Where there is no noise, entries far below
    the largest are taken for rounding.
    """
    variance = Q if isinstance(structure, Elementwise) else jnp.diagonal(Q, axis1=-2, axis2=-1)
    rounding = jnp.max(jnp.abs(b)) * jnp.finfo(b.dtype).eps * 64 / _ROUGH
    return jnp.maximum(jnp.sqrt(jnp.max(variance, axis=0) / width), rounding)


def _quadrature(structure: AbstractStructure, A: Array, b: Array, Q: Array) -> AffineMoments:
    """The moments over [0, 1] of independent coordinates: `a(x) = ∫_x^1 A`, `∫ e^a b`, `∫ e^{2a} Q`."""
    rule = _SCALAR_RULE

    def contract(matrix, values):
        return jnp.tensordot(jnp.asarray(matrix, values.dtype), values, 1)

    A = jnp.broadcast_to(A, b.shape)
    growth = jnp.exp(contract(rule.to_end, A))
    return AffineMoments(
        jnp.exp(contract(rule.weights, A)), contract(rule.weights, growth * b), contract(rule.weights, growth**2 * Q)
    )


def _polynomial(values: Array) -> Array:
    """Coefficients of powers of time, from 0 to 1 over a step, of matrices known at the nodes or constant."""
    if len(values) == 1:
        return values
    return jnp.tensordot(jnp.asarray(_MATRIX_RULE.to_monomials, values.dtype), values, 1)


def _series(structure: AbstractStructure, A: Array, b: Array, Q: Array) -> AffineMoments:
    """`Φ' = AΦ`, `u' = Au + b`, `P' = AP + PAᵀ + Q` on [0, 1] for interpolated A, b, Q, by power series.

    All three are columns of one matrix, and the powers of time in A lie side by side: a term is one product.
    """
    terms = 30 if A.dtype == jnp.float64 else 21  # P varies as e^{2δA}: within reach, 4ⁿ/n! of the next is rounding
    n = structure.rows
    A = _polynomial(A)
    powers = len(A)
    A = jnp.concatenate(list(A), axis=-1)  # (*sites, n, powers · n)

    def columns(flow, shift, cov):
        return jnp.concatenate([flow, shift[..., None], cov], axis=-1)

    def padded(coefficients):
        missing = jnp.zeros((terms - len(coefficients), *coefficients.shape[1:]), A.dtype)
        return jnp.concatenate([coefficients, missing])

    def term(carry, inputs):
        k, b_k, Q_k = inputs
        latest, total = carry  # the latest coefficients of the solution, one above the other, and the sum of all
        product = A @ latest
        cov = product[..., n + 1 :]
        new = (product + columns(jnp.zeros_like(cov), b_k, structure.transpose(cov) + Q_k)) / k
        return (jnp.concatenate([new, latest[..., : (powers - 1) * n, :]], axis=-2), total + new), None

    first = columns(structure.identity(A.dtype), jnp.zeros_like(b[0]), jnp.zeros_like(Q[0]))
    window = jnp.concatenate([first, *[jnp.zeros_like(first)] * (powers - 1)], axis=-2)
    inputs = (jnp.arange(1, terms + 1, dtype=A.dtype), padded(_polynomial(b)), padded(_polynomial(Q)))
    total = jax.lax.scan(term, (window, first), inputs)[0][1]
    return AffineMoments(total[..., :n], total[..., n], total[..., n + 1 :])


def _after(structure: AbstractStructure, step: AffineMoments, before: AffineMoments) -> AffineMoments:
    """`before`, then `step`."""
    flow = structure.matmul(step.flow, before.flow)
    shift = structure.matvec(step.flow, before.shift) + step.shift
    carried = structure.matmul(structure.matmul(step.flow, before.cov), structure.transpose(step.flow))
    return AffineMoments(flow, shift, carried + step.cov)
