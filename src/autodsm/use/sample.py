"""Samples from a generative model: a score, run backwards in time from a prior.

- `method="sde"`, the reversed process: `dz = [Q s − f](z, t1 − τ) dτ + g(t1 − τ) dw`. Steps of Heun's rule on a grid
  that is half even in t and half in log G; or, with `tol`, steps that adapt to the state. After each fixed step,
  `corrector` steps of `dz = ½ Q s dτ + g dw`, which leaves the law at t as it is and mends what the step did to it.
- `method="ode"`, the probability flow, which also knows the density of its samples.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from rich.progress import track

from ..base.errors import as_double, as_shape, check_count, check_key, check_name, check_number, suggest_options
from ..base.estimate import chunk_for
from ..base.types import PRNGKey, State
from ..network import state_shape
from ..paths.schemes import SOLVERS
from ..paths.simulate import _simulate
from ..process.clock import EARLIEST, TimeLaw
from ..process.noise import DIVERGENCES, apply_Q
from ..process.priors import draw_prior, log_prior, prior_shape
from ..process.process import Process, check_process
from .flow import check_score, flow_with_density, lost

DEFAULT_STEPS = 250


class Samples(NamedTuple):
    """Samples with the logarithm of the model's density at them."""

    y: np.ndarray
    log_density: np.ndarray


@suggest_options()
def sample(
    process: Process,
    score: Callable,
    prior,
    n: int,
    *,
    key: PRNGKey,
    shape: tuple[int, ...] | None = None,
    method: str = "sde",
    steps: int | None = None,
    tol: float | None = None,
    corrector: int = 0,
    t0: float | None = None,
    times=None,
    log_density: bool = False,
    divergence: str = "exact",
    chunk: int | None = None,
    progress: bool = False,
) -> np.ndarray | Samples:
    """n samples, (n, *shape), at time t0.

        y = sample(process, model.score, prior, 10_000, key=key)

    **Arguments:**

    - `prior`: the law at t1. An object with `sample(key, shape)`, such as a numpyro distribution; one over a number is
      taken for every coordinate. Or a function `prior(key, n)`.
    - `shape`: of a state, where neither the prior nor the network says it.
    - `method`: "sde" or "ode".
    - `steps`: of "sde", 250 unless given; `tol`: of "ode" (10⁻⁵), or of adaptive steps of "sde". There errors exceed
      tol: with tol = 0.01 variances of an Ornstein–Uhlenbeck process came out 2 and 8 % low, with 0.001 by 1 to 2 %.
    - `corrector`: Langevin steps after each step of "sde".
    - `t0`: where to stop, by default `t1/1000`, where training starts.
    - `times`: decreasing; the states at all of them are returned, (len(times), n, *shape).
    - `log_density`: return `Samples` with log-densities as well; for "ode". `divergence`: "exact" or "hutchinson".
    - `chunk`: how many are made at once.
    """
    check_process(process)
    check_key(key)
    check_count("n", n)
    check_name("method", method, ("sde", "ode"))
    check_name("divergence", divergence, DIVERGENCES)
    _check_options(method, steps, tol, corrector, log_density, times, prior)
    stops = _stops(process, t0, times)
    start_key, path_key = jax.random.split(key)
    shape = None if shape is None else as_shape(shape)
    if shape is None and (shape := prior_shape(prior)) is None:
        shape = state_shape(score)
    starts = draw_prior(prior, n, shape, key=start_key)
    shape = starts.shape[1:]
    process.check(starts[0], process.t1)
    check_score(score, shape, starts.dtype)
    numbers = math.prod(shape) * (len(stops) + (math.prod(shape) if log_density and divergence == "exact" else 0))
    chunk = chunk_for(numbers) if chunk is None else chunk
    check_count("chunk", chunk)
    gained = divergence if log_density else None
    grid = np.concatenate([[process.t1], stops])
    if method == "sde" and tol is None:
        grid = _grid(process, stops, DEFAULT_STEPS if steps is None else steps)
    return _in_chunks(process, score, prior, starts, path_key, method, grid, stops, tol, corrector, gained,
                      chunk=min(chunk, n), keep_times=times is not None, progress=progress)  # fmt: skip


def sampler(process: Process, score: Callable, steps: int | None = None) -> Callable[[State, PRNGKey], State]:
    """`(y, key) -> y_0`: one state, from a draw of the prior, by fixed steps of the reversed process, as `sample`."""
    check_count("steps", steps := DEFAULT_STEPS if steps is None else steps)
    stops = _stops(process, None, None)
    grid = _grid(process, stops, steps)
    slots = jnp.asarray((grid[1:] != stops[0]).astype(int))
    return lambda y, key: _fixed(process, score, y, key, jnp.asarray(grid, y.dtype), slots, 1, 0)[0]


def _in_chunks(
    process, score, prior, starts, key, method, grid, stops, tol, corrector, gained, *, chunk, keep_times, progress
) -> np.ndarray | Samples:
    n = len(starts)
    keys = jax.random.split(key, n)
    pieces, logs = [], []
    where = range(0, n, chunk)
    for i in track(where, description="sampling", disable=not progress):
        taken = np.minimum(np.arange(i, i + chunk), n - 1)  # the last chunk is filled up: one compilation serves all
        y, gain = _run(process, score, starts[taken], keys[taken], method, jnp.asarray(grid, starts.dtype),
                       jnp.asarray(stops, starts.dtype), tol, corrector, gained)  # fmt: skip
        y, count = np.asarray(y), min(chunk, n - i)
        bad = ~np.all(np.isfinite(y.reshape(len(y), -1)), axis=1)
        if bad.any():
            raise lost(process, score, starts[taken][np.flatnonzero(bad)[:256]], grid)
        pieces.append(y[:count])
        if gained is not None:
            logs.append(np.asarray(log_prior(prior, starts[taken]) + gain)[:count])
    y = np.concatenate(pieces)
    y = np.moveaxis(y, 1, 0) if keep_times else y[:, -1]
    return Samples(y, np.concatenate(logs)) if logs else y


