"""Grid solution of the Fokker–Planck equation, an exact reference for low-dimensional processes.

    ∂q/∂t = −∂J/∂x,    J = f q − D ∂q/∂x,    D = ½ g²

Finite volumes with exponentially fitted (Scharfetter–Gummel) fluxes: on the face between cells i and i+1,
`J = D/Δx [B(−p) q_i − B(p) q_{i+1}]`, `B(z) = z/(eᶻ−1)`, `p = f Δx/D`, which is exact for constant f and D and of
second order otherwise. No flux leaves the grid, so mass is conserved to rounding. Time is advanced by Alexander's
two-stage, second-order, L-stable implicit Runge–Kutta rule; what undershoots zero is clipped, and the mass restored.

`transition_1d` solves for the kernel `q(y_t|y_0)` of many starts at once, each in the frame `ξ = (y − M)/S` that moves
with its own mean and deviation, where

    dξ = [(f − M')/S − (S'/S) ξ] dt + (g/S) dw.

As t → 0 its solution tends to N(0,1), so that one grid in ξ resolves all times, however narrow the kernel is.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from scipy.linalg import solve_banded
from scipy.special import ndtri

from ..base.errors import check_callable, check_count
from ..process.process import Process, check_process
from .checks import check_cells, check_density, check_drift, check_ends, check_range, check_resolved, check_times


class GridDensity(NamedTuple):
    """Densities on a uniform grid of cell centres."""

    x: np.ndarray
    """(cells,)"""
    times: np.ndarray
    q: np.ndarray
    """(times, cells)"""

    def score(self) -> np.ndarray:
        """`∂ log q/∂x`, (times, cells)."""
        return np.gradient(np.log(np.maximum(self.q, np.finfo(float).tiny)), self.x, axis=1)

    def entropy(self) -> np.ndarray:
        """`−∫ q log q`, (times,)."""
        q = np.maximum(self.q, np.finfo(float).tiny)
        return -np.sum(self.q * np.log(q), axis=1) * (self.x[1] - self.x[0])

    def current(self, process: Process) -> np.ndarray:
        """`J = f q − D ∂q/∂x` at the centres, (times, cells)."""
        drift = jax.jit(jax.vmap(process.f, in_axes=(0, None)))
        centres = jax.numpy.asarray(self.x[:, None])
        rows = []
        for t, q in zip(self.times, self.q, strict=True):
            D = 0.5 * float(np.asarray(process.structure_for((1,)).noise_cov(process.g(t))).reshape(()))
            rows.append(np.asarray(drift(centres, t), float)[:, 0] * q - D * np.gradient(q, self.x))
        return np.stack(rows)


_GAMMA = 1.0 - 1.0 / np.sqrt(2.0)  # Alexander's: of second order, and L-stable
_MIDDLES = (np.arange(8) + 0.5) / 8
"""Where in a step drift and noise are averaged over time: of second order, as the rule is, and to an eighth of a step
where they jump."""


def solve_1d(
    process: Process,
    density: Callable,
    times,
    *,
    x_range: tuple[float, float],
    cells: int = 1000,
    steps: int = 200,
) -> GridDensity:
    """Density of a one-dimensional process at `times`, from `density(x)` at t = 0.

        grid = solve_1d(process, lambda x: np.exp(-x**2 / 2), [0.5, 1.0], x_range=(-8.0, 8.0))

    `density` is normalized on the grid; `steps` are taken between consecutive times. The process has states of
    shape (1,). Choose `x_range` so that the density is negligible at its ends: where it is not, that is an error, and
    so are cells that are wider than the density.
    """
    check_process(process)
    check_callable("density", density, "density(x) of an array")
    check_cells(cells)
    check_count("steps", steps)
    times = check_times(times, process.t1)
    faces = np.linspace(*check_range("x_range", x_range), cells + 1)
    x = 0.5 * (faces[1:] + faces[:-1])
    q = evolve_1d(process, check_density(density(x), x.shape)[None], times, faces=faces, steps=steps)
    return GridDensity(x, times, q[:, 0])


def evolve_1d(process: Process, q: np.ndarray, times, *, faces: np.ndarray, steps: int) -> np.ndarray:
    """Several densities on the same cells at once, (densities, cells), at `times`: (times, densities, cells).

    `faces` are those of the cells, evenly spaced; the densities are normalized.
    """
    times = check_times(times, process.t1)
    q = check_density(q, (len(q), len(faces) - 1), name="q")
    process.check(np.array([0.5 * (faces[0] + faces[-1])]))
    dx = (faces[-1] - faces[0]) / (len(faces) - 1)
    inner = jax.numpy.asarray(faces[1:-1, None])
    drift = jax.jit(jax.vmap(process.f, in_axes=(0, None)))
    noise = jax.jit(lambda t: process.structure_for((1,)).noise_cov(process.g(t)))

    def generator(t: float) -> np.ndarray:
        f = np.asarray(drift(inner, t), float)[:, 0]
        check_drift(f, t)
        return _generator(f[None], 0.5 * np.asarray(noise(t), float).reshape(1, 1), dx)

    q = q / (q.sum(axis=1, keepdims=True) * dx)
    saved, start, at_ends = [], 0.0, q[:, [0, -1]]

    def check(t: float) -> None:
        check_resolved("x_range", q[:, None], t)
        check_ends("x_range", q, at_ends, faces, t)

    check(0.0)
    for end in times:
        h = (end - start) / steps
        for i in range(steps if end > start else 0):
            t = start + i * h
            q = _positive(_advance(q, h, generator(t + _GAMMA * h), generator(t + h)), q)
            at_ends = np.maximum(at_ends, q[:, [0, -1]])
        check(end)
        saved.append(q)
        start = end
    return np.stack(saved)


class Transitions(NamedTuple):
    """Kernels `q(y_t|y_0)` as densities of `ξ = (y − M)/S`, one frame (M, S) for each time and start."""

    times: np.ndarray
    mean: np.ndarray
    """M, (times, starts)"""
    std: np.ndarray
    """S, (times, starts)"""
    faces: np.ndarray
    """(cells+1,), in ξ"""
    q: np.ndarray
    """(times, starts, cells)"""

    def maps(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For `z ~ N(0,1)`: ξ(z) with the law of the kernel, and `S ∂ log q/∂y` there; (times, starts, len(z))."""
        found = [_maps(q, self.faces, z) for q in self.q]
        return np.stack([xi for xi, _ in found]), np.stack([score for _, score in found])


