"""How long a step may be: the change of the drift over it, relative to the step. See `simulate` for the formulas."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..base.types import PRNGKey, State
from ..process.process import Process


def local_error(process: Process, y: State, t, h, *, key: PRNGKey, eta: float = 0.0, f: State | None = None) -> Array:
    """How much the drift changes over a step of length h, relative to the step: the left sides in `simulate` over the
    right ones without their factor η, as a root mean square over coordinates."""
    f = process.f(y, t) if f is None else f
    tiny = jnp.finfo(y.dtype).tiny
    kick = process.diffuse(t, jax.random.rademacher(key, process.noise_shape(y.shape), y.dtype), y.shape)
    moved = h * jnp.abs(f) + jnp.sqrt(h) * jnp.abs(kick)
    by_drift = jnp.abs(process.f(y + h * f, t + h) - f) / jnp.maximum(moved + eta * jnp.abs(y), tiny)
    unkicked = jnp.where(kick == 0, jnp.abs(y), 0.0)
    by_noise = jnp.abs(process.f(y + jnp.sqrt(h) * kick, t) - f) / jnp.maximum(moved + unkicked, tiny)
    return 0.5 * h * jnp.sqrt(jnp.maximum(jnp.mean(by_drift**2), jnp.mean(by_noise**2)))
