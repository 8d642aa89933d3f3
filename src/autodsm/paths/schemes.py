"""Step rules, each written once, and the random numbers that they take. The table in `simulate` says what each is."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from ..base.types import PRNGKey, State
from ..process.process import Process


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


def euler(process: Process, y: State, f: State, t, h, dw: Array) -> State:
    return y + h * f + process.diffuse(t, dw, y.shape)


def heun(process: Process, y: State, f: State, t, h, dw: Array) -> State:
    noise = process.diffuse(t + 0.5 * h, dw, y.shape)
    return y + 0.5 * h * (f + process.f(y + h * f + noise, t + h)) + noise


def kutta(rate: Callable, y: State, t, h) -> State:
    """A step h of `y' = rate(y, t)`, by Kutta's method of order three."""
    first = rate(y, t)
    second = rate(y + 0.5 * h * first, t + 0.5 * h)
    third = rate(y + h * (2.0 * second - first), t + h)
    return y + h / 6.0 * (first + 4.0 * second + third)


ENDS, MIDDLE = 1 / 6, 4 / 6
"""Shares of the noise of a step by splitting: at either end of it, and in its middle; half of the drift is between. The
step is of weak order two, as Strang's splitting is. For a linear drift its variance is Simpson's rule for
`∫ exp(uA) Q exp(uA)ᵀ du`, so that steps may be longer (Chin, Phys. Lett. A 226, 1997)."""


class Scheme(NamedTuple):
    step: Callable
    noise: Callable
    order: int


SOLVERS = {
    "euler": Scheme(euler, jax.random.normal, 1),
    "heun": Scheme(heun, jax.random.normal, 2),
    "weak2": Scheme(heun, four_point, 2),
    "lamba": Scheme(euler, jax.random.normal, 1),
}
