"""What a grid can be asked, and whether its answer can be right.

No flux leaves a grid. A density that would leave piles up at an end instead, so it is not small there; and one that is
narrower than the cells has a shape that they do not show. Both can be seen in the density itself.
"""

import numpy as np

from ..base.errors import as_double, check_count

LEAST_CELLS = 10
"""Between ends at four deviations, cells of three quarters of one: see `WALL` and `NARROW`."""
WALL = 4e-5
"""Largest share of a density, within a quarter of its deviation, at an end. A Gaussian at rest has it with ends at four
deviations, and its variance is then too small by `8z` times the share at each end: by 10⁻³, as measured. By diffusion
alone, which the ends reflect, it has twice the share and a quarter of the error."""
NARROW = 0.95
"""Largest share that three cells may hold of the fifteen around them: a Gaussian of deviation 0.77 cells."""
VISIBLE = 0.1
"""Largest share of a density in such peaks. In the tails of a conditional law they do no harm."""


def check_cells(cells) -> None:
    check_count("cells", cells)
    if cells < LEAST_CELLS:
        raise ValueError(
            f"cells={cells} do not show a density between ends where it is small; give {LEAST_CELLS} or more."
        )


def check_range(name: str, value) -> tuple[float, float]:
    """Refuse what is not an increasing pair of finite numbers."""
    ends = as_double(value, name)
    if ends.shape != (2,) or not np.all(np.isfinite(ends)) or not ends[1] > ends[0]:
        raise ValueError(f"{name}={value} must be two finite numbers that increase, (low, high).")
    return float(ends[0]), float(ends[1])


def check_times(times, t1: float) -> np.ndarray:
    """Refuse what is not a list of finite times within [0, t1] that do not decrease."""
    times = as_double(times, "times")
    inside = times.ndim == 1 and times.size > 0 and np.all(np.isfinite(times)) and times[-1] <= t1 * (1 + 1e-6)
    if not inside or np.any(np.diff(times, prepend=0.0) < 0):
        raise ValueError(f"times={times} must increase within [0, {t1}].")
    return times


def check_density(q, shape: tuple[int, ...], *, name: str = "density") -> np.ndarray:
    """Refuse values that are no density on the centres of the cells."""
    q = as_double(q, name)
    if q.shape != shape:
        raise ValueError(f"{name} returned shape {q.shape} for arrays of shape {shape}; return that shape.")
    if not np.all(np.isfinite(q)) or np.any(q < 0) or not np.any(q > 0):
        raise ValueError(
            f"{name} must be finite, non-negative and somewhere positive on the grid; it lies between {q.min()} and "
            f"{q.max()}."
        )
    return q


def check_drift(f: np.ndarray, t: float) -> None:
    if not np.all(np.isfinite(f)):
        raise ValueError(f"the drift is not finite on the grid at t={t:g}; choose a range within its domain.")


def check_ends(name: str, q: np.ndarray, ends: np.ndarray, faces: np.ndarray, t: float) -> None:
    """Refuse a range at whose ends the densities q (laws, cells) were as large as `ends` (laws, 2)."""
    width = faces[1] - faces[0]
    x = 0.5 * (faces[1:] + faces[:-1])
    share = q / q.sum(axis=1, keepdims=True)
    mean = share @ x
    deviation = np.sqrt(np.sum(share * (x - mean[:, None]) ** 2, axis=1))
    near = np.maximum(0.25 * deviation, width)[:, None] * ends
    law, end = np.unravel_index(np.argmax(near), near.shape)
    if near[law, end] > WALL:
        low, high = float(faces[0]), float(faces[-1])
        raise ValueError(
            f"the density reaches the {('lower', 'upper')[end]} end of {name}=({low:g}, {high:g}) by t={t:g}: "
            f"{100 * near[law, end]:.2g} % of it lies within a quarter of its deviation of that end, where nothing "
            f"can leave, so that it piles up. Make {name} wider."
        )


def narrow_share(q: np.ndarray) -> np.ndarray:
    """Which share of each density (laws, lines, cells) is in peaks narrower than the cells of the lines; (laws,)."""
    mass = np.cumsum(np.pad(q, ((0, 0), (0, 0), (8, 7))), axis=2)
    cells = q.shape[2]
    three, fifteen = (mass[..., 8 + k : 8 + k + cells] - mass[..., 7 - k : 7 - k + cells] for k in (1, 7))
    narrow = (q > 0) & (three > NARROW * fifteen)
    return np.sum(np.where(narrow, q, 0.0), axis=(1, 2)) / q.sum(axis=(1, 2))


def check_resolved(name: str, q: np.ndarray, t: float) -> None:
    """Refuse densities (laws, lines, cells) that the cells of the lines do not show."""
    if not np.all(np.isfinite(q)):
        raise FloatingPointError(f"the density is not finite at t={t:g}; take more steps, or a shorter time.")
    if (share := float(np.max(narrow_share(q)))) > VISIBLE:
        when = "in the start" if t == 0 else f"at t={t:g}"
        raise ValueError(
            f"the density is narrower than the cells {when}: {100 * share:.2g} % of it is in peaks of a cell or two. "
            f"Give more cells (now {q.shape[2]}), or make {name} narrower."
        )
