"""Inverses of correlation matrices R_t at the times of a table, from samples, shrunk where samples are few.

Of z, states in units of their deviations, `R = E zzᵀ` has ones on its diagonal. Up to `FULL` coordinates

    W = [(1 − α) R̂ + α I]⁻¹,

and for more of them, with the largest eigenvalues `ℓ_i` of R that the samples resolve and their directions `u_i`,

    W = [D + (1 − α) Σ_i (ℓ_i − σ²) u_i u_iᵀ]⁻¹,    D diagonal, such that ones are on the diagonal of what is inverted.

The score `−W z` of a Gaussian is wrong by `E|W z − R⁻¹z|² = tr WRW − 2 tr W + const`. That is known, but for the
constant, from samples which had no part in W: α is where it is smallest for one half of the samples when W is made of
the other half. Nothing depends on the units of the coordinates. Between the times W is linear, and so stays positive
definite.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import eigh, solve_triangular

FULL = 64
"""Coordinates up to which W is a matrix. It is read twice at each call: of 32 coordinates that takes 5% of the time
that the default network and its gradient take at a batch of 1,024 on CPU, of 64 it takes 20%."""
RANK = 16
"""Directions that are kept beyond; as many numbers are read as of 32 coordinates for each 64."""
LARGEST = 1024
"""Coordinates up to which there are such directions: the pilot has 170 states of this size, and fewer of larger."""
SMALLEST = 1e-6
"""Of an eigenvalue: a thousandth, squared, as of deviations. A product with W is then right to 10⁻⁴ in float32."""
SHARES = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 25)])
FEW_SHARES = np.array([0.0, 0.1, 0.2, 0.4, 0.7, 1.0])
"""Values of α that are compared."""
EVERY = 8
"""Of the times of a table, those where α is chosen for many coordinates."""


class Full(eqx.Module):
    """W as matrices."""

    table: Float[Array, "points d d"]

    def __call__(self, left, part, z: Float[Array, " d"]) -> Float[Array, " d"]:
        """`W z`, W between the points `left` and `left + 1`."""
        # A sum of products is compiled into one loop that reads the tables; a matrix product would copy them first.
        matrix = (1 - part) * self.table[left] + part * self.table[left + 1]
        return jnp.sum(matrix * z, axis=-1)


class LowRank(eqx.Module):
    """W as `diagonal − factor factorᵀ`."""

    diagonal: Float[Array, "points d"]
    factor: Float[Array, "points d rank"]

    def __call__(self, left, part, z: Float[Array, " d"]) -> Float[Array, " d"]:
        """`W z`, W between the points `left` and `left + 1`."""

        def product(point):
            factor = self.factor[point]
            inside = jnp.sum(factor * z[:, None], axis=0)
            return self.diagonal[point] * z - jnp.sum(factor * inside, axis=-1)

        return (1 - part) * product(left) + part * product(left + 1)


def invert_correlations(samples) -> Full | LowRank:
    """W at each time, from `samples`, an iterable over times of states z, (n, d), in units of their deviations.

    A variance below one is that of a coordinate whose deviation was raised; what it lacks is put on the diagonal.
    """
    samples = list(samples)
    if samples[0].shape[1] <= FULL:
        return Full(jnp.asarray(np.stack([_full(z) for z in samples]), float))
    looked = np.arange(0, len(samples), EVERY)
    chosen = [_share_of_spikes(samples[i]) for i in looked]
    shares = np.interp(np.arange(len(samples)), looked, chosen)
    pairs = [_inverse_of_spikes(*_spikes(z), share) for z, share in zip(samples, shares, strict=True)]
    diagonal, factor = (np.stack(parts) for parts in zip(*pairs, strict=True))
    return LowRank(jnp.asarray(diagonal, float), jnp.asarray(factor, float))


def _full(z: np.ndarray) -> np.ndarray:
    lacking = np.diag(np.maximum(1.0 - np.mean(z**2, axis=0), 0.0))
    halves = [part.T @ part / len(part) + lacking for part in (z[::2], z[1::2])]
    share = _of_all(_smallest(SHARES, _loss(*halves) + _loss(*halves[::-1])))
    values, vectors = np.linalg.eigh(z.T @ z / len(z) + lacking)
    return (vectors / _shrunk(values, share)) @ vectors.T


def _shrunk(values: np.ndarray, share) -> np.ndarray:
    return np.maximum((1.0 - share) * values + share, SMALLEST)


def _loss(made: np.ndarray, held: np.ndarray) -> np.ndarray:
    """`tr WRW − 2 tr W` for each of `SHARES`, W from one estimate of R and R another."""
    values, vectors = np.linalg.eigh(made)
    seen = np.sum(vectors * (held @ vectors), axis=0)
    inverse = 1.0 / _shrunk(values, SHARES[:, None])
    return inverse**2 @ seen - 2.0 * inverse.sum(axis=1)


def _smallest(shares: np.ndarray, losses: np.ndarray) -> float:
    return float(shares[np.argmin(losses)])


def _of_all(share: float) -> float:
    """The best share is noise/(noise + correlations), and all samples have half the noise of half of them."""
    return share / (2.0 - share)


def _spikes(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`ℓ − σ²` and directions, (d, rank), of the eigenvalues of R that stand out of sampling noise.

    Of n samples of d coordinates of variance σ², noise alone has eigenvalues up to `σ² (1 + √γ)²`, γ = d/n, and one at
    ℓ is seen at `λ = ℓ + γ σ² ℓ/(ℓ − σ²)` (the spiked model of Johnstone, and of Baik and Silverstein).
    """
    n, d = z.shape
    ratio, rank = d / n, min(RANK, n, d)
    ends = (min(n, d) - rank, min(n, d) - 1)
    if d <= n:
        values, vectors = eigh(z.T @ z / n, subset_by_index=ends)
    else:
        values, vectors = eigh(z @ z.T / n, subset_by_index=ends)
        vectors = z.T @ vectors / np.sqrt(n * np.maximum(values, SMALLEST))
    variance, true, stands_out = 1.0, values, values < 0
    for _ in range(8):  # what stands out takes variance from the rest, of which there is then less noise
        stands_out = values > variance * (1.0 + np.sqrt(ratio)) ** 2
        half = values + variance * (1.0 - ratio)
        true = 0.5 * (half + np.sqrt(np.maximum(half**2 - 4.0 * variance * values, 0.0)))
        variance = max((d - true[stands_out].sum()) / (d - stands_out.sum()), SMALLEST)
    excess = np.where(stands_out, np.maximum(true - variance, 0.0), 0.0)
    pad = RANK - rank
    return np.pad(excess, (pad, 0)), np.pad(vectors, ((0, 0), (pad, 0)))


def _inverse_of_spikes(excess: np.ndarray, vectors: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Diagonal and factor of W."""
    scaled = vectors * np.sqrt((1.0 - share) * excess)
    rest = np.maximum(1.0 - np.sum(scaled**2, axis=1), SMALLEST)
    inside = np.eye(len(excess)) + scaled.T @ (scaled / rest[:, None])
    factor = solve_triangular(np.linalg.cholesky(inside), (scaled / rest[:, None]).T, lower=True).T
    return 1.0 / rest, factor


def _share_of_spikes(z: np.ndarray) -> float:
    losses = np.zeros(len(FEW_SHARES))
    for made, held in ((z[::2], z[1::2]), (z[1::2], z[::2])):
        found = _spikes(made)
        for i, share in enumerate(FEW_SHARES):
            diagonal, factor = _inverse_of_spikes(*found, share)
            times_z = held * diagonal - (held @ factor) @ factor.T
            losses[i] += np.sum(times_z**2) / len(held) - 2.0 * (diagonal.sum() - np.sum(factor**2))
    return _of_all(_smallest(FEW_SHARES, losses))
