"""Tables of the kernels q(y_t|y_0) of elementwise processes.

Each coordinate is a scalar diffusion, so its kernel is a function of three numbers. `exact.grid1d.transition_1d`
computes it for a grid of y_0; it is stored as a transport map of `z ~ N(0,1)`,

    y_t = M + S (z + R(y_0, τ, z)),        S ∂ log q(y_t|y_0) = −z + R₂(y_0, τ, z),

with `(M − y_0)/τ` and `S/√(T σ)` on a (τ, y_0) grid and R, R₂ on a (τ, y_0, z) grid, all interpolated linearly; T is
the noise that a coordinate receives in all, σ(t) the share of it that was received by t. τ is σ where that is the same
for all coordinates and `f/g²` does not depend on time (Langevin processes), else τ is t. The grid of times is even in
log τ; where drift or noise have a time of their own, half of its density is even in τ. Starts are placed by a `Span`.
Coordinates of equal drift and noise share a law; each law has a table and a span.

Where a given y is to be looked up, as to average targets over starts, a second table over `u = (y − M)/S` holds

    log q(y|y_0) = L(y_0, τ, u) − u²/2 − log S,        S ∂ log q(y|y_0) = −u + R₃(y_0, τ, u),

on the same starts and times. Beyond its ends, or where the density is below what the solution resolves, R₃ is held and
L goes on with that slope, so that densities fall there as `exp(−u²/2)`, or faster.

**Errors** are estimated in all directions, in deviations: between starts, from every other one; between times, at
midpoints that were solved for; and of the solution, from one with half as many steps and cells. The second table is
compared likewise, and between its nodes; it is left out where it does not reach `MAX_ERROR`. Starts and times are
doubled until each is below a quarter of `MAX_ERROR`; a table that does not reach `MAX_ERROR` is refused. Where no data
were seen, though a sampler may draw there once in a long training, ten times as much is allowed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..base.precision import double_precision
from ..exact.grid1d import Transitions, log_density, transition_1d
from ..process.clock import Clock
from ..process.process import Process
from ..process.structure import expand_noise
from ..process.value_key import process_key
from .laws import MAX_LAWS, Laws, Starts, find_laws, spans_of
from .spans import Span

MAX_ERROR = 0.02
"""Of a draw or its score, in deviations; tables are refined while it is above a quarter of this."""
FRAMES = 513
"""Of the splines, for look-ups: chords are off by 5·10⁻⁷ of the curvature over the range."""
Z = np.linspace(-5.6, 5.6, 81)
"""All but 2·10⁻⁸ of normal draws; 0.14 apart, chords are off by 0.0025 of the curvature of a residual."""
U = np.linspace(-8.4, 8.4, 121)
"""All that the solution's grid holds, as far apart as `Z`."""
_NORMAL = np.exp(-0.5 * Z**2) / np.sum(np.exp(-0.5 * Z**2))
_STARTS = (17, 33, 65, 129, 257)  # doubled while the error between them asks for it
_TIMES = (241, 481, 961)  # likewise; the first are 24 a factor of 4 in time, or half as many
_CELLS = 800  # of second order: a fiftieth of a deviation each; a solution with half as many says what that costs
_EARLIEST = 1e-6
"""The first time, as a share of the last: kernels before it are those of constant drift and noise."""
_KEPT = 8  # tables that are kept; each takes some 5 to 100 MB
_cache: dict[tuple, "Tables | str"] = {}
"""Values of drift and noise, shape, spans and t1 -> tables; the last used at the end."""


class Tables(eqx.Module):
    """Tables of several scalar laws, and how to read them."""

    frame: Float[Array, "laws times frames 2"]
    """`(M − y_0)/τ` and `S/√(T σ)`; these vary fastest with y_0, and are refined in it by splines."""
    residual: Float[Array, "laws times starts z 2"]
    """R and R₂."""
    law: Int[Array, "..."] | None
    """Which table each coordinate uses; None when there is one."""
    shape: tuple[int, ...] = eqx.field(static=True)
    last: float = eqx.field(static=True)
    """The largest τ."""
    spans: tuple[Span, ...] = eqx.field(static=True)
    """Of the starts, for each law."""
    separable: bool = eqx.field(static=True)
    error: float = eqx.field(static=True)
    """Largest error, over times and y_0; root mean square over z, estimated."""
    spread: Float[Array, "laws times"]
    """`S/√(T σ)`, its root mean square over starts where data were seen."""
    density: Float[Array, "laws times starts u 2"] | None = None
    """L and R₃; None where it was not asked for, or is not good enough."""
    density_error: float = eqx.field(static=True, default=0.0)
    """Likewise of L and R₃, if they were asked for."""

    def place(self, tau) -> Array:
        """Where τ lies between the first time, 0, and the last, 1."""
        return place_of(tau / self.last, self.separable, jnp)

    def span(self) -> Span:
        """Of every coordinate."""
        if self.law is None:
            return self.spans[0]
        columns: Any = (np.array(column)[np.asarray(self.law)] for column in zip(*self.spans, strict=True))
        return Span(*columns)


