"""Exact density and score, at every t, of independent coordinates that start from a mixture of products.

When all coordinates obey the same scalar diffusion with independent noise, a mixture of products stays one,

    p_0(y) = Σ_c w_c Π_i p_ci(y_i)   ⇒   q_t(y) = Σ_c w_c Π_i (K_t p_ci)(y_i),

where K_t propagates densities on the line. A few one-dimensional grid solutions of the Fokker–Planck equation then
give q_t in any dimension. The checkerboard is such a mixture, over its columns.

Between cell centres, log K_t p_ci is a piecewise cubic (Hermite, slopes of fourth order), and the score is the
derivative of that same function. The grid resolves a factor where it exceeds 1e-12 of its maximum; below, the factor
counts as zero, and where every component does so the density is zero and the score NaN. With σ the
width of the noise at t, log q errs by about (Δx/σ)² z⁴/24 at a distance zσ beyond an edge: choose Δx below σ/6.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import as_double, as_floating, check_callable, check_count
from ..process.process import Process, check_process
from ..process.structure import Elementwise
from .checks import check_cells, check_density, check_range, check_times
from .grid1d import evolve_1d

RESOLVED = 1e-12
"""Of the maximum of a factor, where it counts as zero: rounding, 2·10⁻¹⁶ of the maximum, is 2·10⁻⁴ of it there, less
than the error of the grid so far out, see above."""
_OCTAVES_BEFORE = 8  # from the first time asked for down to the first step taken


class ProductMixture(eqx.Module):
    """`q_t(y) = Σ_c w_c Π_i q_ci(y_i)` on a grid, at a list of times; methods take one state and the index of a time.

        mixture = checkerboard(process, [0.1, 1.0])
        score = jax.vmap(lambda y: mixture.score(y, 0))(ys)

    A coordinate outside [x[2], x[-3]), or an index that is not in the list, gives NaN.
    """

    x: Float[Array, " cells"]
    times: Float[Array, " times"]
    weights: Float[Array, " components"]
    factors: Float[Array, "times components d cells"]
    """Densities at the centres x of uniform cells."""
    cubics: Float[Array, "times components d cells 4"]
    """`log q = Σ_n cubics[..., n] uⁿ`, `0 ≤ u < 1` from one centre to the next; −inf where unresolved."""

    def log_density(self, y, t_index) -> Array:
        """`log q_t(y)`."""
        y = as_floating(y)
        d, cells = self.factors.shape[2:]
        if y.shape != (d,):
            raise ValueError(f"y has shape {y.shape}, the mixture is over states of shape {(d,)}; use jax.vmap.")
        place = (y - self.x[0]) * ((cells - 1) / (self.x[-1] - self.x[0])).astype(y.dtype)
        inside = (place >= 2) & (place < cells - 3)
        # An index beyond the end reads NaN coefficients, so that the derivative is NaN too.
        cell = jnp.where(inside, jnp.floor(place), cells).astype(int)
        a = self.cubics.at[t_index, :, jnp.arange(d), cell].get(mode="fill", fill_value=jnp.nan).astype(y.dtype)
        u = (place - cell)[:, None]
        logs = a[..., 0] + u * (a[..., 1] + u * (a[..., 2] + u * a[..., 3]))
        return jax.nn.logsumexp(jnp.log(self.weights).astype(y.dtype) + jnp.sum(logs, axis=0))

    def density(self, y, t_index) -> Array:
        """`q_t(y)`."""
        return jnp.exp(self.log_density(y, t_index))

    def score(self, y, t_index) -> Array:
        """`∇ log q_t(y)`."""
        return jax.grad(self.log_density)(as_floating(y), t_index)

    def log_density_at(self, y, t) -> Array:
        """`log q_t(y)` at any t between the first and the last of the times, interpolated linearly in log t."""
        t = jnp.asarray(t)
        left = jnp.clip(jnp.searchsorted(self.times, t, side="right") - 1, 0, len(self.times) - 2)
        low, high = jnp.log(self.times[left]), jnp.log(self.times[left + 1])
        part = ((jnp.log(t) - low) / (high - low)).astype(as_floating(y).dtype)
        return (1.0 - part) * self.log_density(y, left) + part * self.log_density(y, left + 1)

    def score_at(self, y, t) -> Array:
        """`∇ log q_t(y)` at any t between the first and the last of the times."""
        return jax.grad(self.log_density_at)(as_floating(y), t)


@dataclasses.dataclass(frozen=True)
class UniformOn:
    """A uniform density that knows its exact averages over cells; made by `uniform_on`."""

    intervals: tuple[tuple[float, float], ...]

    def __post_init__(self):
        ends = np.ravel(self.intervals)
        if ends.size == 0 or np.any(np.diff(ends)[::2] <= 0) or np.any(np.diff(ends) < 0):
            raise ValueError(f"intervals={self.intervals} must be pairs (low, high) in increasing order.")

    def __call__(self, x) -> np.ndarray:
        low, high = np.array(self.intervals).T
        x = np.asarray(x)[..., None]
        return np.any((low <= x) & (x < high), axis=-1) / np.sum(high - low)

    def cell_averages(self, faces: np.ndarray) -> np.ndarray:
        """Averages over the cells between consecutive `faces`."""
        low, high = np.array(self.intervals).T
        below = np.sum(np.clip(faces[:, None], low, high) - low, axis=1) / np.sum(high - low)
        return np.diff(below) / np.diff(faces)


def uniform_on(*intervals: tuple[float, float]) -> UniformOn:
    """The uniform density on a union of intervals: `uniform_on((-2.0, -1.0), (0.0, 1.0))`."""
    return UniformOn(intervals)


def solve_products(
    process: Process,
    weights,
    densities: Sequence[Sequence[Callable]],
    times,
    *,
    x_range: tuple[float, float],
    cells: int = 4000,
    steps: int = 40,
) -> ProductMixture:
    """Propagate `Σ_c weights[c] Π_i densities[c][i](y_i)` to `times`, all after 0.

        mixture = solve_products(process, [1.0], [[uniform_on((0.0, 1.0))] * 2], [0.1, 1.0], x_range=(-8.0, 8.0))

    A density is a function of an array x, sampled at the cell centres and normalized; `uniform_on` is averaged over
    the cells instead. One that occurs several times, as the same object, is solved once. `steps` are taken while t
    doubles, from far below the first time on: from a discontinuous start, steps must grow with t.
    """
    check_process(process)
    check_cells(cells)
    check_count("steps", steps)
    x_range = check_range("x_range", x_range)
    weights, times = as_double(weights, "weights"), check_times(times, process.t1)
    if weights.ndim != 1 or np.any(weights < 0) or not np.isclose(weights.sum(), 1.0, rtol=0, atol=1e-6):
        raise ValueError(f"weights={weights} must be non-negative and sum to one.")
    if not isinstance(densities, Sequence) or not all(isinstance(row, Sequence) for row in densities):
        raise TypeError(f"densities={densities!r} must be rows of functions, one row for each weight.")
    for density in itertools.chain.from_iterable(densities):
        check_callable("density", density, "density(x) of an array; densities are rows of such functions")
    d = len(densities[0]) if len(densities) else 0
    if len(densities) != len(weights) or d == 0 or any(len(row) != d for row in densities):
        raise ValueError(f"densities must be {len(weights)} rows, one for each weight, of equally many functions.")
    if not times[0] > 0 or not np.all(np.diff(times) > 0):
        raise ValueError(f"times={times} must be above zero and increase.")
    _check_identical(process, max(d, 2), x_range)

    grown, asked = _growing_steps(times, steps)
    faces = np.linspace(x_range[0], x_range[1], cells + 1)
    flat = list(itertools.chain.from_iterable(densities))
    first = [next(i for i, other in enumerate(flat) if other is density) for density in flat]  # of those that are one
    distinct, which = np.unique(first, return_inverse=True)
    starts = np.stack([_on_cells(flat[i], faces) for i in distinct])
    solved = evolve_1d(process, starts, grown, faces=faces, steps=1)[asked]  # (times, distinct, cells)
    factors = solved[:, which.reshape(len(densities), d)]
    x = 0.5 * (faces[1:] + faces[:-1])
    return ProductMixture(*(jnp.asarray(v, float) for v in (x, times, weights, factors, _log_cubics(factors))))


def checkerboard_mixture() -> tuple[np.ndarray, list[list[UniformOn]]]:
    """Weights and densities of `data.checkerboard`: column c, with the rows of the parity of c."""
    columns = [uniform_on((c - 2.0, c - 1.0)) for c in range(4)]
    rows = [uniform_on((-2.0, -1.0), (0.0, 1.0)), uniform_on((-1.0, 0.0), (1.0, 2.0))]
    return np.full(4, 0.25), [[columns[c], rows[c % 2]] for c in range(4)]


def checkerboard(process: Process, times, *, x_range=(-16.0, 16.0), cells: int = 4000, steps: int = 40):
    """The marginals of `process` started from `data.checkerboard`, with room for the tails of a logistic prior."""
    return solve_products(process, *checkerboard_mixture(), times, x_range=x_range, cells=cells, steps=steps)


def _check_identical(process: Process, d: int, x_range: tuple[float, float]) -> None:
    if not isinstance(process.structure_for((d,)), Elementwise):
        raise ValueError("the drift or noise couples coordinates, so that products of densities do not stay products.")
    x = jnp.asarray(np.linspace(x_range[0], x_range[1], 8)[1:-1, None], float)
    for t in (0.0, 0.5 * process.t1, process.t1):
        drift = jax.vmap(lambda y, t=t: process.f(y, t))
        every, one = np.asarray(drift(jnp.tile(x, d))), np.asarray(drift(x))
        if not np.allclose(every, one, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(f"the drift differs between coordinates: at t = {t:g} and equal y_i it is {every[0]}.")


def _growing_steps(times: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Times in geometric progression through all of `times`, and where those are among them."""
    knots = [times[0] * 0.5**_OCTAVES_BEFORE, *times]
    pieces = [np.array(knots[:1])]
    for low, high in itertools.pairwise(knots):
        pieces.append(np.geomspace(low, high, int(np.ceil(steps * np.log2(high / low))) + 1)[1:])
    return np.concatenate(pieces), np.cumsum([len(piece) for piece in pieces])[1:] - 1


