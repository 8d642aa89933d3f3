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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..base.errors import (
    as_floating,
    check_count,
    check_key,
    check_name,
    check_positive,
    is_concrete,
    suggest_options,
)
from ..base.types import PRNGKey, State, StateLike
from ..process.process import Process, check_process
from ..process.structure import Dense, expand_noise, noise_kind
from .schemes import SOLVERS, Scheme
from .steps import local_error

_DRAW_AT_ONCE = 256  # random numbers drawn together, for one path: enough to be cheap, few enough for 10⁶ paths

_TREE = 1e-2  # resolution of the Brownian tree, of the shortest step known: two increments share no leaf
_FIRST_STEPS = 100  # of an interval: the first step that diffrax tries where it adapts them
_LOOKED_AT = 8  # times at which a path is looked at for an explosion, which lasts: a few suffice
_GROWTH = 10.0  # growth beyond start, first drift and noise together that only an explosion, or an unstable drift, has


@suggest_options()
def simulate(
    process: Process,
    y0: StateLike,
    times: StateLike,
    *,
    key: PRNGKey,
    solver: str | eqx.Module | type = "weak2",
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

    A path that is not finite, or that exploded because `steps` are too few, is an error: a FloatingPointError, or under
    `jit` and `vmap` a RuntimeError when it runs.
    """
    check_process(process)
    check_key(key)
    y0 = as_floating(y0, "y0")
    times = _check_times(process, times, t0)
    process.check(y0, t0)
    if isinstance(solver, type):
        raise ValueError(f"solver={solver.__name__} is a class: pass an instance, {solver.__name__}().")
    if not isinstance(solver, eqx.Module):
        check_name("solver", solver, SOLVERS)
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
    times = times.astype(y0.dtype)
    path = _simulate(process, y0, times, key, solver, steps, float(tol), t0, differentiable)
    path = path if differentiable else jax.lax.stop_gradient(path)
    return _refuse_wrong(process, path, y0, times, t0, steps)


def _refuse_wrong(process: Process, path: Array, y0: State, times: Array, t0, steps: int | None) -> Array:
    """The path; an error if it is not finite, or if it exploded because its fixed steps are too long.

    Where values are traced, by `jit` or `vmap`, the error is raised as the compiled function runs.
    """
    infinite = (
        f"the path is not finite with {'steps chosen from tol' if steps is None else f'steps={steps}'}. The drift is "
        "too stiff for these steps or its solutions run away in finite time: take more steps, a smaller tol, or an "
        "earlier last time."
    )
    unstable = (
        f"the path exploded: steps={steps} are too few for this drift, whose explicit steps amplify each other. Take "
        "more steps, or give tol=... instead."
    )
    found = jax.lax.stop_gradient(path)
    checks = [(~jnp.all(jnp.isfinite(found)), infinite)]
    if steps is not None:
        checks.append(
            (_exploded(process, found, jax.lax.stop_gradient(y0), times, jnp.asarray(t0, y0.dtype), steps), unstable)
        )
    for wrong, message in checks:
        if not is_concrete(wrong):
            path = eqx.error_if(path, wrong, message)
        elif bool(wrong):
            raise FloatingPointError(message)
    return path


@eqx.filter_jit
def _exploded(process: Process, path: Array, y0: State, times: Array, t0: Array, steps: int) -> Array:
    """True when the path grew far beyond its start, in a place where one step turns the drift over.

    An explicit step is unstable where `h |∂f/∂y| > 2`. There the drift changes over a step by more than what the step
    moves, the state is, and noise changes of the drift. Growth that the steps resolve has small changes.
    """
    looked = np.unique(np.linspace(0, len(times) - 1, _LOOKED_AT).astype(int))
    starts = jnp.concatenate([t0[None], times[:-1]])[looked]
    first = process.f(y0, t0)

    def at(y, start, t):
        h, ones = (t - start) / steps, jnp.ones(process.noise_shape(y.shape), y.dtype)
        f, kick = process.f(y, t), process.diffuse(t, ones, y.shape)
        by_drift = h * jnp.abs(process.f(y + h * f, t) - f)
        by_noise = h * jnp.abs(process.f(y + jnp.sqrt(h) * kick, t) - f)
        turned = by_drift > h * jnp.abs(f) + jnp.sqrt(h) * jnp.abs(kick) + jnp.abs(y) + by_noise
        begun = jnp.abs(y0) + (t - t0) * jnp.abs(first) + jnp.sqrt(t - t0) * jnp.abs(kick)
        return jnp.any(turned & (jnp.abs(y) > _GROWTH * begun))

    return jnp.any(jax.vmap(at)(path[looked], starts, times[looked]))


@eqx.filter_jit
def _simulate(process, y0, times, key, solver, steps, tol, t0, differentiable) -> Array:
    if not isinstance(solver, str):
        advance = _diffrax(process, solver, y0, times, key, t0, steps, tol, differentiable)
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


def _fixed(process: Process, scheme: Scheme, steps: int) -> Callable:
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


def _adaptive(process: Process, scheme: Scheme, tol: float) -> Callable:
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


def _diffrax(process, solver, y0, times, key, t0, steps, tol, differentiable) -> Callable:
    import diffrax  # here: only paths by its solvers need them
    import lineax

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
    gaps = jnp.diff(times, prepend=jnp.asarray(t0, times.dtype))
    shortest = jnp.min(jnp.where(gaps > 0, gaps, span)) / (steps or 1)
    finest = 4 * jnp.finfo(times.dtype).eps * span  # times are not known better
    brownian = diffrax.VirtualBrownianTree(
        t0,
        t0 + span,
        tol=jnp.maximum(_TREE * shortest, finest),
        shape=jax.ShapeDtypeStruct(control, y0.dtype),
        key=key,
        levy_area=levy_area,
    )

    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: process.f(y, t)), diffrax.ControlTerm(diffusion, brownian)
    )
    # Absolute errors are relative to the noise received by t1 or, where none enters, to the start.
    middle = process.diffuse(0.5 * process.t1, jnp.ones(process.noise_shape(shape), y0.dtype), shape)
    scale = jnp.where(middle == 0, jnp.abs(y0), jnp.sqrt(process.t1) * jnp.abs(middle))
    atol = tol * jnp.maximum(scale, jnp.finfo(y0.dtype).tiny)
    controller = diffrax.PIDController(rtol=tol, atol=atol) if steps is None else diffrax.ConstantStepSize()
    adjoint = diffrax.RecursiveCheckpointAdjoint() if differentiable else diffrax.ForwardMode()

    def advance(y, start, end, key):
        solution = diffrax.diffeqsolve(
            terms,
            solver,
            start,
            end,
            dt0=jnp.maximum((end - start) / (_FIRST_STEPS if steps is None else steps), jnp.finfo(y.dtype).tiny),
            y0=y,
            stepsize_controller=controller,
            adjoint=adjoint,
            max_steps=1 << 16,
        )
        assert solution.ys is not None  # for the type checker: the end is always saved
        return solution.ys[-1]

    return advance


def _check_times(process: Process, times, t0) -> Array:
    times = as_floating(times, "times")
    if times.ndim != 1 or len(times) == 0:
        raise ValueError(f"times has shape {times.shape}; it must be a list of at least one time, e.g. [{process.t1}].")
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
