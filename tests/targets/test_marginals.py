"""Moments of a pilot, and the Gaussian score that they give, against exact covariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.learn.choose import default_network
from autodsm.targets import Paths
from autodsm.targets.correlations import FULL, LARGEST, Full, LowRank, invert_correlations
from autodsm.targets.marginals import POINTS, SHARES, Marginals
from oracles import linear_moments

D = 5
RNG = np.random.default_rng(3)
SLOPE = RNG.normal(size=(D, D)) - 2.0 * np.eye(D)
NOISE = np.eye(D) + 0.4 * RNG.normal(size=(D, D))
START = RNG.normal(size=D)
T1 = 2.0
TIMES = (0.002, 0.0031, 0.01, 0.05, 0.27, 0.9, 1.99)  # of which none is in the table


def exact(t, width=0.1):
    """Mean and covariance of a coupled linear process from a narrow start."""
    found = linear_moments(
        lambda s: SLOPE, lambda s: 0.0, lambda s: NOISE, START, 0.0, t, cov=width**2 * np.eye(len(START))
    )
    return found.mean, found.cov


def process():
    slope, noise = jnp.asarray(SLOPE, jnp.float32), jnp.asarray(NOISE, jnp.float32)
    return ad.Process(lambda y, t: slope @ y, noise, T1)


def y0(key, n):
    return jnp.asarray(START, jnp.float32) + 0.1 * jax.random.normal(key, (n, D))


@pytest.fixture(scope="module")
def marginals():
    return Marginals.estimate(process(), y0, Paths(process(), 64), key=jax.random.key(0))


def precision(score, cov, t):
    """`−∂s/∂y`, in the frame in which the exact one is the identity."""
    factor = np.linalg.cholesky(cov)
    slope = -np.asarray(jax.jacfwd(lambda y: score(y, t))(jnp.zeros(len(cov))), float)
    return factor.T @ slope @ factor


def test_a_network_before_training_obeys_steins_identity_as_a_matrix(marginals):
    """E[s (y − m)ᵀ] = −I, where E[s_i (y − m)_i] = −1 alone holds for independent coordinates.

    In the frame of the exact covariance the sample's precision is I with deviations √(1/n), of the diagonal √(2/n),
    and too large by d/n.
    """
    network = default_network(process(), (D,), marginals, None, key=jax.random.key(1), width=8, depth=1)
    alone = Marginals(marginals.mean, marginals.std, T1)
    bound = (D + 2) / 4096 + 4.5 * np.sqrt((1.0 + np.eye(D)) / 4096)
    for t in TIMES:
        mean, cov = exact(t)
        found = precision(network, cov, t)
        assert np.all(np.abs(found - np.eye(D)) < bound + 2e-3), t  # of interpolation
        offset = np.linalg.solve(np.linalg.cholesky(cov), np.asarray(marginals.at(t)[0]) - mean)
        assert np.all(np.abs(offset) < 4.5 / np.sqrt(4096) + 1e-3), t
        if t > 0.1:
            assert np.abs(precision(alone.score, cov, t) - np.eye(D)).max() > 0.3


def test_between_the_times_the_gaussian_is_exact(x64):
    """Tables of exact moments, and times in the middle between theirs, from a start that noise widens at once."""
    moments = [exact(max(share, 1e-6) * T1) for share in SHARES]
    std = np.array([np.sqrt(np.diag(cov)) for _, cov in moments])
    inverse = np.array([np.linalg.inv(cov / np.outer(s, s)) for s, (_, cov) in zip(std, moments, strict=True)])
    made = Marginals(jnp.asarray([mean for mean, _ in moments]), jnp.asarray(std), T1, Full(jnp.asarray(inverse)))
    for left, right in zip(SHARES[7:-1:6], SHARES[8::6], strict=True):
        t = 0.5 * (left + right) * T1
        mean, cov = exact(t)
        assert np.abs(precision(made.score, cov, t) - np.eye(D)).max() < 2e-3
        assert np.abs(np.linalg.solve(np.linalg.cholesky(cov), np.asarray(made.at(t)[0]) - mean)).max() < 1e-3
    assert 0.5e-3 < SHARES[1:].min() * 5 < 2e-3  # some times lie before the first one that is used
    assert len(SHARES) == POINTS


@pytest.mark.parametrize("seconds", [2.0**-30, 2.0**30])
def test_units_of_coordinates_and_time_do_not_matter(seconds):
    """Factors are powers of two, so that rounding is the same."""
    lengths = np.array([2.0**30, 2.0**-30, 1.0, 2.0**-30, 2.0**30], np.float32)
    known = process()
    noise = lengths[:, None] * np.asarray(known.g(0.0)) / np.float32(np.sqrt(seconds))
    other = ad.Process(lambda y, t: lengths * known.f(y / lengths, t) / seconds, noise, seconds * T1)
    forwards = Paths(known, 32), Paths(other, 32)
    before = Marginals.estimate(known, y0, forwards[0], key=jax.random.key(0), n=256)
    after = Marginals.estimate(other, lambda key, n: lengths * y0(key, n), forwards[1], key=jax.random.key(0), n=256)
    np.testing.assert_allclose(after.inverse.table, before.inverse.table, rtol=1e-3, atol=1e-3)
    y = jnp.asarray(START, jnp.float32) + 0.1
    for t in TIMES:
        found = lengths * after.score(lengths * y, seconds * t)
        np.testing.assert_allclose(found, before.score(y, t), rtol=1e-3, atol=1e-3 * np.abs(found).max())


def correlated(n, d, correlation, rng):
    """Samples whose coordinates all have one part in common, and the exact inverse of their correlations."""
    z = np.sqrt(1.0 - correlation) * rng.normal(size=(n, d)) + np.sqrt(correlation) * rng.normal(size=(n, 1))
    inverse = (np.eye(d) - correlation / (1.0 + (d - 1) * correlation)) / (1.0 - correlation)
    z = z - z.mean(axis=0)
    return z / z.std(axis=0), np.eye(d) * (1.0 - correlation) + correlation, inverse


def dense(found):
    """W at the first of the times."""
    d = (found.table if isinstance(found, Full) else found.diagonal).shape[1]
    return np.asarray(jax.vmap(lambda z: found(0, 0.0, z))(jnp.eye(d)), float)


def error(found, exact, inverse):
    """`E|W z − R⁻¹ z|² / E|R⁻¹ z|²`."""
    off = dense(found) - inverse
    return np.trace(off @ exact @ off) / np.trace(inverse)


def test_correlations_are_shrunk_where_samples_are_few():
    """Half as many coordinates as samples: the inverse of the sample's matrix has an error of 3, none at all 0."""
    rng = np.random.default_rng(0)
    z, exact, inverse = correlated(60, 30, 0.0, rng)
    raw = Full(jnp.asarray(np.linalg.inv(z.T @ z / len(z)))[None])
    assert error(raw, exact, inverse) > 1.0
    assert error(invert_correlations([z, z]), exact, inverse) < 0.05
    z, exact, inverse = correlated(60, 30, 0.5, rng)  # what is there is not shrunk away
    found = error(invert_correlations([z, z]), exact, inverse)
    assert found < 0.5 * error(Full(jnp.eye(30)[None]), exact, inverse)
    assert found < 0.2 * error(Full(jnp.asarray(np.linalg.inv(z.T @ z / len(z)))[None]), exact, inverse)


