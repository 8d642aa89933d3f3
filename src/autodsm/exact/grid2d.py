"""Grid solution of the Fokker–Planck equation in two dimensions, with noise in both coordinates or in one.

    ∂q/∂t = −∂J_1/∂y_1 − ∂J_2/∂y_2,    J_a = f_a q − D_a ∂q/∂y_a,    D_a = ½ g_a²

The two directions take turns (Strang: half a step along 1, a whole one along 2, half a step along 1), all lines of a
direction at once, by finite volumes without flux through the ends:

- `D_a > 0`: the exponentially fitted fluxes and the implicit second-order rule of `fokker_planck`. That rule may
  undershoot zero, with the steps that are usual far out in the tails only. What is below zero is then removed, and
  the line scaled to the mass it had. That moves twice the mass of the undershoot; falling back on backward Euler,
  which is positive, or limiting by it, changes it by orders of magnitude more.
- `D_a = 0`: the faces are traced back along the flow, and each cell receives the mass that was between its faces.
  Inside of cells the density is a parabola with their mass, limited only where it would be negative. No limit on the
  step, and far less diffusive than upwind fluxes.

Guaranteed: `q ≥ 0`, and mass to rounding. The error is of second order in Δy and Δt where cells resolve the noise,
`|f_a| Δy_a ≲ 2 D_a`, or there is none; in between, the fitted fluxes are upwind ones, of first order. They add noise,
`D_a (p coth p − 1)` with `p = f_a Δy_a/(2 D_a)` to D_a, which is refused where it counts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.special import xlogy

from ..base.errors import check_callable, check_count
from ..process.process import Process, check_process
from ..process.structure import noise_kind
from .checks import check_cells, check_density, check_drift, check_ends, check_range, check_resolved, check_times
from .grid1d import _GAMMA, _advance, _generator, _positive

_STRAIN = 0.1  # largest |∂f/∂y| times a Runge–Kutta step of the traced faces


BLUR = 0.1
"""Largest variance that fluxes may add by t, as a share of that of the start and the noise. With .2 the variance of a
kinetic oscillator is off by a quarter, with .05 by a tenth."""


class GridDensity2D(NamedTuple):
    """Densities on a uniform grid of cell centres."""

    x1: np.ndarray
    """(n1,)"""
    x2: np.ndarray
    """(n2,)"""
    times: np.ndarray
    q: np.ndarray
    """(times, n1, n2)"""

    @property
    def area(self) -> float:
        """Area of a cell."""
        return float((self.x1[1] - self.x1[0]) * (self.x2[1] - self.x2[0]))

    def mass(self) -> np.ndarray:
        """Total probability, (times,)."""
        return self.area * self.q.sum(axis=(1, 2))

    def mean(self) -> np.ndarray:
        """(times, 2)"""
        return self.area * np.einsum("tij,ija->ta", self.q, self._states())

    def cov(self) -> np.ndarray:
        """(times, 2, 2)"""
        apart = self._states() - self.mean()[:, None, None]
        return self.area * np.einsum("tij,tija,tijb->tab", self.q, apart, apart)

    def entropy(self) -> np.ndarray:
        """`−∫ q log q`, in nats, (times,)."""
        return -self.area * xlogy(self.q, self.q).sum(axis=(1, 2))

    def score(self) -> np.ndarray:
        """`∇ log q` by central differences, (times, n1, n2, 2); NaN next to cells where q is zero."""
        log_q = np.log(np.where(self.q > 0, self.q, np.nan))
        return self._gradient(log_q)

    def score_at(self, y: Array, index) -> Array:
        """The score at one state and `times[index]`, bilinear between centres and NaN outside of them.

        exact = jax.jit(jax.vmap(lambda y: grid.score_at(y, -1)))(states)
        """
        return self.interpolate(jnp.asarray(self.score())[index], y)

    def interpolate(self, table: Array, y: Array) -> Array:
        """Values given at the centres, (n1, n2, …), at one state: bilinear, and NaN outside of them."""
        place = [(y[a] - x[0]) / (x[1] - x[0]) for a, x in enumerate((self.x1, self.x2))]
        last = (len(self.x1) - 1, len(self.x2) - 1)
        i, j = (jnp.clip(jnp.floor(p).astype(int), 0, n - 1) for p, n in zip(place, last, strict=True))
        u, v = place[0] - i, place[1] - j
        low = (1 - v) * table[i, j] + v * table[i, j + 1]
        high = (1 - v) * table[i + 1, j] + v * table[i + 1, j + 1]
        slack = 1e-4  # rounding of single precision
        inside = (jnp.minimum(u, v) >= -slack) & (jnp.maximum(u, v) <= 1 + slack)
        return jnp.where(inside, (1 - u) * low + u * high, jnp.nan).astype(y.dtype)

    def current(self, process: Process) -> np.ndarray:
        """`f q − D ∇q` at the centres, (times, n1, n2, 2)."""
        drift = jax.jit(jax.vmap(jax.vmap(process.f, in_axes=(0, None)), in_axes=(0, None)))
        f = np.stack([np.asarray(drift(jnp.asarray(self._states()), t), float) for t in self.times])
        D = np.stack([_diffusivity(process, t) for t in self.times])[:, None, None]
        return f * self.q[..., None] - D * self._gradient(self.q)

    def _gradient(self, values: np.ndarray) -> np.ndarray:
        return np.stack([np.gradient(values, self.x1, axis=1), np.gradient(values, self.x2, axis=2)], axis=-1)

    def _states(self) -> np.ndarray:
        return np.stack(np.meshgrid(self.x1, self.x2, indexing="ij"), axis=-1)


def solve_2d(
    process: Process,
    density: Callable,
    times,
    *,
    ranges: Sequence,
    cells: int | tuple[int, int] = 200,
    steps: int = 100,
) -> GridDensity2D:
    """Density of a process with states of shape (2,) at `times`, from `density(y1, y2)` at t = 0.

        process = systems.swimmer().process
        grid = solve_2d(process, lambda x, v: np.exp(-(x**2 + v**2) / 2), [1.0], ranges=((-4, 4), (-5, 5)))

    **Arguments:**

    - `process`: any drift; noise without correlation between the coordinates, and possibly none in one of them.
    - `density`: elementwise on arrays; it is normalized on the grid.
    - `ranges`: `((low, high), (low, high))`, such that the density is negligible at the ends. Where it is not, that is
      an error, and so are cells that are wider than the density.
    - `cells`: in each direction, or one number for both.
    - `steps`: between consecutive times.
    """
    check_process(process)
    check_callable("density", density, "density(y1, y2) of two arrays")
    counts = tuple(cells) if isinstance(cells, Sequence) else (cells, cells)
    if len(counts) != 2:
        raise ValueError(f"cells={cells} must be two numbers, or one for both directions.")
    for n in counts:
        check_cells(n)
    check_count("steps", steps)
    if np.ndim(ranges) != 2 or len(ranges) != 2:
        raise ValueError(f"ranges={ranges} must be two pairs, ((low, high), (low, high)).")
    ends = [check_range(f"ranges[{a}]", pair) for a, pair in enumerate(ranges)]
    times = check_times(times, process.t1)
    faces = [np.linspace(low, high, n + 1) for (low, high), n in zip(ends, counts, strict=True)]
    x1, x2 = (0.5 * (x[1:] + x[:-1]) for x in faces)
    _check_planar(process, np.array([x1[len(x1) // 2], x2[len(x2) // 2]]))
    y1, y2 = np.meshgrid(x1, x2, indexing="ij")
    grid = GridDensity2D(x1, x2, times, check_density(density(y1, y2), y1.shape)[None])
    directions = [_Direction(process, 0, faces[0], x2), _Direction(process, 1, faces[1], x1)]

    q, start, saved = grid.q[0] / grid.mass()[0], 0.0, []
    widths = [x[1] - x[0] for x in faces]
    at_ends = np.zeros((2, 2))

    def check(t: float) -> None:
        for a, lines in enumerate((q.T, q)):
            check_resolved(f"ranges[{a}]", lines[None], t)
            marginal = widths[1 - a] * lines.sum(axis=0)
            check_ends(f"ranges[{a}]", marginal[None], at_ends[a : a + 1], faces[a], t)

    def feel_ends() -> np.ndarray:
        """The largest densities so far of each coordinate, (2, 2), at the ends of its range."""
        now = [widths[1] * q[[0, -1]].sum(axis=1), widths[0] * q[:, [0, -1]].sum(axis=0)]
        return np.maximum(at_ends, now)

    at_ends = feel_ends()
    check(0.0)
    rates = np.array([directions[0].noise(q.T, 0.0), directions[1].noise(q, 0.0)])
    added, present = np.zeros(2), np.diag(grid._replace(q=q[None]).cov()[0])
    for end in times:
        h = (end - start) / steps
        if h > 0:
            q = directions[0].advance(q.T, start, 0.5 * h).T
            for i in range(steps):
                t = start + i * h
                q = directions[1].advance(q, t, h)
                # Two half steps along 1 are one whole step.
                q = directions[0].advance(q.T, t + 0.5 * h, h if i < steps - 1 else 0.5 * h).T
                at_ends = feel_ends()
        check(end)
        before, rates = rates, np.array([directions[0].noise(q.T, end), directions[1].noise(q, end)])
        grown = 0.5 * (end - start) * (before + rates)
        added, present = added + grown[:, 0], present + grown[:, 1]
        _check_blur(added / present, counts, end)
        saved.append(q)
        start = end
    return grid._replace(q=np.stack(saved))


def _check_blur(shares: np.ndarray, counts: Sequence[int], t: float) -> None:
    """Refuse cells whose fluxes add these shares to the variances of both coordinates."""
    a = int(np.argmax(shares))
    if shares[a] > BLUR:
        raise ValueError(
            f"cells={counts[a]} of coordinate {a} are too wide for this drift and its noise: by t={t:g} they add "
            f"{100 * shares[a]:.2g} % to the variance of start and noise. Give more cells."
        )


class _Direction:
    """Steps along one axis of densities (lines, cells), whose other coordinate is `across` (lines,)."""

    def __init__(self, process: Process, axis: int, faces: np.ndarray, across: np.ndarray):
        self.process, self.axis, self.faces = process, axis, faces
        self.dx = float(faces[1] - faces[0])
        self.inner = jnp.asarray(np.broadcast_to(faces[1:-1], (len(across), len(faces) - 2)))
        self.constant = process.constant_noise and process.autonomous((2,))
        self.known: dict = {}
        low, high, others = float(faces[0]), float(faces[-1]), jnp.asarray(across)[:, None]

        def along(x, t):  # f_a at x on every line
            x = jnp.clip(x, low, high)
            pair = (x, jnp.broadcast_to(others, x.shape))
            y = jnp.stack(pair if axis == 0 else pair[::-1], axis=-1)
            return jax.vmap(jax.vmap(process.f, in_axes=(0, None)), in_axes=(0, None))(y, t)[..., axis]

        def displacement(x, t, h, n):  # from x at t back to t − h; kept apart from x, which would round it
            k = h / n

            def step(i, u):
                s = t - i * k
                a = along(x + u, s)
                b = along(x + u - 0.5 * k * a, s - 0.5 * k)
                c = along(x + u - 0.5 * k * b, s - 0.5 * k)
                d = along(x + u - k * c, s - k)
                return u - k / 6 * (a + 2 * b + 2 * c + d)

            return jax.lax.fori_loop(0, n, step, jnp.zeros_like(x))

        self.along, self.displacement = jax.jit(along), jax.jit(displacement)

    def advance(self, q: np.ndarray, t: float, h: float) -> np.ndarray:
        early, late = self._diffusivity(t + _GAMMA * h), self._diffusivity(t + h)
        if early == late == 0:
            return _remap(q, *self._once(("feet", h), lambda: self._feet(t, h)))
        first, second = (
            self._once("generator", lambda at=at, D=D: _generator(self._drift(at), np.full((1, 1), D), self.dx))
            for at, D in ((t + _GAMMA * h, early), (t + h, late))
        )
        return _positive(_advance(q.ravel(), h, first, second).reshape(q.shape), q)

    def noise(self, q: np.ndarray, t: float) -> tuple[float, float]:
        """By how much the fluxes add to the variance in a unit of time, and how much the noise does, `2 D`."""
        D = self._diffusivity(t)
        if D == 0:
            return 0.0, 0.0
        p = np.abs(self._drift(t)) * self.dx / (2.0 * D)
        extra = np.where(p > 1e-3, p / np.tanh(np.maximum(p, 1e-3)) - 1.0, p**2 / 3.0)
        mass = q[:, 1:] + q[:, :-1]
        return 2.0 * D * float(np.sum(mass * extra) / np.sum(mass)), 2.0 * D

    def _once(self, what, compute: Callable):
        """What does not change in time is computed once."""
        if not self.constant:
            return compute()
        if what not in self.known:
            self.known[what] = compute()
        return self.known[what]

    def _diffusivity(self, t: float) -> float:
        return self._once("noise", lambda: float(_diffusivity(self.process, t)[self.axis]))

    def _drift(self, t: float) -> np.ndarray:
        f = np.asarray(self.along(self.inner, t), float)
        check_drift(f, t)
        return f

    def _feet(self, t: float, h: float) -> tuple[np.ndarray, np.ndarray]:
        """Where faces at t + h were at t: the cells (lines, cells+1), and the places in them, from 0 to 1."""
        strain = np.max(np.abs(np.diff(self._drift(t + h), axis=1)), initial=0.0) / self.dx
        moved = np.asarray(self.displacement(self.inner, t + h, h, max(1, int(np.ceil(h * strain / _STRAIN)))), float)
        n = len(self.faces) - 1
        at = np.clip(np.arange(1, n) + moved / self.dx, 0.0, n)
        at = np.pad(np.maximum.accumulate(at, axis=1), ((0, 0), (1, 1)), constant_values=((0, 0), (0, n)))
        cell = np.minimum(at.astype(int), n - 1)
        return cell, at - cell


def _remap(q: np.ndarray, cell: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Densities whose cells receive what `q` has between the feet of their faces."""
    # Densities at faces: of fourth order inside. Not above three times those beside them, the parabola is positive.
    wide = np.pad(q, ((0, 0), (2, 2)), mode="edge")
    beside = np.minimum(wide[:, 1:-2], wide[:, 2:-1])
    edge = (7 * (wide[:, 1:-2] + wide[:, 2:-1]) - (wide[:, :-3] + wide[:, 3:])) / 12
    edge = np.clip(edge, 0.0, 3.0 * beside)
    with np.errstate(divide="ignore", invalid="ignore"):
        left, right = (np.where(q > 0, e / q, 1.0) for e in (edge[:, :-1], edge[:, 1:]))
    left, right = (np.take_along_axis(e, cell, axis=1) for e in (left, right))
    s = place
    part = s * s * (3 - 2 * s) + s * (1 - s) * ((1 - s) * left - s * right)  # of the mass of its cell, left of the foot
    below = np.clip(part, 0.0, 1.0) * np.take_along_axis(q, cell, axis=1)
    above = np.clip(1.0 - part, 0.0, 1.0) * np.take_along_axis(q, cell, axis=1)

    # Sums of positive parts rather than differences of cumulative mass, which would round the tails.
    first, last = cell[:, :-1], cell[:, 1:]
    new = np.where(first == last, np.maximum(below[:, 1:] - below[:, :-1], 0.0), above[:, :-1] + below[:, 1:])
    for k in range(1, int(np.max(last - first))):
        whole = np.take_along_axis(q, np.minimum(first + k, q.shape[1] - 1), axis=1)
        new += np.where(first + k < last, whole, 0.0)
    return new


def _diffusivity(process: Process, t: float) -> np.ndarray:
    """`½ g²` of the two coordinates."""
    g = np.asarray(process.g(t), float)
    if noise_kind(g.shape, (2,)) != "matrix":
        return np.broadcast_to(0.5 * g**2, (2,))
    Q = g @ g.T
    if abs(Q[0, 1]) > 1e-6 * np.sqrt(Q[0, 0] * Q[1, 1]):
        raise ValueError(
            f"diffusion g={g.tolist()} at t={t:g} correlates the noise of the two coordinates (g gᵀ is not diagonal). "
            "Rotate the state to the axes of g gᵀ, where g is diagonal."
        )
    return 0.5 * np.diag(Q)


def _check_planar(process: Process, y: np.ndarray) -> None:
    try:
        process.check(y)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"process does not fit states of shape (2,), which solve_2d needs: {error}") from error