@eqx.filter_jit
def _run(process, score, starts, keys, method, grid, stops, tol, corrector, gained) -> tuple[Array, Array]:
    """States at `stops`, (chunk, stops, *shape), and the gain of log-density up to the last."""
    if method == "ode":
        given: dict = dict(tol=1e-5 if tol is None else tol, divergence=gained)
        found = jax.vmap(lambda y, k: flow_with_density(process, score, y, grid, key=k, **given))(starts, keys)
        return found.y[:, 1:], found.gain[:, -1]
    if tol is not None:
        backwards = reverse(process, score)

        def adaptive(y, key):
            # Unchecked: what is not finite is looked into, with its time, when all samples are there.
            return _simulate(backwards, y, process.t1 - stops, key, "heun", None, tol, 0.0, False)

        return jax.vmap(adaptive)(starts, keys), jnp.zeros(len(starts))
    slots = jnp.searchsorted(-stops, -grid[1:])  # the place of a time among the stops, if it is one of them
    slots = jnp.where(stops[jnp.minimum(slots, len(stops) - 1)] == grid[1:], slots, len(stops))
    return jax.vmap(lambda y, k: _fixed(process, score, y, k, grid, slots, len(stops), corrector))(
        starts, keys
    ), jnp.zeros(len(starts))


def _fixed(process: Process, score, y: State, key, grid, slots, stops: int, corrector: int) -> Array:
    backwards, step = reverse(process, score), SOLVERS["heun"].step
    noise_shape = process.noise_shape(y.shape)

    def advance(carry, inputs):
        y, saved = carry
        start, end, slot, key = inputs
        h = start - end
        noise = jnp.sqrt(h) * jax.random.normal(key, (1 + corrector, *noise_shape), y.dtype)
        tau = process.t1 - start
        y = step(backwards, y, backwards.f(y, tau), tau, h, noise[0])
        for i in range(corrector):
            kick = process.diffuse(end, noise[1 + i], y.shape)
            pull = 0.5 * h * _Q_score(process, score, y, end)
            ahead = 0.5 * h * _Q_score(process, score, y + pull + kick, end)
            y = y + 0.5 * (pull + ahead) + kick
        return (y, saved.at[slot].set(y, mode="drop")), None

    saved = jnp.zeros((stops, *y.shape), y.dtype)
    steps = (grid[:-1], grid[1:], slots, jax.random.split(key, len(grid) - 1))
    return jax.lax.scan(advance, (y, saved), steps)[0][1]


def reverse(process: Process, score: Callable) -> Process:
    """The reversed process in the time `τ = t1 − t`."""

    def drift(z, tau):
        t = process.t1 - tau
        return _Q_score(process, score, z, t) - process.f(z, t)

    return Process(drift, lambda tau: process.g(process.t1 - tau), process.t1, structure="dense")


def _Q_score(process: Process, score, y: State, t) -> State:
    return apply_Q(process, t, score(y, t)).astype(y.dtype)


def _grid(process: Process, stops: np.ndarray, steps: int) -> np.ndarray:
    """Times from t1 down to the last of the stops, through all of them."""
    law = TimeLaw(process, "mixed", float(stops[-1]))
    halves = np.linspace(0.0, 0.5, steps // 2 + 1)[:-1], np.linspace(0.5, 1.0, steps - steps // 2 + 2)[1:-1]
    times = np.asarray(law.at(jnp.asarray(np.concatenate(halves))), float)
    between = [t for t in times if stops[-1] < t < process.t1 and np.min(np.abs(stops - t)) > 1e-6 * process.t1]
    return np.unique([process.t1, *stops, *between])[::-1]


def _stops(process: Process, t0: float | None, times) -> np.ndarray:
    if times is None:
        t0 = EARLIEST * process.t1 if t0 is None else t0
        check_number("t0", t0)
        if not 0 < t0 < process.t1:
            raise ValueError(f"t0={t0} must lie inside (0, t1) = (0, {process.t1}): sampling stops there.")
        return np.array([t0], float)
    if t0 is not None:
        raise ValueError(f"t0={t0} and times={times} exclude each other: sampling stops at the last of the times.")
    times = np.atleast_1d(as_double(times, "times"))
    inside = times.ndim == 1 and times.size > 0 and times[-1] > 0 and times[0] < process.t1
    if not inside or np.any(np.diff(times) >= 0):
        raise ValueError(f"times={times} must decrease within (0, t1) = (0, {process.t1}).")
    return times


def _check_options(method, steps, tol, corrector, log_density, times, prior) -> None:
    if steps is not None:
        check_count("steps", steps)
        if method == "ode" or tol is not None:
            raise ValueError(f'steps={steps} is for method="sde" without tol, whose steps are fixed.')
    if corrector:
        check_count("corrector", corrector)
        if method == "ode" or tol is not None:
            raise ValueError(f'corrector={corrector} is for method="sde" with fixed steps.')
    if log_density and (method != "ode" or times is not None or not hasattr(prior, "log_prob")):
        raise ValueError('log_density=True needs method="ode", no times, and a prior with log_prob(y).')
