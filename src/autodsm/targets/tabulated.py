"""The exact kernel q(y_t|y_0) of an elementwise process, from a table.

Each coordinate is a scalar diffusion, so its kernel is a function of three numbers. `fokker_planck.transition_1d`
computes it for a grid of y_0; it is stored as a transport map of `z ~ N(0,1)`,

    y_t = M + S (z + R(y_0, τ, z)),        S ∂ log q(y_t|y_0) = −z + R₂(y_0, τ, z),

with `(M − y_0)/τ` and `S/√τ` on a (log τ, y_0) grid and R, R₂ on a (log τ, y_0, z) grid, all interpolated linearly. τ
is `½ ∫_0^t g²` when `f/g²` does not depend on time (Langevin processes), else it is t. A draw is then a look-up: no
path, no linearization. Coordinates with different drifts or noise have a table each.
"""

import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.interpolate import CubicSpline

from ..clock import Clock
from ..fokker_planck import transition_1d
from ..process import Process
from ..structure import Elementwise, expand_noise
from .base import AbstractTarget, Draw

MAX_LAWS = 64
MAX_ERROR = 0.02
"""Of the interpolation between starts, in deviations; tables are refined while it is above a quarter of this."""
_TIMES, _FRAMES = 241, 513
_STARTS = (17, 33, 65, 129, 257)  # the fewest that are accurate
_Z = np.linspace(-5.6, 5.6, 81)
_cache: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # drift -> {what it was built for: tables}


class Tables(eqx.Module):
    """Tables of several scalar laws, and how to read them."""

    frame: Float[Array, "laws times frames 2"]
    """`(M − y_0)/τ` and `S/√τ`; these vary fastest with y_0, and are refined in it by splines."""
    residual: Float[Array, "laws times starts z 2"]
    """R and R₂."""
    law: Int[Array, "..."] | None
    """Which table each coordinate uses; None when there is one."""
    shape: tuple[int, ...] = eqx.field(static=True)
    log_tau: tuple[float, float] = eqx.field(static=True)
    y_range: tuple[float, float] = eqx.field(static=True)
    separable: bool = eqx.field(static=True)
    error: float = eqx.field(static=True)
    """Largest error, over times and y_0, of interpolating between starts; root mean square over z, estimated."""


class Tabulated(AbstractTarget):
    """Draws of y_t and its exact conditional score, for elementwise drifts.

        target = Tabulated(process, (2,), y_range=(-2.0, 2.0))

    `shape` is that of one state, `y_range` must contain every coordinate of the data; a draw for a coordinate outside
    of it is NaN. Tables are built once for a process and range, and kept as long as its drift is.
    """

    process: Process
    tables: Tables
    clock: Clock
    antithetic: bool = eqx.field(static=True)

    def __init__(
        self,
        process: Process,
        shape: tuple[int, ...],
        *,
        y_range: tuple[float, float],
        antithetic: bool = False,
    ):
        if not isinstance(process.structure_for(shape), Elementwise):
            raise ValueError(
                "the tabulated kernel needs a drift that acts on each coordinate alone, and a scalar or diagonal "
                "diffusion; this process couples coordinates. Use PathwiseDSM, or LocalDSM where g is singular. If it "
                'does not, declare Process(..., structure="elementwise").'
            )
        low, high = (float(v) for v in y_range)
        if not (np.isfinite([low, high]).all() and high > low):
            raise ValueError(f"y_range={y_range} must be two finite, increasing numbers that contain the data.")
        self.process = process
        self.tables = _tables(process, tuple(shape), (low, high))
        self.clock = Clock(process)
        self.antithetic = antithetic

    def draw(self, x, times, *, key):
        times = jnp.asarray(times, x.dtype)
        z = jax.random.normal(key, (len(times), *x.shape), x.dtype)
        return jax.lax.stop_gradient(jax.vmap(lambda t, z: self._draw(x, t, z))(times, z))

    def states(self, x, times, *, key):
        return self.draw(x, times, key=key).y[:, 0]

    def covers(self, x):
        low, high = self.tables.y_range
        x = np.asarray(x)
        if x.min() >= low and x.max() <= high:
            return None
        return (
            f"data lie in [{x.min():.6g}, {x.max():.6g}], outside y_range=({low:g}, {high:g}) of the tabulated kernel. "
            "Give a y_range that contains them all."
        )

    def _draw(self, x, t, z) -> Draw:
        tables = self.tables
        if tables.shape != x.shape:
            raise ValueError(f"the table was built for states of shape {tables.shape}, not {x.shape}.")
        tau = 0.5 * self.clock(t) if tables.separable else t
        law = 0 if tables.law is None else tables.law
        i, a = _position(jnp.log(tau), *tables.log_tau, tables.frame.shape[1])
        j, b = _position(x, *tables.y_range, tables.residual.shape[2])
        weights = [((1 - a) * (1 - b), 0, 0), ((1 - a) * b, 0, 1), (a * (1 - b), 1, 0), (a * b, 1, 1)]
        k, c = _position(x, *tables.y_range, _FRAMES)
        frame = jnp.zeros((*x.shape, 2), tables.frame.dtype)
        for w, di, dk in ((1 - a) * (1 - c), 0, 0), ((1 - a) * c, 0, 1), (a * (1 - c), 1, 0), (a * c, 1, 1):
            frame = frame + w[..., None] * tables.frame[law, i + di, k + dk]
        inside = (x >= tables.y_range[0]) & (x <= tables.y_range[1])
        mean = jnp.where(inside, x + tau * frame[..., 0], jnp.nan).astype(x.dtype)
        scale = (jnp.sqrt(tau) * frame[..., 1]).astype(x.dtype)

        def one(z):
            k, c = _position(jnp.clip(z, _Z[0], _Z[-1]), _Z[0], _Z[-1], len(_Z))
            found = jnp.zeros((*x.shape, 2), tables.residual.dtype)
            for w, di, dj in weights:
                for v, dk in ((1 - c, 0), (c, 1)):
                    found = found + (w * v)[..., None] * tables.residual[law, i + di, j + dj, k + dk]
            return mean + scale * (z + found[..., 0]), (-z + found[..., 1]) / scale

        y, score = jax.vmap(one)(jnp.stack([z, -z]) if self.antithetic else z[None])
        return Draw(t, y.astype(x.dtype), score.astype(x.dtype), scale, mean)


