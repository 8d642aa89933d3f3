"""The kinetic target: for noise in some coordinates v only, which reaches the others, x, through one derivative.

    x' = f_x(x, v, t),    dv = f_v(x, v, t) dt + g(t) dw,    ∂f_x/∂v of full row rank at every state

as positions are reached through velocities. A target is the sum of the noise of a window [s, t], weighted so that its
mean given y_t is `∂_v log q(y_t)`: see `shifts`. It has no linearization, and is exact for the steps of the path, for
any window; the window's length changes its variance only. Each draw has a window of its own, from a state y_s of
`Paths`. Coordinates without noise have no score here: a loss weighs them with their noise, which is none.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import SMALL, jit_once
from ..base.linalg import MAX_UNROLLED
from ..base.modules import replace
from ..paths.initial import LOOK, initial_states
from ..process.clock import Clock
from ..process.process import Process
from ..process.structure import Elementwise
from .adapted import TOL_WEIGHTED
from .base import AbstractTarget, Draw
from .paths import Paths
from .shifts import Kinds, follow

MAX_STEPS, LEAST_STEPS = 24, 6
"""Steps of a window. A plan costs matrix products in proportion to the steps that are left."""
EARLIEST_START = 1 / 16
"""Of the window's end, in the process' own time: before it rare far starts of a heavy law may need shorter steps than
the window has, which `Paths` takes. It costs a sixteenth of the window."""
PER_PATH = 8
"""Draws from one path: two thirds of the cost of a draw are then its own window, for the swimmer."""
ENOUGH = 1.1
"""The shortest window is taken whose `E|ŝ|²` is within this factor of the least: shorter ones take fewer steps."""
LEAST_RANK = 1e-2
"""Smallest singular value of `∂f_x/∂v` over pilot states, in units of the size of its rows and of the noise, below
which it is taken to vanish somewhere: of 4,096 Gaussian values of v, the least is below 10⁻³."""


class Kinetic(AbstractTarget):
    """Targets from paths over windows of their own, for noise in some coordinates.

        target = Kinetic(process, Paths(process), window=0.2)

    **Arguments:**

    - `forward`: paths to the window's start.
    - `window`: its length, a share of the process' own time `½ t/t1 + ½ G(t)/G(t1)`; until `prepared` chooses it, 0.1.
    - `count`: steps of a window; until `prepared` chooses it, 12.
    """

    process: Process
    forward: Paths
    window: Array | None
    count: int | None = eqx.field(static=True)
    elapsed: Float[Array, " points"]
    """The process' own time, at even times."""

    def __init__(
        self,
        process: Process,
        forward: Paths,
        *,
        window: float | None = None,
        count: int | None = None,
        clock: Clock | None = None,
    ):
        if window is not None and not 0 < window <= 1:
            raise ValueError(f"window={window} must be a share of the process' time, above 0 and at most 1.")
        if count is not None and count < 2:
            raise ValueError(f"count={count} must be at least two steps.")
        self.process, self.forward, self.count = process, forward, count
        self.window = None if window is None else jnp.asarray(window, float)
        even = np.linspace(0.0, 1.0, 4097)
        with jax.ensure_compile_time_eval():
            share = np.asarray((clock or Clock(process)).share(jnp.asarray(process.t1 * even[1:])), float)
        self.elapsed = jnp.asarray(0.5 * even + 0.5 * np.concatenate([[0.0], share]), float)

    def draw(self, x, times, *, key):
        start_key, noise_key = jax.random.split(key)
        times, n = jnp.asarray(times, x.dtype), 2 * self.window_steps + 1
        kinds = kinds_of(self.process, x.shape)
        if isinstance(kinds, str):
            raise ValueError(f"the kinetic target cannot be used: {kinds}. Use LocalDSM instead.")
        knots = jax.vmap(self._knots)(times)
        starts = self.forward.states(x, knots[:, 0], key=start_key)
        xi = jax.random.normal(noise_key, (len(times), n, *self.process.noise_shape(x.shape)), x.dtype)
        y, score, scale = jax.vmap(lambda *each: follow(self.process, kinds, *each))(starts, knots, xi)
        return jax.lax.stop_gradient(Draw(times, y[:, None], score[:, None], scale, None))

    def states(self, x, times, *, key):
        return self.forward.states(x, times, key=key)

    def draws_per_path(self, shape):
        return PER_PATH

    @property
    def window_steps(self) -> int:
        return 12 if self.count is None else self.count

    def prepared(self, pilot):
        if (problem := kinetic_problem(pilot)) is not None:
            raise ValueError(f"the kinetic target cannot be used: {problem}. Use LocalDSM instead.")
        ready = replace(self, forward=self.forward.prepared(pilot))
        whole = pilot.paths(TOL_WEIGHTED).steps  # that a path to t1 needs
        if self.window is None:
            pilot.report("pilot: length of the windows …")
            ready = replace(ready, window=jnp.asarray(choose_window(ready, pilot, whole), float))
        if self.count is None:
            assert ready.window is not None
            count = int(np.clip(math.ceil(float(ready.window) * whole), LEAST_STEPS, MAX_STEPS))
            ready = replace(ready, count=count)
        return ready

    def _knots(self, t) -> Array:
        """Ends of the steps of the window that ends at t, even in the process' own time."""
        even = self.process.t1 * jnp.linspace(0.0, 1.0, len(self.elapsed))
        end = jnp.interp(t, even, self.elapsed)
        start = jnp.maximum(end - (0.1 if self.window is None else self.window), EARLIEST_START * end)
        knots = jnp.interp(jnp.linspace(start, end, self.window_steps + 1), self.elapsed, even)
        share = (knots - knots[0]) / (knots[-1] - knots[0])  # the end is t, whatever rounding makes of it
        return (knots[0] + (t - knots[0]) * share).astype(t.dtype)


