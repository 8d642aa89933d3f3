"""Means with standard errors, and functions over samples in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autodsm.estimate import chunk_for, estimate, over_samples


def test_estimate():
    found = estimate([1.0, 2.0, 6.0])
    assert found == pytest.approx((3.0, np.sqrt(7.0 / 3.0)))
    assert str(found) == "3 ± 2"
    with pytest.raises(ValueError, match=r"values has shape \(1,\)"):
        estimate([1.0])


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_over_samples(chunk):
    ys = np.arange(14.0).reshape(7, 2)
    found = over_samples(lambda y: (jnp.sum(y), 2 * y), ys, chunk=chunk)
    np.testing.assert_array_equal(found[0], ys.sum(1))
    np.testing.assert_array_equal(found[1], 2 * ys)
    keyed = over_samples(lambda y, k: jax.random.normal(k), ys, key=jax.random.key(0), chunk=chunk)
    np.testing.assert_allclose(keyed, jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), 7)), rtol=1e-6)


def test_chunks_by_size():
    assert chunk_for(1) == 4096
    assert chunk_for(1 << 20) == 4
    assert chunk_for(1 << 30) == 1
