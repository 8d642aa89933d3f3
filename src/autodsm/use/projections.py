"""How large the error of a score is, as far as test fields see it, without the exact score.

Let `δ = gᵀ(s_θ − s)`, the error where noise enters, and `f_l = φ_k(y) e_a` fields of such vectors. For each sample of
q_t there are numbers `x_l` with the mean `E[δ·f_l]`, which is all zero for the exact score:

    x_l = gᵀ(s_θ − ŝ)·f_l                           by a target ŝ whose mean given y is the score,
    x_l = gᵀs_θ·f_l + ∇·(g f_l)                     by Stein's identity,

and any mean of the two. With the matrix `G = E[f·f']` of the fields, made the identity below, and `b = E[x]`,

    ‖P δ‖² = bᵀ G⁻¹ b ≤ E|δ|²,

P the projection on the fields. Over pairs of different samples, `Σ_{i≠j} x_iᵀ G⁻¹ x_j / n(n−1)` is an estimate of it
without bias: the noise of b has been taken away. For the exact score its law is that of `Σ_l λ_l (χ²_1 − 1)`, λ the
eigenvalues of `cov(x)/n`. A lower bound of the error is known then, and its interval; what no field sees is not.

Fields are ridge functions `φ(w·(y − m))` of states made white: a constant, linear ones, and waves. Nothing has units.
"""

from typing import NamedTuple

import numpy as np

FIELDS = 256
"""At one time, at most."""
WAVES = 24
"""Of an error of 1.0 %, a wave of one coordinate, fields see 1.0 % in two coordinates, and .64 % in six."""
LINEAR = 16
"""Linear functions, at most: of more coordinates, random ones."""
SLOWEST, FASTEST = 0.5, 2.5
"""Wave numbers, in inverse deviations: smooth modes, whose error flows and rates feel most."""
OUTPUTS = 8
"""Components of the error that are looked at where the noise has more than `FIELDS` allow; random directions."""
_DROPPED = 1e-4
"""Of an eigenvalue of the functions' second moments: directions with less are the same function twice."""


class Size(NamedTuple):
    """A number that cannot be negative, with an interval, and how often chance alone gives as much where it is zero."""

    value: float
    """Without bias; may be below zero."""
    low: float
    high: float
    p_value: float

    def scaled(self, unit: float) -> "Size":
        """The same in another unit."""
        if not unit > 0:
            return Size(np.inf, 0.0 if self.low == 0 else np.inf, np.inf, self.p_value)
        return Size(self.value / unit, self.low / unit, self.high / unit, self.p_value)


class Whitened(NamedTuple):
    """States in units of their own covariance."""

    z: np.ndarray
    """(n, d)"""
    mean: np.ndarray
    rows: np.ndarray
    """(d, d), `z = rows (y − mean)`; where there are too few samples for it, (d,), its diagonal."""

    @classmethod
    def of(cls, y: np.ndarray) -> "Whitened":
        """By the inverse root of the matrix of correlations; `y` is (n, d)."""
        mean, std = y.mean(axis=0), y.std(axis=0)
        std = np.where(std > 0, std, 1.0)
        z = (y - mean) / std
        n, d = y.shape
        if 16 * d > n:
            return cls(z, mean, 1.0 / std)
        values, vectors = np.linalg.eigh(z.T @ z / n)
        rows = (vectors / np.sqrt(np.maximum(values, 1e-9))).T
        return cls(z @ rows.T, mean, rows / std)

    def directions(self, u: np.ndarray) -> np.ndarray:
        """The w of `w·(y − m) = u·z`, for rows u, (k, d)."""
        return u * self.rows if self.rows.ndim == 1 else u @ self.rows

    def directions_of(self, v: np.ndarray) -> np.ndarray:
        """`C^{−½} v`, for rows v, (k, d)."""
        return v * self.rows if self.rows.ndim == 1 else v @ self.rows.T


class Functions(NamedTuple):
    """`φ_k` at all samples, with `φ_k'` along its direction."""

    values: np.ndarray
    """(n, K)"""
    slopes: np.ndarray
    """(n, K)"""
    directions: np.ndarray
    """(K, d), w_k: the gradient of φ_k is `slopes[:, k] w_k`."""
    linear: int
    """How many are linear."""