def _maps(q: np.ndarray, faces: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Transitions.maps` at one time, of densities (starts, cells)."""
    dx, inner = faces[1] - faces[0], faces[1:-1]
    mass = np.maximum(q, 0.0) * dx
    below, above = np.cumsum(mass, axis=1)[:, :-1], np.cumsum(mass[:, ::-1], axis=1)[:, -2::-1]
    # From the nearer end, where no digits are lost.
    normal = np.where(below < above, 1.0, -1.0) * ndtri(np.maximum(np.minimum(below, above), 1e-15))
    _, score, known = log_density(q, dx)
    # The differences to z are smooth; interpolate those, for all starts at once, one behind the other on a long axis.
    low = np.min(normal, axis=1, where=known, initial=np.inf, keepdims=True)
    high = np.max(normal, axis=1, where=known, initial=-np.inf, keepdims=True)
    place = 32.0 * np.arange(len(q))[:, None]  # |z| is below 8
    grid, wanted = (normal + place)[known], np.clip(z, low, high) + place
    return z + np.interp(wanted, grid, (inner - normal)[known]), -z + np.interp(wanted, grid, (score + normal)[known])


def log_density(q: np.ndarray, dx: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of densities (starts, cells): the logarithm in cells, its slope on the faces between, and where that is known."""
    # Far out the scheme may leave densities that are small and negative; beyond ten times those nothing is known.
    floor = np.maximum(-10.0 * q.min(axis=1, keepdims=True), 1e-11 * q.max(axis=1, keepdims=True))
    known = (q > floor)[:, 1:] & (q > floor)[:, :-1]
    logs = np.log(np.maximum(q, floor))
    return logs, np.diff(logs, axis=1) / dx, known


def transition_1d(
    drift: Callable, noise: Callable, starts: np.ndarray, times: np.ndarray, *, cells: int = 400, reach: float = 8.5
) -> Transitions:
    """Kernels from every one of `starts` at t = 0 to every one of `times`, which should start geometrically.

    `drift(y, t)` is elementwise on arrays y and averaged over an array t; `noise(t)` is g², averaged likewise. The
    first time must be so early that the kernel is still that of constant drift. One step is taken from each time to
    the next, with averages over it, so that a pulse shorter than a step is felt for as long as it lasts. Where the
    drift is too stiff for these times, means and all else are NaN from then on.
    """
    faces = np.linspace(-reach, reach, cells + 1)
    inner, xi, dx = faces[1:-1], 0.5 * (faces[1:] + faces[:-1]), 2.0 * reach / cells
    y0, first = np.asarray(starts, float), float(times[0])
    mean, variance = y0 + first * drift(y0, first * _MIDDLES), np.full(y0.shape, first * noise(first * _MIDDLES))
    q = np.broadcast_to(np.exp(-0.5 * xi**2), (len(y0), cells))
    q = q / (q.sum(axis=1, keepdims=True) * dx)

    saved, lost = [(mean, np.sqrt(variance), q)], False
    for t, end in itertools.pairwise(times):
        if lost:
            saved.append(saved[-1])
            continue
        h = end - t
        during = t + h * _MIDDLES
        received = noise(during)
        # The frame follows mean and variance, and catches up with what it missed of them in the last step.
        force = drift(mean[:, None] + np.sqrt(variance)[:, None] * xi, during)
        at = dx * np.sum(q * xi, axis=1)
        spread = dx * np.sum(q * xi**2, axis=1) - at**2
        push = dx * np.sum(q * force, axis=1)
        along = dx * np.sum(q * force * (xi - at[:, None]), axis=1)
        velocity = push + np.sqrt(variance) * at / h
        growth = 2.0 * np.sqrt(variance) * along + received + variance * (spread - 1.0) / h
        growth = np.maximum(growth, -0.5 * variance / h)

        def generator(later, mean=mean, variance=variance, velocity=velocity, growth=growth, step=(during, received)):
            M, V = (mean + later * velocity)[:, None], (variance + later * growth)[:, None]
            S = np.sqrt(V)
            b = (drift(M + S * inner, step[0]) - velocity[:, None]) / S - 0.5 * growth[:, None] / V * inner
            return _generator(b, 0.5 * step[1] / V, dx)

        early, late = generator(_GAMMA * h), generator(h)
        lost = not (np.isfinite(early).all() and np.isfinite(late).all())
        q = np.full(q.shape, np.nan) if lost else _advance(q.ravel(), h, early, late).reshape(q.shape)
        mean, variance = mean + h * velocity, variance + h * growth
        if lost:
            mean, variance = np.full_like(mean, np.nan), np.full_like(variance, np.nan)
        saved.append((mean, np.sqrt(variance), q))
    means, stds, densities = (np.stack(x) for x in zip(*saved, strict=True))
    return Transitions(np.asarray(times), means, stds, faces, densities)


def _generator(f: np.ndarray, D: np.ndarray, dx: float) -> np.ndarray:
    """The tridiagonal matrix of `q' = L q`, in banded storage, from the drift (grids, cells−1) on inner faces.

    Several grids are stacked to one; no flux passes between them.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # D = 0 gives the upwind flux
        p = f * dx / D
        left = np.where(np.abs(p) > 1e-6, f / dx / np.expm1(p), (D - 0.5 * f * dx) / dx**2)  # D B(p)/Δx²
    left = np.where(f == 0, D / dx**2, left)
    right = left + f / dx  # B(−p) = B(p) + p
    bands = np.zeros((3, len(f), f.shape[1] + 1))
    bands[1, :, :-1] -= right
    bands[2, :, :-1] += right
    bands[1, :, 1:] -= left
    bands[0, :, 1:] += left
    return bands.reshape(3, -1)


def _advance(q: np.ndarray, h: float, early: np.ndarray, late: np.ndarray) -> np.ndarray:
    """One step of `q' = L q` for each line of q, given L at the two stages, t + γh and t + h."""
    k1 = _solve(early, _GAMMA * h, _apply(early, q))
    k2 = _solve(late, _GAMMA * h, _apply(late, q + (1 - _GAMMA) * h * k1))
    return q + h * ((1 - _GAMMA) * k1 + _GAMMA * k2)


def _positive(new: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`new` without what fell below zero, its lines scaled to the mass that they had in `q`."""
    if new.min() >= 0:
        return new
    kept = np.maximum(new, 0.0)
    bad, total = new.min(axis=1, keepdims=True) < 0, kept.sum(axis=1, keepdims=True)
    return np.where(bad & (total > 0), kept * (q.sum(axis=1, keepdims=True) / np.where(total > 0, total, 1.0)), kept)


def _apply(bands: np.ndarray, q: np.ndarray) -> np.ndarray:
    out = bands[1] * q
    out[..., :-1] += bands[0, 1:] * q[..., 1:]
    out[..., 1:] += bands[2, :-1] * q[..., :-1]
    return out


def _solve(bands: np.ndarray, h: float, q: np.ndarray) -> np.ndarray:
    system = -h * bands
    system[1] += 1.0
    return solve_banded((1, 1), system, q.T).T
