"""Noise processes for generative modelling: Langevin dynamics towards any prior, and the linear classics.

`langevin`: `dy = β(t) ∇log π(y) dt + √(2β(t)) dw` has the stationary law π, whatever π is.

| process  | drift                         | diffusion                        |
|----------|-------------------------------|----------------------------------|
| `vp`     | `−½ β y`                      | `√β`                             |
| `sub_vp` | `−½ β y`                      | `√(β (1 − exp(−2∫β)))`           |
| `ve`     | `0`                           | `√(dσ²/dt)`, `σ = σ0 (σ1/σ0)^t`  |
| `cld`    | `β (v/M, −x − Γ v/M)`         | `(0, √(2Γβ))`, `Γ² = 4M`         |
| `linear` | `A(t) y + c(t)`               | anything                         |

`underdamped` is `cld` for any prior, whose score takes the place of −x; `WithVelocity` is the law that both end in.
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.errors import as_floating, check_callable, check_key, check_number, check_positive, check_shape
from ..base.quadrature import NODES, WEIGHTS
from ..base.types import PRNGKey
from .process import Process
from .recipe import recorded


class AbstractBeta(eqx.Module):
    """A noise schedule β(t). Any other function of `t` works too; these also know their integral."""

    t1: eqx.AbstractVar[float]
    """Where a process with this schedule ends unless told otherwise; before any singularity."""

    @abc.abstractmethod
    def __call__(self, t) -> Array: ...

    @abc.abstractmethod
    def integral(self, t) -> Array:
        """`∫_0^t β`."""


class ConstantBeta(AbstractBeta):
    """`β = value`."""

    value: float = 1.0
    t1: float = eqx.field(default=1.0, static=True)

    def __check_init__(self):
        check_number("value", self.value)

    def __call__(self, t):
        return self.value + 0.0 * jnp.asarray(t, float)

    def integral(self, t):
        return self.value * jnp.asarray(t, float)


class LinearBeta(AbstractBeta):
    """`β = β0 + (β1 − β0) t`."""

    beta0: float = 0.1
    beta1: float = 10.0
    t1: float = eqx.field(default=1.0, static=True)

    def __check_init__(self):
        check_number("beta0", self.beta0)
        check_number("beta1", self.beta1)

    def __call__(self, t):
        return self.beta0 + (self.beta1 - self.beta0) * jnp.asarray(t, float)

    def integral(self, t):
        t = jnp.asarray(t, float)
        return self.beta0 * t + 0.5 * (self.beta1 - self.beta0) * t**2


class InverseBeta(AbstractBeta):
    """`β = 1/(1 − t)`: the signal decays linearly. Singular at t = 1, so `t1 < 1`."""

    t1: float = eqx.field(default=0.999, static=True)

    def __call__(self, t):
        return 1.0 / (1.0 - jnp.asarray(t, float))

    def integral(self, t):
        return -jnp.log1p(-jnp.asarray(t, float))


class CosineBeta(AbstractBeta):
    """`β = (π/2) tan(πt/2)`: `exp(−∫β) = cos(πt/2)`. Singular at t = 1, so `t1 < 1`."""

    t1: float = eqx.field(default=0.999, static=True)

    def __call__(self, t):
        return 0.5 * np.pi * jnp.tan(0.5 * np.pi * jnp.asarray(t, float))

    def integral(self, t):
        return -jnp.log(jnp.cos(0.5 * np.pi * jnp.asarray(t, float)))


BetaLike = Any
"""An `AbstractBeta`, or any function of t."""


_PROBES = tuple(sign * 10.0**power for power in (-3, -0.3, 0, 1, 3, 9, 30) for sign in (-1, 1))
"""States, every coordinate at one value, that a law of the whole line has in its support. They reach from unit scale to
nearly the largest float, so that a law that ends anywhere is noticed; 10^-0.3 is no integer, as counts are."""


_BEYOND = 4.0
"""Deviations from its mean at which a law that does not say its support is looked at: every law on a bounded interval
or a half-line of the common ones ends before, and exp(−8), the Gaussian's density there, is far from underflow."""


