"""Exact marginals of linear processes: Gaussians, from the moment equations or in closed form."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.integrate import solve_ivp

from ..base.errors import as_double, as_floating, as_time, check_count, check_key, check_times
from ..base.linalg import inverse_and_log_det
from ..process.probes import is_linear
from ..process.process import Process, check_process
from ..process.structure import Dense


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
    check_times("t", t)
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
        check_times("t", t, self.t1)
        u = jnp.clip(2.0 * as_time(t) / self.t1 - 1.0, -1.0, 1.0)
        degrees = jnp.arange(len(self.coefficients))
        found = jnp.cos(degrees * jnp.arccos(u)) @ self.coefficients
        d = int(np.prod(self.shape))
        return found[:d], found[d:].reshape(d, d)

    def score(self, y, t) -> Array:
        y = self._state(y)
        mean, cov = self.moments(t)
        return -(inverse_and_log_det(cov)[0] @ (y.reshape(-1) - mean)).reshape(y.shape).astype(y.dtype)

    def log_density(self, y, t) -> Array:
        y = self._state(y)
        mean, cov = self.moments(t)
        off = y.reshape(-1) - mean
        inverse, log_det = inverse_and_log_det(2 * np.pi * cov)
        return -0.5 * (2 * np.pi * off @ inverse @ off + log_det)

    def sample(self, key, n: int, t) -> Array:
        check_key(key)
        check_count("n", n)
        mean, cov = self.moments(t)
        z = jax.random.normal(key, (n, len(mean)))
        return (mean + z @ jnp.linalg.cholesky(cov).T).reshape(n, *self.shape)

    def _state(self, y) -> Array:
        y = as_floating(y, "y")
        if y.shape != self.shape:
            raise ValueError(f"y has shape {y.shape}, a state has shape {self.shape}; use jax.vmap for a batch.")
        return y


def gaussian_marginals(process: Process, mean, cov, *, degree: int = 96) -> GaussianMarginals:
    """The exact marginals of a linear process from N(mean, cov); `mean` has the shape of a state, `cov` is d×d."""
    check_process(process)
    check_count("degree", degree)
    mean, cov = as_double(mean, "mean"), as_double(cov, "cov")
    if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
        raise ValueError(f"mean={mean} and cov={cov} must be finite.")
    shape, d, t1 = mean.shape, mean.size, process.t1
    if cov.shape != (d, d):
        raise ValueError(f"cov has shape {cov.shape}; for a state of shape {shape} it must be {(d, d)}.")
    angles = np.pi * np.arange(degree + 1) / degree
    points = 0.5 * t1 * (1.0 + np.cos(angles))

    def coefficients(y, t):
        noise = Dense(shape).noise_columns(process.g(t)).reshape(-1, d)
        slope = jax.jacfwd(lambda y: process.drift(y, t))(y).reshape(d, d)
        return slope, process.drift(y, t).reshape(d), noise.T @ noise

    spread = np.sqrt(np.diag(cov)).reshape(shape)
    if not is_linear(process, np.random.default_rng(0).normal(mean, spread, (8, *shape))):
        raise ValueError("the drift is not linear in the state, so that its marginals are not Gaussian.")
    at = jax.jit(jax.vmap(coefficients, in_axes=(None, 0)))
    slopes, offsets, noises = (np.asarray(x, float) for x in at(jnp.zeros(shape), jnp.asarray(points)))
    unit = _units(mean.ravel(), cov, slopes, offsets, noises, t1)
    units = np.concatenate([unit, np.outer(unit, unit).ravel()])  # of the moments

    # Polynomials through the Chebyshev points: smooth, where a drift in single precision would not be.
    basis = np.linalg.inv(np.cos(np.outer(angles, np.arange(degree + 1))))
    table = basis @ np.concatenate([x.reshape(degree + 1, -1) for x in (slopes, offsets, noises)], axis=1)

    def rates(t, x):
        row = np.polynomial.chebyshev.chebval(2.0 * t / t1 - 1.0, table)
        A, c, Q = row[: d * d].reshape(d, d), row[d * d : d * d + d], row[d * d + d :].reshape(d, d)
        P = x[d:].reshape(d, d)
        return np.concatenate([A @ x[:d] + c, (A @ P + P @ A.T + Q).ravel()])

    start = np.concatenate([mean.reshape(-1), cov.ravel()])
    solution = solve_ivp(rates, (0.0, t1), start, method="DOP853", rtol=1e-11, atol=1e-13 * units, t_eval=points[::-1])
    found = basis @ (solution.y.T[::-1] / units)
    if np.abs(found[-3:]).max() > 1e-5 * np.abs(found).max():
        raise ValueError(f"the moments are not polynomials of degree {degree} in t; raise degree.")
    # Terms at the end that do not count in this precision only cost time.
    least = max(1e-13, 0.1 * float(jnp.finfo(jnp.zeros(()).dtype).eps)) * np.abs(found).max()
    terms = 1 + np.flatnonzero(np.abs(found).max(axis=1) > least)[-1]
    return GaussianMarginals(jnp.asarray(units * found[:terms]), shape, t1)


def _units(mean, cov, slopes, offsets, noises, t1: float) -> np.ndarray:
    """A length of each coordinate: how far start, noise and drift take it; of one at rest, how far the others do."""
    noise = np.max(np.diagonal(noises, axis1=1, axis2=2), axis=0)
    unit = np.abs(mean) + np.sqrt(np.diag(cov) + t1 * noise) + t1 * np.abs(offsets).max(axis=0)
    through = t1 * np.abs(slopes).max(axis=0)
    for _ in range(len(unit)):
        unit = np.where(unit > 0, unit, through @ unit)
    return np.where(unit > 0, unit, 1.0)
