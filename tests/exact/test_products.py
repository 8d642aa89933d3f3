"""Mixtures of products on a grid: against closed forms, identities of the score, and simulated paths."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.special import ndtr

import autodsm as ad
from autodsm.exact import products
from autodsm.exact.products import solve_products, uniform_on
from batches import in_batches

WEIGHTS = (0.3, 0.7)
INTERVALS = (((0.3, 1.2), (-1.5, 0.1)), ((-2.0, -0.4), (0.5, 1.5)))  # [component][coordinate], no symmetry
TIMES = (0.1, 0.4)


def vp_mixture(cells=2000, steps=40):
    densities = [[uniform_on(interval) for interval in row] for row in INTERVALS]
    return solve_products(ad.vp(), WEIGHTS, densities, TIMES, x_range=(-7.0, 7.0), cells=cells, steps=steps)


@pytest.fixture(scope="module")
def vp32():
    """In float32, as users do."""
    return vp_mixture()


def exact_vp(y, t):
    """Density and score at states (n, 2): a uniform law under VP is a difference of normal distribution functions."""
    integral = 0.1 * t + 0.5 * 19.9 * t**2
    decay, sigma = np.exp(-0.5 * integral), np.sqrt(-np.expm1(-integral))
    low, high = decay * np.moveaxis(np.array(INTERVALS), -1, 0)[:, None]
    a, b = (y[:, None] - high) / sigma, (y[:, None] - low) / sigma
    factor = (ndtr(b) - ndtr(a)) / (high - low)
    slope = (np.exp(-0.5 * b**2) - np.exp(-0.5 * a**2)) / np.sqrt(2 * np.pi) / sigma / (high - low)
    q = factor.prod(-1) @ WEIGHTS
    gradient = np.einsum("c,nci,nci->ni", WEIGHTS, slope, factor[..., ::-1])
    return q, gradient / q[:, None]


def lattice(low, high, n):
    """Midpoints of a square, (n², 2), and the area of each."""
    x = low + (np.arange(n) + 0.5) * (high - low) / n
    return np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2), ((high - low) / n) ** 2


def evaluate(mixture, y, k):
    """Density and score at states (n, 2), as float64."""
    both = jax.jit(jax.vmap(lambda y: (mixture.density(y, k), mixture.score(y, k))))
    return tuple(np.asarray(value, float) for value in both(jnp.asarray(y)))


def test_uniform_factors_under_vp(vp32):
    y, _ = lattice(-2.5, 2.5, 80)
    assert vp32.factors.shape == (2, 2, 2, 2000)
    for k, t in enumerate(TIMES):
        q, score = evaluate(vp32, y, k)
        q_exact, score_exact = exact_vp(y, t)
        np.testing.assert_allclose(q, q_exact, atol=5e-4 * q_exact.max())
        bulk = q_exact > 0.02 * q_exact.max()
        error = np.linalg.norm(score - score_exact, axis=1)[bulk]
        assert error.max() < 1e-3 * np.linalg.norm(score_exact, axis=1)[bulk].max()


def test_identities_of_the_score(x64):
    mixture, (y, area) = vp_mixture(cells=1400, steps=20), lattice(-6.5, 6.5, 400)
    for k in range(len(TIMES)):
        q, score = evaluate(mixture, y, k)
        p = np.where(q > 0, q, 0) * area
        score = np.where(p[:, None] > 0, score, 0)  # NaN where the density is not resolved
        assert p.sum() == pytest.approx(1, abs=1e-4)
        np.testing.assert_allclose(p @ score, 0, atol=1e-4)
        np.testing.assert_allclose(np.einsum("n,ni,nj->ij", p, score, y), -np.eye(2), atol=2e-4)


def test_score_is_the_derivative_of_the_log_density(x64):
    mixture, (y, _) = vp_mixture(cells=700, steps=10), lattice(-1.7, 1.7, 9)
    for k in range(len(TIMES)):
        score = evaluate(mixture, y, k)[1]
        log_q = jax.jit(jax.vmap(lambda y, k=k: mixture.log_density(y, k)))
        shifts = 1e-6 * jnp.eye(2)
        difference = jnp.stack([(log_q(y + shift) - log_q(y - shift)) / 2e-6 for shift in shifts], axis=1)
        np.testing.assert_allclose(score, difference, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            score, jax.jit(jax.vmap(lambda y, k=k: jax.grad(mixture.log_density)(y, k)))(y), rtol=1e-12
        )


def test_paths_from_the_checkerboard_have_its_density():
    process, times, n = ad.langevin(dist.Logistic(0.0, 1.0)), (0.05, 0.3), 10_000
    mixture = products.checkerboard(process, times, x_range=(-14.0, 14.0), cells=1400, steps=10)
    data_key, path_key = jax.random.split(jax.random.key(0))
    y0, keys = ad.data.checkerboard(data_key, n), jax.random.split(path_key, n)
    paths = in_batches(lambda y, k: ad.simulate(process, y, jnp.array(times), key=k), y0, keys)
    for k, extent in enumerate((3.5, 10.0)):
        y, area = lattice(-extent, extent, 350)
        q, _ = evaluate(mixture, y, k)
        inside = q > 0
        negentropy = np.sum(q[inside] * np.log(q[inside])) * area
        found = np.log(evaluate(mixture, paths[:, k], k)[0])  # NaN, should a path have left the grid
        assert abs(found.mean() - negentropy) < 4 * found.std() / np.sqrt(n)


def test_the_checkerboard_is_the_sampled_one():
    weights, densities = products.checkerboard_mixture()
    y = np.asarray(ad.data.checkerboard(jax.random.key(1), 4000))
    p0 = sum(w * first(y[:, 0]) * second(y[:, 1]) for w, (first, second) in zip(weights, densities, strict=True))
    np.testing.assert_array_equal(p0, 1 / 8)


def test_cell_averages_keep_mass_between_faces():
    faces = np.linspace(-1, 2, 8)
    averages = uniform_on((-0.33, 0.51), (0.7, 1.9)).cell_averages(faces)
    assert averages @ np.diff(faces) == pytest.approx(1)
    np.testing.assert_allclose(averages[[1, 6]], np.array([faces[2] + 0.33, 1.9 - faces[6]]) / 2.04 / (3 / 7))


def test_scores_between_centres_are_of_third_order():
    errors = []
    for cells in (100, 200, 400):
        x, dx = np.linspace(-3, 3, cells, retstep=True)
        a = products._log_cubics(np.exp(np.sin(2 * x)))[2:-3]
        slope = (a[:, 1] + 2 * 0.2 * a[:, 2] + 3 * 0.2**2 * a[:, 3]) / dx
        errors.append(np.max(np.abs(slope - 2 * np.cos(2 * (x[2:-3] + 0.2 * dx)))))
    assert np.all(np.log2(np.array(errors[:-1]) / errors[1:]) > 2.7)


def test_nan_where_nothing_is_known(vp32):
    for y, k in [((0.0, 6.999), 0), ((-9.0, 0.0), 0), ((0.0, np.nan), 1), ((0.0, 0.0), 2)]:
        assert np.isnan(vp32.log_density(jnp.array(y), k))
        assert np.all(np.isnan(vp32.score(jnp.array(y), k)))
    far = jnp.array([6.5, 6.5])  # on the grid, but twenty standard deviations away
    assert vp32.density(far, 0) == 0
    assert np.all(np.isnan(vp32.score(far, 0)))
    with pytest.raises(ValueError, match="shape"):
        vp32.density(jnp.zeros(3), 0)


def test_bad_arguments():
    square = [[uniform_on((0.0, 1.0))] * 2]
    coupled = ad.Process(lambda y, t: -y + jnp.sum(y), 1.0, 1.0)
    uneven = ad.Process(lambda y, t: -y * (1.0 + jnp.arange(y.size)), 1.0, 1.0)
    for options, text in [
        (dict(process=coupled), "couples coordinates"),
        (dict(process=uneven), "differs between coordinates"),
        (dict(weights=[0.9]), "sum to one"),
        (dict(weights=[0.5, 0.5]), "2 rows"),
        (dict(times=[0.0, 0.5]), "above zero"),
        (dict(times=[2.0]), "must increase within"),
        (dict(x_range=(0.5, 4.0)), "leaves the grid"),
        (dict(densities=[[np.sin] * 2]), "non-negative"),
    ]:
        given = {"process": ad.vp(), "weights": [1.0], "densities": square, "times": [0.5], "x_range": (-4.0, 4.0)}
        with pytest.raises(ValueError, match=text):
            solve_products(**{**given, **options}, cells=100, steps=2)
    with pytest.raises(ValueError, match="increasing order"):
        uniform_on((1.0, 0.0))
