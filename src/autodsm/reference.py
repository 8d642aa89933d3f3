"""Exact answers, computed by routes that share no code with what they check.

Linear processes: moment equations integrated by scipy to 1e-12. Classical ones: closed forms. Nonlinear ones, over
a short time h: the semigroup `E φ(y_{s+h}) = Σ hⁿ/n! Lⁿφ(y_s)`, `Lφ = ∂φ/∂t + f·∇φ + ½ tr(Q ∇²φ)`, by autodiff.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.integrate import solve_ivp

from .linalg import inverse_and_log_det
from .process import Process
from .structure import Dense


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


class HarmonicMoments(NamedTuple):
    """Exact marginals of `systems.harmonic_particles`: one mean for all, two variances of normal modes."""

    mean: np.ndarray
    """(2,), the mean of every particle."""
    fluctuation: float
    """Variance of each of the 2(n−1) modes relative to the centre."""
    centre: float
    """Variance of the two modes of the centre, normalized as the others: n times the variance of the mean."""

    def trace(self, n: int) -> float:
        """Trace of the covariance of the whole state."""
        return 2 * (n - 1) * self.fluctuation + 2 * self.centre

    def entropy(self, n: int) -> float:
        """Entropy of the whole state, in nats."""
        logs = 2 * (n - 1) * np.log(self.fluctuation) + 2 * np.log(self.centre)
        return 0.5 * logs + n * np.log(2 * np.pi * np.e)


def harmonic_particles(t: float, *, a=2.0, omega=np.pi, D=0.25, std0=0.25) -> HarmonicMoments:
    """Modes relax as `v' = −v + 2D` (fluctuations) and `v' = −2v + 2D` (centre); the mean follows the trap."""
    fluctuation = 2 * D + (std0**2 - 2 * D) * np.exp(-t)
    centre = D + (std0**2 - D) * np.exp(-2 * t)
    # z' = −z + a e^{iωt}, z(0) = a, with z = x + iy.
    steady = a / (1 + 1j * omega)
    z = steady * np.exp(1j * omega * t) + (a - steady) * np.exp(-t)
    return HarmonicMoments(np.array([z.real, z.imag]), float(fluctuation), float(centre))


class HarmonicParticles(eqx.Module):
    """Marginals of `systems.harmonic_particles` as functions of one state (n, 2) and a time."""

    n: int = eqx.field(static=True, default=50)
    a: float = 2.0
    omega: float = np.pi
    D: float = 0.25
    std0: float = 0.25

    def parts(self, t) -> tuple[Array, Array, Array]:
        """Mean (2,), variance of the fluctuations, variance of the centre's modes."""
        fluctuation = 2 * self.D + (self.std0**2 - 2 * self.D) * jnp.exp(-t)
        centre = self.D + (self.std0**2 - self.D) * jnp.exp(-2 * t)
        weight = self.a / (1 + self.omega**2)  # z = x + iy = [e^{iωt} + iω e^{−t}] a/(1 + iω)
        cos, sin, decay = jnp.cos(self.omega * t), jnp.sin(self.omega * t), jnp.exp(-t)
        x = weight * (cos + self.omega * sin + self.omega**2 * decay)
        return jnp.stack([x, weight * (sin - self.omega * cos + self.omega * decay)]), fluctuation, centre

    def score(self, y, t) -> Array:
        mean, fluctuation, centre = self.parts(t)
        middle = jnp.mean(y, axis=0)
        return -(y - middle) / fluctuation - (middle - mean) / centre

    def log_density(self, y, t) -> Array:
        mean, fluctuation, centre = self.parts(t)
        middle = jnp.mean(y, axis=0)
        squares = jnp.sum((y - middle) ** 2) / fluctuation + self.n * jnp.sum((middle - mean) ** 2) / centre
        logs = 2 * (self.n - 1) * jnp.log(fluctuation) + 2 * jnp.log(centre)
        return -0.5 * (squares + logs) - self.n * np.log(2 * np.pi)

    def sample(self, key, n: int, t) -> Array:
        mean, fluctuation, centre = self.parts(t)
        z = jax.random.normal(key, (n, self.n, 2))
        middle = jnp.mean(z, axis=1, keepdims=True)
        return mean + jnp.sqrt(fluctuation) * (z - middle) + jnp.sqrt(centre) * middle

    def production(self, t) -> tuple[float, float]:
        """Exact dS/dt and total entropy production."""
        _, fluctuation, centre = (np.asarray(part, float) for part in self.parts(t))
        rates = np.array([2 * self.D / fluctuation - 1.0, 2 * self.D / centre - 2.0])  # (log variance)'
        counts, variances = np.array([2 * (self.n - 1), 2]), np.array([fluctuation, centre])
        mean = np.asarray(jax.jvp(lambda t: self.parts(t)[0], (float(t),), (1.0,))[1])
        # v = m' + ½ (log variance)' (y − m) in each mode
        total = (np.sum(counts * variances * (0.5 * rates) ** 2) + self.n * np.sum(mean**2)) / self.D
        return float(0.5 * np.sum(counts * rates)), float(total)


