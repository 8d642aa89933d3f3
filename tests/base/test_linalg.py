"""Small matrices against numpy, below and above the size at which loops are written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autodsm.base.linalg import MAX_UNROLLED, cholesky, inverse_and_log_det, solve_lower


@pytest.mark.parametrize("n", [1, 2, 5, MAX_UNROLLED, MAX_UNROLLED + 3])
def test_against_numpy(x64, n):
    rng = np.random.default_rng(n)
    a = rng.normal(size=(4, n, n))
    spd, near = a @ np.swapaxes(a, -1, -2) + 0.1 * np.eye(n), np.eye(n) + 0.5 / n * a
    for matrix in (spd, near):
        inverse, log_det = inverse_and_log_det(jnp.asarray(matrix))
        np.testing.assert_allclose(inverse @ matrix, np.broadcast_to(np.eye(n), a.shape), atol=1e-7)
        np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1], rtol=1e-8, atol=1e-10)
    factor = cholesky(jnp.asarray(spd))
    np.testing.assert_allclose(factor, np.linalg.cholesky(spd), rtol=1e-7, atol=1e-10)
    z = rng.normal(size=(4, n))
    for transpose in (False, True):
        x = np.asarray(solve_lower(factor, jnp.asarray(z), transpose=transpose))
        matrix = np.swapaxes(factor, -1, -2) if transpose else factor
        np.testing.assert_allclose(np.einsum("sij,sj->si", matrix, x), z, atol=1e-8)


def test_log_det_differentiates(x64):
    a = jnp.eye(3) + 0.2 * jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)))
    grad = jax.grad(lambda a: inverse_and_log_det(a)[1])(a)
    np.testing.assert_allclose(grad, np.linalg.inv(a).T, rtol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_units_of_coordinates_do_not_matter(n):
    """In single precision: a power of two for each coordinate changes no digit of an inverse."""
    rng = np.random.default_rng(n)
    a = rng.normal(size=(n, n))
    spd = (a @ a.T + 0.1 * np.eye(n)).astype(np.float32)
    units = 2.0 ** rng.integers(-25, 26, n)
    inverse, log_det = inverse_and_log_det(jnp.asarray(spd))
    scaled, scaled_log_det = inverse_and_log_det(jnp.asarray(np.outer(units, units) * spd, jnp.float32))
    np.testing.assert_array_equal(scaled, np.asarray(inverse) / np.outer(units, units))
    np.testing.assert_allclose(scaled_log_det, log_det + 2 * np.log(units).sum(), atol=2e-5)
