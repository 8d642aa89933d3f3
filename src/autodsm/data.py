"""Data sets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import PRNGKey
from .errors import check_count


def checkerboard(key: PRNGKey, n: int) -> Float[Array, "n 2"]:
    """Uniform on the eight dark squares of a 4×4 board over [−2, 2]².

    x = checkerboard(jax.random.key(0), 1024)
    """
    check_count("n", n)
    position_key, column_key, row_key = jax.random.split(key, 3)
    inside = jax.random.uniform(position_key, (n, 2))
    column = jax.random.randint(column_key, (n,), 0, 4)
    row = 2 * jax.random.randint(row_key, (n,), 0, 2) + column % 2
    return inside + jnp.stack([column, row], axis=1) - 2.0
