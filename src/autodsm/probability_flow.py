"""The probability flow `y' = v(y, t) = f − ½ Q s`, an ordinary equation whose solutions have the law of the process.

Along it the density is known: `d log q/dt = −∇·v`. Solved by diffrax (Tsitouras 5(4), adaptive), in either direction of
time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._types import PRNGKey, State, StateLike
from .errors import as_floating, check_positive, is_concrete
from .noise import apply_Q, trace_directions
from .process import Process

_MAX_SOLVER_STEPS = 1 << 14


class Flow(NamedTuple):
    """States along the flow, and what the logarithm of the density gained since the first of the times."""

    y: Float[Array, "times ..."]
    gain: Float[Array, " times"]


def velocity(process: Process, score: Callable, y: State, t) -> State:
    """`v = f − ½ Q s` at one state."""
    return process.f(y, t) - 0.5 * apply_Q(process, t, score(y, t)).astype(y.dtype)


def flow(process: Process, score: Callable, y0: StateLike, times: StateLike, *, tol: float = 1e-5) -> Array:
    """States at `times` of the solution through `y0` at `times[0]`, (len(times), *y0.shape).

        ys = flow(process, score, y0, [0.0, 1.0, 2.0])             # with the physical system, forwards
        y = flow(process, score, y1, [process.t1, 0.001])[-1]      # from the prior, backwards

    One state; batch by `jax.vmap`. `times` increase or decrease. `tol` bounds the error of each step, relative and
    absolute.
    """
    return flow_with_density(process, score, y0, times, tol=tol, divergence=None).y


def flow_with_density(
    process: Process,
    score: Callable,
    y0: StateLike,
    times: StateLike,
    *,
    tol: float = 1e-5,
    divergence: str | None = "exact",
    probes: int | None = None,
    key: PRNGKey | None = None,
) -> Flow:
    """The same, with `log q_t(y_t) − log q(y0)` at each time.

    `divergence="exact"` takes one derivative for each coordinate; "hutchinson" estimates it, without bias in the gain,
    from `probes` (1) random directions that stay the same along the path, and needs a `key`.
    """
    y0 = as_floating(y0)
    times = _check_times(process, times)
    check_positive("tol", tol)
    check_score(score, y0.shape, y0.dtype)
    along = trace_directions(divergence, probes, key, y0)
    found = _solve(process, score, y0, times.astype(y0.dtype), along, tol)
    if is_concrete(found) and not bool(jnp.all(jnp.isfinite(found.y))):
        raise lost(process, score, y0[None], np.asarray(times))
    return found


@eqx.filter_jit
def _solve(process: Process, score, y0: State, times: Array, along: Array | None, tol: float) -> Flow:
    start = (y0, jnp.zeros((), y0.dtype))
    if len(times) == 1:
        return Flow(y0[None], jnp.zeros(1, y0.dtype))

    def rates(t, state, args):
        def v(y):
            return velocity(process, score, y, t)

        if along is None:
            return v(state[0]), jnp.zeros_like(state[1])
        value, push = jax.linearize(v, state[0])
        return value, -jnp.sum(jax.vmap(lambda e: jnp.sum(e * push(e)))(along))

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Tsit5(),
        times[0],
        times[-1],
        dt0=None,
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=tol, atol=tol),
        max_steps=_MAX_SOLVER_STEPS,
        throw=False,
    )
    assert solution.ys is not None  # for the type checker
    return Flow(*solution.ys)


def check_score(score: Callable, shape: tuple[int, ...], dtype: Any = float) -> None:
    """Refuse what is not a function `score(y, t)` that returns the shape of the state."""
    if not callable(score):
        raise TypeError(f"score={score!r} must be a function score(y, t), e.g. the .score of a fitted model.")
    out = jax.eval_shape(score, jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), dtype))
    if getattr(out, "shape", None) != shape:
        raise ValueError(
            f"score returned shape {getattr(out, 'shape', type(out).__name__)} for a state of shape {shape}; it must "
            "return the state's shape. The score is called with ONE state and a time."
        )


def lost(process: Process, score: Callable, ys: Array, times: np.ndarray) -> FloatingPointError:
    """The error for paths that left the finite numbers: at which time the score did, as far as that can be found."""
    grid = np.interp(np.linspace(0, len(times) - 1, 257), np.arange(len(times)), times)
    ys = jnp.asarray(ys)
    batched = jax.jit(jax.vmap(lambda y, t: (score(y, t), velocity(process, score, y, t)), in_axes=(0, None)))
    previous = float(times[0])
    for t in (*map(float, grid), float(times[-1])):  # the last one twice: the score is looked at before each step
        if not bool(jnp.all(jnp.isfinite(ys))):
            break
        found, speed = batched(ys, jnp.asarray(previous, ys.dtype))
        if bad := int(jnp.sum(~jnp.all(jnp.isfinite(found.reshape(len(ys), -1)), axis=1))):
            return FloatingPointError(
                f"the score is not finite at t={previous:g}, for {bad} of {len(ys)} states. A score that is singular "
                "there needs to stop earlier: give t0=... (or times=...) away from it."
            )
        ys, previous = ys + (t - previous) * speed, t
    return FloatingPointError(
        f"paths from t={times[0]:g} to t={times[-1]:g} left the finite numbers, though the score is finite along the "
        "flow. The drift or the score may be too steep: take more steps, a smaller tol, or a shorter span of times."
    )


def _check_times(process: Process, times) -> Array:
    times = as_floating(times)
    if times.ndim != 1 or len(times) == 0:
        raise ValueError(f"times has shape {times.shape}; it must be a list of times, e.g. [0.0, {process.t1:g}].")
    if is_concrete(times):
        values = np.asarray(times, float)
        steps = np.diff(values)
        if not (np.all(np.isfinite(values)) and (np.all(steps > 0) or np.all(steps < 0))):
            raise ValueError(f"times={values} must increase, or decrease, from one to the next.")
        if values.min() < 0 or values.max() > process.t1 * (1 + 1e-6):
            raise ValueError(
                f"times from {values[0]:g} to {values[-1]:g} leave the span of the process, [0, {process.t1:g}]. Build "
                "the Process with a larger t1."
            )
    return times
