"""Data sets of points."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.errors import check_count, check_key
from ..base.types import PRNGKey


def checkerboard(key: PRNGKey, n: int) -> Float[Array, "n 2"]:
    """Uniform on the eight dark squares of a 4×4 board over [−2, 2]².

    x = checkerboard(jax.random.key(0), 1024)
    """
    check_key(key)
    check_count("n", n)
    position_key, column_key, row_key = jax.random.split(key, 3)
    inside = jax.random.uniform(position_key, (n, 2))
    column = jax.random.randint(column_key, (n,), 0, 4)
    row = 2 * jax.random.randint(row_key, (n,), 0, 2) + column % 2
    return inside + jnp.stack([column, row], axis=1) - 2.0
