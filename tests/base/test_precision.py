"""A block of double precision inside of single precision."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.base.precision import double_precision, warn_if_rounded
from autodsm.targets import Tabulated


@pytest.mark.parametrize("first", ["single", "double"])
def test_functions_that_hold_numpy_arrays_run_in_both_precisions(first):
    """JAX 0.10 takes what a numpy array was in single precision for what it is in double precision."""
    held = np.array([0.7])

    def times_held(y):
        return held * y

    found = {}
    for kind in ("single", "double") if first == "single" else ("double", "single"):
        if kind == "single":
            found[kind] = jax.jit(times_held)(jnp.ones(1))
        else:
            with double_precision():
                found[kind] = jax.jit(times_held)(jnp.ones(1))
    assert found["single"].dtype == np.float32
    assert found["double"].dtype == np.float64
    np.testing.assert_array_equal(np.asarray(found["double"]), held)
    assert float(found["single"][0]) == np.float32(0.7)


def test_a_drift_with_numpy_arrays_gets_its_table_after_a_call():
    rates = np.array([1.0, 2.0])
    process = ad.Process(lambda y, t: -rates * y, 0.7, 1.0)
    jax.jit(lambda y: process.f(y, 0.5))(jnp.ones(2))
    assert Tabulated(process, (2,), y_range=(-1.0, 1.0)).tables.error < 1e-2


def test_states_far_from_the_origin_are_named():
    mean, std = np.full((3, 2), 1e4) * [0.0, 1.0], np.ones(2)
    with pytest.warns(UserWarning, match=r"states lie 1e\+04 of their deviations .* Shift the origin"):
        warn_if_rounded(mean, std, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_rounded(mean, std, np.float64)
        warn_if_rounded(0.1 * mean, std, np.float32)
        warn_if_rounded(mean, 0.0 * std, np.float32)


def test_a_shift_changes_nothing_in_double_precision(x64):
    """A nonlinear drift and its start moved together by 10⁴: the same paths and draws of a table."""
    shift = 1e4
    process = ad.Process(lambda y, t: -jnp.tanh(y - shift), 0.7, 1.0)
    still = ad.Process(lambda y, t: -jnp.tanh(y), 0.7, 1.0)
    times, key = jnp.array([0.3, 1.0]), jax.random.key(0)
    moved, path = (
        ad.simulate(p, jnp.array([0.2 + a]), times, key=key, steps=40) for p, a in ((process, shift), (still, 0.0))
    )
    np.testing.assert_allclose(moved - shift, path, atol=1e-9)
    draws = [
        Tabulated(p, (1,), y_range=(a - 1.0, a + 1.0)).draw(jnp.array([0.2 + a]), times, key=key)
        for p, a in ((process, shift), (still, 0.0))
    ]
    np.testing.assert_allclose(draws[0].y - shift, draws[1].y, atol=1e-3)
    np.testing.assert_allclose(draws[0].score, draws[1].score, atol=5e-3)