def _position(value, low: float, high: float, points: int) -> tuple[Array, Array]:
    """Index of the grid cell that holds the value, and where in it; clamped to the grid."""
    place = jnp.clip((value - low) * ((points - 1) / (high - low)), 0.0, points - 1.0)
    index = jnp.minimum(place.astype(jnp.int32), points - 2)
    return index, place - index


def _tables(process: Process, shape: tuple[int, ...], y_range: tuple[float, float]) -> Tables:
    try:
        known = _cache.setdefault(process.drift, {})
    except TypeError:  # a drift that cannot be hashed
        known = {}
    at = (shape, y_range, process.t1, id(process.diffusion))
    if at not in known:
        with jax.ensure_compile_time_eval():
            known[at] = _build(process, shape, y_range)
    return known[at]


def _build(process: Process, shape: tuple[int, ...], y_range: tuple[float, float]) -> Tables:
    t1 = process.t1
    clock = Clock(process)
    with jax.enable_x64(True):
        ys, ts = np.linspace(*y_range, 17), t1 * np.linspace(0.02, 1.0, 9)

        @jax.jit
        def probe(y, t):  # drift and noise of every coordinate, (d,) each
            at = jnp.full(shape, y)
            g = jnp.broadcast_to(expand_noise(process.g(t), shape), shape)
            return process.f(at, t).ravel(), (g**2).ravel().astype(float)

        f, q = (np.asarray(v) for v in jax.vmap(lambda y: jax.vmap(lambda t: probe(y, t))(ts))(ys))  # (17, 9, d)
        laws = _distinct(np.concatenate([f.reshape(-1, f.shape[-1]), q.reshape(-1, q.shape[-1])]))
        ratio = f / np.where(q > 0, q, np.nan)
        size = np.abs(ratio).max(axis=(0, 1), keepdims=True)
        scalar = np.ptp(q, axis=-1).max() == 0
        separable = bool(scalar and np.all(np.ptp(ratio, axis=1) <= 1e-5 * size[0]))

        last = 0.5 * clock.total if separable else t1
        log_tau = (float(np.log(1e-6 * last)), float(np.log(last)))
        times = np.exp(np.linspace(*log_tau, 2 * _TIMES - 1))
        scalars = [_scalar(process, shape, np.flatnonzero(laws == k), separable) for k in range(laws.max() + 1)]
        frames, residuals, error = _refine(scalars, y_range, times)
    if not error < MAX_ERROR:
        raise ValueError(
            f"the drift varies too sharply over y_range={y_range} for the table: error {error:.2g} of a standard "
            "deviation. Narrow the range to that of the data, or use PathwiseDSM."
        )
    law = None if laws.max() == 0 else jnp.asarray(laws.reshape(shape))
    frame, residual = (jnp.asarray(np.stack(v), jnp.float32) for v in (frames, residuals))
    return Tables(frame, residual, law, shape, log_tau, y_range, separable, error)


