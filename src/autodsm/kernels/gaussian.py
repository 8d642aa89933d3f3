"""The Gaussian transition kernel of a linearized process, from y_s at time s to time t.

With `u = y − y_s` and `u' = A(τ) u + b(τ)`, noise covariance `Q(τ)`:

    mean      m = y_s + ∫ Φ(t,τ) b(τ) dτ
    cov       P = ∫ Φ(t,τ) Q(τ) Φ(t,τ)ᵀ dτ,        ∂Φ/∂t = A Φ
    sample    y_t = m + L ε,  P = L Lᵀ             score  ∇log q̂(y_t|y_s) = −L⁻ᵀ ε

**Local order** for a nonlinear drift, in h = t − s, the same for both expansions: the mean is wrong by O(h²), and by
O(h³) with the Itô term; the covariance by O(h³). Where the drift is linear in the coordinates that carry noise (the
swimmer) the Itô term is zero, and the errors are O(h³) and O(h⁴). When the drift is linear all of this is exact:
with `expand="s"` for constant A and b at most linear in time, with `expand="t"` always.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox.internal import unvmap_any
from jaxtyping import Array, Float

from ..base.errors import as_floating, check_flag, check_interval, check_name, is_concrete
from ..base.linalg import cholesky, solve_lower
from ..base.types import State, StateLike
from ..process.process import Process, check_process
from ..process.structure import MAX_DENSE, AbstractStructure, Elementwise
from .linearize import linearize
from .moments import affine_moments

_SAFE = 40.0
"""Own times of a drift in an interval for which there is always a kernel: growth by e^40 has a variance of e^80, near
the largest number in single precision. Contraction may go on for 5·10⁴ of them."""


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
        return self.mean + self._spread(eps)

    def score(self, eps: State) -> State:
        """`−L⁻ᵀ ε`, the score at `sample(eps)`."""
        z = self.structure.split(eps)
        if self.correlation_factor is not None:
            z = solve_lower(self.correlation_factor, z, transpose=True)
        return -self.structure.join(z * self._precision())

    def whiten(self, v: State) -> State:
        """`L⁻¹ v`."""
        z = self.structure.split(v) * self._precision()
        if self.correlation_factor is not None:
            z = solve_lower(self.correlation_factor, z, transpose=False)
        return self.structure.join(z)

    def log_prob(self, y: State) -> Float[Array, ""]:
        z = self.whiten(y - self.mean)
        noisy = self.deviation > 0
        log_det = jnp.sum(jnp.where(noisy, jnp.log(jnp.where(noisy, self.deviation, 1.0)), 0.0))
        if self.correlation_factor is not None:
            diagonal = jnp.diagonal(self.correlation_factor, axis1=-2, axis2=-1)
            log_det = log_det + jnp.sum(jnp.log(diagonal))
        return -0.5 * jnp.sum(z**2) - log_det - 0.5 * jnp.sum(noisy) * math.log(2 * math.pi)

    def covary(self, v: State) -> State:
        """`P v`."""
        _, pull = jax.vjp(self._spread, jnp.zeros_like(self.mean))
        return self._spread(pull(v)[0])

    def variance(self) -> State:
        """Variance of each coordinate, in the state's shape."""
        return self.structure.join(self.deviation**2)

    def cov(self) -> Float[Array, "d d"]:
        """The full covariance of the raveled state. For large states use `variance`."""
        shape = self.structure.shape
        if (d := math.prod(shape)) > MAX_DENSE:
            raise ValueError(f"cov() of a state of shape {shape} would be {d}×{d}; use variance() instead.")
        units = jnp.eye(d, dtype=self.mean.dtype).reshape(d, *shape)
        factor = jax.vmap(lambda e: self._spread(e).reshape(-1), out_axes=1)(units)
        return factor @ factor.T

    def _spread(self, eps: State) -> State:
        """`L ε`. As the difference of a sample and the mean it would lose deviations far below the mean to rounding."""
        return self.structure.join(self.deviation * self._correlate(self.structure.split(eps)))

    def _correlate(self, z: Array) -> Array:
        k = self.correlation_factor
        return z if k is None else self.structure.matvec(k, z)

    def _precision(self) -> Array:
        noisy = self.deviation > 0
        return jnp.where(noisy, 1.0 / jnp.where(noisy, self.deviation, 1.0), 0.0)


