"""The stationary score that a drift tells: where it exists, and where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.process.equilibrium import EquilibriumScore, equilibrium_score

STATES = np.random.default_rng(0).normal(size=(16, 3))
MATRIX = np.array([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.3, 0.2, 1.5]], np.float32)
CURL = np.array([[0.0, 1.0, -0.5], [-1.0, 0.0, 0.3], [0.5, -0.3, 0.0]], np.float32)


def log_density(y):
    return -0.25 * jnp.sum(y**4) - 0.5 * jnp.sum((y - jnp.roll(y, 1)) ** 2) + y[0]


slope = jax.grad(log_density)


def relaxing(g, curl=0.0):
    """`(½ Q + curl · C) ∇log π`, C antisymmetric: π is stationary for every curl, in equilibrium without."""
    g = np.asarray(g, np.float32)
    Q = g @ g.T if g.ndim == 2 else np.diag(np.broadcast_to(g, 3) ** 2)
    return ad.Process(lambda y, t: (0.5 * Q + curl * CURL) @ slope(y), g, 1.0)


@pytest.mark.parametrize("g", [1.4, [0.5, 1.0, 2.0], MATRIX])
def test_it_is_that_of_the_stationary_law(g):
    score = equilibrium_score(relaxing(g), STATES)
    assert isinstance(score, EquilibriumScore)
    for y in jnp.asarray(STATES[:4], jnp.float32):
        np.testing.assert_allclose(score(y), slope(y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("g", [1.4, [0.5, 1.0, 2.0], MATRIX])
def test_a_current_is_noticed(g):
    """A hundredth of the size is seen, though its law is stationary too."""
    for curl in (0.01, 1.0):
        assert "is no gradient" in equilibrium_score(relaxing(g, curl), STATES)


@pytest.mark.parametrize("curl", [0.0, 0.05])
def test_units_do_not_matter(curl):
    known, lengths, seconds = relaxing(MATRIX, curl), np.array([2.0**30, 1.0, 2.0**-30], np.float32), 2.0**-30
    noise = lengths[:, None] * MATRIX / np.float32(np.sqrt(seconds))
    other = ad.Process(lambda y, t: lengths * known.f(y / lengths, t) / seconds, noise, seconds)
    before, after = equilibrium_score(known, STATES), equilibrium_score(other, lengths * STATES)
    assert type(before) is type(after) is (str if curl else EquilibriumScore)
    if curl == 0.0:
        y = jnp.asarray(STATES[0], jnp.float32)
        np.testing.assert_allclose(lengths * after(lengths * y), before(y), rtol=1e-4, atol=1e-4)


def test_channels_of_pixels():
    """A matrix over channels, the same at every pixel."""
    g = np.array([[1.0, 0.0], [0.6, 0.8]], np.float32)
    Q = g @ g.T
    process = ad.Process(lambda y, t: -jnp.tensordot(Q, y**3, 1), g, 1.0)
    score = equilibrium_score(process, np.random.default_rng(0).normal(size=(8, 2, 2, 3)))
    y = jnp.ones((2, 2, 3)) * 0.7
    np.testing.assert_allclose(score(y), -2.0 * y**3, rtol=1e-4)


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (ad.Process(lambda y, t: -(1.0 + t) * y, 1.0, 1.0), "depends on time"),
        (ad.Process(lambda y, t: -y, lambda t: 1.0 + t, 1.0), "depends on time"),
        (ad.Process(lambda y, t: -y, np.array([1.0, 0.0, 1.0]), 1.0), "some directions"),
        (ad.Process(lambda y, t: jnp.log(y), 1.0, 1.0), "not finite"),
        (ad.Process(lambda y, t: jnp.ones(3), 1.0, 1.0), "does not depend on the state"),
        (ad.Process(lambda y, t: jnp.roll(y, 1) - y, 1.0, 1.0), "is no gradient"),
    ],
)
def test_where_there_is_none(process, reason):
    assert reason in equilibrium_score(process, STATES)