def place_of(share, separable: bool, np=np):
    """See `Tables.place`; of τ as a share of the last. Unless the table is separable, half of the density is even."""
    logarithmic = 1.0 - np.log(share) / np.log(_EARLIEST)
    return logarithmic if separable else 0.5 * (logarithmic + (share - _EARLIEST) / (1.0 - _EARLIEST))


def find_tables(
    process: Process, shape: tuple[int, ...], starts: Starts, *, clock: Clock, density: bool = False
) -> Tables | str:
    """The tables of a process, built or remembered; or why they cannot be had. `density`: with the second ones."""
    with jax.ensure_compile_time_eval(), double_precision():
        key = process_key(process, shape)
        # A range that was given is the same for all laws, which need not be known to find its tables.
        laws = None if starts.x is None else find_laws(process, shape, starts)
        spans = spans_of(laws, starts, clock)
        at = (key, shape, spans, density)
        if key is None or at not in _cache:
            laws = find_laws(process, shape, starts) if laws is None else laws
            _cache[at] = _build(process, shape, laws, spans, clock, density)
        found = _cache.pop(at)
    if key is not None:
        _cache[at] = found  # the last used is the last to go
        while len(_cache) > _KEPT:
            del _cache[next(iter(_cache))]
    return found


class _Scalar(NamedTuple):
    """A law: `drift(y, τ)` and `noise(τ)`, the noise T in all, and where the data are."""

    drift: Callable
    noise: Callable
    total: float
    span: Span


def _build(
    process: Process, shape: tuple[int, ...], laws: Laws, spans: tuple[Span, ...], clock: Clock, density: bool
) -> Tables | str:
    if laws.count > MAX_LAWS:
        return (
            f"the coordinates follow {laws.count} different laws, and each needs a table (limit {MAX_LAWS}). Use "
            "PathwiseDSM or LocalDSM."
        )
    spans = spans * laws.count if len(spans) == 1 else spans
    last = 1.0 if laws.separable else process.t1
    totals = np.broadcast_to(np.asarray(clock.totals_of(shape), float), shape).ravel()
    members = [np.flatnonzero(laws.which == k) for k in range(laws.count)]
    scalars = [
        _scalar(process, shape, each, float(totals[each[0]]), span, separable=laws.separable)
        for each, span in zip(members, spans, strict=True)
    ]

    def share(tau):
        return tau if laws.separable else np.asarray(clock.share(tau), float)

    built = _refine(scalars, last, laws.separable, share, density)
    error = max((max(table.errors) for table in built), default=np.inf)
    y_range = (min(span.low for span in spans), max(span.high for span in spans))
    if not np.isfinite(error):
        return (
            f"the drift is not finite everywhere that the process goes from y_range=({y_range[0]:g}, {y_range[1]:g}); "
            "narrow the range."
        )
    if error > MAX_ERROR:
        return (
            f"drift or noise vary too sharply over y_range=({y_range[0]:g}, {y_range[1]:g}) or in time for the table: "
            f"error {error:.2g} of a standard deviation. Narrow the range to that of the data, or use PathwiseDSM."
        )
    law = None if laws.count == 1 else jnp.asarray(laws.which.reshape(shape), jnp.int32)

    def stacked(name: str):
        return jnp.asarray(np.stack([getattr(table, name) for table in built]), jnp.float32)

    off = max(table.density_error for table in built)
    second = stacked("density") if density and off <= MAX_ERROR else None
    frame, residual = stacked("frame"), stacked("residual")
    seen = np.stack([span.weight(span.starts(FRAMES)) == 1.0 for span in spans])
    spread = jnp.sqrt(jnp.mean(frame[..., 1] ** 2, axis=-1, where=seen[:, None]))
    return Tables(frame, residual, law, shape, last, spans, laws.separable, error, spread, second, off)