def check_support(prior) -> None:
    """Refuse a law that is zero somewhere: noise carries paths there. One without `support` is looked at beyond its
    samples; without these it is taken as it is."""
    if isinstance(prior, WithVelocity):
        return check_support(prior.position)
    support = getattr(prior, "support", None)
    if not callable(support):
        if callable(getattr(prior, "sample", None)):
            _check_beyond(prior)
        return
    shape = (*getattr(prior, "batch_shape", ()), *getattr(prior, "event_shape", ()))
    with jax.ensure_compile_time_eval():
        if all(bool(np.all(np.asarray(support(jnp.full(shape, value))))) for value in _PROBES):
            return
    raise ValueError(
        f"prior={type(prior).__name__} is zero outside of {support}, and noise carries paths out of it. Map prior and "
        "data to the whole line by T = numpyro.distributions.biject_to(prior.support).inv: give "
        "TransformedDistribution(prior, T) as the prior and T(y0) as the data; or take a prior of the whole line, "
        "such as Logistic."
    )


def _check_beyond(prior) -> None:
    with jax.ensure_compile_time_eval():
        x = jnp.asarray(prior.sample(jax.random.key(0), (256,)))
        for side in (-1.0, 1.0):
            y = jnp.mean(x, axis=0) + side * _BEYOND * jnp.std(x, axis=0)
            if bool(jnp.any(jnp.isneginf(prior.log_prob(y)))):
                raise ValueError(
                    f"prior={type(prior).__name__} is zero at y={np.asarray(y)}, and noise carries paths there. Map "
                    "prior and data to the whole line, or take a prior of the whole line, such as Logistic."
                )


def check_log_prob(prior) -> None:
    """Refuse a prior without a density, and a class of priors."""
    if isinstance(prior, type):
        raise TypeError(f"prior={prior.__name__} is a class: give one law of it, such as {prior.__name__}(0.0, 1.0).")
    if not callable(getattr(prior, "log_prob", None)):
        raise TypeError(f"prior={prior!r} must have a method log_prob(y).")


def score_of(prior) -> Callable:
    """`∇ log π` as a function of state and time, of which it needs the first alone."""
    check_log_prob(prior)
    return PriorScore(prior)


class PriorScore:
    """`∇ log π` of a law."""

    def __init__(self, prior):
        self.prior = prior
        self._slope = jax.grad(lambda y: jnp.sum(prior.log_prob(y)))

    def __call__(self, y, t=None):
        return self._slope(y)


@recorded
def langevin(prior, beta: BetaLike = None, *, t1: float | None = None, structure: str | None = None) -> Process:
    """Langevin dynamics whose stationary law is `prior`, run at the speed `beta` (default: 0.1 to 10, linear).

        process = langevin(numpyro.distributions.Logistic(0.0, 1.0))

    `prior` is any object with `log_prob(y)`, of a density above zero everywhere. A scalar distribution is taken as the
    law of every coordinate independently; `log_prob` may return one number or one for each coordinate.
    """
    rate, t1 = _schedule(beta, t1, LinearBeta())
    stationary_score = score_of(prior)
    check_support(prior)

    def drift(y, t):
        return rate(t) * stationary_score(y)

    return Process(drift, lambda t: jnp.sqrt(2.0 * rate(t)), t1, structure=structure)


@recorded
def vp(beta: BetaLike = None, *, t1: float | None = None) -> Process:
    """Variance-preserving process of Song et al. (2021); stationary law N(0, 1)."""
    rate, t1 = _schedule(beta, t1, LinearBeta(0.1, 20.0))
    return Process(lambda y, t: -0.5 * rate(t) * y, lambda t: jnp.sqrt(rate(t)), t1, structure="elementwise")


@recorded
def sub_vp(beta: BetaLike = None, *, t1: float | None = None) -> Process:
    """Sub-VP process of Song et al. (2021): less noise than `vp` at every t, the same limit."""
    rate, t1 = _schedule(beta, t1, LinearBeta(0.1, 20.0))

    def diffusion(t):
        return jnp.sqrt(rate(t) * -jnp.expm1(-2.0 * beta_integral(rate, t)))

    return Process(lambda y, t: -0.5 * rate(t) * y, diffusion, t1, structure="elementwise")