def _on_cells(density: Callable, faces: np.ndarray) -> np.ndarray:
    exact = isinstance(density, UniformOn)
    q = density.cell_averages(faces) if exact else density(0.5 * (faces[1:] + faces[:-1]))
    q = check_density(q, (len(faces) - 1,), name=f"density {density!r}")
    if exact and not np.isclose(q @ np.diff(faces), 1.0):
        raise ValueError(f"{density} leaves the grid x_range={faces[0], faces[-1]}.")
    return q


def _log_cubics(q: np.ndarray) -> np.ndarray:
    """Coefficients of the cubic Hermite interpolant of log q on each [x_i, x_{i+1}], (..., cells, 4)."""
    resolved = q > RESOLVED * np.max(q, axis=-1, keepdims=True)
    log_q = np.log(np.where(resolved, q, np.nan))
    slope = np.full_like(log_q, np.nan)
    near, far = log_q[..., 3:-1] - log_q[..., 1:-3], log_q[..., 4:] - log_q[..., :-4]
    slope[..., 2:-2] = (8 * near - far) / 12
    cubic = np.full((*q.shape, 4), np.nan)
    rise, a, b = np.diff(log_q), slope[..., :-1], slope[..., 1:]
    cubic[..., :-1, :] = np.stack([log_q[..., :-1], a, 3 * rise - 2 * a - b, a + b - 2 * rise], axis=-1)
    unresolved = np.any(np.isnan(cubic), axis=-1, keepdims=True)
    return np.where(unresolved, np.array([-np.inf, 0.0, 0.0, 0.0]), cubic)