def kinds_of(process: Process, shape: tuple[int, ...]) -> Kinds | str:
    """Which coordinates are noisy; or why the noise is not of the kind that this target is for."""
    structure = process.structure_for(shape)
    if isinstance(structure, Elementwise):
        return "the drift couples no coordinates, so noise reaches none but its own"
    if structure.rows > MAX_UNROLLED:
        return f"{structure.rows} coordinates are coupled to each other (limit {MAX_UNROLLED})"
    with jax.ensure_compile_time_eval():
        # Both ends of the span, where a schedule may begin or end without noise, are left out.
        covs = [np.asarray(structure.noise_cov(process.g(share * process.t1)), float) for share in _SHARES]
    covs = np.stack(covs).reshape(-1, structure.rows, structure.rows)
    marks = np.diagonal(covs, axis1=1, axis2=2) > 0
    if (marks != marks[0]).any():
        return "which coordinates have noise is not the same at all times and pixels"
    if not marks[0].any() or marks[0].all():
        return "noise enters all coordinates" if marks[0].any() else "there is no noise"
    kinds = Kinds(np.flatnonzero(~marks[0]), np.flatnonzero(marks[0]))
    among = covs[:, kinds.v[:, None], kinds.v]
    deviation = np.sqrt(np.diagonal(among, axis1=1, axis2=2))
    correlations = among / (deviation[:, :, None] * deviation[:, None, :])
    if np.linalg.eigvalsh(correlations)[:, 0].min() < LEAST_RANK**2:
        return "the noise of coordinates that have some is singular: fewer sources than coordinates"
    return kinds


_SHARES = (np.arange(16) + 0.5) / 16
"""Of t1, at which pilots look."""
_NUMBERS = 1 << 16
"""In the starts of a pilot, at most: each pixel of a large state is a draw of its own."""
_HELD = 1 << 26
"""Numbers that a pilot holds at once: 256 MB."""