@recorded
def ve(sigma0: float = 0.01, sigma1: float = 50.0, *, t1: float = 1.0) -> Process:
    """Variance-exploding process: `Var y_t = Var y_0 + σ(t)² − σ0²`, `σ(t) = σ0 (σ1/σ0)^t`."""
    check_positive("sigma0", sigma0)
    check_positive("sigma1", sigma1)
    if not sigma1 > sigma0:
        raise ValueError(f"sigma1={sigma1} must be larger than sigma0={sigma0}.")
    growth = np.log(sigma1 / sigma0)

    def diffusion(t):
        return sigma0 * jnp.exp(growth * t) * np.sqrt(2.0 * growth)

    return Process(lambda y, t: jnp.zeros_like(y), diffusion, t1, structure="elementwise")


@recorded
def cld(beta: BetaLike = None, *, mass: float = 0.25, t1: float | None = None, structure: str | None = None) -> Process:
    """Critically-damped Langevin diffusion of Dockhorn et al. (2022), state (2, *pixels) = (x, v).

    `dx = β v/M dt`, `dv = β (−x − Γ v/M) dt + √(2Γβ) dw`, `Γ² = 4M`; stationary law x ~ N(0,1), v ~ N(0,M).
    """
    check_positive("mass", mass)
    return _with_velocity(lambda x: -x, beta, mass, 2.0 * np.sqrt(mass), t1, structure)


@recorded
def underdamped(
    prior,
    beta: BetaLike = None,
    *,
    mass: float = 0.25,
    friction: float | None = None,
    t1: float | None = None,
    structure: str | None = None,
) -> Process:
    """Langevin dynamics with velocities, towards any prior: `cld` for the standard normal. State (2, *pixels) = (x, v).

        process = underdamped(numpyro.distributions.Logistic(0.0, 1.0))

    `dx = β v/M dt`, `dv = β (∇log π(x) − Γ v/M) dt + √(2Γβ) dw`. `friction` is Γ, by default `2√M`. The stationary law
    is `WithVelocity(prior, mass)`.
    """
    force = score_of(prior)
    check_support(prior)
    check_positive("mass", mass)
    friction = float(2.0 * np.sqrt(mass)) if friction is None else friction
    check_positive("friction", friction)
    return _with_velocity(force, beta, mass, friction, t1, structure)


def _with_velocity(force: Callable, beta: BetaLike, mass, friction, t1: float | None, structure: str | None) -> Process:
    rate, t1 = _schedule(beta, t1, ConstantBeta(4.0))

    def drift(y, t):
        x, v = y
        return rate(t) * jnp.stack([v / mass, force(x) - friction * v / mass])

    def diffusion(t):
        b = rate(t)
        return jnp.stack([jnp.zeros_like(b), jnp.sqrt(2.0 * friction * b)])

    return Process(drift, diffusion, t1, structure=structure)


class WithVelocity(eqx.Module):
    """The law of states (2, *pixels) = (x, v): x by a prior, over a number or over all pixels, and v ~ N(0, M)."""

    position: Any
    mass: float = 0.25

    def log_prob(self, y) -> Array:
        x, v = y
        velocities = -0.5 * jnp.sum(v**2) / self.mass - 0.5 * v.size * np.log(2.0 * np.pi * self.mass)
        return jnp.sum(self.position.log_prob(x)) + velocities

    def sample(self, key, shape: tuple[int, ...]) -> Array:
        """`shape` is (n, 2, *pixels)."""
        check_key(key)
        if len(shape) < 2 or shape[1] != 2:
            raise ValueError(f"shape={shape} of samples must be (n, 2, *pixels): positions and velocities.")
        n, pixels = shape[0], tuple(shape[2:])
        own = (*getattr(self.position, "batch_shape", ()), *getattr(self.position, "event_shape", ()))
        x_key, v_key = jax.random.split(key)
        x = self.position.sample(x_key, (n,) if own else (n, *pixels))
        return jnp.stack([x, np.sqrt(self.mass) * jax.random.normal(v_key, (n, *pixels), x.dtype)], axis=1)


