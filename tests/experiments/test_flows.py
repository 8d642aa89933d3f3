"""What the experiment of flows measures, against what is known."""

import numpy as np
from scipy.stats import ks_2samp

import autodsm as ad
from autodsm.experiments.flows import kolmogorov, stein


def test_distance_of_marginals_is_that_of_kolmogorov_and_smirnov():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(500, 1)), rng.normal(0.3, 1.2, size=(400, 1))
    expected = ks_2samp(a[:, 0], b[:, 0]).statistic / (1.3581 * np.sqrt(1 / 500 + 1 / 400))  # the 95 % quantile
    np.testing.assert_allclose(kolmogorov(a, b), expected, rtol=1e-3)


def test_equal_laws_pass_and_others_do_not():
    """At 5 %, of 200 pairs with two coordinates each: 10 ± 3."""
    rng = np.random.default_rng(1)
    found = [kolmogorov(*rng.normal(size=(2, 300, 2))) for _ in range(200)]
    assert 1 <= np.sum(np.array(found) > 1.0) <= 20
    shifted = rng.normal(size=(300, 2)) + np.array([0.0, 0.5])
    assert kolmogorov(shifted, rng.normal(size=(300, 2))) > 1.5


def test_stein_matrix_sees_errors_of_an_exact_gaussian_score():
    process, rng = ad.systems.ornstein_uhlenbeck(3).process, np.random.default_rng(2)
    cov = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1e-6]])
    y = rng.multivariate_normal(np.array([1.0, -2.0, 0.0]), cov, size=20_000)
    exact = -(y - np.array([1.0, -2.0, 0.0])) @ np.linalg.inv(cov)
    off, least = stein(process, y, exact, 1.0)
    assert off < 2.5 * np.sqrt(3 / 20_000)
    assert abs(least - 1.0) < 5.0 * np.sqrt(3 / 20_000)
    wrong = exact + 0.2 * (y - y.mean(axis=0)) @ np.linalg.inv(np.diag(np.diag(cov)))  # right but for correlations
    assert stein(process, y, wrong, 1.0)[0] > 0.15


def test_noiseless_coordinates_are_left_out():
    process, rng = ad.systems.swimmer().process, np.random.default_rng(3)
    cov = np.array([[1.0, 0.6], [0.6, 1.0]])
    y = rng.multivariate_normal(np.zeros(2), cov, size=20_000)
    exact = -y @ np.linalg.inv(cov)
    exact[:, 0] = 1e3  # nobody looks at it
    off, least = stein(process, y, exact, 1.0)
    assert off < 2.5 * np.sqrt(2 / 20_000)
    assert abs(least - 1.0) < 5.0 * np.sqrt(2 / 20_000)