class GaussianMarginals(eqx.Module):
    """Marginals of a linear process from a Gaussian start, as functions of one state and a time.

        exact = gaussian_marginals(process, mean, cov)
        exact.score(y, t), exact.log_density(y, t), exact.sample(key, n, t)

    The moments are polynomials in t through Chebyshev points, where the moment equations were solved to 1e-11.
    """

    coefficients: Array
    """(degree+1, d + d²), of Chebyshev polynomials on [0, t1]."""
    shape: tuple[int, ...] = eqx.field(static=True)
    t1: float = eqx.field(static=True)

    def moments(self, t) -> tuple[Array, Array]:
        """Mean (d,) and covariance (d, d) of the raveled state."""
        u = jnp.clip(2.0 * jnp.asarray(t, float) / self.t1 - 1.0, -1.0, 1.0)
        degrees = jnp.arange(len(self.coefficients))
        found = jnp.cos(degrees * jnp.arccos(u)) @ self.coefficients
        d = int(np.prod(self.shape))
        return found[:d], found[d:].reshape(d, d)

    def score(self, y, t) -> Array:
        mean, cov = self.moments(t)
        return -(inverse_and_log_det(cov)[0] @ (y.reshape(-1) - mean)).reshape(y.shape).astype(y.dtype)

    def log_density(self, y, t) -> Array:
        mean, cov = self.moments(t)
        off = y.reshape(-1) - mean
        inverse, log_det = inverse_and_log_det(2 * np.pi * cov)
        return -0.5 * (2 * np.pi * off @ inverse @ off + log_det)

    def sample(self, key, n: int, t) -> Array:
        mean, cov = self.moments(t)
        z = jax.random.normal(key, (n, len(mean)))
        return (mean + z @ jnp.linalg.cholesky(cov).T).reshape(n, *self.shape)


def gaussian_marginals(process: Process, mean, cov, *, degree: int = 96) -> GaussianMarginals:
    """The exact marginals of a linear process from N(mean, cov); `mean` has the shape of a state, `cov` is d×d."""
    mean, cov = np.asarray(mean, float), np.asarray(cov, float)
    shape, d, t1 = mean.shape, mean.size, process.t1
    if cov.shape != (d, d):
        raise ValueError(f"cov has shape {cov.shape}; for a state of shape {shape} it must be {(d, d)}.")
    angles = np.pi * np.arange(degree + 1) / degree
    points = 0.5 * t1 * (1.0 + np.cos(angles))

    def coefficients(y, t):
        noise = Dense(shape).noise_columns(process.g(t)).reshape(-1, d)
        slope = jax.jacfwd(lambda y: process.drift(y, t))(y).reshape(d, d)
        return slope, process.drift(y, t).reshape(d), noise.T @ noise

    at = jax.jit(jax.vmap(coefficients, in_axes=(None, 0)))
    slopes, offsets, noises = (np.asarray(x, float) for x in at(jnp.zeros(shape), jnp.asarray(points)))
    away = np.random.default_rng(0).normal(mean, 1.0 + np.abs(mean))
    elsewhere = np.asarray(at(jnp.asarray(away), jnp.asarray(points))[0], float)
    if not np.allclose(slopes, elsewhere, rtol=1e-4, atol=1e-5 * (1 + np.abs(slopes).max())):
        raise ValueError("the drift is not linear in the state, so that its marginals are not Gaussian.")

    # Polynomials through the Chebyshev points: smooth, where a drift in single precision would not be.
    basis = np.linalg.inv(np.cos(np.outer(angles, np.arange(degree + 1))))
    table = basis @ np.concatenate([x.reshape(degree + 1, -1) for x in (slopes, offsets, noises)], axis=1)

    def rates(t, x):
        row = np.polynomial.chebyshev.chebval(2.0 * t / t1 - 1.0, table)
        A, c, Q = row[: d * d].reshape(d, d), row[d * d : d * d + d], row[d * d + d :].reshape(d, d)
        P = x[d:].reshape(d, d)
        return np.concatenate([A @ x[:d] + c, (A @ P + P @ A.T + Q).ravel()])

    start = np.concatenate([mean.reshape(-1), cov.ravel()])
    solution = solve_ivp(rates, (0.0, t1), start, method="DOP853", rtol=1e-11, atol=1e-13, t_eval=points[::-1])
    found = basis @ solution.y.T[::-1]
    if np.abs(found[-3:]).max() > 1e-5 * np.abs(found).max():
        raise ValueError(f"the moments are not polynomials of degree {degree} in t; raise degree.")
    # Terms at the end that do not count in this precision only cost time.
    least = max(1e-13, 0.1 * float(jnp.finfo(jnp.zeros(()).dtype).eps)) * np.abs(found).max()
    terms = 1 + np.flatnonzero(np.abs(found).max(axis=1) > least)[-1]
    return GaussianMarginals(jnp.asarray(found[:terms]), shape, t1)


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