def kinetic_problem(pilot) -> str | None:
    """Why this target does not apply to the process of a `Pilot`, or None where it does."""
    process, structure = pilot.process, pilot.structure
    kinds = kinds_of(process, pilot.shape)
    if isinstance(kinds, str):
        return kinds
    times = jnp.asarray(process.t1 * _SHARES, float)
    paths = pilot.paths()

    def slopes(x, key):  # ∂f_x/∂v along a path, in units of the noise
        states = paths.states(x, times.astype(x.dtype), key=key)
        found = jax.vmap(lambda y, t: structure.jacobian(lambda y: process.f(y, t), y)[1])(states, times)
        return found[..., kinds.x[:, None], kinds.v]

    x = jnp.asarray(pilot.x)[: _looks(pilot)]
    every = _of_each(slopes, len(x), numbers=paths.steps * x[0].size, large=x[0].size > SMALL)
    found = every((x, jax.random.split(pilot.key, len(x))))
    noise = jnp.broadcast_to(pilot.clock.totals_of(pilot.shape), pilot.shape)
    units = np.sqrt(np.asarray(structure.split(noise), float)[..., None, kinds.v])
    found = np.moveaxis(np.asarray(found, float) * units, 1, 0)  # (times, paths, *sites, x, v)
    found = found.reshape(len(times), -1, len(kinds.x), len(kinds.v))
    sizes = np.sqrt(np.mean(np.sum(found**2, axis=-1), axis=1))  # of each row, at each time
    if not sizes.all():
        which = tuple(int(i) for i in kinds.x[~sizes.all(axis=0)])
        return f"noise reaches noiseless coordinates {which} of a site through more than one derivative, or not at all"
    scaled = found / sizes[:, None, :, None]
    smallest = np.linalg.svd(scaled, compute_uv=False)[..., -1] if len(kinds.v) >= len(kinds.x) else np.zeros(1)
    turns = len(kinds.v) == len(kinds.x) and (np.ptp(np.sign(np.linalg.det(scaled)), axis=1) > 0).any()
    if turns or smallest.min() < LEAST_RANK:
        return "the derivative of the noiseless coordinates' drift by the noisy ones has no full rank at some states"
    return None


def _looks(pilot) -> int:
    """Paths of a pilot."""
    return int(np.clip(_NUMBERS // math.prod(pilot.shape), 16, LOOK))


def _of_each(one, n: int, *, numbers: int, large: bool):
    """`one` of each of n paths, so many at once that their numbers, given for one path, fit into memory."""
    size = int(np.clip(_HELD // numbers, 1, n))
    every = lambda given: jax.lax.map(lambda each: one(*each), given, batch_size=size)  # noqa: E731
    return jit_once(every, optimize=large)


def choose_window(target: Kinetic, pilot, whole: int) -> float:
    """The shortest window whose `E|ŝ|²` is near the least, over twelve times, in units of the noise.

    `E|ŝ|² = E|score|² + noise`. `whole` are steps that a path to t1 needs: no window has more than MAX_STEPS of them.
    """
    process, n = target.process, _looks(pilot)
    x = initial_states(pilot.y0, LOOK, key=pilot.key)[:n]
    # Early windows reach back to the start, however long they may be.
    times = process.t1 * jnp.linspace(0.1, 1.0, 12, dtype=x.dtype)
    units = pilot.clock.totals_of(x.shape[1:]) / jnp.max(pilot.clock.totals)

    def moment(x, key, window):
        trial = replace(target, window=window, count=MAX_STEPS)
        return jnp.mean(units * trial.draw(x, times, key=key).score ** 2)

    windows = min(1.0, MAX_STEPS / whole) * 0.5 ** np.arange(6.0)
    numbers = max(len(times) * 8 * MAX_STEPS, target.forward.steps) * x[0].size
    every, keys = _of_each(moment, n, numbers=numbers, large=x[0].size > SMALL), jax.random.split(pilot.key, n)
    moments = [every((x, keys, jnp.full(n, window))) for window in windows]
    moments = np.mean(np.asarray(moments, float), axis=1)
    if not np.isfinite(moments).any():
        raise ValueError("kinetic targets are not finite on pilot paths; give more steps=..., or a shorter window.")
    moments = np.where(np.isfinite(moments), moments, np.inf)
    return float(windows[moments <= ENOUGH * moments.min()].min())
