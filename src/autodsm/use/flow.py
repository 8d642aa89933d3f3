"""The probability flow `y' = v(y, t) = f − ½ Q s`, an ordinary equation whose solutions have the law of the process.

Along it the density is known: `d log q/dt = −∇·v`. Solved by diffrax (Tsitouras 5(4), adaptive), in either direction of
time. It is solved for `y_i/L_i` over `t/t1`, so that tolerances have no units: L_i is the deviation of the noise that
coordinate i has received by the earliest of the times, where densities are sharpest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.calls import check_returned, shape_of
from ..base.errors import as_floating, check_callable, check_positive, is_concrete
from ..base.quadrature import NODES, WEIGHTS
from ..base.types import PRNGKey, State, StateLike
from ..process.noise import apply_Q, trace_directions
from ..process.process import Process, check_process
from ..process.structure import Elementwise, noise_kind

_MAX_SOLVER_STEPS = 1 << 14  # of an explicit rule, stable up to 3 relaxation times a step: of a span of 5·10⁴
_EARLY = 1e-3  # of t1: where the use of a trained score begins; before it, noise gives no scale
_LEAST = 1e-3  # of the deviation of all noise, for a coordinate that receives its noise late
_LOST = (
    "the flow is not finite: the score is not, or the drift or the score is too steep for so small a tol. Without jit "
    "and vmap the error names the time. Take a larger tol, or times that keep away from where the score is singular."
)


class Flow(NamedTuple):
    """States along the flow, and what the logarithm of the density gained since the first of the times."""

    y: Float[Array, "times ..."]
    gain: Float[Array, " times"]


def velocity(process: Process, score: Callable, y: State, t) -> State:
    """`v = f − ½ Q s` at one state."""
    check_process(process)
    check_callable("score", score, "score(y, t)")
    return process.f(y, t) - 0.5 * apply_Q(process, t, score(y, t)).astype(y.dtype)


def flow(process: Process, score: Callable, y0: StateLike, times: StateLike, *, tol: float = 1e-5) -> Array:
    """States at `times` of the solution through `y0` at `times[0]`, (len(times), *y0.shape).

        ys = flow(process, score, y0, [0.0, 1.0, 2.0])             # with the physical system, forwards
        y = flow(process, score, y1, [process.t1, 0.001])[-1]      # from the prior, backwards

    One state; batch by `jax.vmap`. `times` increase or decrease. `tol` bounds the error of each step, relative to the
    state or to the noise received by the earliest of the times.
    """
    return refuse_lost(flow_with_density(process, score, y0, times, tol=tol, divergence=None)).y


def refuse_lost(found: Flow) -> Flow:
    """The same; under `jit` and `vmap` an error, as it runs, for a flow that is not finite."""
    if is_concrete(found):  # looked at before, with the time at which it was lost
        return found
    wrong = ~(jnp.all(jnp.isfinite(found.y)) & jnp.all(jnp.isfinite(found.gain)))
    return eqx.error_if(found, wrong, _LOST)


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
    check_process(process)
    y0 = as_floating(y0, "y0")
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
    if len(times) == 1:
        return Flow(y0[None], jnp.zeros(1, y0.dtype))
    unit = _units(process, y0, jnp.min(times))

    def rates(part, state, args):
        t = part * process.t1

        def v(y):
            return process.t1 * velocity(process, score, y, t)

        if along is None:
            return v(unit * state[0]) / unit, jnp.zeros_like(state[1])
        value, push = jax.linearize(v, unit * state[0])
        return value / unit, -jnp.sum(jax.vmap(lambda e: jnp.sum(e * push(e)))(along))

    parts = times / process.t1

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Tsit5(),
        parts[0],
        parts[-1],
        dt0=None,
        y0=(y0 / unit, jnp.zeros((), y0.dtype)),
        saveat=diffrax.SaveAt(ts=parts),
        stepsize_controller=diffrax.PIDController(rtol=tol, atol=tol),
        max_steps=_MAX_SOLVER_STEPS,
        throw=False,
    )
    assert solution.ys is not None  # for the type checker
    return Flow(unit * solution.ys[0], solution.ys[1])


def _units(process: Process, y0: State, earliest: Array) -> State:
    """L, in powers of two, which do not round: `√∫Q_ii` to the earliest time, or where no noise enters, what the
    coordinate is and what the drift makes of the noise of the others."""

    def received(end):
        times = end * jnp.asarray(NODES, y0.dtype)
        rates = jax.vmap(lambda t: jnp.broadcast_to(_noise_rates(process, t, y0), y0.shape))(times)
        return end * jnp.tensordot(jnp.asarray(WEIGHTS, y0.dtype), rates, 1)

    early = jnp.maximum(earliest, _EARLY * process.t1).astype(y0.dtype)
    noise = jnp.sqrt(jnp.maximum(received(early), _LEAST**2 * received(jnp.asarray(process.t1, y0.dtype))))
    _, passed_on = jax.jvp(lambda y: process.f(y, early), (y0,), (noise,))
    scale = jnp.where(noise > 0, noise, jnp.abs(y0) + process.t1 * jnp.abs(passed_on))
    scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1.0)  # at rest in 0: any unit will do
    return jnp.ldexp(jnp.ones_like(y0), jnp.frexp(scale)[1])


def _noise_rates(process: Process, t, y: State) -> State:
    """`Q_ii`."""
    g = process.g(t).astype(y.dtype)
    if noise_kind(g.shape, y.shape) == "matrix":
        structure = process.structure_for(y.shape)
        return structure.join(jnp.diagonal(structure.noise_cov(g), axis1=-2, axis2=-1))
    return Elementwise(y.shape).noise_cov(g)


def check_score(score: Callable, shape: tuple[int, ...], dtype: Any = float) -> None:
    """Refuse what is not a function `score(y, t)` that returns the shape of the state."""
    check_callable("score", score, "score(y, t), e.g. the .score of a fitted model")
    example = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), dtype))
    out = shape_of("score", score, *example)
    check_returned("score", out, shape)


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
    times = as_floating(times, "times")
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