def transition(process: Process, y_s: StateLike, s, t, *, expand: str = "t", ito: bool = False) -> Gaussian:
    """The Gaussian kernel `q̂(y_t | y_s)` of the process linearized at y_s.

        kernel = transition(process, y_s, 0.50, 0.51)
        y_t, target = kernel.sample(eps), kernel.score(eps)

    One state; batch by `jax.vmap` over `y_s`, `s` and `t`. `expand="s"` linearizes the drift in state and time,
    `"t"` in the state only; `ito` adds the second-order term. See `linearize`. Differentiable in
    all arguments and in what the drift holds, over up to some 4000 times that the drift relaxes.

    A kernel that is not finite is an error; inside of `jax.jit`, where a check would keep what is compiled out of
    JAX's cache, it is NaN.
    """
    check_process(process)
    y_s = as_floating(y_s, "y_s")
    check_interval(s, t, process.t1)
    check_name("expand", expand, ("s", "t"))
    check_flag("ito", ito)
    process.check(y_s, s)
    s, t = jnp.asarray(s, y_s.dtype), jnp.asarray(t, y_s.dtype)
    kernel = _transition(process, y_s, s, t, expand, ito)
    bad = unvmap_any(~(jnp.all(jnp.isfinite(kernel.mean)) & jnp.all(jnp.isfinite(kernel.deviation))))
    if is_concrete(bad) and bool(bad):
        raise _not_finite(process, y_s, s, t)
    return kernel


def _not_finite(process: Process, y_s: State, s: Array, t: Array) -> FloatingPointError:
    """The error for such a kernel, with the reason where the values are known."""
    if not is_concrete(y_s, s, t):
        return FloatingPointError(
            "a kernel is not finite: the drift is too stiff or grows too fast for the interval from s to t, or its "
            "derivative is not finite at y_s. Take t closer to s."
        )
    structure = process.structure_for(y_s.shape)
    rate = float(structure.norm(structure.jacobian(lambda y: process.f(y, s), y_s)[1]))
    what = f"the kernel from s={float(s)} to t={float(t)} is not finite"
    if not math.isfinite(rate):
        return FloatingPointError(f"{what}: the derivative of the drift is not finite at y_s={y_s}. Start elsewhere.")
    return FloatingPointError(
        f"{what}: the drift relaxes or grows at a rate of {rate:.3g}, and {rate * float(t - s):.3g} "
        f"times over the interval. Take t below s + {_SAFE / max(rate, _SAFE / process.t1):.1g}."
    )


@eqx.filter_jit
def _transition(process: Process, y_s: State, s: Array, t: Array, expand: str, ito: bool) -> Gaussian:
    affine = linearize(process, y_s, s, expand=expand, ito=ito)
    moments = affine_moments(process, affine, s, t)
    deviation, factor = _factor(affine.structure, moments.cov)
    return Gaussian(y_s + affine.structure.join(moments.shift), deviation, factor, affine.structure)


def _factor(structure: AbstractStructure, cov: Array) -> tuple[Array, Array | None]:
    """Deviations, and the Cholesky factor of the correlation matrix."""
    variance = cov if isinstance(structure, Elementwise) else jnp.diagonal(cov, axis1=-2, axis2=-1)
    # NaN stays NaN; at zero the root is given a slope of zero.
    deviation = jnp.where(variance <= 0, 0.0, jnp.sqrt(jnp.where(variance <= 0, 1.0, variance)))
    if isinstance(structure, Elementwise):
        return deviation, None
    inverse = jnp.where(deviation > 0, 1.0 / jnp.where(deviation > 0, deviation, 1.0), 0.0)
    correlation = cov * inverse[..., :, None] * inverse[..., None, :]
    # Rounding may leave a singular P (fewer noises than coordinates) slightly indefinite. The shift moves only
    # directions that g cannot see; elsewhere it is of the size of the rounding error.
    n = correlation.shape[-1]
    unit = jnp.where(deviation > 0, 2.0 * n * jnp.finfo(cov.dtype).eps, 1.0)
    return deviation, cholesky(correlation + unit[..., None] * jnp.eye(n, dtype=cov.dtype))