@pytest.mark.parametrize("correlation", [0.9, 0.9999])
def test_narrow_directions_stay_narrow(correlation):
    """Two coordinates that are nearly one: the precision across is right to √(2/n), not lost in the shrinkage."""
    z, exact, _ = correlated(4000, 2, correlation, np.random.default_rng(0))
    across = np.array([1.0, -1.0]) / np.sqrt(2.0)
    found = (across @ dense(invert_correlations([z, z])) @ across) * (across @ exact @ across)
    assert abs(found - 1.0) < 4.5 * np.sqrt(2.0 / 4000)


@pytest.mark.parametrize(("n", "d"), [(1000, FULL + 36), (150, 300)])
def test_many_coordinates_with_a_part_in_common(n, d):
    """One eigenvalue is far larger than the others: found with more samples than coordinates, and with fewer."""
    rng = np.random.default_rng(0)
    z, exact, inverse = correlated(n, d, 0.4, rng)
    found = invert_correlations([z, z])
    assert isinstance(found, LowRank)
    np.testing.assert_array_less(0.0, np.linalg.eigvalsh(dense(found)))
    nothing = error(Full(jnp.eye(d)[None]), exact, inverse)
    assert nothing > 0.25
    assert error(found, exact, inverse) < 0.1 * nothing
    z, exact, inverse = correlated(n, d, 0.0, rng)
    assert error(invert_correlations([z, z]), exact, inverse) < 0.02  # noise is not taken for correlations


def test_products_between_two_times():
    """Both kinds against their matrices, mixed."""
    rng = np.random.default_rng(0)
    for d in (6, FULL + 6):
        samples = [correlated(500, d, c, rng)[0] for c in (0.2, 0.6)]
        found, z = invert_correlations(samples), jnp.asarray(rng.normal(size=d), jnp.float32)
        ends = [np.asarray(found(0, part, z)) for part in (0.0, 1.0)]
        if isinstance(found, Full):
            matrices = np.asarray(found.table)
        else:
            matrices = [
                np.diag(x) - b @ b.T for x, b in zip(*map(np.asarray, (found.diagonal, found.factor)), strict=True)
            ]
        np.testing.assert_allclose(ends, [m @ z for m in matrices], rtol=1e-4, atol=1e-4)
        assert np.abs(ends[1] - ends[0]).max() > 0.1
        np.testing.assert_allclose(found(0, 0.25, z), 0.75 * ends[0] + 0.25 * ends[1], rtol=1e-4, atol=1e-5)


def test_which_states_have_correlations():
    """One coordinate has none, and of the largest states a pilot has too few."""

    def kind(d):
        linear = ad.Process(lambda y, t: -y, 1.0, 1.0)
        start = lambda key, n: jax.random.normal(key, (n, d))  # noqa: E731
        return type(Marginals.estimate(linear, start, Paths(linear, 8), key=jax.random.key(0), n=16).inverse)

    assert [kind(d) for d in (1, 2, FULL + 1, LARGEST + 1)] == [type(None), Full, LowRank, type(None)]


def test_a_start_at_a_point_and_coordinates_that_rest():
    """Deviations that were raised to their floor have no correlations from rounding; nothing is infinite."""
    still = ad.Process(lambda y, t: jnp.stack([-y[0] + y[1], 0.0 * y[1], -y[2]]), np.array([1.0, 0.0, 1.0]), 1.0)
    found = Marginals.estimate(still, np.array([[1.0, 5.0, 2.0]], np.float32), Paths(still, 32), key=jax.random.key(0))
    assert np.all(np.isfinite(found.inverse.table))
    for t in (0.0, 1e-3, 0.5, 1.0):
        s = found.score(jnp.array([1.0, 5.0, 2.0]), t)
        assert np.all(np.isfinite(s))
    np.testing.assert_allclose(found.inverse.table[:, 1, 1], 1.0, atol=1e-3)
