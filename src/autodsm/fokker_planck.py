"""Grid solution of the Fokker–Planck equation, an exact reference for low-dimensional processes.

    ∂q/∂t = −∂J/∂x,    J = f q − D ∂q/∂x,    D = ½ g²

Finite volumes with exponentially fitted (Scharfetter–Gummel) fluxes: on the face between cells i and i+1,
`J = D/Δx [B(−p) q_i − B(p) q_{i+1}]`, `B(z) = z/(eᶻ−1)`, `p = f Δx/D`, which is exact for constant f and D and of
second order otherwise. No flux leaves the grid, so mass is conserved to rounding. Time is advanced by Alexander's
two-stage, second-order, L-stable implicit Runge–Kutta rule.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from scipy.linalg import solve_banded

from .errors import check_count
from .process import Process


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
    shape (1,). Choose `x_range` so that the density is negligible at its ends.
    """
    check_count("cells", cells)
    check_count("steps", steps)
    low, high = x_range
    if not high > low:
        raise ValueError(f"x_range={x_range} must increase.")
    times = np.asarray(times, float)
    inside = times.ndim == 1 and times.size > 0 and times[-1] <= process.t1 * (1 + 1e-6)
    if not inside or np.any(np.diff(times, prepend=0.0) < 0):
        raise ValueError(f"times={times} must increase within [0, {process.t1}].")
    process.check(np.array([0.5 * (low + high)]))
    faces = np.linspace(low, high, cells + 1)
    x, dx = 0.5 * (faces[1:] + faces[:-1]), (high - low) / cells

    inner = jax.numpy.asarray(faces[1:-1, None])
    drift = jax.jit(jax.vmap(process.f, in_axes=(0, None)))
    noise = jax.jit(lambda t: process.structure_for((1,)).noise_cov(process.g(t)))

    def generator(t: float) -> np.ndarray:
        """The tridiagonal matrix of `q' = L q`, in banded storage."""
        f = np.asarray(drift(inner, t), float)[:, 0]
        D = 0.5 * np.asarray(noise(t), float).item()
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # D = 0 gives the upwind flux
            p = f * dx / D
            left = np.where(np.abs(p) > 1e-6, f / dx / np.expm1(p), (D - 0.5 * f * dx) / dx**2)  # D B(p)/Δx²
        left = np.where(f == 0, D / dx**2, left)
        right = left + f / dx  # B(−p) = B(p) + p
        bands = np.zeros((3, cells))
        bands[1, :-1] -= right
        bands[2, :-1] += right
        bands[1, 1:] -= left
        bands[0, 1:] += left
        return bands

    def apply(bands, q):
        out = bands[1] * q
        out[:-1] += bands[0, 1:] * q[1:]
        out[1:] += bands[2, :-1] * q[:-1]
        return out

    def solve(bands, h, q):
        system = -h * bands
        system[1] += 1.0
        return solve_banded((1, 1), system, q)

    gamma = 1.0 - 1.0 / np.sqrt(2.0)
    q = np.asarray(density(x), float)
    q = q / (q.sum() * dx)
    saved, start = [], 0.0
    for end in times:
        h = (end - start) / steps
        for i in range(steps if end > start else 0):
            t = start + i * h
            early, late = generator(t + gamma * h), generator(t + h)
            k1 = solve(early, gamma * h, apply(early, q))
            k2 = solve(late, gamma * h, apply(late, q + (1 - gamma) * h * k1))
            q = q + h * ((1 - gamma) * k1 + gamma * k2)
        saved.append(q)
        start = end
    return GridDensity(x, times, np.stack(saved))
