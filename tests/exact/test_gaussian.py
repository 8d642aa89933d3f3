"""Exact Gaussian marginals in any units; what they refuse."""

import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad

MATRIX, NOISE = np.array([[-1.0, 0.8], [-0.5, -1.5]]), np.array([0.7, 1.0])
MEAN, COV = np.array([0.5, -0.3]), np.array([[0.6, 0.1], [0.1, 0.4]])
ONES = np.ones(2)
UNITS = [(2.0**-30 * ONES, 1.0), (2.0 ** np.array([30.0, -30.0]), 2.0**-30), (ONES, 2.0**30)]


def moments(L, tau):
    """Of a linear process whose drift depends on time, in units L and τ, given in natural ones."""

    def drift(y, t):
        return L / tau * ((MATRIX * (1 + 0.5 * jnp.sin(4 * t / tau))) @ (y / L))

    process = ad.Process(drift, L / np.sqrt(tau) * NOISE, tau)
    exact = ad.reference.gaussian_marginals(process, L * MEAN, np.outer(L, L) * COV)
    mean, cov = exact.moments(0.6 * tau)
    score = exact.score(jnp.asarray(0.1 * L, jnp.float32), 0.6 * tau)
    return [np.asarray(mean) / L, np.asarray(cov) / np.outer(L, L), np.asarray(score) * L]


@pytest.mark.parametrize(("L", "tau"), UNITS)
def test_moments_do_not_depend_on_units(L, tau):
    for found, expected in zip(moments(L, tau), moments(ONES, 1.0), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("L", "tau"), [(1.0, 1.0), (2.0**30, 1.0), (2.0**-30, 1.0), (1.0, 2.0**30)])
def test_drifts_that_are_not_linear_are_refused_in_any_units(L, tau):
    process = ad.Process(lambda y, t: L / tau * (y / L - (y / L) ** 3), L / np.sqrt(tau), tau)
    with pytest.raises(ValueError, match="not linear"):
        ad.reference.gaussian_marginals(process, np.zeros(1), L**2 * np.eye(1))


@pytest.mark.parametrize("t", [-0.1, 1.1, np.nan])
def test_times_outside_of_the_process_are_refused(t):
    exact = ad.reference.gaussian_marginals(ad.Process(lambda y, t: -y, 1.0, 1.0), np.ones(1), np.eye(1))
    for use in (exact.moments, lambda t: exact.score(np.ones(1), t)):
        with pytest.raises(ValueError, match=r"t=.* is "):
            use(t)
    with pytest.raises(ValueError, match=r"t=-0\.1 is before"):
        ad.reference.harmonic_particles(-0.1)
