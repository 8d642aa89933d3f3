"""Stein's identity for regression targets: `E[ŝ φ(y)] = −E[∇φ(y)]` for all φ, on coupled processes."""

import jax
import jax.numpy as jnp
import numpy as np

import autodsm as ad
from batches import in_batches

N = 100_000
MATRIX = jnp.array([[0.9, 0.2], [-0.3, 0.7]])


def repulsion(y):
    apart = y[:, None] - y[None]
    return 1.5 * jnp.sum(apart * jnp.exp(-jnp.sum(apart**2, -1, keepdims=True)), 1)


# Coupled, nonlinear, time-dependent, without symmetry; slopes bounded, so that coarse steps are stable.
COUPLED = {
    "tanh": (
        ad.Process(
            lambda y, t: jnp.stack(
                [jnp.tanh(2 * y[0] - y[1]) - y[0] + 0.5 * jnp.sin(3 * t), jnp.sin(y[0]) - 0.7 * y[1]]
            ),
            MATRIX,
            2.0,
        ),
        (2,),
    ),
    "ring": (
        ad.Process(
            lambda y, t: jnp.roll(jnp.tanh(y), 1) * (1 + 0.5 * t) - 0.8 * y, lambda t: 0.6 + 0.3 * jnp.sin(t), 2.0
        ),
        (3,),
    ),
    "pairs": (
        ad.Process(
            lambda y, t: -0.5 * y + repulsion(y),
            jnp.array([[0.8, 0.0, 0.3], [0.1, 0.6, 0.0]]),
            2.0,
        ),
        (2, 2),
    ),
}  # fmt: skip
TESTS = (
    lambda y: y[0],
    lambda y: y[0] * y[1],
    lambda y: jnp.sin(y[0] - 2 * y[-1]),
    lambda y: jnp.tanh(y[1]) ** 2,
)


def start(shape):
    return lambda key, n: 0.7 * jax.random.normal(key, (n, *shape)) + 0.3


def drawn(target, x, times, keys):
    return in_batches(lambda x, k: target.draw(x, jnp.asarray(times), key=k), x, keys)


def examples(shape, n=N):
    x_key, draw_key = jax.random.split(jax.random.key(0))
    return start(shape)(x_key, n), jax.random.split(draw_key, n)


@jax.jit
def residuals(y, s):
    found = [jax.vmap(jax.vmap(jax.value_and_grad(phi)))(y) for phi in TESTS]
    return jnp.stack([value[..., None] * s + slope for value, slope in found])


def z_scores(draw):
    """`E[ŝ φ + ∇φ]` in standard errors, for each test function, time and coordinate."""
    y, s = (v[:, :, 0].reshape(*v.shape[:2], -1) for v in (draw.y, draw.score))
    found = np.asarray(residuals(y, s), np.float64)  # (tests, n, times, coordinates)
    return found.mean(1) / (found.std(1) / np.sqrt(len(y)))


def stein_z_scores(target, shape, times, n=N):
    x, keys = examples(shape, n)
    return z_scores(drawn(target, x, times, keys))
