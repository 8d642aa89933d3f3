"""Observables against exact curves of Gaussian systems and stationary states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.exact.gaussian import HarmonicParticles

KEY = jax.random.key(0)
SYSTEM = ad.systems.harmonic_particles(50)
EXACT = HarmonicParticles(50)
obs = ad.observables


def test_harmonic_reference_against_moment_equations(x64):
    """The marginals in closed form against the moment equations, for three particles; and the published values."""
    process = ad.systems.harmonic_particles(3).process
    closed = HarmonicParticles(3)
    numeric = ad.reference.gaussian_marginals(process, np.tile(np.array([2.0, 0.0]), (3, 1)), 0.0625 * np.eye(6))
    y = jax.random.normal(KEY, (3, 2))
    for t in (0.0, 0.4, 2.0, 5.0):
        np.testing.assert_allclose(closed.score(y, t), numeric.score(y, t), rtol=1e-6)
        assert float(closed.log_density(y, t)) == pytest.approx(float(numeric.log_density(y, t)), abs=1e-6)
    for t, entropy in ((0.0, 3.2644), (0.5, 69.150), (1.0, 87.402), (2.0, 100.354), (5.0, 106.254)):
        assert ad.reference.harmonic_particles(t).entropy(50) == pytest.approx(entropy, abs=1e-3)
    drawn = EXACT.sample(KEY, 4000, 1.0)
    assert float(jnp.sum(jnp.var(drawn, axis=0))) == pytest.approx(33.676, rel=4 * np.sqrt(2 / (4000 * 100)))


def test_harmonic_rates_by_differences(x64):
    for t in (0.3, 1.0, 4.0):
        entropy = [ad.reference.harmonic_particles(t + h).entropy(50) for h in (-1e-4, 1e-4)]
        assert EXACT.production(t)[0] == pytest.approx((entropy[1] - entropy[0]) / 2e-4, rel=1e-6)
    assert EXACT.production(60.0)[1] == pytest.approx(726.4, abs=0.05)


def test_entropy_follows_the_exact_curve(x64):
    """N = 50, d = 100, exact score: the flow carries log q, so S(t) − S(0) is known to 1e-3 from few samples."""
    times = [0.0, 0.5, 1.0, 2.0, 5.0]
    y0 = EXACT.sample(KEY, 8, 0.0)
    start = jax.vmap(lambda y: EXACT.log_density(y, 0.0))(y0)
    found = obs.log_density(SYSTEM.process, EXACT.score, y0, start, times, tol=1e-6)
    assert found.y.shape == (5, 8, 50, 2)
    for i, t in enumerate(times):
        want = np.asarray(jax.vmap(lambda y, t=t: EXACT.log_density(y, t))(jnp.asarray(found.y[i])))
        np.testing.assert_allclose(found.log_density[i], want, atol=1e-3)
        gained = obs.entropy(found.log_density[i]).value - obs.entropy(found.log_density[0]).value
        exact = ad.reference.harmonic_particles(t).entropy(50) - ad.reference.harmonic_particles(0.0).entropy(50)
        assert gained == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("t", [0.2, 1.0, 5.0])
def test_entropy_rates_of_harmonic_particles(x64, t):
    ys = EXACT.sample(KEY, 4000, t)
    system, total = EXACT.production(t)
    by_divergence = obs.entropy_rate(SYSTEM.process, EXACT.score, ys[:16], t)
    assert by_divergence.value == pytest.approx(system, abs=1e-3)  # ∇·v is the same everywhere
    for estimate, want in zip(
        (
            obs.entropy_rate(SYSTEM.process, EXACT.score, ys, t, form="score"),
            obs.entropy_rate(SYSTEM.process, EXACT.score, ys, t, divergence="hutchinson", key=KEY),
        ),
        (system, system),
        strict=True,
    ):
        assert abs(estimate.value - want) < 4.5 * estimate.stderr
    rates = obs.entropy_production(SYSTEM.process, EXACT.score, ys, t)
    for estimate, want in zip(rates, (system, total - system, total), strict=True):
        assert abs(estimate.value - want) < 4.5 * estimate.stderr
        assert estimate.stderr < 0.02 * (1 + abs(total))


def test_production_of_the_rotating_state():
    """As t grows, 726.4: all of it is heat."""
    process = ad.systems.harmonic_particles(50, t1=30.0).process
    rates = obs.entropy_production(process, EXACT.score, EXACT.sample(KEY, 8000, 30.0), 30.0)
    assert abs(rates.total.value - 726.4) < 4.5 * rates.total.stderr + 0.05
    assert abs(rates.medium.value - 726.4) < 4.5 * rates.medium.stderr + 0.05
    assert abs(rates.system.value) < 4.5 * rates.system.stderr


def test_matrix_noise_and_a_current():
    """A linear system out of equilibrium with correlated noise: current and production in closed form."""
    A, g = np.array([[-1.0, 0.8], [-0.5, -0.7]]), np.array([[0.8, 0.0], [0.4, 0.6]])
    process = ad.linear(A, g, t1=40.0)
    exact = ad.reference.gaussian_marginals(process, np.zeros(2), 0.5 * np.eye(2))
    cov = np.asarray(exact.moments(40.0)[1], float)
    D = 0.5 * g @ g.T
    turn = A + D @ np.linalg.inv(cov)  # v = turn · y
    y = jnp.array([0.4, -0.3])
    np.testing.assert_allclose(obs.velocity(process, exact.score, y, 40.0), turn @ np.asarray(y), atol=1e-5)
    log_q = exact.log_density(y, 40.0)
    np.testing.assert_allclose(
        obs.current(process, exact.score, y, 40.0, log_q), turn @ np.asarray(y) * np.exp(float(log_q)), atol=1e-5
    )
    rates = obs.entropy_production(process, exact.score, exact.sample(KEY, 20_000, 40.0), 40.0)
    want = np.trace(turn.T @ np.linalg.inv(D) @ turn @ cov)
    assert want > 0.1
    assert abs(rates.total.value - want) < 4.5 * rates.total.stderr
    assert abs(rates.medium.value - want) < 4.5 * rates.medium.stderr


def test_equilibrium_produces_nothing(x64):
    """A double well at rest: v = 0 everywhere, and F = −T log Z with no variance."""
    process = ad.systems.double_well(1, noise=0.7).process
    T = 0.5 * 0.7**2
    grid = np.linspace(-4, 4, 20_001)
    weights = np.exp(-(grid**4 / 4 - grid**2 / 2) / T)
    Z = np.trapezoid(weights, grid)
    y = np.random.default_rng(0).choice(grid, size=(500, 1), p=weights / weights.sum())
    score = lambda y, t: (y - y**3) / T  # noqa: E731
    rates = obs.entropy_production(process, score, y, 1.0)
    assert max(abs(rates.total.value), abs(rates.medium.value)) < 1e-8
    energy = lambda y: jnp.sum(y**4 / 4 - y**2 / 2)  # noqa: E731
    log_q = np.asarray([-float(energy(v)) / T - np.log(Z) for v in y])
    free = obs.free_energy(energy, T, y, log_q)
    assert free.value == pytest.approx(-T * np.log(Z), abs=1e-5)
    assert free.stderr < 1e-6
    mean = obs.average(energy, y)
    assert abs(mean.value - np.trapezoid(weights * (grid**4 / 4 - grid**2 / 2), grid) / Z) < 4.5 * mean.stderr


def test_degenerate_noise():
    """The swimmer: the rate of the system exists by the divergence, the rest is refused by name."""
    process = ad.systems.swimmer().process
    score = lambda y, t: -y  # noqa: E731  (the v-component is the exact one)
    ys = jax.random.normal(KEY, (2000, 2))
    rate = obs.entropy_rate(process, score, ys, 1.0)
    # ∇·v = −3x² − γ + γD: the noise's part is that of v ~ N(0, 1)
    want = -3 * np.asarray(ys[:, 0], float) ** 2
    assert rate.value == pytest.approx(want.mean(), abs=1e-4)
    with pytest.raises(ValueError, match=r"entropy production divides by the noise.*use entropy_rate"):
        obs.entropy_production(process, score, ys, 1.0)
    with pytest.raises(ValueError, match='Use form="divergence"'):
        obs.entropy_rate(process, score, ys, 1.0, form="score")


def test_derivatives_of_a_drift_that_jumps_are_refused():
    """f = −sign(y) at N(0, 1), Q = 2: dS/dt = E[∇·v] = 1 − 2 E δ(y) = 1 − √(2/π); without the delta it is 1."""
    process = ad.Process(lambda y, t: -jnp.sign(y), np.sqrt(2.0), 1.0)
    ys, gaussian = jax.random.normal(KEY, (4000, 1)), lambda y, t: -y
    found = obs.entropy_rate(process, gaussian, ys, 0.5, form="score")
    assert abs(found.value - (1 - np.sqrt(2 / np.pi))) < 4.5 * found.stderr
    with pytest.raises(ValueError, match=r"jumps by.*form=\"score\""):
        obs.entropy_rate(process, gaussian, ys, 0.5)
    with pytest.raises(ValueError, match="jumps by"):
        obs.log_density(process, gaussian, ys[:8], np.zeros(8), [0.1, 0.2])


def test_bad_input():
    process, score, ys = SYSTEM.process, EXACT.score, EXACT.sample(KEY, 4, 1.0)
    with pytest.raises(ValueError, match=r"t=9.0 is outside the span of the process, \[0, 5.0\]"):
        obs.entropy_rate(process, score, ys, 9.0)
    with pytest.raises(ValueError, match="give several samples"):
        obs.entropy_production(process, score, ys[:1], 1.0)
    with pytest.raises(FloatingPointError, match=r"score is not finite at t=1, for 4 of 4"):
        obs.entropy_rate(process, lambda y, t: y * jnp.nan, ys, 1.0)
    with pytest.raises(ValueError, match="score returned shape"):
        obs.entropy_rate(process, lambda y, t: y[:1], ys, 1.0)
    with pytest.raises(ValueError, match="one number for each of the 4 samples"):
        obs.log_density(process, score, ys, np.zeros(3), [0.0, 1.0])
    with pytest.raises(ValueError, match="give key"):
        obs.log_density(process, score, ys, np.zeros(4), [0.0, 1.0], divergence="hutchinson")
