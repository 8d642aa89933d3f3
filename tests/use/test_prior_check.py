"""A process that has reached its prior is told from one that has not, also without moments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.use.prior_check import distances, prior_mismatch

KEY, N = jax.random.key(0), 4096
NORMAL, STUDENT = dist.Normal(0.0, 1.0), dist.StudentT(2.0)


def ends(beta, d=2):
    """At t1 of a variance-preserving process, from data at ±1 in the first coordinate and N(0, 1) in the others."""
    left = np.exp(-float(beta.integral(1.0)))
    noise, start = jax.random.normal(jax.random.key(1), (2, N, d))
    return np.sqrt(left) * start.at[:, 0].set(jnp.sign(start[:, 0])) + np.sqrt(1 - left) * noise


@pytest.mark.parametrize("beta", [ad.LinearBeta(0.1, 10.0), ad.LinearBeta(0.1, 20.0)])
def test_silent_where_they_agree(beta):
    assert prior_mismatch(NORMAL, ends(beta), key=KEY) is None


def test_says_how_far_they_are():
    message = prior_mismatch(NORMAL, 3.0 * ends(ad.LinearBeta(0.1, 1.0)), key=KEY)
    assert message is not None
    assert "has not reached the prior" in message
    assert "coordinate (" in message
    shifted = prior_mismatch(NORMAL, 0.5 + ends(ad.LinearBeta(0.1, 10.0), 1), key=KEY)
    assert shifted is not None
    assert re.search(r"around 0\.[45]", shifted)


@pytest.mark.parametrize("unit", [1.0, 2.0**-30])
def test_heavy_tails(unit):
    """Of a law without a variance: from itself, and from a Gaussian that has not become it."""
    law = dist.TransformedDistribution(STUDENT, dist.transforms.AffineTransform(0.0, unit))
    own = unit * STUDENT.sample(jax.random.key(2), (N, 1))
    assert prior_mismatch(law, own, key=KEY) is None
    assert prior_mismatch(law, 0.5 * own, key=KEY) is not None


def test_distance_of_distribution_functions():
    x = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    np.testing.assert_allclose(distances(x, x + np.array([0.5, 2.5])), [0.25, 0.75])
