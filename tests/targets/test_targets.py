"""Targets against exact kernels and Stein's identity: `E[ŝ φ(y)] = −E[∇φ(y)]` for all φ."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.exact.grid1d import evolve_1d, transition_1d
from autodsm.exact.grid2d import solve_2d
from autodsm.targets import Adapted, Local, Paths, Tabulated
from autodsm.targets.paths import choose_steps, time_grid
from autodsm.targets.pilot import Pilot
from batches import in_batches
from stein import COUPLED, N, start, stein_z_scores


def scalar_kernels(process, starts, times, width, cells=8000):
    """q(y_t|y_0) of a scalar process on a fixed fine grid, from narrow Gaussians in place of points; with its cells."""
    faces = np.linspace(-12.0, 12.0, cells + 1)
    x = 0.5 * (faces[1:] + faces[:-1])
    first = np.exp(-0.5 * ((x - np.array(starts)[:, None]) / width) ** 2)
    return x, evolve_1d(process, first, times, faces=faces, steps=400)


PROCESSES = {
    "logistic": ad.langevin(dist.Logistic(0.0, 1.0)),
    "double well": ad.Process(lambda y, t: y - y**3, 0.7, 1.0),
    "driven": ad.Process(lambda y, t: jnp.sin(2 * y) - y + jnp.cos(3 * t), lambda t: 0.5 + 0.4 * t, 1.0),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_tabulated_moments_and_stein_by_quadrature(name):
    """No random numbers: z on a fine grid with its normal weights."""
    process = PROCESSES[name]
    target = Tabulated(process, (1,), y_range=(-2.0, 2.0))
    z = np.linspace(-5.5, 5.5, 2201)
    weight = np.exp(-0.5 * z**2) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    at = jax.jit(jax.vmap(lambda y0, t, z: target._draw(target.tables, y0, t, z), in_axes=(None, None, 0)))
    nodes, shares = np.polynomial.hermite_e.hermegauss(5)
    middles, times, width = (-1.73, 0.31), (0.05, 0.3, 1.0), 0.02
    x, kernels = scalar_kernels(process, middles, times, width)
    dx = x[1] - x[0]
    for y0, kernel in zip(middles, np.moveaxis(kernels, 1, 0), strict=True):
        for t, q in zip(times, kernel, strict=True):
            std = np.sqrt(np.sum(q * x**2) * dx - (np.sum(q * x) * dx) ** 2)
            # The reference starts from a narrow Gaussian: so does the table, by quadrature over y_0.
            starts = y0 + width * nodes
            draws = [at(jnp.array([y], jnp.float32), t, jnp.asarray(z[:, None], jnp.float32)) for y in starts]
            y, s = (np.stack([np.asarray(d[k][:, 0, 0], float) for d in draws]) for k in (1, 2))
            mass = shares[:, None] / shares.sum() * weight
            for phi in (lambda y: y, lambda y: y**2, np.sin):
                expected = np.sum(q * phi(x)) * dx
                assert np.sum(mass * phi(y)) == pytest.approx(expected, abs=3e-3 * std)
            for phi, slope in ((lambda y: y, np.ones_like), (np.sin, np.cos), (lambda y: y**2, lambda y: 2 * y)):
                residual = np.sum(mass * (s * phi(y) + slope(y)))
                assert abs(residual) < 4e-3 * max(np.sqrt(np.sum(mass * slope(y) ** 2)), 1.0)


def test_tabulated_is_exact_for_a_gaussian_kernel():
    process = ad.vp(ad.LinearBeta(0.1, 10.0))
    target = Tabulated(process, (3,), y_range=(-2.0, 2.0))
    x, z = jnp.array([-1.9, 0.1, 1.2]), jnp.array([0.5, -2.2, 3.1])
    for t in (1e-4, 1e-3, 0.05, 0.4, 1.0):
        draw = target._draw(target.tables, x, jnp.asarray(t), z)
        total = 0.1 * t + 4.95 * t**2
        std = np.sqrt(-np.expm1(-total))
        np.testing.assert_allclose((draw.y[0] - np.exp(-0.5 * total) * x) / std, z, atol=2e-3)
        np.testing.assert_allclose(draw.score[0] * std, -z, atol=2e-3)
        np.testing.assert_allclose(draw.scale, std, rtol=1e-3)


def test_tabulated_clock():
    assert Tabulated(PROCESSES["logistic"], (1,), y_range=(-2.0, 2.0)).tables.separable
    assert not Tabulated(PROCESSES["driven"], (1,), y_range=(-2.0, 2.0)).tables.separable


def test_tabulated_tells_laws_apart():
    process = ad.Process(lambda y, t: -jnp.array([0.5, 2.0, 0.5]) * y, 1.0, 2.0)
    target = Tabulated(process, (3,), y_range=(-1.0, 1.0))
    assert target.tables.law.tolist() in ([0, 1, 0], [1, 0, 1])
    draw = target._draw(target.tables, jnp.ones(3), jnp.asarray(1.0), jnp.zeros(3))
    np.testing.assert_allclose(draw.y[0], np.exp([-0.5, -2.0, -0.5]), rtol=2e-3)
    many = ad.Process(lambda y, t: -jnp.arange(100.0) * y, 1.0, 2.0)
    with pytest.raises(ValueError, match="100 different laws"):
        Tabulated(many, (100,), y_range=(-1.0, 1.0))


def test_tabulated_refusals():
    with pytest.raises(ValueError, match=r"couples coordinates\. Use PathwiseDSM"):
        Tabulated(COUPLED["ring"][0], (3,), y_range=(-1.0, 1.0))
    with pytest.raises(ValueError, match=r"y_range=\(1\.0, -1\.0\)"):
        Tabulated(PROCESSES["logistic"], (1,), y_range=(1.0, -1.0))
    target = Tabulated(PROCESSES["logistic"], (1,), y_range=(-2.0, 2.0))
    assert "outside y_range=(-2, 2)" in target.covers(np.array([[0.0], [2.5]]))
    assert target.covers(np.array([[0.0], [1.5]])) is None
    draw = target.draw(jnp.array([2.5]), jnp.array([0.5]), key=jax.random.key(0))
    assert np.isnan(draw.y).all()


def test_tables_are_built_once():
    process = ad.langevin(dist.Logistic(0.0, 1.0))
    first = Tabulated(process, (1,), y_range=(-1.0, 1.0)).tables
    assert Tabulated(process, (1,), y_range=(-1.0, 1.0)).tables is first
    assert Tabulated(process, (1,), y_range=(-1.5, 1.0)).tables is not first


def test_tables_of_one_drift_with_several_noises():
    """Ornstein–Uhlenbeck, mean and deviation known. One object with several values, as memory that is used again is."""

    class Noise:
        def __call__(self, t):
            return jnp.asarray(self.value)

    def drift(y, t):
        return -y

    noise = Noise()
    for noise.value in (0.3, 0.6, 1.2):
        target = Tabulated(ad.Process(drift, noise, 1.0), (1,), y_range=(-1.0, 1.0))
        draw = target._draw(target.tables, jnp.ones(1), jnp.asarray(1.0), jnp.zeros(1))
        assert float(draw.scale[0]) == pytest.approx(noise.value * np.sqrt(-np.expm1(-2.0) / 2), rel=1e-3)
        assert float(draw.y[0, 0]) == pytest.approx(np.exp(-1.0), rel=1e-3)


def test_equal_processes_share_tables():
    def built(rate):
        rates = jnp.array([rate, 2.0])
        return Tabulated(ad.Process(lambda y, t: -rates * y, 1.0, 1.0), (2,), y_range=(-1.0, 1.0)).tables

    assert built(1.0) is built(1.0)
    assert built(1.0) is not built(1.0 + 1e-6)


def test_a_sharper_drift_gets_more_starts():
    smooth, sharp = (
        Tabulated(process, (1,), y_range=(-2.0, 2.0)).tables
        for process in (PROCESSES["logistic"], ad.Process(lambda y, t: y - y**3, 1.0, 2.0))
    )
    assert smooth.residual.shape[2] < sharp.residual.shape[2]
    assert max(smooth.error, sharp.error) < 0.005


def test_moving_frame_keeps_mass_and_moments():
    times = np.exp(np.linspace(np.log(1e-6), np.log(3.0), 301))
    found = transition_1d(lambda y, t: y - y**3, lambda t: 0.49, np.array([-1.5, 0.0, 4.0]), times, cells=800)
    dx, xi = found.faces[1] - found.faces[0], 0.5 * (found.faces[1:] + found.faces[:-1])
    np.testing.assert_allclose(found.q.sum(-1) * dx, 1.0, atol=1e-10)
    np.testing.assert_allclose((found.q * xi).sum(-1) * dx, 0.0, atol=0.02)
    np.testing.assert_allclose((found.q * xi**2).sum(-1) * dx, 1.0, atol=0.05)


def test_paths_have_the_right_law_at_any_time():
    system = ad.systems.ornstein_uhlenbeck(rate=1.3, noise=0.8, t1=2.0)
    paths = Paths(system.process, 24)
    times, n = jnp.array([1.77, 0.013, 0.5]), N
    x = jnp.array([0.7])
    y = jax.jit(jax.vmap(lambda k: paths.states(x, times, key=k)))(jax.random.split(jax.random.key(0), n))[..., 0]
    mean, var = 0.7 * np.exp(-1.3 * times), 0.64 / 2.6 * (1 - np.exp(-2.6 * times))
    assert np.all(np.abs(y.mean(0) - mean) < 4 * np.sqrt(var / n) + 2e-3)
    assert np.all(np.abs(y.var(0) / var - 1) < 4 * np.sqrt(2 / n) + 5e-3)


def test_steps_follow_the_stiffness():
    start_law = start((1,))
    slow, fast = (ad.Process(lambda y, t, a=a: -a * y, 1.0, 1.0) for a in (2.0, 40.0))
    few, many = (choose_steps(p, start_law, key=jax.random.key(0)) for p in (slow, fast))
    assert few < 32
    assert 4 * few < many
    grid = time_grid(ad.vp(ad.LinearBeta(0.1, 20.0)), 10)
    assert grid[0] == 0
    assert grid[-1] == pytest.approx(1.0)
    assert np.all(np.diff(grid) > 0)
    assert np.diff(grid).max() > 1.4 * (grid[-1] - grid[-2])


@pytest.mark.parametrize("along", [lambda paths: paths, lambda paths: Adapted(paths.process, paths)])
def test_paths_survive_far_starts(along):
    """A cubic drift from 20 deviations out, with steps that would be a hundred times too long there."""
    process = ad.Process(lambda y, t: -(y**3), 1.0, 5.0)
    paths = along(Paths(process, 48))
    y = jax.vmap(lambda k: paths.states(jnp.array([20.0]), jnp.array([0.3, 5.0]), key=k))(
        jax.random.split(jax.random.key(0), 4096)
    )
    exact = 1 / np.sqrt(2 * 0.3 + 1 / 400)  # without noise, which adds little by then
    assert np.isfinite(y).all()
    assert float(y[:, 0].mean()) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("antithetic", [False, True])
def test_local_target_is_the_kernel_score(antithetic):
    process, shape = COUPLED["tanh"]
    target = Local(process, ad.ScheduledPairs(process, 0.1), Paths(process, 32), antithetic=antithetic)
    draw = target.draw(jnp.array([0.3, -0.2]), jnp.array([0.7, 1.4]), key=jax.random.key(1))
    assert draw.y.shape == (2, 1 + antithetic, 2)
    if antithetic:
        np.testing.assert_allclose(draw.y.mean(1), draw.anchor, atol=1e-6)
        np.testing.assert_allclose(draw.score[:, 0], -draw.score[:, 1], atol=1e-6)
    z = stein_z_scores(Local(process, ad.ScheduledPairs(process, 0.01), Paths(process, 64)), shape, [0.5, 1.5])
    assert np.abs(z).max() < 4.5


def test_paths_of_sharp_laws_take_short_steps():
    """The swimmer stays near v = x³, which no noise in x blurs: how near is what a coarse path gets wrong first."""
    system, n = ad.systems.swimmer(), 100_000
    times = [3.0, 5.0]
    normal = lambda x, v: np.exp(-(x**2 + v**2) / 2)  # noqa: E731
    grid = solve_2d(system.process, normal, times, ranges=((-4.8, 4.8), (-6.0, 6.0)), cells=(384, 300), steps=100)
    off = (grid.x2[None] - grid.x1[:, None] ** 3) ** 2
    exact = grid.area * np.sum(grid.q * off, axis=(1, 2))
    keys, starts = jax.random.split(jax.random.key(1), n), system.y0(jax.random.key(0), n)

    def found(paths):
        states = in_batches(lambda x, k: paths.states(x, jnp.asarray(times), key=k), starts, keys)
        squares = np.asarray((states[..., 1] - states[..., 0] ** 3) ** 2, float)
        return (squares.mean(axis=0) - exact) / (squares.std(axis=0) / np.sqrt(n))

    assert np.all(np.abs(found(Pilot(*system[:2], key=jax.random.key(2)).paths())) < 4.5)
    assert np.abs(found(Paths(system.process, 24))).max() > 5  # so the test can fail


def test_steps_beyond_the_limit_are_refused():
    """One coordinate is a thousand times as fast as the other, and needs more steps than there may be."""
    rates = jnp.array([2e5, 1.0])
    process = ad.Process(lambda y, t: -rates * y * (1 + 0.1 * jnp.sum(y**2)), 1.0, t1=1.0)
    with pytest.raises(ValueError, match="steps"):
        choose_steps(process, lambda key, n: jax.random.normal(key, (n, 2)), key=jax.random.key(0))