def functions_of(white: Whitened, count: int, rng: np.random.Generator) -> Functions:
    """At most `count` of them: constant, linear, waves along axes and along random directions."""
    n, d = white.z.shape
    linear = np.eye(d)
    if d > LINEAR or 1 + d > count:
        linear = np.linalg.qr(rng.normal(size=(d, min(LINEAR, max(1, count - 1), d))))[0].T
    waves = int(np.clip(count - 1 - len(linear), 0, WAVES))
    ways = rng.normal(size=(waves, d))
    ways[::2] = np.eye(d)[rng.integers(0, d, size=len(ways[::2]))]
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    ways *= rng.uniform(SLOWEST, FASTEST, size=(waves, 1))
    phases = rng.uniform(0, 2 * np.pi, size=waves)
    angles = white.z @ ways.T + phases
    values = np.concatenate([np.ones((n, 1)), white.z @ linear.T, np.cos(angles)], axis=1)
    slopes = np.concatenate([np.zeros((n, 1)), np.ones((n, len(linear))), -np.sin(angles)], axis=1)
    return Functions(values, slopes, white.directions(np.concatenate([np.zeros((1, d)), linear, ways])), len(linear))


def by_target(functions: Functions, off: np.ndarray) -> np.ndarray:
    """`x` from `gᵀ(s_θ − ŝ)`, (n, P): (n, K, P)."""
    return functions.values[:, :, None] * off[:, None, :]


def by_stein(functions: Functions, score: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`x` from `gᵀ s_θ`, (n, P), and g, (P, d): (n, K, P)."""
    along = functions.directions @ columns.T  # (K, P)
    return functions.values[:, :, None] * score[:, None, :] + functions.slopes[:, :, None] * along


def least_noise(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The mean of two estimates of the same numbers with the least variance, each column by itself."""
    apart = first - second
    own = apart - apart.mean(axis=0)
    part = np.sum((first - first.mean(axis=0)) * own, axis=0) / np.maximum(np.sum(own**2, axis=0), 1e-300)
    return first - np.clip(part, 0.0, 1.0) * apart


def orthonormal(functions: Functions, x: np.ndarray) -> np.ndarray:
    """`G^{−½} x`, (n, L)."""
    values, vectors = np.linalg.eigh(functions.values.T @ functions.values / len(x))
    kept = values > _DROPPED * values[-1]
    white = vectors[:, kept] / np.sqrt(values[kept])
    return np.tensordot(x, white, axes=(1, 0)).reshape(len(x), -1)


def squared_mean(x: np.ndarray, *, level: float) -> Size:
    """`|E x|²` of independent rows, (n, L), with an interval that holds it with probability 1 − level.

    The rate of chance and the shape of the interval are those of `a χ²_k + b` with the first three moments of
    `Σ λ_l χ²_1` (Hall, Buckley and Eagleson).
    """
    from scipy.special import chdtrc, chdtri, ndtri

    n, count = x.shape
    mean = x.mean(axis=0)
    centred = x - mean
    gram = centred.T @ centred if count <= n else centred @ centred.T
    eigenvalues = np.maximum(np.linalg.eigvalsh(gram / (n - 1) / n), 0.0)
    total = eigenvalues.sum()
    value = float(mean @ mean - total)
    if not total > 0:  # no noise at all: as for a score that is its own target
        return Size(value, value, value, float(value <= 0))
    # The squares of sample eigenvalues are too large by (tr)²/n in the mean.
    second = max(np.sum(eigenvalues**2) - total**2 / n, total**2 / count)
    third = max(np.sum(eigenvalues**3), second**2 / total)
    freedom = second**3 / third**2
    noise = np.sqrt(2.0 * second)

    def reach(p):  # in errors: that of the null law, or of a Gaussian, which it is where the mean is large
        return max(abs(chdtri(freedom, p) - freedom) / np.sqrt(2.0 * freedom), abs(ndtri(p)))

    p_value = float(chdtrc(freedom, max(0.0, freedom + np.sqrt(2.0 * freedom) * value / noise)))
    # The variance is `noise² + 4 λ θ` at a squared mean of θ; both ends are where θ is just so far from the value.
    least = noise * reach(level / 2)
    along = float(np.mean((centred @ mean) ** 2)) / n - np.sum(eigenvalues**2)
    own = max(second / total, along / max(value, least))

    def end(c, side):
        return (
            value + 2.0 * c**2 * own + side * c * np.sqrt(max(noise**2 + 4.0 * own * value + 4.0 * c**2 * own**2, 0.0))
        )

    low = end(reach(level / 2), -1) if value > least else 0.0
    high = max(end(reach(1 - level / 2), 1), 0.0)
    return Size(value, float(low), float(high), p_value)
