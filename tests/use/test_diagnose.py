"""Diagnostics: the size of an error, as it was put there; exact scores pass; what went unseen before is flagged."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.use import projections
from autodsm.use.findings import CANNOT_TELL, CONSISTENT, INCONSISTENT, Report, judged
from autodsm.use.projections import Size, squared_mean

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import diagnostics

KEY = jax.random.key(0)
A, G = np.array([[-1.0, 0.8], [-0.5, -0.7]]), np.array([[0.8, 0.0], [0.4, 0.6]])
MEAN, COV = np.array([1.0, 0.0]), np.diag([0.3, 0.1])
TURNING = ad.linear(A, G, t1=3.0)
EXACT = ad.reference.gaussian_marginals(TURNING, MEAN, COV).score
START = dist.MultivariateNormal(jnp.asarray(MEAN), jnp.asarray(COV))


def larger(y, t):
    return 1.1 * EXACT(y, t)


def look(score, **options) -> Report:
    given: dict = dict(key=KEY, n=2000, times=[0.3, 1.0, 3.0], flow=False)
    return ad.diagnose(TURNING, score, START, **{**given, **options})


@pytest.fixture(scope="module")
def wrong() -> Report:
    return look(larger)


def test_squared_means_are_unbiased_and_their_chances_right():
    """Rows of unequal and correlated noise: of zero mean p is uniform; of another one intervals hold it."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(12, 12)) * np.geomspace(1.0, 0.05, 12)
    shift = 0.15 * rng.normal(size=12)
    zero = [squared_mean(rng.standard_t(8, size=(400, 12)) @ root, level=0.1) for _ in range(600)]
    for level in (0.01, 0.05, 0.5):
        rate = np.mean([size.p_value < level for size in zero])
        assert abs(rate - level) < 4 * np.sqrt(level * (1 - level) / 600) + 0.2 * level
    values = np.array([size.value for size in zero])
    assert abs(values.mean()) < 4 * values.std() / np.sqrt(600)
    found = [squared_mean(rng.normal(size=(400, 12)) @ root + shift, level=0.1) for _ in range(400)]
    values, truth = np.array([size.value for size in found]), np.sum(shift**2)
    assert abs(values.mean() - truth) < 4 * values.std() / np.sqrt(400)
    held = np.mean([size.low <= truth <= size.high for size in found])
    assert held > 0.9 - 4 * np.sqrt(0.09 / 400)


def test_the_size_of_an_error_is_found(wrong):
    """A score that is 10 % too large has a squared error of 1 %, at all times."""
    for seen in wrong.looks:
        assert seen.error.low <= 0.01 <= seen.error.high
        assert seen.error.high < 0.02
    assert wrong.looks[-1].error.low > 0.007
    assert "error" in wrong.flags
    assert wrong.verdict == CONSISTENT  # with a tolerance of 2 %, though some error is certain
    assert "Some error is certain" in wrong.sentence


def test_an_exact_score_has_none():
    found = look(EXACT)
    assert found.flags == ()
    assert found.verdict == CONSISTENT
    assert found.velocity_verdict != INCONSISTENT
    assert all(seen.error.low == 0.0 for seen in found.looks)
    assert "Consistent to" in str(found)


def test_nothing_has_units(wrong):
    """Other units of each coordinate and of time: the same sizes and rates."""
    units, second = np.array([1e3, 1e-2]), 10.0
    process = ad.linear(A * units[:, None] / units / second, G * units[:, None] / np.sqrt(second), t1=3.0 * second)
    start = dist.MultivariateNormal(jnp.asarray(MEAN * units), jnp.asarray(COV * np.outer(units, units)))

    def score(y, t):
        return larger(y / units, t / second) / units

    found = ad.diagnose(process, score, start, key=KEY, n=2000, times=np.array([0.3, 1.0, 3.0]) * second, flow=False)
    assert found.verdict == wrong.verdict
    for one, other in zip(found.looks, wrong.looks, strict=True):
        assert abs(one.error.value - other.error.value) < 0.5 * (other.error.high - other.error.low)
        assert one.rates.total.value * second == pytest.approx(other.rates.total.value, rel=0.2)


