"""How much of a weight along a path is kept at each of its kicks: the matrices R_n of `adapted`.

For a chain `y_{n+1} = Φ_n(y_n) + G_n ξ_n`, Q_n = G_n G_nᵀ, the sum

    ŝ_{n+1} = R_nᵀ (ŝ_n + DΦ_nᵀ η_n) − η_n,    η_n = G_n⁻ᵀ ξ_n,

has the score as its mean given y_{n+1} if ŝ_n has it given y_n, for any R_n that is not random. With P_n = E ŝ_n ŝ_nᵀ,
and since ŝ_n and ξ_n are independent, `E ŝ_{n+1} ŝ_{n+1}ᵀ` is least, as a matrix, at

    R_n = (P_n + E[DΦ_nᵀ Q_n⁻¹ DΦ_n])⁻¹ E[DΦ_n]ᵀ Q_n⁻¹,    P_{n+1} = Q_n⁻¹ − Q_n⁻¹ E[DΦ_n] R_n.

P_0 = E[s_0 s_0ᵀ] if the score s_0 of the start is known; else R_0 = 0. Averages are taken over paths of a pilot. For a
linear drift P_n⁻¹ is the covariance of the chain from a point (or from a Gaussian start), and ŝ_n its exact score.

A "matrix" profile has one matrix for the coordinates that are coupled. A "diagonal" one keeps a number for each
coordinate, which takes O(d) work; its R_n is the best for each coordinate of ŝ alone. Both are the same in all units.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import SMALL, jit_once
from ..base.linalg import cholesky, inverse_and_log_det, solve_lower
from ..base.types import PRNGKey
from ..paths.schemes import ENDS, MIDDLE
from ..process.clock import Clock
from ..process.process import Process
from ..process.structure import AbstractStructure, Elementwise, expand_noise, noise_kind
from .chain import Kick, Piece

PROFILES = ("matrix", "diagonal")
MAX_MATRIX = 64
"""Coupled coordinates up to which a profile is a matrix: a kick then multiplies by it, which costs d² and, for so few,
less than the drift's derivatives do."""
PATHS = 512
"""Paths of the pilot: their averages are right to a few percent, and the noise of a target to the square of that."""
STARTS = 8192
"""States whose scores are looked at, where these are known: their mean square is the size of the first targets."""


class Profile(eqx.Module):
    """R_n at all kicks of a chain, as `(R_n − I)ᵀ`, in the layout of `algebra`."""

    turns: Float[Array, "steps 3 ..."]
    """At the kicks of the pieces, and at the end of a branch over the whole step."""
    spread: Float[Array, "points ..."]
    """`1/E ŝ_i²` at the points of the grid, 0 where ŝ has no mean square."""
    algebra: AbstractStructure = eqx.field(static=True)
    known: bool = eqx.field(static=True)
    """Whether sums begin with the score of the start."""

    @property
    def kind(self) -> str:
        return "diagonal" if isinstance(self.algebra, Elementwise) else "matrix"

    def branch(self, index, share) -> Array:
        """At the kicks of a branch over a part of step `index`: in proportion to it; the first from what it would be at
        the end of the step before.

        Where the start's score is not known, the first step forgets it as a whole, however short it is.
        """
        whole, ended = self.turns[index], self.turns[jnp.maximum(index - 1, 0), 2]
        none = jnp.where(index == 0, 0.0, ended)
        part = jnp.concatenate([(none + share * (whole[0] - none))[None], share * whole[1:]])
        return part if self.known else jnp.where(index == 0, whole, part)

    def scale(self, index, share) -> Array:
        """`(E ŝ_i²)^(−½)` at a part of step `index`; linear in the spread, which grows as the noise received does."""
        low, high = self.spread[index], self.spread[index + 1]
        return jnp.sqrt(low + share * (high - low))


def algebra_for(process: Process, shape: tuple[int, ...], kind: str | None) -> AbstractStructure:
    """The coordinates that a matrix of a profile couples."""
    structure = process.structure_for(shape)
    kind = kind or ("matrix" if structure.rows <= MAX_MATRIX else "diagonal")
    return structure if kind == "matrix" else Elementwise(shape)


