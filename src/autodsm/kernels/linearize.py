"""Local linearization of a drift around a state: `u = y − y_s` follows `u' = A(τ) u + b(τ)`, `u(s) = 0`.

| operator             | A(τ)            | b(τ)                              |
|----------------------|-----------------|-----------------------------------|
| `expand="s"`         | `∂f/∂y(y_s, s)` | `f(y_s, s) + (τ−s) ∂f/∂t(y_s, s)` |
| `expand="t"`         | `∂f/∂y(y_s, τ)` | `f(y_s, τ)`                       |
| `ito=True` adds      |                 | `½ (τ−s) Σ_ij Q_ij ∂²f/∂y_i∂y_j`  |

The Itô term (Shoji & Ozaki, 1998) has Q and the derivatives at (y_s, s) for `expand="s"`; for `expand="t"` the
derivatives are at (y_s, τ) and Q at the middle of [s, τ], which is ∫Q/(τ−s) up to third order.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..base.errors import as_floating, as_time, check_flag, check_name, is_concrete
from ..base.types import State
from ..process.process import Process, check_process
from ..process.structure import AbstractStructure


class Affine(eqx.Module):
    """The drift `A(τ) u + b(τ)` of a linearized process, in the layout of its structure."""

    coefficients: Callable
    """`coefficients(τ) -> (A, b)`."""
    constant_matrix: bool = eqx.field(static=True)
    """True when A does not depend on τ."""
    structure: AbstractStructure = eqx.field(static=True)
    constant: bool = eqx.field(default=False, static=True)
    """True when b does not either."""


def linearize(process: Process, y_s: State, s, *, expand: str = "t", ito: bool = False) -> Affine:
    """Taylor's operator at (y_s, s), `expand="s"`, or at y_s alone, `expand="t"`.

    affine = linearize(process, y_s, s)
    A, b = affine.coefficients(tau)
    """
    check_process(process)
    check_name("expand", expand, ("s", "t"))
    check_flag("ito", ito)
    y_s = as_floating(y_s, "y_s")
    structure = process.structure_for(y_s.shape)
    s = as_time(s, "s").astype(y_s.dtype)
    if is_concrete(y_s, s):
        process.check(y_s, s)

    # The two expansions of a drift that does not depend on time are the same, and "s" is cheaper; with a curvature
    # term they differ where the noise depends on time.
    same = process.autonomous(y_s.shape) and (not ito or process.constant_noise)
    if expand == "t" and not same:

        def moving(tau):
            b, A = structure.jacobian(lambda y: process.f(y, tau), y_s)
            if ito:
                g = process.g(0.5 * (s + tau)).astype(y_s.dtype)
                b = b + 0.5 * (tau - s) * _curvature(process, structure, y_s, tau, g)
            return A, b

        return Affine(moving, constant_matrix=False, structure=structure)

    b0, A = structure.jacobian(lambda y: process.f(y, s), y_s)
    if process.autonomous(y_s.shape) and not ito:
        return Affine(lambda tau: (A, b0), constant_matrix=True, structure=structure, constant=True)
    _, b1 = jax.jvp(lambda tau: structure.split(process.f(y_s, tau)), (s,), (jnp.ones_like(s),))
    if ito:
        b1 = b1 + 0.5 * _curvature(process, structure, y_s, s, process.g(s).astype(y_s.dtype))
    return Affine(lambda tau: (A, b0 + (tau - s) * b1), constant_matrix=True, structure=structure)


def _curvature(process: Process, structure: AbstractStructure, y: State, t, g: Array) -> Array:
    """`Σ_ij Q_ij ∂²f/∂y_i∂y_j`, one second directional derivative for each column of the noise."""

    def second(v):
        def first(y):
            return jax.jvp(lambda x: process.f(x, t), (y,), (v,))[1]

        return jax.jvp(first, (y,), (v,))[1]

    return structure.split(jnp.sum(jax.vmap(second)(structure.noise_columns(g)), axis=0))