def _refine(scalars: list[_Scalar], last: float, separable: bool, share: Callable, density: bool) -> list["_Table"]:
    """The tables of all laws, with as many starts and times as are needed; none if one is not finite."""
    wanted, count, points = 0.25 * MAX_ERROR, _STARTS[0], _TIMES[0]
    while True:
        times = last * _times(2 * points - 1, separable)
        built = []
        for law in scalars:
            starts = law.span.starts(count)
            if (table := _tabulate(law, starts, times, law.total * share(times), density)) is None:
                return []
            built.append(table)
        over_starts, over_times = (max(errors) for errors in zip(*(b.errors for b in built), strict=True))
        finer = [n for n in _STARTS if n > count and over_starts >= wanted]
        more = [n for n in _TIMES if n > points and over_times >= wanted]
        if not finer and not more:
            return built
        # Errors fall as the square of the spacing: go to the first that should do, and look.
        if finer:
            count = next((n for n in finer if over_starts * (count - 1) ** 2 < wanted * (n - 1) ** 2), finer[-1])
        if more:
            points = next((n for n in more if over_times * (points - 1) ** 2 < wanted * (n - 1) ** 2), more[-1])


def _times(count: int, separable: bool) -> np.ndarray:
    """Shares of the last time, evenly placed: the inverse of `place_of`, by bisection in log τ."""
    places = np.linspace(0.0, 1.0, count)
    low, high = np.full(count, np.log(_EARLIEST)), np.zeros(count)
    for _ in range(60):
        middle = 0.5 * (low + high)
        below = place_of(np.exp(middle), separable) < places
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.exp(0.5 * (low + high))


class _Table(NamedTuple):
    frame: np.ndarray
    residual: np.ndarray
    errors: tuple[float, float]
    """Between starts; between times, with that of the solution."""
    density: np.ndarray | None
    density_error: float


