"""Linear algebra of many small matrices, written out in array operations.

The calls to LAPACK behind `jnp.linalg` treat one matrix after another, which costs more than the arithmetic for the
small ones here; and on CPU (jaxlib 0.10.1) several of them inside a compiled loop over a large batch may wait for each
other forever. Above `MAX_UNROLLED` rows, where neither matters much, `jnp.linalg` is used.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

MAX_UNROLLED = 16


def inverse_and_log_det(
    matrix: Float[Array, "*sites n n"],
) -> tuple[Float[Array, "*sites n n"], Float[Array, "*sites"]]:
    """By elimination without pivots, for matrices that need none: near the identity, or positive definite, in any
    units."""
    n = matrix.shape[-1]
    if n > MAX_UNROLLED:
        return jnp.linalg.inv(matrix), jnp.linalg.slogdet(matrix)[1]
    rows = jnp.concatenate([matrix, jnp.broadcast_to(jnp.eye(n, dtype=matrix.dtype), matrix.shape)], axis=-1)
    log_det = jnp.zeros(matrix.shape[:-2], matrix.dtype)
    for k in range(n):
        pivot = rows[..., k, k]
        log_det = log_det + jnp.log(jnp.abs(pivot))
        row = (rows[..., k, :] / pivot[..., None])[..., None, :]
        rows = jnp.where(np.arange(n)[:, None] == k, row, rows - rows[..., :, k, None] * row)
    return rows[..., n:], log_det


def cholesky(matrix: Float[Array, "*sites n n"]) -> Float[Array, "*sites n n"]:
    """The lower factor of a positive definite matrix."""
    n = matrix.shape[-1]
    if n > MAX_UNROLLED:
        return jnp.linalg.cholesky(matrix)
    columns = []
    for k in range(n):
        below = jnp.asarray(np.arange(n) >= k, matrix.dtype)
        column = below * matrix[..., :, k] / jnp.sqrt(matrix[..., k, k])[..., None]
        matrix = matrix - column[..., :, None] * column[..., None, :]
        columns.append(column)
    return jnp.stack(columns, axis=-1)


def solve_lower(
    factor: Float[Array, "*sites n n"], z: Float[Array, "*sites n"], *, transpose: bool
) -> Float[Array, "*sites n"]:
    """`L⁻¹ z`, or `L⁻ᵀ z`, for lower triangular L."""
    n = factor.shape[-1]
    if n > MAX_UNROLLED:
        solve = jax.lax.linalg.triangular_solve
        return solve(factor, z[..., None], left_side=True, lower=True, transpose_a=transpose)[..., 0]
    solution: list = [None] * n
    for k in reversed(range(n)) if transpose else range(n):
        solution[k] = z[..., k] / factor[..., k, k]
        z = z - (factor[..., k, :] if transpose else factor[..., :, k]) * solution[k][..., None]
    return jnp.stack(solution, axis=-1)
