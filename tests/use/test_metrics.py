"""Metrics: against closed forms for Gaussians, double loops, scipy, and the laws of their own noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gamma
from scipy.stats import wasserstein_distance

import autodsm as ad
from autodsm.use import metrics

BANDWIDTHS = (0.7, 1.5)


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def naive_mmd2(x, y, bandwidths):
    def k(a, b):
        return sum(np.exp(-np.sum((a - b) ** 2) / (2 * b_ * b_)) for b_ in bandwidths)

    n, m = len(x), len(y)
    xx = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j)
    yy = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j)
    xy = sum(k(x[i], y[j]) for i in range(n) for j in range(m))
    return xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / (n * m)


def gaussian_mmd2(shift, a, b, d, bandwidths):
    """Of N(0, a² I) and N(μ, b² I), with shift = |μ|."""

    def mean_kernel(h, variance, distance):
        return (h**2 / (h**2 + variance)) ** (d / 2) * np.exp(-(distance**2) / (2 * (h**2 + variance)))

    terms = [(2 * a**2, 0.0, 1), (2 * b**2, 0.0, 1), (a**2 + b**2, shift, -2)]
    return sum(c * mean_kernel(h, variance, distance) for h in bandwidths for variance, distance, c in terms)


def draws(rng, repeats, n, m, mu=(0.0, 0.0), b=1.0):
    for _ in range(repeats):
        yield rng.normal(size=(n, 2)), np.array(mu) + b * rng.normal(size=(m, 2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_mmd_is_the_double_sum(shape):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(9, *shape)), 0.5 + 2 * rng.normal(size=(6, *shape))
    found = metrics.mmd2(x, y, key=jax.random.key(0), bandwidth=BANDWIDTHS)
    assert found.value == pytest.approx(naive_mmd2(x, y, BANDWIDTHS), abs=1e-5)
    assert found.bandwidths == BANDWIDTHS
    single = metrics.mmd2(jnp.asarray(x), jnp.asarray(y), key=jax.random.key(0), bandwidth=1)
    assert single.value == pytest.approx(naive_mmd2(x, y, (1,)), abs=1e-5)


def test_mmd_over_several_slabs_in_double_precision(x64, monkeypatch):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(23, 3)), rng.normal(size=(17, 3))
    monkeypatch.setattr(metrics, "_ROWS", 16)
    found = metrics.mmd2(x, y, key=jax.random.key(0), bandwidth=BANDWIDTHS)
    assert found.value == pytest.approx(naive_mmd2(x, y, BANDWIDTHS), abs=1e-13)


def test_permuted_mmd_is_that_of_the_permuted_samples(x64):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(8, 2)), 1 + rng.normal(size=(5, 2))
    found = metrics.mmd2(x, y, key=jax.random.key(4), bandwidth=1.0, permutations=30)
    split_key = jax.random.split(jax.random.key(4))[1]
    pooled, splits = np.concatenate([x, y]), metrics._splits(split_key, 8, 5, 30)
    assert splits.shape == (31, 13)
    assert np.all(splits.sum(1) == 8)
    assert len(np.unique(splits, axis=0)) > 25
    values = np.array([naive_mmd2(pooled[s], pooled[~s], (1.0,)) for s in splits])
    assert found.floor == pytest.approx(np.sort(values[1:])[28])  # the 29th of 30
    assert found.p_value == np.mean(values >= values[0] - 1e-12)


@pytest.mark.parametrize(("mu", "b"), [((0.0, 0.0), 1.0), ((0.6, -0.3), 1.4)])
def test_mmd_is_unbiased(mu, b):
    pairs = draws(np.random.default_rng(5), 300, 20, 12, mu, b)
    found = np.array(
        [metrics.mmd2(x, y, key=jax.random.key(0), bandwidth=BANDWIDTHS, permutations=1).value for x, y in pairs]
    )
    exact = gaussian_mmd2(np.linalg.norm(mu), 1.0, b, 2, BANDWIDTHS)
    assert abs(found.mean() - exact) < 4 * found.std() / np.sqrt(300)
    if b == 1.0:
        assert exact == pytest.approx(0)
        assert np.mean(found < 0) > 0.3


def test_p_values_of_equal_laws_are_uniform():
    pairs = zip(draws(np.random.default_rng(6), 200, 15, 10), keys(200), strict=True)
    found = [metrics.mmd2(x, y, key=key, permutations=99) for (x, y), key in pairs]
    p = np.array([f.p_value for f in found])
    assert p.min() >= 0.01
    for level in (0.05, 0.5):
        assert abs(np.mean(p < level + 1e-6) - level) < 4 * np.sqrt(level * (1 - level) / 200)
    assert abs(p.mean() - 0.505) < 4 * np.sqrt(1 / 12 / 200)
    assert all((f.p_value < 0.05 + 1e-6) == (f.value > f.floor) for f in found)


def test_mmd_sees_a_shift_and_a_spread():
    for mu, b in [((0.8, 0.0), 1.0), ((0.0, 0.0), 2.0)]:
        x, y = next(draws(np.random.default_rng(7), 1, 100, 150, mu, b))
        found = metrics.mmd2(x, y, key=jax.random.key(1))
        assert found.p_value == pytest.approx(1 / 101)
        assert found.value > 2 * found.floor > 0


def test_default_bandwidths_are_about_the_median():
    x, y = np.zeros((3, 2)), np.tile([3.0, 4.0], (4, 1))  # distances 0 (9 of them) and 5 (12)
    assert metrics.mmd2(x, y, key=jax.random.key(0)).bandwidths == pytest.approx((2.5, 5.0, 10.0))


def test_mmd_far_from_the_origin_and_at_other_scales():
    x, y = next(draws(np.random.default_rng(8), 1, 40, 30, (0.5, 0.0)))
    here = metrics.mmd2(x, y, key=jax.random.key(2))
    for scale, offset in [(1.0, 1e4), (1e25, 0.0), (1e-25, 0.0)]:
        there = metrics.mmd2(scale * x + offset, scale * y + offset, key=jax.random.key(2))
        assert there.value == pytest.approx(here.value, abs=1e-5)
        assert there.floor == pytest.approx(here.floor, abs=1e-5)


@pytest.mark.parametrize("order", [1, 2, 3.5])
def test_sliced_distance_of_a_translation(order):
    d, n, v = 3, 4000, np.array([1.0, -2.0, 0.5])
    x = np.random.default_rng(9).normal(size=(50, d))
    found = metrics.sliced_wasserstein(x, x + v, key=jax.random.key(0), projections=n, order=order, permutations=1)

    def power(p):  # E|u·v|^p
        return np.linalg.norm(v) ** p * gamma(d / 2) * gamma((p + 1) / 2) / gamma(0.5) / gamma((d + p) / 2)

    assert power(2) == pytest.approx(v @ v / d)
    stderr = np.sqrt((power(2 * order) - power(order) ** 2) / n)
    assert abs(found.value**order - power(order)) < 4 * stderr


def test_sliced_distance_on_the_line():
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=14), 0.3 + rng.exponential(size=21)
    first = metrics.sliced_wasserstein(x, y, key=jax.random.key(0), projections=3, order=1)
    assert first.value == pytest.approx(wasserstein_distance(x, y), rel=1e-12)
    second = metrics.sliced_wasserstein(x[:, None], jnp.asarray(y)[:, None], key=jax.random.key(0), projections=3)
    gaps = np.sort(np.repeat(x, 3)) - np.sort(np.repeat(y, 2))
    assert second.value == pytest.approx(np.sqrt(np.mean(gaps**2)), rel=1e-6)
    assert metrics.sliced_wasserstein(x, x[::-1], key=jax.random.key(0)).value == pytest.approx(0, abs=1e-12)


def test_sliced_floor():
    pairs = zip(draws(np.random.default_rng(11), 300, 20, 30), keys(300), strict=True)
    found = [metrics.sliced_wasserstein(x, y, key=key, projections=16, permutations=19) for (x, y), key in pairs]
    above = np.mean([f.value > f.floor for f in found])
    assert abs(above - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 300)
    assert above > 0  # about 15 of 300: the floor is not out of reach
    x, y = next(draws(np.random.default_rng(12), 1, 100, 150, (1.0, 0.0)))
    shifted = metrics.sliced_wasserstein(x, y, key=jax.random.key(0))
    assert shifted.value > 2 * shifted.floor > 0


def check_moments(x, mean, variance, fourth):
    """Over many independent coordinates, so that z-scores can be counted; `fourth` is central."""
    found = metrics.moments(x)
    n, many = x.shape[0], x[0].size
    of_variance = np.sqrt((fourth - variance**2 * (n - 3) / (n - 1)) / n)
    assert all(v.shape == x.shape[1:] for v in found)
    for value, stderr, exact, exact_stderr in (
        (found.mean, found.mean_stderr, mean, np.sqrt(variance / n)),
        (found.variance, found.variance_stderr, variance, of_variance),
    ):
        z = (value - exact) / stderr
        np.testing.assert_allclose(np.mean(stderr), exact_stderr, rtol=0.01)
        assert abs(np.mean(z)) < 4.5 / np.sqrt(many)
        assert abs(np.mean(np.abs(z) < 1.96) - 0.95) < 4 * np.sqrt(0.95 * 0.05 / many)


def test_moments_of_gaussian_and_uniform():
    rng = np.random.default_rng(13)
    check_moments(1e3 + 2 * rng.normal(size=(2000, 20, 20)), 1e3, 4.0, 3 * 16.0)
    check_moments(rng.uniform(-1, 2, size=(2000, 400)), 0.5, 9 / 12, 81 / 80)


def test_moments_by_hand():
    found = metrics.moments([1, 2, 6])  # deviations −2, −1, 3
    assert found.mean == 3
    assert found.variance == 7
    assert found.mean_stderr == pytest.approx(np.sqrt(7 / 3))
    assert found.variance_stderr == pytest.approx(np.sqrt((16 + 1 + 81) / 9))


def test_relative_score_error():
    d, n, c = 3, 2000, jnp.array([0.5, -1.0, 0.2])
    y = jax.random.normal(jax.random.key(0), (n, d))
    scaled = metrics.relative_score_error(lambda y, t: -t * y, lambda y, t: -y, y, 1.3)
    assert scaled.value == pytest.approx(0.09, rel=1e-5)
    assert scaled.stderr == pytest.approx(0, abs=1e-6)
    assert metrics.relative_score_error(lambda y, t: 0 * y, lambda y, t: -y, y, 1.0).value == pytest.approx(1)

    def shifted(y):
        return metrics.relative_score_error(lambda y, t: c - y, lambda y, t: -y, y, 1.0)

    exact = float(c @ c) / d
    value, stderr = np.array([shifted(y) for y in jax.random.normal(jax.random.key(1), (30, n, d))]).T
    assert stderr.mean() == pytest.approx(exact * np.sqrt(2 / (d * n)), rel=0.02)
    z = (value - exact) / stderr
    assert abs(z.mean()) < 4 / np.sqrt(30)
    assert abs(np.mean(z**2) - 1) < 4 * np.sqrt(2 / 30)


@pytest.mark.parametrize("g", [0.5, [[0.8, 0.0, 0.3], [-0.6, 1.1, 0.0]], lambda t: jnp.array([t, 3 * t])])
def test_relative_velocity_error(g):
    """`f = −k y`, `s = −y`, `s_θ = −c y`: v = (½Q − k) y, off by `½ (c − 1) Q y`, averaged over the same states."""
    k, c, t = 0.2, 1.3, 0.5
    process = ad.Process(lambda y, t: -k * y, g, t1=1.0)
    y = jax.random.normal(jax.random.key(2), (500, 2))
    found = metrics.relative_velocity_error(process, lambda y, t: -c * y, lambda y, t: -y, y, t)
    value = np.asarray(g(t) if callable(g) else g)
    Q = value @ value.T if value.ndim == 2 else np.diag(np.broadcast_to(value, 2) ** 2)
    off, v = np.asarray(y) @ (0.5 * (c - 1) * Q), np.asarray(y) @ (0.5 * Q - k * np.eye(2))
    assert found.value == pytest.approx(np.sum(off**2) / np.sum(v**2), rel=1e-4)
    assert 0 < found.stderr < 0.2 * found.value
    exact = metrics.relative_velocity_error(process, lambda y, t: -y, lambda y, t: -y, y, t)
    assert exact == (0.0, 0.0)


def test_velocity_errors_are_relative_to_a_velocity():
    process, y = ad.Process(lambda y, t: 0 * y, 1.0, 1.0), jnp.ones((3, 2))
    with pytest.raises(ValueError, match="the exact velocity is zero at all states"):
        metrics.relative_velocity_error(process, lambda y, t: y, lambda y, t: 0 * y, y, 0.5)


@pytest.mark.parametrize("g", [0.5, [[0.8, 0.0, 0.3], [-0.6, 1.1, 0.0]], lambda t: jnp.array([t, 3 * t])])
def test_fisher_divergence_of_gaussians(g):
    process = ad.Process(lambda y, t: -y, g, t1=1.0)
    mean, variance, t, n = jnp.array([0.7, -0.4]), 1.7, 0.5, 20_000
    y = jax.random.normal(jax.random.key(2), (n, 2))
    found = metrics.fisher_divergence(process, lambda y, t: -(y - mean) / variance, lambda y, t: -y, y, t)
    value = np.asarray(g(t) if callable(g) else g)
    Q = value @ value.T if value.ndim == 2 else np.diag(np.broadcast_to(value, 2) ** 2)
    a, b = 1 - 1 / variance, np.asarray(mean) / variance  # s − s* = a y + b
    exact = 0.5 * (a**2 * np.trace(Q) + b @ Q @ b)
    stderr = 0.5 * np.sqrt((2 * a**4 * np.trace(Q @ Q) + 4 * a**2 * b @ Q @ Q @ b) / n)
    assert found.stderr == pytest.approx(stderr, rel=0.05)
    assert abs(found.value - exact) < 4 * stderr


def test_fisher_divergence_of_images():
    y = jnp.ones((5, 2, 3, 3))
    found = metrics.fisher_divergence(ad.Process(lambda y, t: -y, 2.0, 1.0), lambda y, t: 0 * y, lambda y, t: y, y, 0.1)
    assert found == (pytest.approx(0.5 * 4 * 18), pytest.approx(0))


def test_a_score_that_fails_gives_nan():
    process, y = ad.Process(lambda y, t: -y, 1.0, 1.0), jnp.array([[0.0], [1.0], [2.0]])
    for failing in (lambda y, t: jnp.log(y), lambda y, t: y * jnp.nan):
        assert np.all(np.isnan(metrics.relative_score_error(failing, lambda y, t: -y, y, 0.5)))
        assert np.all(np.isnan(metrics.fisher_divergence(process, failing, lambda y, t: -y, y, 0.5)))


def test_bad_samples():
    good, key = np.random.default_rng(14).normal(size=(6, 2)), jax.random.key(0)
    holes = np.where(np.arange(6)[:, None] % 3 == 0, np.nan, good)
    for function in (metrics.mmd2, metrics.sliced_wasserstein):
        for x, y, text in [
            (good, good[:1], r"y has shape \(1, 2\); give at least 2 samples"),
            (good, good[:, :1], r"states of shape \(2,\) and y of shape \(1,\)"),
            (holes, good, "x is not finite in 2 of 6 samples; drop"),
        ]:
            with pytest.raises(ValueError, match=text):
                function(x, y, key=key)
        with pytest.raises(ValueError, match="permutations=0"):
            function(good, good, key=key, permutations=0)
    for bandwidth in (0.0, (1.0, -1.0), (), np.inf):
        with pytest.raises(ValueError, match=r"bandwidth=.* above zero"):
            metrics.mmd2(good, good, key=key, bandwidth=bandwidth)
    with pytest.raises(ValueError, match="most samples are equal"):
        metrics.mmd2(np.ones((6, 2)), good[:2], key=key)
    with pytest.raises(ValueError, match="projections=0"):
        metrics.sliced_wasserstein(good, good, key=key, projections=0)
    with pytest.raises(ValueError, match=r"order=0.5 must be at least 1"):
        metrics.sliced_wasserstein(good, good, key=key, order=0.5)
    for x, text in [(1.0, "at least 2 samples"), (good[:1], "at least 2 samples"), (holes, "x is not finite in 2")]:
        with pytest.raises(ValueError, match=text):
            metrics.moments(x)


def test_bad_scores():
    process, y = ad.Process(lambda y, t: -y, 1.0, 1.0), jnp.array([[-1.0, 1.0], [1.0, 1.0], [2.0, 0.0]])

    def exact(y, t):
        return -y

    for error in (
        metrics.relative_score_error,
        lambda *arguments: metrics.fisher_divergence(process, *arguments),
        lambda *arguments: metrics.relative_velocity_error(process, *arguments),
    ):
        for arguments, text in [
            ((exact, lambda y, t: jnp.log(y), y, 0.5), "exact is not finite at 2 of 3 states of y; drop"),
            ((lambda y, t: jnp.sum(y), exact, y, 0.5), r"score returned shape \(\) for a state of shape \(2,\)"),
            ((exact, lambda y, t: y[None], y, 0.5), r"exact returned shape \(1, 2\)"),
            ((exact, exact, y[:1], 0.5), "y has shape .*at least 2"),
            ((exact, exact, jnp.log(y), 0.5), "y is not finite in 2 of 3"),
            ((exact, exact, y, jnp.zeros(3)), r"t has shape \(3,\); give one time"),
        ]:
            with pytest.raises(ValueError, match=text):
                error(*arguments)
    with pytest.raises(ValueError, match="use fisher_divergence"):
        metrics.relative_score_error(exact, lambda y, t: 0 * y, y, 0.5)