def _refine(scalars: list[tuple[Callable, Callable]], y_range: tuple[float, float], times: np.ndarray):
    """Frames and residuals of all laws, and their largest error, with as many starts as are needed."""
    wanted, count = 0.25 * MAX_ERROR, _STARTS[0]
    while True:
        starts = np.linspace(*y_range, count)
        frames, residuals, errors = zip(*(_tabulate(*law, starts, times) for law in scalars), strict=True)
        error = max(errors)
        if error < wanted or count == _STARTS[-1]:
            return frames, residuals, error
        # The error falls as the square of the spacing: go to the first that should do, and look.
        finer = [n for n in _STARTS if n > count]
        count = next((n for n in finer if error * (count - 1) ** 2 < wanted * (n - 1) ** 2), finer[-1])


def _tabulate(drift: Callable, noise: Callable, starts: np.ndarray, times: np.ndarray):
    """Frame and residual of one scalar law, and the error of interpolating between starts."""
    found = transition_1d(drift, noise, starts, times, cells=800)
    found = found._replace(times=times[::2], mean=found.mean[::2], std=found.std[::2], q=found.q[::2])
    if not all(np.isfinite(v).all() for v in (found.mean, found.std, found.q)):
        raise ValueError(
            f"the drift is not finite everywhere that the process goes from y_range=({starts[0]:g}, {starts[-1]:g}); "
            "narrow the range."
        )
    xi, score = found.maps(_Z)
    tau = found.times[:, None]
    frame = np.stack([(found.mean - starts) / tau, found.std / np.sqrt(tau)], axis=-1)
    residual = np.stack([xi - _Z, score + _Z], axis=-1)
    # From every other start the ones between are guessed; halving the spacing divides the error of linear
    # interpolation by 4, that of the spline by 16.
    normal = np.exp(-0.5 * _Z**2) / np.sum(np.exp(-0.5 * _Z**2))
    rough = (residual[:, 1::2] - 0.5 * (residual[:, :-1:2] + residual[:, 2::2])) / 4
    moved = np.abs(CubicSpline(starts[::2], frame[:, ::2], axis=1)(starts[1::2]) - frame[:, 1::2]) / 16
    scale = frame[:, 1::2, 1]
    errors = [np.sqrt(np.einsum("tszc,z->tsc", rough**2, normal)), moved[..., 0] * np.sqrt(tau) / scale]
    fine = CubicSpline(starts, frame, axis=1)(np.linspace(starts[0], starts[-1], _FRAMES))
    return fine, residual, max(float(e.max()) for e in [*errors, moved[..., 1] / scale])


def _distinct(columns: np.ndarray) -> np.ndarray:
    """A number for each column, equal for columns that are equal up to rounding."""
    scale = np.abs(columns).max(axis=1, keepdims=True)
    rounded = np.round(columns / np.where(scale > 0, scale, 1.0), 6) + 0.0
    laws = np.unique(rounded, axis=1, return_inverse=True)[1].ravel()
    if laws.max() >= MAX_LAWS:
        raise ValueError(
            f"the coordinates follow {laws.max() + 1} different laws, and each needs a table (limit {MAX_LAWS}). Use "
            "PathwiseDSM or LocalDSM."
        )
    return laws


def _scalar(process: Process, shape: tuple[int, ...], mine: np.ndarray, separable: bool) -> tuple[Callable, Callable]:
    """Drift f(y, t) on arrays, and g²(t), of the law of the coordinates `mine`; in the clock of the noise, `2f/g²` and
    2."""
    middle = 0.5 * process.t1

    @jax.jit
    def drift(y, t):
        # As many values at once as there are coordinates of this law, so that an image costs no more than a number.
        rows = jnp.pad(y.ravel(), (0, -y.size % len(mine)), mode="edge").reshape(-1, len(mine))

        def one(row):
            state = jnp.full(int(np.prod(shape)), row[0]).at[mine].set(row)
            return process.f(state.reshape(shape), t).ravel()[mine]

        return jax.vmap(one)(rows).ravel()[: y.size].reshape(y.shape)

    @jax.jit
    def squared(t):
        return jnp.broadcast_to(expand_noise(process.g(t), shape), shape).ravel()[mine[0]].astype(float) ** 2

    if not separable:
        return (lambda y, t: np.asarray(drift(y, t))), (lambda t: float(squared(t)))
    scale = 2.0 / float(squared(middle))
    return (lambda y, t: scale * np.asarray(drift(y, middle))), (lambda t: 2.0)
