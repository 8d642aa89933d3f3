"""Paths of `dy = f(y,t) dt + g(t) dw`: states at requested times.

| solver   | step                                                    | noise      | weak order |
|----------|---------------------------------------------------------|------------|------------|
| "euler"  | `y + h f(y,t) + g(t) Δ`                                 | Gaussian   | 1          |
| "heun"   | `y + ½h [f(y,t) + f(ŷ,t+h)] + g(t+½h) Δ`                | Gaussian   | 2          |
| "weak2"  | the same                                                | four-point | 2          |
| "lamba"  | Euler's, always with adaptive steps                     | Gaussian   | 1          |

with `ŷ = y + h f(y,t) + g(t+½h) Δ`. Only the law of `y_t` matters for score matching, not the path, so noise with
the right moments suffices. The four-point noise takes `±a` with probability 1/16 and `±b` with 7/16,
`a² = 1 + √14`, `b² = 1 − √(2/7)`: its first five moments are those of N(0,1), as for the classical three-point
noise, its sixth is 13.4 (Gaussian 15, three-point 9), and since its probabilities are multiples of 1/16 one random
32-bit word yields eight of them. Random bits dominate the cost of a path, so this is what makes it cheap.

**Steps.** With `steps`, each interval between requested times is cut into that many. Without, they follow from
`tol`, after Lamba (2003): h is chosen at the current state before the noise is drawn, so accepting or rejecting it
does not bias the noise. With the displacements `h f` by the drift and `√h g ζ` by noise of random signs ζ, the drift
may change over a step, in every coordinate i, by

    ½h |f(y + h f, t+h) − f|_i   ≤  η (h|f_i| + √h|g_i| + η|y_i|)
    ½h |f(y + √h g ζ, t) − f|_i  ≤  η (h|f_i| + √h|g_i|),    with + |y_i| where noise does not enter,

η = tol for order 1, √tol for order 2; the root mean square over i of left over right side must not exceed 1. In a
system that forgets as fast as it moves the relative weak error is then about tol. Errors of a weakly damped oscillator
add up over the periods it remembers; there it is a few times larger.
"""

from collections.abc import Callable
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from ._types import PRNGKey, State, StateLike
from .errors import as_floating, check_count, check_positive, is_concrete, unknown_name
from .process import Process
from .structure import Dense, expand_noise, noise_kind

_DRAW_AT_ONCE = 256  # random numbers drawn together, for one path: enough to be cheap, few enough for 10⁶ paths