def plain_profile(clock: Clock, grid: Array, shape: tuple[int, ...]) -> Profile:
    """That of a process without drift, for a start whose score is not known: R is the noise received before a kick over
    that after it."""
    received = clock.share(grid).at[0].set(0.0)
    own = jnp.diff(received)
    at, before = received[:-1], jnp.concatenate([jnp.zeros_like(own[:1]), own[:-1]])
    kicks = (ENDS * (before + own), MIDDLE * own, ENDS * own)
    after = (at + ENDS * own, at + (ENDS + MIDDLE) * own, at + own)
    parts = jnp.stack([-kick / total for kick, total in zip(kicks, after, strict=True)], axis=1)
    turns = jnp.broadcast_to(parts.reshape(*parts.shape, *(1 for _ in shape)), (*parts.shape, *shape))
    spread = received.reshape(-1, *(1 for _ in shape)) * jnp.broadcast_to(clock.totals_of(shape), shape)
    return Profile(turns, spread, Elementwise(shape), False)


def best_profile(
    process: Process,
    grid: Array,
    x: Float[Array, "n ..."],
    *,
    key: PRNGKey,
    kind: str | None = None,
    score: Callable | None = None,
) -> Profile:
    """The profile that is best on paths from x; `score` is that of the start, where it is known."""
    shape = x.shape[1:]
    algebra = algebra_for(process, shape, kind)
    averages = jit_once(_averages, optimize=x[0].size > SMALL)
    found = [np.asarray(v, np.float64) for v in averages(process, algebra, grid, x[:PATHS], key)]
    size = None if score is None else _square(algebra, np.asarray(jax.vmap(score)(x), np.float64))
    turns, spread = [], [np.zeros(shape) if size is None else 1.0 / _diagonal(algebra, size)]
    for k in range(len(grid) - 1):
        between, middle, end = ([v[k, i] for v in found] for i in range(3))
        first, size = _turn(algebra, size, *between)
        second, size = _turn(algebra, size, *middle)
        third, last = _turn(algebra, size, *end)
        turns.append(np.stack([first, second, third]))
        spread.append(1.0 / _diagonal(algebra, last))
    tables = np.stack(turns), np.stack(spread)
    if not all(np.isfinite(v).all() for v in tables) or np.min(spread[1:]) <= 0:
        raise ValueError(
            "the drift's derivatives are not finite along pilot paths: it may blow up where paths go. Use "
            "LocalDSM(process), or give more steps=... ."
        )
    at_kicks, at_points = (jnp.asarray(v, float) for v in tables)
    return Profile(at_kicks, at_points, algebra, score is not None)


def _averages(process: Process, algebra: AbstractStructure, grid, x, key) -> tuple[Array, Array, Array]:
    """`Q⁻¹`, and averages of `DΦᵀQ⁻¹ − Q⁻¹` and `DΦᵀQ⁻¹DΦ − Q⁻¹`, at the kicks of `Profile.turns`."""
    shape = x.shape[1:]
    exact = algebra == process.structure_for(shape)

    def moved(y, drift, kick, key):
        """States after a drift, and averages for the kick that follows."""
        inverse = _inverse(process, algebra, kick.t, shape, x.dtype) / kick.h
        probes = jax.random.rademacher(key, y.shape, y.dtype)

        def one(y, probe):
            if exact:
                return _by_matrix(algebra, drift, y, inverse)
            return _by_probe(process, drift, y, kick, probe)

        y, *averages = jax.vmap(one)(y, probes)
        return y, (inverse, *(jnp.mean(v, axis=0) for v in averages))

    def kicked(y, kick, key):
        xi = jax.random.normal(key, (len(x), *process.noise_shape(shape)), x.dtype)
        return y + jax.vmap(lambda xi: kick.noise(process, xi, shape))(xi)

    def step(y, inputs):
        piece, key = inputs
        keys = jax.random.split(key, 5)
        (to_end, to_middle, beyond), (between, middle, end) = piece.drifts(process), piece.kicks()
        y, first = moved(y, to_end, between, keys[0])
        y, second = moved(kicked(y, between, keys[1]), to_middle, middle, keys[2])
        y = kicked(y, middle, keys[3])
        _, third = moved(y, beyond, end, keys[4])
        return y, jax.tree.map(lambda *kicks: jnp.stack(kicks), first, second, third)

    pieces = Piece.along(grid.astype(x.dtype))
    return jax.lax.scan(step, x, (pieces, jax.random.split(key, len(grid) - 1)))[1]