def test_the_flow_of_a_wrong_score_drifts():
    found = look(lambda y, t: 1.3 * EXACT(y, t), flow=True, n=1000, times=[1.0, 3.0], rates=False)
    assert found.verdict == INCONSISTENT
    assert {"error", "Stein", "flow"} <= set(found.flags)
    assert found.drifts
    assert found.flow[-1].variance.value > 0.5
    assert found.flow[-1].outside > 0.02
    assert "in variance at t = 3" in found.sentence
    assert all(seen.error.low <= 0.09 <= seen.error.high for seen in found.looks)


def test_a_wrong_covariance_with_the_right_variances():
    """What the diagonal of the Stein matrix passes: coordinates taken for independent ones."""
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    cov = turn @ np.diag([0.2, 0.6, 1.2, 2.0]) @ turn.T
    process = ad.linear(-0.5 * np.linalg.inv(cov), np.eye(4), t1=1.0)  # this law at all times
    start = dist.MultivariateNormal(jnp.zeros(4), jnp.asarray(cov))
    found = ad.diagnose(process, lambda y, t: -y / jnp.diag(cov), start, key=KEY, n=2000, times=[1.0], flow=False)
    (seen,) = found.looks
    assert seen.diagonal < 4.0
    assert seen.matrix < 1e-9
    assert "Stein" in found.flags
    assert found.verdict == INCONSISTENT
    # Known exactly, with a scalar noise: tr (D⁻¹ − C⁻¹) C (D⁻¹ − C⁻¹) / tr C⁻¹
    off = np.linalg.inv(np.diag(np.diag(cov))) - np.linalg.inv(cov)
    truth = np.trace(off @ cov @ off) / np.trace(np.linalg.inv(cov))
    assert seen.error.low <= truth <= seen.error.high


def test_production_near_equilibrium_is_printed_with_the_error_of_its_score():
    """A score that is good to 0.25 %, and a production that is off by many standard errors of its samples."""
    process = ad.linear(-np.eye(2), np.sqrt(2.0) * np.eye(2), t1=1.0)
    exact = ad.reference.gaussian_marginals(process, np.zeros(2), 0.8 * np.eye(2))
    start = dist.MultivariateNormal(jnp.zeros(2), 0.8 * jnp.eye(2))
    found = ad.diagnose(process, lambda y, t: 1.05 * exact.score(y, t), start, key=KEY, times=[1.0], flow=False)
    (seen,) = found.looks
    variance = float(exact.moments(1.0)[1][0, 0])
    truth = 2 * variance * (1 / variance - 1) ** 2  # E|v|²/D
    total = seen.rates.total
    assert abs(total.value - truth) > 8 * total.stderr
    assert abs(total.value - truth) < 2 * total.error
    assert found.verdict == CONSISTENT
    assert found.velocity_verdict == INCONSISTENT
    assert "currents and entropy production" in found.sentence


def test_forms_of_the_entropy_rate_that_disagree_are_said(wrong):
    """dS/dt by divergence and by score, of a score that is wrong by 30 %."""
    found = look(lambda y, t: 1.3 * EXACT(y, t))
    assert "balance" in found.flags
    process = TURNING
    for seen in found.looks:
        cov = np.asarray(ad.reference.gaussian_marginals(process, MEAN, COV).moments(seen.t)[1], float)
        truth = np.trace(A) + 0.5 * np.trace(G @ G.T @ np.linalg.inv(cov))
        assert abs(seen.rates.system.value - truth) > 10 * seen.rates.system.stderr
        assert abs(seen.rates.system.value - truth) < 2 * seen.rates.system.error