def four_point(key: PRNGKey, shape: tuple[int, ...], dtype: DTypeLike = float) -> Array:
    """Random numbers with the first five moments of N(0,1), eight from each random word."""
    n = int(np.prod(shape))
    words = jax.random.bits(key, (-(-n // 8),), jnp.uint32)
    bits = words[:, None] >> (4 * jnp.arange(8, dtype=jnp.uint32))
    outer = jnp.asarray(np.sqrt(1 + np.sqrt(14)), dtype)
    inner = jnp.asarray(np.sqrt(1 - np.sqrt(2 / 7)), dtype)
    size = jnp.where((bits & 7) == 0, outer, inner)
    return jnp.where((bits & 8) == 0, size, -size).reshape(-1)[:n].reshape(shape)


def signs(key: PRNGKey, shape: tuple[int, ...], dtype: DTypeLike = float) -> Array:
    """Random signs ±1, 32 from each random word."""
    n = int(np.prod(shape))
    words = jax.random.bits(key, (-(-n // 32),), jnp.uint32)
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return (1.0 - 2.0 * bits.astype(dtype)).reshape(-1)[:n].reshape(shape)


def _euler(process: Process, y: State, f: State, t, h, dw: Array) -> State:
    return y + h * f + process.diffuse(t, dw, y.shape)


def _heun(process: Process, y: State, f: State, t, h, dw: Array) -> State:
    noise = process.diffuse(t + 0.5 * h, dw, y.shape)
    return y + 0.5 * h * (f + process.f(y + h * f + noise, t + h)) + noise


class _Scheme(NamedTuple):
    step: Callable
    noise: Callable
    order: int


SOLVERS = {
    "euler": _Scheme(_euler, jax.random.normal, 1),
    "heun": _Scheme(_heun, jax.random.normal, 2),
    "weak2": _Scheme(_heun, four_point, 2),
    "lamba": _Scheme(_euler, jax.random.normal, 1),
}


def simulate(
    process: Process,
    y0: StateLike,
    times: StateLike,
    *,
    key: PRNGKey,
    solver: str | diffrax.AbstractSolver | type = "weak2",
    steps: int | None = None,
    tol: float | None = None,
    t0: ArrayLike = 0.0,
    differentiable: bool = False,
) -> Float[Array, " times ..."]:
    """One path from `y0` at `t0`: its states at `times`, shape (len(times), *y0.shape).

        path = simulate(process, y0, jnp.linspace(0.0, 5.0, 11), key=key)
        paths = jax.vmap(lambda y, k: simulate(process, y, times, key=k))(y0s, jax.random.split(key, len(y0s)))

    **Arguments:**

    - `times`: increasing, within [t0, t1].
    - `solver`: "weak2" (the default: correct in law), "heun", "euler", "lamba", or any diffrax solver object.
    - `steps`: a fixed number of steps in each interval between consecutive times.
    - `tol`: without `steps`, they are chosen so that the relative weak error is about `tol` (default 10⁻³).
    - `differentiable`: let reverse-mode gradients through. They need fixed `steps`; by default the path is a
      constant for differentiation.
    """
    y0 = as_floating(y0)
    times = _check_times(process, times, t0)
    process.check(y0, t0)
    if isinstance(solver, type):
        raise ValueError(f"solver={solver.__name__} is a class: pass an instance, {solver.__name__}().")
    if isinstance(solver, str) and solver not in SOLVERS:
        raise unknown_name("solver", solver, SOLVERS)
    if steps is not None:
        check_count("steps", steps)
        if tol is not None:
            raise ValueError(f"steps={steps} and tol={tol} exclude each other: steps are fixed, or follow from tol.")
        if solver == "lamba":
            raise ValueError(f'solver="lamba" chooses its own steps; give tol instead of steps={steps}, or "euler".')
    elif differentiable and isinstance(solver, str):
        raise ValueError("differentiable=True needs a fixed number of steps: give steps=...")
    tol = 1e-3 if tol is None else tol
    check_positive("tol", tol)
    path = _simulate(process, y0, times.astype(y0.dtype), key, solver, steps, float(tol), t0, differentiable)
    return path if differentiable else jax.lax.stop_gradient(path)


@eqx.filter_jit
def _simulate(process, y0, times, key, solver, steps, tol, t0, differentiable) -> Array:
    if not isinstance(solver, str):
        advance = _diffrax(process, solver, y0, key, t0, steps, tol, differentiable)
    elif steps is None:
        advance = _adaptive(process, SOLVERS[solver], tol)
    else:
        advance = _fixed(process, SOLVERS[solver], steps)

    def interval(y, inputs):
        start, end, key = inputs
        y = advance(y, start, end, key)
        return y, y

    starts = jnp.concatenate([jnp.asarray(t0, y0.dtype)[None], times[:-1]])
    _, path = jax.lax.scan(interval, y0, (starts, times, jax.random.split(key, len(times))))
    return path


def _fixed(process: Process, scheme: _Scheme, steps: int) -> Callable:
    def advance(y, start, end, key):
        h = (end - start) / steps
        shape = process.noise_shape(y.shape)

        def step(y, inputs):
            i, dw = inputs
            t = start + i * h
            return scheme.step(process, y, process.f(y, t), t, h, dw), None

        def run(y, first, count, key):
            noise = jnp.sqrt(h) * scheme.noise(key, (count, *shape), y.dtype)
            return jax.lax.scan(step, y, (first + jnp.arange(count, dtype=y.dtype), noise))[0]

        together = min(steps, max(1, _DRAW_AT_ONCE // max(1, int(np.prod(shape)))))
        runs, rest = divmod(steps, together)
        keys = jax.random.split(key, runs + 1)
        if runs > 1:
            firsts = together * jnp.arange(runs, dtype=y.dtype)
            y, _ = jax.lax.scan(lambda y, x: (run(y, x[0], together, x[1]), None), y, (firsts, keys[:-1]))
        else:
            y = run(y, 0, together, keys[0])
        return run(y, together * runs, rest, keys[-1]) if rest else y

    return advance


def local_error(process: Process, y: State, t, h, *, key: PRNGKey, eta: float = 0.0, f: State | None = None) -> Array:
    """How much the drift changes over a step of length h, relative to the step: the left sides above over the right
    ones without their factor η, as a root mean square over coordinates."""
    f = process.f(y, t) if f is None else f
    tiny = jnp.finfo(y.dtype).tiny
    kick = process.diffuse(t, jax.random.rademacher(key, process.noise_shape(y.shape), y.dtype), y.shape)
    moved = h * jnp.abs(f) + jnp.sqrt(h) * jnp.abs(kick)
    by_drift = jnp.abs(process.f(y + h * f, t + h) - f) / jnp.maximum(moved + eta * jnp.abs(y), tiny)
    unkicked = jnp.where(kick == 0, jnp.abs(y), 0.0)
    by_noise = jnp.abs(process.f(y + jnp.sqrt(h) * kick, t) - f) / jnp.maximum(moved + unkicked, tiny)
    return 0.5 * h * jnp.sqrt(jnp.maximum(jnp.mean(by_drift**2), jnp.mean(by_noise**2)))


def _adaptive(process: Process, scheme: _Scheme, tol: float) -> Callable:
    eta = tol ** (1.0 / scheme.order)

    def advance(y, start, end, key):
        shape = process.noise_shape(y.shape)
        shortest = jnp.maximum(1e-7 * (end - start), 8 * jnp.finfo(y.dtype).eps * jnp.abs(end))

        def body(carry):
            y, t, h, i, done = carry
            last = ~(h < end - t)
            h = jnp.minimum(h, end - t)
            look_key, noise_key = jax.random.split(jax.random.fold_in(key, i))
            f = process.f(y, t)
            excess = local_error(process, y, t, h, key=look_key, eta=eta, f=f) / eta
            # Written so that a NaN is accepted: a state that is lost must not stop the loop from ending.
            accept = ~(excess > 1.0) | ~(h > shortest)
            dw = jnp.sqrt(h) * scheme.noise(noise_key, shape, y.dtype)
            y = jnp.where(accept, scheme.step(process, y, f, t, h, dw), y)
            t = jnp.where(accept, t + h, t)
            factor = jnp.nan_to_num(jnp.clip(0.8 / jnp.maximum(excess, 1e-3), 0.2, 2.0), nan=1.0)
            return y, t, jnp.maximum(h * factor, shortest), i + 1, done | (accept & last)

        first = (end - start) / 16
        return jax.lax.while_loop(lambda carry: ~carry[4], body, (y, start, first, 0, ~(end > start)))[0]

    return advance


def _diffrax(process, solver, y0, key, t0, steps, tol, differentiable) -> Callable:
    if steps is None and not isinstance(solver, diffrax.AbstractAdaptiveSolver | diffrax.AbstractSRK):
        raise ValueError(f"solver={type(solver).__name__}() cannot choose its steps: give steps=...")
    shape = y0.shape
    matrix = noise_kind(process.g(t0).shape, shape) == "matrix"

    def diffusion(t, y, args):
        g = process.g(t).astype(y0.dtype)
        if matrix:
            return jnp.moveaxis(Dense(shape).noise_columns(g), 0, -1)
        return lineax.DiagonalLinearOperator(jnp.broadcast_to(expand_noise(g, shape), shape))

    control = jax.eval_shape(diffusion, t0, y0, None).shape[-1:] if matrix else shape
    needed = solver.minimal_levy_area if isinstance(solver, diffrax.AbstractSRK) else diffrax.AbstractBrownianIncrement
    offered = (diffrax.BrownianIncrement, diffrax.SpaceTimeLevyArea, diffrax.SpaceTimeTimeLevyArea)
    levy_area = next(kind for kind in offered if issubclass(kind, needed))
    span = process.t1 - t0
    brownian = diffrax.VirtualBrownianTree(
        t0,
        t0 + span,
        tol=1e-4 * span / (steps or 1),
        shape=jax.ShapeDtypeStruct(control, y0.dtype),
        key=key,
        levy_area=levy_area,
    )

    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: process.f(y, t)), diffrax.ControlTerm(diffusion, brownian)
    )
    controller = diffrax.PIDController(rtol=tol, atol=tol) if steps is None else diffrax.ConstantStepSize()
    adjoint = diffrax.RecursiveCheckpointAdjoint() if differentiable else diffrax.ForwardMode()

    def advance(y, start, end, key):
        solution = diffrax.diffeqsolve(
            terms,
            solver,
            start,
            end,
            dt0=None if steps is None else jnp.maximum((end - start) / steps, jnp.finfo(y.dtype).tiny),
            y0=y,
            stepsize_controller=controller,
            adjoint=adjoint,
            max_steps=1 << 16,
        )
        assert solution.ys is not None  # for the type checker: the end is always saved
        return solution.ys[-1]

    return advance


def _check_times(process: Process, times, t0) -> Array:
    times = as_floating(times)
    if times.ndim != 1 or len(times) == 0:
        raise ValueError(f"times has shape {times.shape}; it must be a list of at least one time, e.g. [{t0}, 1.0].")
    if is_concrete(times, t0):
        values = np.asarray(times)
        if not (values[0] >= t0 and np.all(np.diff(values) >= 0)):  # also when one is NaN
            raise ValueError(f"times={values} must increase and not begin before t0={t0}.")
        if t0 < 0 or values[-1] > process.t1 * (1 + 1e-6):
            raise ValueError(
                f"times up to {values[-1]} from t0={t0} leave the span of the process, [0, {process.t1}]. Build the "
                "Process with a larger t1."
            )
    return times


LOOK = 256
"""Initial states that are looked at before work begins; of one number, so that a sampler is compiled once for it."""


def initial_states(y0, n: int, *, key: PRNGKey) -> Float[Array, "n ..."]:
    """n initial states, from a sampler `y0(key, n)` or, drawn with replacement, from an array of samples."""
    check_count("n", n)
    if callable(y0):
        samples = as_floating(y0(key, n))
        if len(samples) != n:
            raise ValueError(f"y0(key, {n}) returned {len(samples)} states; a sampler must return n of them.")
        return samples
    samples = as_floating(y0)
    if samples.ndim == 0 or len(samples) == 0:
        raise ValueError(f"y0 has shape {samples.shape}; samples must be stacked along a first axis.")
    return samples[jax.random.randint(key, (n,), 0, len(samples))]
