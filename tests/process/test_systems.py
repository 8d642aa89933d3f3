"""Systems: their equations, initial laws and symmetries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
import oracles
from autodsm.exact import gaussian as reference


@pytest.mark.parametrize("name", ad.systems.SYSTEMS)
def test_defaults_work(name):
    system = ad.systems.SYSTEMS[name]()
    y = system.y0(jax.random.key(0), 4)
    assert y.shape == (4, *system.shape)
    system.process.check(y[0])


def test_swimmer_equations():
    process = ad.systems.swimmer(gamma=0.3, D=2.0).process
    np.testing.assert_allclose(process.drift(jnp.array([2.0, 0.5]), 0.0), [-7.5, -0.15], rtol=1e-6)
    np.testing.assert_allclose(process.g(0.0), [0.0, np.sqrt(1.2)], rtol=1e-6)
    y = jnp.array([0.3, -1.1])
    np.testing.assert_allclose(process.drift(-y, 0.0), -process.drift(y, 0.0))  # odd drift, hence odd score


def test_mueller_brown_rests_at_its_published_minima(x64):
    drift = ad.systems.mueller_brown().process.drift
    for minimum in ([-0.558, 1.442], [0.623, 0.028], [-0.050, 0.467]):  # to three digits
        hessian = jax.jacobian(lambda y: -drift(y, 0.0))(jnp.array(minimum))
        away = jnp.linalg.solve(hessian, drift(jnp.array(minimum), 0.0))  # by Newton's method
        np.testing.assert_allclose(away, 0.0, atol=6e-4)
        assert np.linalg.eigvalsh(hessian).min() > 0
    # The derivative of the first term alone, by hand, where the others are next to nothing.
    far = jnp.array([1.5, -1.0])
    expected = -0.05 * -200.0 * np.exp(-0.25 - 10.0) * np.array([-1.0, 20.0])
    rest = 0.05 * 15.0 * np.exp(0.7 * 2.5**2 + 0.6 * 2.5 * -2.0 + 0.7 * 4.0) * np.array([3.5 - 1.2, 1.5 - 2.8])
    np.testing.assert_allclose(drift(far, 0.0), expected - rest, rtol=2e-3)


def test_fitzhugh_nagumo_equations():
    process = ad.systems.fitzhugh_nagumo().process
    found = process.drift(jnp.array([1.5, 0.2]), 0.0)
    np.testing.assert_allclose(found, [10 * (1.5 - 1.125 - 0.2 + 0.5), 1.5 + 0.7 - 0.16], rtol=1e-6)
    np.testing.assert_allclose(process.g(0.0), [0.0, 0.3], rtol=1e-6)


def test_lorenz96_conserves_energy_but_for_friction_and_force(x64):
    process = ad.systems.lorenz96(7).process
    y = jax.random.normal(jax.random.key(0), (7,))
    np.testing.assert_allclose(y @ process.drift(y, 0.0), -y @ y + 8.0 * y.sum(), rtol=1e-12)
    moved = process.drift(y, 0.0)[3] + y[3] - 8.0
    np.testing.assert_allclose(moved, (y[4] - y[1]) * y[2], rtol=1e-12)
    with pytest.raises(ValueError, match="dim=3"):
        ad.systems.lorenz96(3)


def test_starts_have_a_mean_of_one_number_or_of_each_coordinate():
    np.testing.assert_allclose(ad.systems.mueller_brown(mean0=1.0).y0.mean, [1.0, 1.0])
    with pytest.raises(ValueError, match="mean0"):
        ad.systems.fitzhugh_nagumo(mean0=(1.0, 2.0, 3.0))


def test_published_exponent_narrows_the_repulsion(x64):
    y = jnp.array([[0.0, 0.0], [0.3, 0.0]])
    force = [ad.systems.particles(2, exponent=c).process.drift(y, 0.0)[1, 0] for c in (0.0, 1.0, 2.0)]
    trap = ad.systems.particles(2, A=0.0).process.drift(y, 0.0)[1, 0]
    ratio = (np.array(force) - trap) / (force[0] - trap)
    np.testing.assert_allclose(ratio, np.exp([0.0, -(0.3**2) / 0.5, -2 * 0.3**2 / 0.5]), rtol=1e-9)


def test_particle_repulsion_is_the_gradient_of_a_gaussian_bump(x64):
    def energy(y):
        apart = y[:, None] - y[None]
        return 10.0 / 5 * 0.5 * jnp.sum(jnp.exp(-jnp.sum(apart**2, axis=-1) / (2 * 0.5**2)))

    y = jax.random.normal(jax.random.key(0), (5, 2))
    trap_only = ad.systems.particles(A=0.0).process.drift(y, 0.7)
    repulsion = ad.systems.particles().process.drift(y, 0.7) - trap_only
    np.testing.assert_allclose(repulsion, -jax.grad(energy)(y), rtol=1e-9)
    centre = 2.0 * np.array([np.cos(0.7 * np.pi), np.sin(0.7 * np.pi)])
    expected = 4 * 0.25 / (25 * 0.25) * (centre - y) * np.sum((y - centre) ** 2, axis=1, keepdims=True)
    np.testing.assert_allclose(trap_only, expected, rtol=1e-9)


def test_harmonic_reference_values():
    times = (0.0, 0.5, 1.0, 2.0, 5.0)
    found = [reference.harmonic_particles(t) for t in times]
    np.testing.assert_allclose([m.trace(50) for m in found], [6.25, 23.357, 33.676, 43.691, 49.211], atol=5e-4)
    np.testing.assert_allclose([m.entropy(50) for m in found], [3.2644, 69.150, 87.402, 100.354, 106.254], atol=5e-4)


def test_harmonic_reference_against_moment_equations(x64):
    n, t = 3, 0.8
    process = ad.systems.harmonic_particles(n).process
    origin = jnp.zeros((n, 2))
    a = np.asarray(jax.jacfwd(lambda y: process.drift(y, 0.0))(origin)).reshape(2 * n, 2 * n)
    start = np.tile([2.0, 0.0], n)
    exact = oracles.linear_moments(
        lambda t: a,
        lambda t: np.ravel(process.drift(origin, t)),
        lambda t: float(process.g(t)) * np.eye(2 * n),
        start,
        0.0,
        t,
        cov=0.25**2 * np.eye(2 * n),
    )
    found = reference.harmonic_particles(t)
    np.testing.assert_allclose(exact.mean.reshape(n, 2), np.tile(found.mean, (n, 1)), rtol=1e-9)
    np.testing.assert_allclose(np.trace(exact.cov), found.trace(n), rtol=1e-9)
    entropy = 0.5 * np.linalg.slogdet(2 * np.pi * np.e * exact.cov)[1]
    np.testing.assert_allclose(entropy, found.entropy(n), rtol=1e-9)


def test_harmonic_paths_follow_the_reference():
    system, count = ad.systems.harmonic_particles(10), 20_000
    y0, keys = system.y0(jax.random.key(0), count), jax.random.split(jax.random.key(1), count)
    end = np.asarray(jax.jit(jax.vmap(lambda y, k: ad.simulate(system.process, y, [2.0], key=k)))(y0, keys))[:, 0]
    exact = reference.harmonic_particles(2.0)
    scale = np.sqrt(exact.fluctuation / count)
    np.testing.assert_allclose(end.mean(0), np.tile(exact.mean, (10, 1)), atol=5 * scale + 2e-3)
    assert np.sum(end.var(0)) == pytest.approx(
        exact.trace(10), abs=5 * exact.trace(10) * np.sqrt(2 / (20 * count)) + 0.02
    )


def test_bad_parameters():
    with pytest.raises(ValueError, match="dim=0 must be a whole number"):
        ad.systems.double_well(0)
    with pytest.raises(ValueError, match="gamma=-1"):
        ad.systems.swimmer(gamma=-1.0)
    with pytest.raises(ValueError, match="n=0"):
        ad.systems.particles(0)


def test_checkerboard_covers_its_squares_evenly():
    x = np.asarray(ad.data.checkerboard(jax.random.key(0), 80_000))
    column, row = np.floor(x).astype(int).T
    assert np.all((column + row) % 2 == 0)
    counts = np.unique(4 * (column + 2) + row + 2, return_counts=True)[1]
    assert len(counts) == 8
    assert np.all(np.abs(counts - 10_000) < 4 * np.sqrt(80_000 / 8 * 7 / 8))