def test_without_a_target_steins_identity_is_left():
    """A drift that jumps, towards the Laplace law it starts from: no derivative of it is taken."""
    process = ad.Process(lambda y, t: -jnp.sign(y), np.sqrt(2.0), 1.0)
    start = lambda key, n: jax.random.laplace(key, (n, 2))  # noqa: E731
    options: dict = dict(key=KEY, n=2000, times=[0.5, 1.0], flow=False)
    exact = ad.diagnose(process, lambda y, t: -jnp.sign(y), start, **options)
    assert "Stein's identity alone" in exact.about
    assert exact.flags == ()
    assert exact.looks[0].rates is None
    wrong = ad.diagnose(process, lambda y, t: -1.3 * jnp.sign(y), start, **options)
    assert "error" in wrong.flags
    assert all(seen.error.low <= 0.09 and seen.error.high > 0.04 for seen in wrong.looks)


def test_another_score_and_a_steady_state():
    """The difference of two errors is known; a steady state has no residual, one that relaxes has."""
    found = look(larger, other=EXACT, steady=True)
    for seen in found.looks:
        assert abs(seen.difference.value - 0.01) < 4.5 * seen.difference.stderr
    assert found.looks[-1].difference.stderr < 0.002
    assert "steady residual" in found.table()[0]
    still = [seen.rates.still for seen in look(EXACT, steady=True).looks]
    assert still[-1] < 0.1 * still[0]  # the mean relaxes as exp(−.85 t), and this as its square


def test_verdicts_are_three_way():
    for size, verdict in (
        (Size(0.01, 0.0, 0.015, 0.5), CONSISTENT),
        (Size(0.05, 0.03, 0.07, 0.0), INCONSISTENT),
        (Size(0.02, 0.01, 0.03, 0.0), CANNOT_TELL),
    ):
        assert judged(size, 0.02) == verdict


def test_least_noise_keeps_the_mean():
    rng = np.random.default_rng(0)
    first, second = rng.normal(1.0, 2.0, (20_000, 3)), rng.normal(1.0, 1.0, (20_000, 3))
    found = projections.least_noise(first, second)
    np.testing.assert_allclose(found.mean(axis=0), 1.0, atol=4.5 * np.sqrt(0.8 / 20_000))
    np.testing.assert_allclose(found.var(axis=0), 0.8, rtol=0.06)  # 1/(1/4 + 1/1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(times=[0.0, 1.0]), "must increase, from above 0 to t1=3"),
        (dict(times=[1.0, 4.0]), "times"),
        (dict(n=10), "at least 64"),
        (dict(tolerance=0.0), "tolerance=0.0 must be above 0"),
        (dict(score=lambda y, t: y[:1]), "score returned"),
        (dict(score=lambda y, t: y * jnp.nan), "score is not finite at t=1, for 64 of 64"),
        (dict(sample=3), "sample"),
    ],
)
def test_bad_input(changes, message):
    given: dict = dict(score=EXACT, key=KEY, times=[1.0], n=64, flow=False) | changes
    with pytest.raises((ValueError, TypeError, FloatingPointError), match=message):
        ad.diagnose(TURNING, y0=START, **given)


def test_rates_of_detection_go_on_where_they_were_stopped(tmp_path, capsys):
    """The benchmark: two exact scores, and one that has a mode too much."""
    diagnostics.main(quick=True, out=tmp_path / "rates.json")
    written = (tmp_path / "rates.json").read_text()
    shown = capsys.readouterr().out
    assert "exact: " in shown
    assert "mode 30 %: 1 of 1 flagged" in shown
    diagnostics.main(quick=True, out=tmp_path / "rates.json")
    assert (tmp_path / "rates.json").read_text() == written
    with pytest.raises(ValueError, match="has runs of n=500 and flow=False, not of n=700"):
        diagnostics.main(n=700, out=tmp_path / "rates.json")
