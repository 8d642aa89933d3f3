"""What the noise of a process makes of vectors: `Q v`, `‖v‖²_Q = vᵀQv`, `Q = g gᵀ`; and divergences, of the drift and
of scores."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import check_count, check_key, check_name, is_concrete
from ..base.linalg import inverse_and_log_det
from ..base.types import PRNGKey, State
from .process import Process
from .structure import MAX_DENSE, Elementwise, expand_noise, noise_kind

DIVERGENCES = ("exact", "hutchinson")


def divergence(process: Process, y: State, t) -> Float[Array, ""]:
    """`∇·f`, exact, at the cost of the drift's structure."""
    structure = process.structure_for(y.shape)
    _, A = structure.jacobian(lambda y: process.f(y, t), y)
    return jnp.sum(A) if isinstance(structure, Elementwise) else jnp.sum(jnp.trace(A, axis1=-2, axis2=-1))


def apply_Q(process: Process, t, v: State) -> State:
    """`Q v`."""
    g = process.g(t).astype(v.dtype)
    if noise_kind(g.shape, v.shape) == "matrix":
        structure = process.structure_for(v.shape)
        return structure.join(structure.matvec(structure.noise_cov(g), structure.split(v)))
    return Elementwise(v.shape).noise_cov(g) * v


def solve_Q(process: Process, t, v: State) -> State:
    """`Q⁻¹ v`, for Q that has an inverse."""
    g = process.g(t).astype(v.dtype)
    if noise_kind(g.shape, v.shape) == "matrix":
        structure = process.structure_for(v.shape)
        inverse, _ = inverse_and_log_det(structure.noise_cov(g))
        return structure.join(structure.matvec(inverse, structure.split(v)))
    return v / expand_noise(g, v.shape) ** 2


def solve_noisy(process: Process, t, v: State) -> State:
    """`Q⁻¹ v` among the coordinates that noise enters, where Q has an inverse among them; zero for others."""
    g = process.g(t).astype(v.dtype)
    mask = noisy(process, t, v.shape).astype(v.dtype)
    if noise_kind(g.shape, v.shape) == "matrix":
        structure = process.structure_for(v.shape)
        rest = 1.0 - structure.split(jnp.broadcast_to(mask, v.shape))
        cov = structure.noise_cov(g) + rest[..., None] * jnp.eye(rest.shape[-1], dtype=v.dtype)
        inverse, _ = inverse_and_log_det(cov)
        return mask * structure.join(structure.matvec(inverse, structure.split(mask * v)))
    return mask * v / (expand_noise(g, v.shape) ** 2 + (1.0 - mask))


def inner(process: Process, t, a: State, b: State) -> Float[Array, ""]:
    """`aᵀ Q b`."""
    return jnp.sum(a * apply_Q(process, t, b))


def squared(process: Process, t, v: State) -> Float[Array, ""]:
    """`‖v‖²_Q`."""
    return inner(process, t, v, v)


def noisy(process: Process, t, shape: tuple[int, ...]) -> Array:
    """1 for coordinates that noise enters, 0 for others."""
    g = process.g(t)
    if noise_kind(g.shape, shape) == "matrix":
        structure = process.structure_for(shape)
        rows = jnp.diagonal(structure.noise_cov(g), axis1=-2, axis2=-1)
        return structure.join((rows > 0).astype(float))
    return (Elementwise(shape).noise_cov(g) > 0).astype(float)


def implicit(process: Process, score: Callable, y: State, t, along: Float[Array, "k ..."]) -> tuple[Array, State]:
    """`½‖s‖²_Q + ∇·(Q s)`, the trace taken over the directions `along`; and s."""

    def spread(y):
        s = score(y, t)
        return apply_Q(process, t, s), s

    Qs, push, s = jax.linearize(spread, y, has_aux=True)
    return 0.5 * jnp.sum(s * Qs) + jnp.sum(jax.vmap(lambda e: jnp.sum(e * push(e)))(along)), s


def trace_directions(
    divergence: str | None, probes: int | None, key: PRNGKey | None, y: State
) -> Float[Array, "k ..."] | None:
    """Vectors e whose sum of `eᵀ J e` is the trace of J, or has it as its mean."""
    if divergence is None:
        return None
    if check_divergence(divergence, probes) == "exact":
        return unit_directions(y)
    if key is None:
        raise ValueError('divergence="hutchinson" draws random probes: give key=...')
    check_key(key)
    count = 1 if probes is None else probes
    return jax.random.rademacher(key, (count, *y.shape), y.dtype) / math.sqrt(count)


def check_divergence(divergence: str, probes: int | None) -> str:
    """Refuse what is not a name of a divergence, and probes that it does not take."""
    check_name("divergence", divergence, DIVERGENCES)
    if divergence == "exact" and probes is not None:
        raise ValueError(f'probes={probes} has no meaning for divergence="exact". Use divergence="hutchinson".')
    check_count("probes", 1 if probes is None else probes)
    return divergence


def check_derivatives(shape: tuple[int, ...], count: int | None = None) -> None:
    """Refuse exact divergences of more coordinates than can be derived by, by default all of a state."""
    count = math.prod(shape) if count is None else count
    if count > MAX_DENSE:
        raise ValueError(
            f'divergence="exact" of a state of shape {shape} takes {count} derivatives at every step (limit '
            f'{MAX_DENSE}). Use divergence="hutchinson", which estimates it without bias.'
        )


def unit_directions(y: State, only: tuple[int, ...] | None = None) -> Float[Array, "k ..."]:
    """Unit vectors along coordinates of the raveled state, by default all."""
    check_derivatives(y.shape, None if only is None else len(only))
    rows = np.eye(y.size) if only is None else np.eye(y.size)[list(only)]
    return jnp.asarray(rows, y.dtype).reshape(len(rows), *y.shape)


def check_invertible(
    process: Process, shape: tuple[int, ...], *, what: str, remedy: str, at: float | None = None
) -> None:
    """Refuse a process whose `g gᵀ` has no inverse, for something that divides by it; noise that is traced has no
    values to look at, and is taken as it is."""
    with jax.ensure_compile_time_eval():
        if not is_concrete(process.g(0.0)):
            return
    for t in (0.5 * process.t1, process.t1) if at is None else (at,):
        if not is_invertible(process, shape, t):
            raise ValueError(
                f"{what} divides by the noise, and g gᵀ is singular at t={t}: some coordinates have no noise of their "
                f"own. {remedy}"
            )


def is_invertible(process: Process, shape: tuple[int, ...], t: float) -> bool:
    """True when every coordinate has noise of its own at t, so that `g gᵀ` has an inverse."""
    with jax.ensure_compile_time_eval():
        g = np.asarray(process.g(t), float)
    if noise_kind(g.shape, shape) == "matrix":
        lengths = np.linalg.norm(g, axis=1, keepdims=True)  # coordinates may have different units
        return bool(np.all(lengths > 0) and np.linalg.matrix_rank(g / lengths) == g.shape[0])
    return bool(np.all(g != 0))
