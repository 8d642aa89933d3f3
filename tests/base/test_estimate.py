"""Means with standard errors, and functions over samples in chunks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.base.estimate import chunk_for, estimate, over_samples


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


def test_a_module_is_compiled_once_for_all_its_values():
    traced = []

    def shifted(by, y):
        traced.append(1)
        return y + by

    for by in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(over_samples(eqx.Partial(shifted, jnp.asarray(by)), np.zeros(7)), by)
    assert len(traced) == 1


def test_observables_of_several_times_compile_once():
    traced = []

    def score(y, t):
        traced.append(1)
        return -y

    process = ad.systems.ornstein_uhlenbeck(1).process
    ys = np.asarray(jax.random.normal(jax.random.key(0), (50, 1)))
    ad.observables.entropy_rate(process, score, ys, 1.0)
    first = len(traced)
    ad.observables.entropy_rate(process, score, ys, 2.0)
    assert len(traced) == first
