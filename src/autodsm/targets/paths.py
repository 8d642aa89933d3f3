"""Forward states from simulated paths: one path serves many times.

A path is simulated on a fixed grid of N steps over [0, t1]. A state at time t branches off: it is reached from the
grid point before t by one shorter step with noise of its own. Steps are equal in `½ t/t1 + ½ G(t)/G(t1)`, so that they
shorten where the noise is strong; before them come a dozen that grow from a hundredth of a step, in proportion to t,
because the rare far states of an initial law may be where the drift is steep: a drift `−yᵖ` slows in proportion to t.

A step is Heun's of weak order two, but with the drift at the two times `t + (½ ∓ √3/6) h` of Gauss's rule in place of t
and t + h. That is of order two as well, and follows a force that turns with time more closely: one that depends on
time alone to order four.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.compilation import SMALL, jit_once
from ..base.errors import check_count
from ..base.types import PRNGKey
from ..paths.initial import initial_states
from ..paths.schemes import four_point
from ..paths.steps import local_error
from ..process.clock import Clock
from ..process.noise import is_invertible
from ..process.process import Process
from .base import AbstractForward

PER_PATH = 32
"""Draws from one path: more of them are alike, and fewer make the path the greater part of the cost."""
MAX_STEPS = 2048
DEFAULT_STEPS = 256
"""Steps of a path to t1, before the data are known that it starts from."""
TOL, TOL_SHARP = 0.002, 3e-4  # of `choose_steps`, which says why
_FIRST_TRY = 32  # steps of a pilot, whose local errors, in proportion to h, say how many are needed
_LENGTHS = (128, 512, MAX_STEPS + 128)
"""Points of the grids that the pilot of `choose_steps` is compiled for: 128 serve 104 steps, which most need."""
_FIRST, _SECOND = 0.5 - math.sqrt(3.0) / 6.0, 0.5 + math.sqrt(3.0) / 6.0


def time_grid(process: Process, steps: int, *, clock: Clock | None = None) -> np.ndarray:
    """Times of N steps, and of the short ones at the start."""
    fine = process.t1 * np.linspace(0.0, 1.0, 4097)
    with jax.ensure_compile_time_eval():
        noise = np.asarray(jit_once(clock or Clock(process), optimize=False)(jnp.asarray(fine[1:])), float)
    elapsed = np.concatenate([[0.0], 0.5 * fine[1:] / process.t1 + 0.5 * noise / noise[-1]])
    even = np.interp(np.linspace(0.0, 1.0, steps + 1), elapsed, fine)
    early = 0.01 * even[1] * 1.4 ** np.arange(18)
    early = early[early < 2.5 * even[1]]  # from there on steps of 0.4 t are longer than even ones
    return np.concatenate([[0.0], early, even[even > early[-1] * 1.05]])


class Paths(AbstractForward):
    """States of simulated paths, by a scheme of weak order two.

        forward = Paths(process, steps=100)
        y = forward.states(x, jnp.array([0.1, 0.7]), key=key)

    `steps` counts those after the start. When they are not given there are `DEFAULT_STEPS`, until `prepared` chooses
    as few as paths from the data need.
    """

    process: Process
    grid: Float[Array, " points"]
    given: bool = eqx.field(static=True)
    """Whether the number of steps is settled."""

    def __init__(self, process: Process, steps: int | None = None, *, clock: Clock | None = None):
        count = DEFAULT_STEPS if steps is None else steps
        check_count("steps", count)
        self.process, self.given = process, steps is not None
        self.grid = jnp.asarray(time_grid(process, count, clock=clock), float)

    def prepared(self, pilot, *, tol: float | None = None) -> "Paths":
        return self if self.given else pilot.paths(tol)

    @property
    def steps(self) -> int:
        return len(self.grid) - 1

    def states(self, x, times, *, key):
        path_key, branch_key = jax.random.split(key)
        path, index = self.trunk(x, times, key=path_key)
        starts, ends = self.grid[index].astype(x.dtype), jnp.asarray(times, x.dtype)
        noise = four_point(branch_key, (len(times), *self.process.noise_shape(x.shape)), x.dtype)
        return jax.vmap(self._step)(path[index], starts, jnp.maximum(ends - starts, 0.0), noise)

    def trunk(self, x, times, *, key) -> tuple[Float[Array, "points ..."], Array]:
        """The path at all points of the grid, and for each of `times` the index of the point before it."""
        grid = self.grid.astype(x.dtype)
        noise = four_point(key, (self.steps, *self.process.noise_shape(x.shape)), x.dtype)

        def step(y, inputs):
            y = self._step(y, *inputs)
            return y, y

        _, path = jax.lax.scan(step, x, (grid[:-1], jnp.diff(grid), noise))
        path = jax.lax.stop_gradient(jnp.concatenate([x[None], path]))
        return path, jnp.clip(jnp.searchsorted(grid, jnp.asarray(times), side="right") - 1, 0, self.steps - 1)

    def _step(self, y, t, h, z):
        f, noise = self.process.f, self.process.diffuse(t + 0.5 * h, jnp.sqrt(h) * z, y.shape)
        first = f(y, t + _FIRST * h)
        return y + 0.5 * h * (first + f(y + h * first + noise, t + _SECOND * h)) + noise


def _padded(grid: np.ndarray, x: Float[Array, "n ..."]) -> Float[Array, " points"]:
    """A grid with its last time repeated, so that one compilation serves grids of several lengths. Large states, whose
    paths take longer than a compilation, get no more than their steps."""
    length = len(grid)
    if x[0].size <= SMALL:
        length = next(n for n in _LENGTHS if n >= length)
    return jnp.asarray(np.pad(grid, (0, length - len(grid)), mode="edge"), x.dtype)


def choose_steps(
    process: Process, y0, *, key: PRNGKey, tol: float | None = None, n: int = 256, clock: Clock | None = None
) -> int:
    """The fewest steps to t1, a multiple of eight, whose local errors stay within `tol` in 99 of 100 places.

    The local error is that of `simulate`, for order two: with tol = 0.002, the default, the drift changes by a
    twentieth of itself in a step. With ten times as much, means and variances of states are still right to a percent,
    but a score learned from them belongs to another drift: the error of its flow adds up over time. Where noise enters
    only some coordinates, densities are sharp, and scores change much when paths are a little off: there it is 3·10⁻⁴.
    """
    start_key, path_key, look_key = jax.random.split(key, 3)
    x = initial_states(y0, n, key=start_key)
    if tol is None:
        tol = TOL if is_invertible(process, x.shape[1:], 0.5 * process.t1) else TOL_SHARP

    paths = Paths(process, _FIRST_TRY, clock=clock)

    def pilot(grid):  # the local error of each step, and whether it ends at a finite state
        def one(x, k, look):
            noise = four_point(k, (len(grid) - 1, *process.noise_shape(x.shape)), x.dtype)

            def step(y, inputs):
                t, h, z, key = inputs
                error = local_error(process, y, t, h, key=key, eta=np.sqrt(tol))
                y = paths._step(y, t, h, z)
                return y, (error, jnp.all(jnp.isfinite(y)))

            keys = jax.random.split(look, len(grid) - 1)
            return jax.lax.scan(step, x, (grid[:-1], jnp.diff(grid), noise, keys))[1]

        return jax.vmap(one)(x, jax.random.split(path_key, n), jax.random.split(look_key, n))

    pilot, steps = jit_once(pilot, optimize=x[0].size > SMALL), _FIRST_TRY
    while steps <= MAX_STEPS:
        grid = time_grid(process, steps, clock=clock)
        errors, finite = (np.asarray(v)[:, : len(grid) - 1] for v in pilot(_padded(grid, x)))
        if not np.all(finite):
            steps *= 4
            continue
        # The local error is proportional to h.
        needed = steps * float(np.quantile(errors, 0.99)) / np.sqrt(tol)
        if needed <= steps:
            return max(16, 8 * int(np.ceil(needed / 8)))
        if steps == MAX_STEPS:
            break
        steps = min(8 * int(np.ceil(1.1 * needed / 8)), MAX_STEPS)
    raise ValueError(
        f"{MAX_STEPS} steps to t1={process.t1} do not resolve this process: its drift is too stiff, or paths leave its "
        "domain. Check the drift with ad.simulate(process, y0, [t1], key=key), or give steps=... yourself."
    )
