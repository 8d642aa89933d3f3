"""What the noise of a process makes of vectors: `Q v`, `‖v‖²_Q = vᵀQv`, `Q = g gᵀ`; and the divergence of its drift."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import State
from .process import Process
from .structure import Elementwise, noise_kind


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