def _by_matrix(algebra: AbstractStructure, drift, y, inverse) -> tuple[Array, Array, Array]:
    end, jacobian = algebra.jacobian(drift, y)
    turned = jacobian - algebra.identity(y.dtype)
    pulled = algebra.matmul(algebra.transpose(turned), inverse)
    return algebra.join(end), pulled, pulled + algebra.transpose(pulled) + algebra.matmul(pulled, turned)


def _by_probe(process: Process, drift, y, kick: Kick, v) -> tuple[Array, Array, Array]:
    """Diagonals, by a random vector w with `E w wᵀ = Q⁻¹`."""
    end, pull = jax.vjp(drift, y)
    w = _root(process, kick.t, v) / jnp.sqrt(kick.h)
    moved = pull(w)[0] - w
    return end, moved * w, moved * (2.0 * w + moved)


def _inverse(process: Process, algebra: AbstractStructure, t, shape: tuple[int, ...], dtype) -> Array:
    """`Q⁻¹` in the layout of the algebra."""
    g = process.g(t).astype(dtype)
    if noise_kind(g.shape, shape) != "matrix":
        return 1.0 / algebra.noise_cov(g) if isinstance(algebra, Elementwise) else _inverted(algebra.noise_cov(g))
    structure = process.structure_for(shape)
    inverse = _inverted(structure.noise_cov(g))
    if not isinstance(algebra, Elementwise):
        return inverse
    return structure.join(jnp.diagonal(inverse, axis1=-2, axis2=-1))


def _inverted(matrix: Array) -> Array:
    return inverse_and_log_det(matrix)[0]


def _root(process: Process, t, v: Array) -> Array:
    """`L⁻ᵀ v`, `Q = L Lᵀ`."""
    g = process.g(t).astype(v.dtype)
    if noise_kind(g.shape, v.shape) != "matrix":
        return v / expand_noise(g, v.shape)
    structure = process.structure_for(v.shape)
    factor = cholesky(structure.noise_cov(g))
    return structure.join(solve_lower(factor, structure.split(v), transpose=True))


def _turn(algebra, size, inverse, pull, square) -> tuple[np.ndarray, np.ndarray]:
    """`(R − I)ᵀ` and P after a kick, from P before it."""
    pulled = inverse + pull
    if isinstance(algebra, Elementwise):
        kept = np.zeros_like(inverse) if size is None else pulled / (size + inverse + square)
        return kept - 1.0, inverse - pulled * kept
    identity = np.eye(inverse.shape[-1])
    if size is None:
        return np.broadcast_to(-identity, inverse.shape), inverse
    whole = size + inverse + square
    unit = 1.0 / np.sqrt(np.diagonal(whole, axis1=-2, axis2=-1))  # entries may have any units
    scaled = np.linalg.solve(unit[..., :, None] * whole * unit[..., None, :], unit[..., :, None] * pulled)
    kept = unit[..., :, None] * scaled
    transposed = np.swapaxes(pulled, -1, -2)
    return np.swapaxes(kept, -1, -2) - identity, inverse - transposed @ kept


def _square(algebra, scores: np.ndarray) -> np.ndarray:
    """The average of `s sᵀ`, in layout."""
    if isinstance(algebra, Elementwise):
        return np.mean(scores**2, axis=0)
    rows = np.stack([np.asarray(algebra.split(s)) for s in scores])
    return np.mean(rows[..., :, None] * rows[..., None, :], axis=0)


def _diagonal(algebra, matrix: np.ndarray) -> np.ndarray:
    if isinstance(algebra, Elementwise):
        return matrix
    return np.asarray(algebra.join(np.diagonal(matrix, axis1=-2, axis2=-1)), np.float64)
