"""The exact kernel q(y_t|y_0) of an elementwise process, from a table: a draw is a look-up, without a path or a
linearization. `tables` says what the tables hold and how they are made."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.errors import as_shape
from ..base.modules import replace
from ..exact.checks import check_range
from ..paths.initial import initial_states
from ..process.clock import Clock
from ..process.process import Process, check_process
from ..process.structure import Elementwise
from .averaging import Averaging, average, check_references, find_averaging
from .base import AbstractTarget, Draw
from .spans import even_span
from .tables import FRAMES, Starts, Tables, U, Z, find_tables

_FEWEST, _MOST = 1 << 10, 1 << 18
"""States of a sampler from which the tails of its law are taken: as many as 2²² numbers hold, between these."""
_NUMBERS = 1 << 22
_TYPICAL = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles of the data, at which deviations of kernels are averaged to weigh losses over t."""


class Tabulated(AbstractTarget):
    """Draws of y_t and its exact conditional score, for elementwise drifts.

        target = Tabulated(process, (2,), y_range=(-2.0, 2.0))

    `shape` is that of one state, `y_range` must contain every coordinate of the data; a draw for a coordinate outside
    of it is NaN. Without a range, `prepared` takes that of the data; without a shape, the table is built for the first
    state that is met. Tables are told apart by the values of drift, noise and range, and the last few are kept.
    """

    process: Process
    tables: Tables | None
    clock: Clock
    averaging: Averaging | None
    spread: Array | None
    """`Tables.spread` of each coordinate, over starts where its own data are, (times, *shape); None without data."""
    y_range: tuple[float, float] | None = eqx.field(static=True)
    antithetic: bool = eqx.field(static=True)
    references: int | None = eqx.field(static=True)

    def __init__(
        self,
        process: Process,
        shape: tuple[int, ...] | None = None,
        *,
        y_range: tuple[float, float] | None = None,
        antithetic: bool = False,
        references: int | None = 1,
        clock: Clock | None = None,
    ):
        check_process(process)
        check_references(references)
        y_range = None if y_range is None else check_range("y_range", y_range)
        self.process, self.y_range, self.antithetic, self.references = process, y_range, antithetic, references
        self.clock = Clock(process) if clock is None else clock
        self.tables = self.averaging = self.spread = None
        if shape is not None and y_range is not None:
            self.tables = _given(process, as_shape(shape), y_range, self.clock, density=references != 1)

    @classmethod
    def find(
        cls,
        pilot,
        *,
        y_range: tuple[float, float] | None = None,
        antithetic: bool = False,
        references: int | None = 1,
    ) -> "Tabulated | str":
        """The target for the data of a `Pilot`; or why there is none."""
        _check_elementwise(pilot.process, pilot.shape)
        pilot.report("pilot: tables of the kernel …")
        if y_range is not None:
            starts = Starts(y_range, None)
        elif callable(pilot.y0):
            n = int(np.clip(_NUMBERS // max(1, np.prod(pilot.shape)), _FEWEST, _MOST))
            starts = Starts(None, np.asarray(initial_states(pilot.y0, n, key=pilot.key)), sampled=True)
        else:
            starts = Starts(None, np.asarray(pilot.y0))
        found = find_tables(pilot.process, pilot.shape, starts, clock=pilot.clock, density=references != 1)
        waiting = cls(pilot.process, antithetic=antithetic, references=references, clock=pilot.clock)
        if isinstance(found, str):
            return found
        return replace(waiting, tables=found, spread=_typical_spread(found, starts))._averaged(pilot)

    def prepared(self, pilot):
        if self.tables is not None:
            return self._averaged(pilot)
        found = Tabulated.find(pilot, y_range=self.y_range, antithetic=self.antithetic, references=self.references)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _averaged(self, pilot) -> "Tabulated":
        """With an `Averaging`, if there is to be one."""
        if self.references == 1 or self.averaging is not None:
            return self
        assert self.tables is not None
        if self.tables.density is None and self.references is None:
            return self
        self._check_density(self.tables)
        return replace(self, averaging=find_averaging(pilot, self.together, self.references))

    def _check_density(self, tables: Tables) -> None:
        if tables.density is None:
            raise ValueError(
                f"references={self.references} needs the density of the kernel, and its table would err by "
                f"{tables.density_error:.2g} of a standard deviation. Give references=1."
            )

    def tables_of(self, shape: tuple[int, ...]) -> Tables:
        """The tables for states of this shape."""
        if self.tables is not None:
            if self.tables.shape != shape:
                raise ValueError(f"the table was built for states of shape {self.tables.shape}, not {shape}.")
            return self.tables
        if self.y_range is None:
            raise ValueError(
                "the range of the tabulated kernel is not known yet. Give y_range=(low, high), or call "
                "objective.prepare(y0, key=key); fit does that."
            )
        return _given(self.process, shape, self.y_range, self.clock, density=self.references != 1)

    def draw(self, x, times, *, key):
        times, tables = jnp.asarray(times, x.dtype), self.tables_of(x.shape)
        z = jax.random.normal(key, (len(times), *x.shape), x.dtype)
        draw = jax.vmap(lambda t, z: self._draw(tables, x, t, z))(times, z)
        scale = jax.vmap(lambda t: self._scale(tables, x, t))(times)
        return jax.lax.stop_gradient(draw._replace(scale=scale))

    def states(self, x, times, *, key):
        return self.draw(x, times, key=key).y[:, 0]

    def covers(self, x):
        x = np.asarray(x)
        span = even_span(*self.y_range) if self.tables is None and self.y_range is not None else None
        span = self.tables.span() if self.tables is not None else span
        if span is None or not (outside := (x < span.low) | (x > span.high)).any():
            return None
        i = np.unravel_index(np.argmax(outside), x.shape)
        low, high = (np.broadcast_to(end, x.shape)[i] for end in (span.low, span.high))
        values = x if np.ndim(span.low) == 0 else x[(..., *i[1:])]
        return (
            f"data lie in [{values.min():.6g}, {values.max():.6g}], outside y_range=({low:g}, {high:g}) of the "
            "tabulated kernel. Give a y_range that contains them all."
        )

    def together(self, xs, t, members, *, key):
        tables, t = self.tables_of(xs.shape[1:]), jnp.asarray(t, xs.dtype)
        self._check_density(tables)
        mean, scale = jax.vmap(lambda x: self._frame(tables, x, t))(xs)
        rows = jax.vmap(lambda x: self._rows(tables, x, t))(xs).astype(xs.dtype)
        z = jax.random.normal(key, (members, *xs.shape[1:]), xs.dtype)
        draw = jax.vmap(lambda x, z: self._draw(tables, x, t, z))(xs[:members], z)

        def one(y, own):
            # By way of the own mean, so that far from zero few digits are lost.
            u = ((y - own) + (own - mean)) / scale
            log_q, score = look_up(rows, u)
            log_q = jnp.sum((log_q - jnp.log(scale)).reshape(len(xs), -1), axis=-1)
            return average(log_q, score / scale)

        score = jax.vmap(jax.vmap(one, (0, None)))(draw.y, draw.anchor)
        typical = jnp.broadcast_to(self._scale(tables, xs[0], t), (members, *xs.shape[1:]))
        return jax.lax.stop_gradient(Draw(jnp.broadcast_to(t, members), draw.y, score, typical, draw.anchor))

    def _scale(self, tables: Tables, x, t) -> Array:
        """The deviation of kernels at t, for weights of the loss: those must not depend on the start, or the minimum
        of the loss, the mean of weight times target over the mean of the weight, is not the score."""
        share = self.clock.share(t)
        i, a = _position(tables.place(share if tables.separable else t), 0.0, 1.0, tables.spread.shape[1])
        if self.spread is not None:
            low, high = self.spread[i], self.spread[i + 1]
        else:
            law = 0 if tables.law is None else tables.law
            low, high = tables.spread[law, i], tables.spread[law, i + 1]
        spread = (1 - a) * low + a * high
        received = jnp.broadcast_to(share * self.clock.totals_of(x.shape), x.shape)
        return (jnp.sqrt(received) * spread).astype(x.dtype)

    def _rows(self, tables: Tables, x, t) -> Array:
        """L and R₃ of the kernel from x, (*shape, u, 2)."""
        assert tables.density is not None
        law, corners, _ = self._place(tables, x, t)
        return sum((w[..., None, None] * tables.density[law, i, j] for w, i, j in corners), jnp.zeros(()))

    def _place(self, tables: Tables, x, t):
        """Which law, weights and places of the four entries (τ, y_0) around a state, and τ."""
        share = self.clock.share(t)
        tau = share if tables.separable else t
        i, a = _position(tables.place(tau), 0.0, 1.0, tables.frame.shape[1])
        place = tables.span().place(x, jnp)
        j, b = _position(place, 0.0, 1.0, tables.residual.shape[2])
        corners = [(u * v, i + di, j + dj) for u, di in ((1 - a, 0), (a, 1)) for v, dj in ((1 - b, 0), (b, 1))]
        return (0 if tables.law is None else tables.law), corners, tau

    def _frame(self, tables: Tables, x, t) -> tuple[Array, Array]:
        """Mean and deviation of the kernel from x."""
        law, _, tau = self._place(tables, x, t)
        received = self.clock.share(t) * self.clock.totals_of(x.shape)
        i, a = _position(tables.place(tau), 0.0, 1.0, tables.frame.shape[1])
        span = tables.span()
        k, c = _position(span.place(x, jnp), 0.0, 1.0, FRAMES)
        frame = jnp.zeros((*x.shape, 2), tables.frame.dtype)
        for w, di, dk in ((1 - a) * (1 - c), 0, 0), ((1 - a) * c, 0, 1), (a * (1 - c), 1, 0), (a * c, 1, 1):
            frame = frame + w[..., None] * tables.frame[law, i + di, k + dk]
        inside = (x >= span.low) & (x <= span.high)
        mean = jnp.where(inside, x + tau * frame[..., 0], jnp.nan).astype(x.dtype)
        return mean, (jnp.sqrt(received) * frame[..., 1]).astype(x.dtype)

    def _draw(self, tables: Tables, x, t, z) -> Draw:
        law, corners, _ = self._place(tables, x, t)
        mean, scale = self._frame(tables, x, t)

        def one(z):
            k, c = _position(jnp.clip(z, Z[0], Z[-1]), Z[0], Z[-1], len(Z))
            found = jnp.zeros((*x.shape, 2), tables.residual.dtype)
            for w, i, j in corners:
                for v, dk in ((1 - c, 0), (c, 1)):
                    found = found + (w * v)[..., None] * tables.residual[law, i, j, k + dk]
            return mean + scale * (z + found[..., 0]), (-z + found[..., 1]) / scale

        y, score = jax.vmap(one)(jnp.stack([z, -z]) if self.antithetic else z[None])
        return Draw(t, y.astype(x.dtype), score.astype(x.dtype), scale, mean)


def _typical_spread(tables: Tables, starts: Starts) -> Array | None:
    """`S/√(T σ)`, its root mean square over typical starts of each coordinate: coordinates that share a table, and only
    they, would otherwise have that of each other's data."""
    if starts.x is None:
        return None
    x = np.quantile(np.asarray(starts.x, float), _TYPICAL, axis=0)
    k, c = _position(jnp.asarray(tables.span().place(x)), 0.0, 1.0, tables.frame.shape[2])
    law = 0 if tables.law is None else tables.law
    low, high = (tables.frame[law, :, k + dk, 1] for dk in (0, 1))  # (starts, *shape, times)
    found = low + c[..., None] * (high - low)
    return jnp.moveaxis(jnp.sqrt(jnp.mean(found**2, axis=0)), -1, 0)


def look_up(rows, u) -> tuple[Array, Array]:
    """`log(S q)` and `S ∂ log q` from entries (*shape, u, 2) of the second table, at u."""
    ends = jnp.clip(u, U[0], U[-1])
    k, c = _position(ends, U[0], U[-1], len(U))
    low, high = (jnp.take_along_axis(rows, (k + dk)[..., None, None], axis=-2)[..., 0, :] for dk in (0, 1))
    level, slope = jnp.moveaxis(low + c[..., None] * (high - low), -1, 0)
    return level + slope * (u - ends) - 0.5 * u**2, slope - u


def _position(value, low: float, high: float, points: int) -> tuple[Array, Array]:
    """Index of the grid cell that holds the value, and where in it; clamped to the grid."""
    place = jnp.clip((value - low) * ((points - 1) / (high - low)), 0.0, points - 1.0)
    index = jnp.minimum(place.astype(jnp.int32), points - 2)
    return index, place - index


def _check_elementwise(process: Process, shape: tuple[int, ...]) -> None:
    if not isinstance(process.structure_for(shape), Elementwise):
        raise ValueError(
            "the tabulated kernel needs a drift that acts on each coordinate alone, and a scalar or diagonal "
            "diffusion; this process couples coordinates. Use PathwiseDSM, or LocalDSM where g is singular. If it "
            'does not, declare Process(..., structure="elementwise").'
        )


def _given(
    process: Process, shape: tuple[int, ...], y_range: tuple[float, float], clock: Clock, *, density: bool
) -> Tables:
    """Tables of a range that was given."""
    _check_elementwise(process, tuple(shape))
    found = find_tables(process, tuple(shape), Starts(y_range, None), clock=clock, density=density)
    if isinstance(found, str):
        raise ValueError(found)
    return found