@recorded
def linear(matrix, diffusion, *, t1: float, offset=None, structure: str | None = None) -> Process:
    """`dy = (A(t) y + c(t)) dt + g(t) dw` from its matrices, each an array or a function of t.

    process = linear(jnp.array([[0.0, 1.0], [-1.0, -0.5]]), jnp.array([0.0, 1.0]), t1=10.0)
    """
    a, c = _function_of_time("matrix", matrix), _function_of_time("offset", 0.0 if offset is None else offset)
    shape = jax.eval_shape(a, 0.0).shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"matrix has shape {shape}; A must be square, d×d.")
    if (found := jax.eval_shape(c, 0.0).shape) not in ((), shape[:1]):
        raise ValueError(f"offset has shape {found}; it must have one entry for each of the {shape[0]} rows of A.")

    def drift(y, t):
        check_shape(y, shape[:1], f"a process with a matrix of shape {shape}")
        return a(t) @ y + c(t)

    return Process(drift, diffusion, t1, structure=structure)


def _function_of_time(name: str, value):
    if callable(value):
        return value
    array = as_floating(value, name).astype(float)
    return lambda t: array


def beta_integral(beta: BetaLike, t) -> Array:
    """`∫_0^t β`: in closed form where the schedule has one, else by Gauss–Legendre quadrature on 16 panels."""
    if isinstance(beta, AbstractBeta):
        return beta.integral(t)
    x = ((np.arange(16)[:, None] + NODES) / 16.0).ravel()
    w = np.tile(WEIGHTS / 16.0, 16)
    t = jnp.asarray(t, float)
    return t * jnp.sum(w * jax.vmap(beta)(t * x))


def _schedule(beta: BetaLike, t1: float | None, default: AbstractBeta) -> tuple[BetaLike, float]:
    beta = default if beta is None else beta
    if not callable(beta):
        raise TypeError(f"beta={beta!r} must be a function of t; for a constant use ConstantBeta({beta}).")
    if t1 is None:
        t1 = beta.t1 if isinstance(beta, AbstractBeta) else 1.0
    check_positive("t1", t1, why="It is the end of the time span [0, t1].")
    if isinstance(beta, InverseBeta | CosineBeta) and t1 >= 1.0:
        raise ValueError(f"t1={t1}: {type(beta).__name__} is singular at t = 1. Choose t1 < 1, e.g. t1=0.999.")
    return beta, t1


def prior_shape(prior: Any) -> tuple[int, ...] | None:
    """The shape of a state, if the prior says it."""
    batch, event = getattr(prior, "batch_shape", None), getattr(prior, "event_shape", None)
    return (tuple(batch) + tuple(event)) or None if batch is not None and event is not None else None


def draw_prior(prior: Any, n: int, shape: tuple[int, ...] | None, *, key: PRNGKey) -> Array:
    """n states from a prior."""
    own = prior_shape(prior)
    if own is not None and shape is not None and own != shape:
        raise ValueError(f"prior has shape {own}, a state has shape {shape}. Give a prior over one state.")
    if callable(getattr(prior, "sample", None)):
        if own is None and shape is None:
            raise ValueError("the prior is over a number, and the shape of a state is not known: give shape=...")
        found: Any = prior.sample(key, (n,) if own is not None else (n, *(shape or ())))
    else:
        check_callable("prior", prior, "prior(key, n), or have a method sample(key, shape)")
        found = prior(key, n)
    expected = shape if own is None else own
    if found.shape[:1] != (n,) or (expected is not None and found.shape[1:] != expected):
        raise ValueError(f"prior returned samples of shape {found.shape}, not {(n, *(expected or ('...',)))}.")
    return jnp.asarray(found) * 1.0


def log_prior(prior: Any, ys: Array) -> Array:
    """log π at each of the states."""
    return jax.vmap(lambda y: jnp.sum(prior.log_prob(y)))(ys)
