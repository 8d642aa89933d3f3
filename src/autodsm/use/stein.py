"""What every score satisfies, whatever the process is: Stein's identities, and Cramér's and Rao's bound.

For states y of mean m and covariance C, and s the score of their law, `E[s] = 0`, `E[s (y − m)ᵀ] = −I` and
`E[s sᵀ] ≥ C⁻¹`. All are looked at in directions of the noise, the only ones in which a score is learned; with white
states `z = C^{−½}(y − m)` the matrix reads `E[gᵀs zᵀ] = −gᵀC^{−½}`. The diagonal alone is fooled by a wrong covariance
with the right variances.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.estimate import Estimate, chunk_for, over_samples
from ..process.process import Process
from .projections import Whitened

LEAST = 0.95
"""Of the smallest eigenvalue of `C^½ E[s sᵀ] C^½`, which is one for a Gaussian and more for any other law."""
_ALIKE = 1e-9
"""Of an eigenvalue: directions of the noise with less are the same direction twice."""
_SOURCES = 1024
"""Sources of noise, among which those that enter no coordinate are looked for."""


def noise_columns(
    process: Process, t: float, shape: tuple[int, ...], rng: np.random.Generator, most: int
) -> tuple[np.ndarray, int]:
    """Rows `(g o)ᵀ`, (P, d), for orthonormal directions o of the noise: all, or `most` random ones; and of how many."""
    sources = process.noise_shape(shape)
    count = math.prod(sources)
    spread = jax.jit(jax.vmap(lambda w: process.diffuse(jnp.asarray(t, float), w, shape)))
    if count > _SOURCES:
        directions = np.linalg.qr(rng.normal(size=(count, most)))[0].T
        return np.asarray(spread(jnp.asarray(directions, float).reshape(most, *sources)), float).reshape(
            most, -1
        ), count
    columns = np.asarray(spread(jnp.eye(count).reshape(count, *sources)), float).reshape(count, -1)
    columns = columns[np.any(columns != 0, axis=1)]
    if len(columns) == 0:
        raise ValueError(f"the process has no noise at t={t:g}: there is no score to look at.")
    if len(columns) <= most:
        return columns, len(columns)
    return np.linalg.qr(rng.normal(size=(len(columns), most)))[0].T @ columns, len(columns)


@eqx.filter_jit
def _spread(process: Process, shape: tuple[int, ...], t, w):
    return jax.vmap(lambda w: process.diffuse(t, w, shape))(w)


def scores_at(score: Callable, y: np.ndarray, t: float) -> np.ndarray:
    """Scores at states (n, *shape), (n, d), in double precision."""
    at = jnp.asarray(t, y.dtype)
    found = over_samples(eqx.Partial(_scored, score, at), y, chunk=chunk_for(256 * math.prod(y.shape[1:])))
    found = found.reshape(len(y), -1).astype(np.float64)
    if bad := int(np.sum(~np.isfinite(found).all(axis=1))):
        raise FloatingPointError(f"the score is not finite at t={t:g}, for {bad} of {len(y)} states.")
    return found


def _scored(score: Callable, t, y):
    return score(y, t)


def stein_matrix(white: Whitened, seen: np.ndarray, columns: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers of mean `E[gᵀs zᵀ] + gᵀC^{−½}`, (n, P·d), zero for a score; of many coordinates, in random directions."""
    n, d = white.z.shape
    most = max(len(columns), 8)
    turned = np.eye(d) if d <= most else np.linalg.qr(rng.normal(size=(d, most)))[0].T
    along = columns @ white.directions(turned).T  # (P, k)
    return (seen[:, :, None] * (white.z @ turned.T)[:, None, :] + along).reshape(n, -1)


def diagonal(y: np.ndarray, s: np.ndarray, columns: np.ndarray) -> float:
    """The largest deviation of `E[s_i (y_i − m_i)]` from −1 in standard errors, over coordinates that noise enters."""
    noisy = np.any(columns != 0, axis=0)
    x = s[:, noisy] * (y - y.mean(axis=0))[:, noisy] + 1.0
    return float(np.max(np.abs(x.mean(axis=0)) / np.maximum(x.std(axis=0) / np.sqrt(len(x)), 1e-300)))


def cramer_rao(white: Whitened, seen: np.ndarray, columns: np.ndarray) -> Estimate | None:
    """The smallest eigenvalue of `C^½ E[s sᵀ] C^½`: its direction from one half of the states, its size from the other.

    None where there are too few states for their covariance.
    """
    if white.rows.ndim == 1:
        return None
    # uᵀ E[gᵀs sᵀg] u ≥ uᵀ gᵀC⁻¹g u, for u of which the right side is not zero
    known = white.directions_of(columns)
    values, vectors = np.linalg.eigh(known @ known.T)
    kept = values > _ALIKE * values[-1]
    unit = vectors[:, kept] / np.sqrt(values[kept])
    first, second = (seen @ unit)[::2], (seen @ unit)[1::2]
    lowest = np.linalg.eigh(first.T @ first / len(first))[1][:, 0]
    squares = (second @ lowest) ** 2
    # Of a Gaussian the squares and C both grow with the variance of this half, by at most twice its deviation together.
    return Estimate(float(squares.mean()), float(2.0 * squares.std() / np.sqrt(len(squares))))