def _tabulate(
    law: _Scalar, starts: np.ndarray, times: np.ndarray, received: np.ndarray, density: bool
) -> _Table | None:
    """One scalar law at every other one of the times, which are those of the solution; None if it is not finite."""
    from scipy.interpolate import CubicSpline  # here: its import takes longer than all of this package's

    found = transition_1d(law.drift, law.noise, starts, times, cells=_CELLS)
    if not all(np.isfinite(v).all() for v in (found.mean, found.std, found.q)):
        return None
    rough = transition_1d(law.drift, law.noise, starts[::4], times[::2], cells=_CELLS // 2)
    unit = np.stack([times, np.sqrt(received)])[:, :, None]
    frame = np.stack([(found.mean - starts) / unit[0], found.std / unit[1]], axis=-1)
    residual = _residual(found)
    # From every other start the ones between are guessed; halving the spacing divides the error of linear
    # interpolation by 4, that of the spline by 16.
    between = (residual[::2, 1::2] - 0.5 * (residual[::2, :-1:2] + residual[::2, 2::2])) / 4
    places = np.linspace(0.0, 1.0, len(starts))
    moved = (CubicSpline(places[::2], frame[::2, ::2], axis=1)(places[1::2]) - frame[::2, 1::2]) / 16
    weight = law.span.weight(starts)
    moved = _in_deviations(moved, frame[::2, 1::2], unit[:, ::2])
    over_starts = _largest(weight[1::2], _rms(between), moved)
    # Midpoints in time were solved for: what interpolation makes of them is compared as it is.
    between = residual[1::2] - 0.5 * (residual[:-1:2] + residual[2::2])
    moved = 0.5 * (frame[:-1:2] + frame[2::2]) - frame[1::2]
    over_times = _largest(weight, _rms(between), _in_deviations(moved, frame[1::2], unit[:, 1::2]))
    over_times = max(over_times, _largest(weight[::4], _solution(found, rough)))
    fine = CubicSpline(places, frame[::2], axis=1)(np.linspace(0.0, 1.0, FRAMES))
    second, off = _density(found, weight) if density else (None, 0.0)
    return _Table(fine, residual[::2], (over_starts, over_times), second, off)


def _density(found: Transitions, weight: np.ndarray) -> tuple[np.ndarray, float]:
    """L and R₃ at every other time, (times, starts, u, 2), and their error."""
    values, share = (np.stack(v) for v in zip(*map(partial(_density_at, faces=found.faces), found.q), strict=True))

    def error(off: np.ndarray, share: np.ndarray, weight: np.ndarray) -> float:
        rms = np.sqrt(np.einsum("tsuc,tsu->tsc", off**2, share / share.sum(axis=-1, keepdims=True))).max(axis=-1)
        return _largest(weight, rms)

    def between(v: np.ndarray, axis: int) -> np.ndarray:
        """What is at odd places, less what linear interpolation of the even ones makes of it."""
        v = np.moveaxis(v, axis, 0)
        return np.moveaxis(v[1::2] - 0.5 * (v[:-1:2] + v[2::2]), 0, axis)

    kept, at = values[::2], share[::2]
    return kept, max(
        error(between(values, 0), share[1::2], weight),
        error(between(kept, 1) / 4, at[:, 1::2], weight[1::2]),
        error(between(kept, 2) / 4, at[:, :, 1::2], weight),
    )


def _density_at(q: np.ndarray, faces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At one time, of densities (starts, cells): L and R₃, (starts, u, 2), and the share of the mass at every u."""
    dx, inner = faces[1] - faces[0], faces[1:-1]
    logs, score, known = log_density(q, dx)
    # R₃ at the ends of what is known, held beyond; a density that rises outwards there is not believed.
    cells = np.arange(len(inner))
    first = np.argmax(known, axis=1)[:, None]
    last = (len(inner) - 1 - np.argmax(known[:, ::-1], axis=1))[:, None]
    end = np.clip(cells, first, last)
    slope = np.take_along_axis(score + inner, end, axis=1)
    slope = np.where(
        cells < first, np.maximum(slope, inner[end]), np.where(cells > last, np.minimum(slope, inner[end]), slope)
    )
    level = np.take_along_axis(0.5 * (logs[:, 1:] + logs[:, :-1]) + 0.5 * inner**2, end, axis=1)
    level = level + slope * (inner - inner[end])
    place = (U - inner[0]) / dx
    left = np.clip(np.floor(place).astype(int), 0, len(inner) - 2)
    part = (place - left)[None, :, None]
    values = np.stack([level, slope], axis=-1)
    values = (1 - part) * values[:, left] + part * values[:, left + 1]
    return values, np.exp(values[..., 0] - 0.5 * U**2)


def _residual(found: Transitions) -> np.ndarray:
    xi, score = found.maps(Z)
    return np.stack([xi - Z, score + Z], axis=-1)


def _largest(weight: np.ndarray, *errors: np.ndarray) -> float:
    """Of errors (times, starts, ...), each start with its weight."""
    return float(max(np.max(weight * error) for error in errors))


def _rms(errors: np.ndarray) -> np.ndarray:
    """Root mean square over z of errors (times, starts, z, 2), the larger of both: (times, starts)."""
    return np.sqrt(np.einsum("tszc,z->tsc", errors**2, _NORMAL)).max(axis=-1)


def _in_deviations(moved: np.ndarray, frame: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The error of a frame (times, starts, 2), of its mean or its deviation: (times, starts)."""
    shift = np.abs(moved[..., 0]) * unit[0] / (unit[1] * frame[..., 1])
    return np.maximum(shift, np.abs(moved[..., 1] / frame[..., 1]))


def _solution(found: Transitions, rough: Transitions) -> np.ndarray:
    """The error of a solution, from one of half as many steps and cells: it is of second order in both."""
    y, s = _drawn(found._replace(mean=found.mean[::2, ::4], std=found.std[::2, ::4], q=found.q[::2, ::4]))
    rough_y, rough_s = _drawn(rough)
    scale = found.std[::2, ::4, None]
    return _rms(np.stack([(y - rough_y) / scale, (s - rough_s) * scale], axis=-1)) / 3.0


def _drawn(found: Transitions) -> tuple[np.ndarray, np.ndarray]:
    """y and its score at the nodes of z, (times, starts, z)."""
    xi, score = found.maps(Z)
    return found.mean[..., None] + found.std[..., None] * xi, score / found.std[..., None]


def _scalar(
    process: Process, shape: tuple[int, ...], mine: np.ndarray, total: float, span: Span, *, separable: bool
) -> _Scalar:
    """The law of the coordinates `mine`: f(y, t) and g²(t), on arrays y and averaged over an array t; in the share σ of
    the noise they are `T f/g²` and T."""
    middle = np.array([0.5 * process.t1])

    @jax.jit
    def drift(y, times):
        # As many values at once as there are coordinates of this law, so that an image costs no more than a number.
        rows = jnp.pad(y.ravel(), (0, -y.size % len(mine)), mode="edge").reshape(-1, len(mine))

        def one(row):
            state = jnp.full(int(np.prod(shape)), row[0]).at[mine].set(row)
            each = jax.vmap(lambda t: process.f(state.reshape(shape), t))(times)
            return each.reshape(len(times), -1).mean(axis=0)[mine]

        return jax.vmap(one)(rows).ravel()[: y.size].reshape(y.shape)

    @jax.jit
    def squared(times):
        g = jax.vmap(lambda t: jnp.broadcast_to(expand_noise(process.g(t), shape), shape).ravel()[mine[0]])(times)
        return jnp.mean(g.astype(float) ** 2)

    if not separable:
        return _Scalar(lambda y, t: np.asarray(drift(y, t)), lambda t: float(squared(t)), total, span)
    scale = total / float(squared(middle))
    return _Scalar(lambda y, t: scale * np.asarray(drift(y, middle)), lambda t: total, total, span)
