"""Exact answers that only tests need, computed by routes that share no code with what they check.

Linear processes: moment equations integrated by scipy to 1e-12. Classical ones: closed forms. Nonlinear ones, over
a short time h: the semigroup `E φ(y_{s+h}) = Σ hⁿ/n! Lⁿφ(y_s)`, `Lφ = ∂φ/∂t + f·∇φ + ½ tr(Q ∇²φ)`, by autodiff.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from matplotlib.image import imread
from scipy.integrate import solve_ivp

from autodsm import Process


class Moments(NamedTuple):
    """Mean, and covariance (or, for independent coordinates, variance)."""

    mean: np.ndarray
    cov: np.ndarray


def linear_moments(matrix: Callable, offset: Callable, noise: Callable, y, s: float, t: float, cov=None) -> Moments:
    """`dy = (A(t) y + c(t)) dt + g(t) dw` from a point (or a Gaussian of covariance `cov`) at s: moments at t."""
    y = np.asarray(y, float)
    d = len(y)

    def rates(tau, x):
        a, g = np.asarray(matrix(tau), float), np.asarray(noise(tau), float)
        p = x[d:].reshape(d, d)
        dp = a @ p + p @ a.T + g @ g.T
        return np.concatenate([a @ x[:d] + np.asarray(offset(tau), float), dp.ravel()])

    start = np.concatenate([y, np.zeros(d * d) if cov is None else np.asarray(cov, float).ravel()])
    end = solve_ivp(rates, (s, t), start, method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    return Moments(end[:d], end[d:].reshape(d, d))


def vp_moments(y, integral: float) -> Moments:
    """VP, with `∫β` over the interval."""
    return Moments(np.exp(-0.5 * integral) * np.asarray(y), -np.expm1(-integral))


def sub_vp_moments(y, integral: float) -> Moments:
    """Sub-VP from t = 0."""
    return Moments(np.exp(-0.5 * integral) * np.asarray(y), np.expm1(-integral) ** 2)


def ve_moments(y, sigma0: float, sigma1: float, s: float, t: float) -> Moments:
    """VE on [s, t]."""
    growth = sigma1 / sigma0
    return Moments(np.asarray(y), sigma0**2 * (growth ** (2 * t) - growth ** (2 * s)))


def separable_moments(drift: Callable, y, integral: float) -> Moments:
    """Linearization of `f = β(t) k(y)`, `g² = 2β`, elementwise: `y + k I φ1(k' I)`, `2 I φ1(2 k' I)`, `I = ∫β`."""
    value, slope = (np.asarray(x) for x in jax.jvp(drift, (y,), (jnp.ones_like(y),)))

    def phi1(z):
        return np.where(z == 0, 1.0, np.expm1(z) / np.where(z == 0, 1.0, z))

    return Moments(np.asarray(y) + value * integral * phi1(slope * integral), 2 * integral * phi1(2 * slope * integral))


def linear_beta_schedule(t, ell: float, beta0: float, beta1: float) -> np.ndarray:
    """`∫_s^t β = ℓ` for `β = β0 + (β1−β0) t`."""
    beta = beta0 + (beta1 - beta0) * np.asarray(t)
    inside = beta**2 - 2 * ell * (beta1 - beta0)
    return np.where(inside >= beta0**2, (np.sqrt(np.maximum(inside, 0)) - beta0) / (beta1 - beta0), 0.0)


def inverse_beta_schedule(t, ell: float) -> np.ndarray:
    """`∫_s^t β = ℓ` for `β = 1/(1−t)`."""
    return np.maximum(0.0, 1 - (1 - np.asarray(t)) * np.exp(ell))


def cosine_beta_schedule(t, ell: float) -> np.ndarray:
    """`∫_s^t β = ℓ` for `β = (π/2) tan(πt/2)`."""
    return 2 / np.pi * np.arccos(np.minimum(1.0, np.exp(ell) * np.cos(0.5 * np.pi * np.asarray(t))))


def semigroup_moments(process: Process, y: Array, s: float, *, order: int) -> Callable[[float], Moments]:
    """Mean and covariance of `y_{s+h}` given `y_s = y` as a function of h, with an error of O(h^{order+1}).

    For any smooth drift and constant g; the work grows steeply with the order, the function of h is then free.
    """
    if not process.constant_noise:
        raise ValueError("semigroup_moments needs a constant g.")
    shape, d = y.shape, y.size
    columns = process.structure_for(shape).noise_columns(process.g(s)).reshape(-1, d)
    origin = y.reshape(-1)

    def generator(phi):
        def applied(x, t):
            f = process.drift(x.reshape(shape), t).reshape(-1)
            _, along = jax.jvp(phi, (x, t), (f, jnp.ones_like(t)))

            def second(v):
                return jax.jvp(lambda x: jax.jvp(lambda z: phi(z, t), (x,), (v,))[1], (x,), (v,))[1]

            return along + 0.5 * jnp.sum(jax.vmap(second)(columns), axis=0)

        return applied

    def phi(x, t):
        u = x - origin
        return jnp.concatenate([u, jnp.outer(u, u).reshape(-1)])

    terms = []
    for _ in range(order):
        phi = generator(phi)
        terms.append(np.asarray(jax.jit(phi)(origin, jnp.asarray(s, origin.dtype))))

    def moments(h: float) -> Moments:
        total, factor = np.zeros(d + d * d), 1.0
        for n, term in enumerate(terms, start=1):
            factor *= h / n
            total = total + factor * term
        mean, second = total[:d], total[d:].reshape(d, d)
        return Moments(np.asarray(origin) + mean, second - np.outer(mean, mean))

    return moments


def is_drawn(figure: Path) -> bool:
    """Whether a PNG shows more than its background: ink on one in a thousand of its pixels, at least."""
    pixels = imread(figure)[..., :3]
    return bool(np.mean(np.any(pixels != pixels[0, 0], axis=-1)) > 1e-3)
