"""The two-dimensional grid solver against exact densities and simulated paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.exact.grid2d import _remap, solve_2d
from batches import in_batches
from oracles import linear_moments

MEAN0, COV0 = np.array([1.0, 0.5]), np.array([[0.2, 0.05], [0.05, 0.15]])


def normal(mean, cov):
    def density(y1, y2):
        apart = np.stack([y1 - mean[0], y2 - mean[1]], axis=-1)
        exponent = np.einsum("...a,ab,...b", apart, np.linalg.inv(cov), apart)
        return np.exp(-0.5 * exponent) / (2 * np.pi * np.sqrt(np.linalg.det(cov)))

    return density


def solve_linear(matrix, noise, t, cells, steps, *, offset=(0.0, 0.0), half=4.0):
    """A linear process from N(MEAN0, COV0) on the grid: its process, density and exact moments at t."""
    matrix, noise, offset = (np.asarray(x, float) for x in (matrix, noise, offset))
    process = ad.Process(lambda y, t: jnp.asarray(matrix) @ y + jnp.asarray(offset), noise, 5.0)
    grid = solve_2d(process, normal(MEAN0, COV0), [t], ranges=((-half, half),) * 2, cells=cells, steps=steps)
    exact = linear_moments(lambda t: matrix, lambda t: offset, lambda t: np.diag(noise), MEAN0, 0.0, t, cov=COV0)
    return process, grid, exact


def solve_rotating(cells, steps):
    turn = [[-1.0, 1.5], [-1.0, -0.6]]
    return solve_linear(turn, [0.8, 0.6], 1.0, cells, steps, offset=(0.3, -0.2), half=3.5)


def solve_kinetic(cells, steps):
    return solve_linear([[0.0, 1.0], [-1.0, -0.5]], [0.0, 0.7], 2.0, cells, steps)


def on_grid(grid, exact):
    return normal(exact.mean, exact.cov)(*np.meshgrid(grid.x1, grid.x2, indexing="ij"))


def assert_law(grid):
    assert grid.q.min() >= 0
    np.testing.assert_allclose(grid.mass(), 1.0, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def rotating():
    with jax.enable_x64(True):
        return solve_rotating((280, 260), 70)


def test_rotating_ornstein_uhlenbeck(rotating):
    _, grid, exact = rotating
    q = on_grid(grid, exact)
    assert_law(grid)
    np.testing.assert_allclose(grid.mean()[0], exact.mean, rtol=0, atol=1e-3)
    np.testing.assert_allclose(grid.cov()[0], exact.cov, rtol=0, atol=4e-3 * np.max(exact.cov))
    np.testing.assert_allclose(grid.q[0], q, rtol=0, atol=2e-3 * q.max())


def test_entropy_and_score(rotating, x64):
    _, grid, exact = rotating
    entropy = 0.5 * np.log(np.linalg.det(2 * np.pi * np.e * exact.cov))
    np.testing.assert_allclose(grid.entropy()[0], entropy, rtol=0, atol=3e-3)
    states = np.stack(np.meshgrid(grid.x1, grid.x2, indexing="ij"), axis=-1)
    score = -(states - exact.mean) @ np.linalg.inv(exact.cov)
    within = on_grid(grid, exact) > np.exp(-4.5) * on_grid(grid, exact).max()  # 3 deviations
    error = np.max(np.abs(grid.score()[0] - score)[within])
    assert error < 0.01 * np.max(np.abs(score[within])), error

    at = jax.jit(jax.vmap(lambda y: grid.score_at(y, -1)))
    np.testing.assert_allclose(at(jnp.asarray(states[within])), grid.score()[0][within], rtol=0, atol=1e-9)
    inside = states[within] + 0.3 * np.array([grid.x1[1] - grid.x1[0], grid.x2[1] - grid.x2[0]])
    # The exact score is linear, so that it is not changed by bilinear interpolation.
    between = -(inside - exact.mean) @ np.linalg.inv(exact.cov)
    np.testing.assert_allclose(at(jnp.asarray(inside)), between, rtol=0, atol=0.01 * np.max(np.abs(score[within])))
    assert np.all(np.isnan(at(jnp.array([[3.6, 0.0], [0.0, -3.6]]))))


def test_current(rotating, x64):
    process, grid, exact = rotating
    states = np.stack(np.meshgrid(grid.x1, grid.x2, indexing="ij"), axis=-1)
    q = on_grid(grid, exact)
    drift = np.asarray(jax.vmap(jax.vmap(lambda y: process.f(y, 1.0)))(jnp.asarray(states)))
    score = -(states - exact.mean) @ np.linalg.inv(exact.cov)
    current = q[..., None] * (drift - 0.5 * np.array([0.64, 0.36]) * score)
    np.testing.assert_allclose(grid.current(process)[0], current, rtol=0, atol=4e-3 * np.max(np.abs(current)))


@pytest.mark.parametrize("solve", [solve_rotating, solve_kinetic])
def test_second_order(x64, solve):
    errors = []
    for n in (60, 120, 240):
        _, grid, exact = solve(n, n // 4)
        errors.append(np.max(np.abs(grid.q[0] - on_grid(grid, exact))))
        assert_law(grid)
    slopes = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(slopes, 2.0, atol=0.2)


def test_kinetic_oscillator(x64):
    _, grid, exact = solve_kinetic(240, 60)
    q = on_grid(grid, exact)
    assert_law(grid)
    np.testing.assert_allclose(grid.mean()[0], exact.mean, rtol=0, atol=1e-3)
    np.testing.assert_allclose(grid.cov()[0], exact.cov, rtol=2e-3, atol=0)
    np.testing.assert_allclose(grid.q[0], q, rtol=0, atol=2e-3 * q.max())


def test_drift_and_noise_that_change_in_time(x64):
    # The trap moves, the second noise fades; the first coordinate has noise in the second half only.
    def matrix(t):
        return np.array([[-1.0, np.sin(3 * t)], [0.5, -1.0 - t]])

    def noise(t):
        return np.array([0.7 * max(0.0, t - 0.5), 0.8 * np.exp(-t)])

    def drift(y, t):
        coupled = jnp.array([[-1.0, jnp.sin(3 * t)], [0.5, -1.0 - t]])
        return coupled @ y + jnp.stack([jnp.cos(t), 0.0 * t])

    process = ad.Process(drift, lambda t: jnp.stack([0.7 * jnp.maximum(0.0, t - 0.5), 0.8 * jnp.exp(-t)]), 2.0)
    options = dict(ranges=((-3.0, 3.5), (-3.0, 3.0)), cells=(200, 180), steps=40)
    grid = solve_2d(process, normal(MEAN0, COV0), [0.0, 0.5, 1.0], **options)
    for k, t in enumerate((0.5, 1.0), start=1):
        exact = linear_moments(
            matrix, lambda t: np.array([np.cos(t), 0.0]), lambda t: np.diag(noise(t)), MEAN0, 0.0, t, cov=COV0
        )
        np.testing.assert_allclose(grid.mean()[k], exact.mean, rtol=0, atol=2e-3)
        np.testing.assert_allclose(grid.cov()[k], exact.cov, rtol=0, atol=1e-2 * np.max(exact.cov))
    np.testing.assert_allclose(grid.cov()[0], COV0, rtol=1e-6)
    assert_law(grid)


def test_flow_without_noise_is_not_diffusive(x64):
    # A quarter turn without any noise; upwind fluxes would add D = ½|f|Δx, a variance of 0.05 here.
    process = ad.Process(lambda y, t: jnp.stack([y[1], -y[0]]), np.zeros(2), 2.0)
    start = normal(np.array([1.0, 0.0]), np.diag([0.04, 0.02]))
    grid = solve_2d(process, start, [0.5 * np.pi], ranges=((-2.5, 2.5),) * 2, cells=100, steps=40)
    np.testing.assert_allclose(grid.mean()[0], [0.0, -1.0], atol=1e-3)
    np.testing.assert_allclose(grid.cov()[0], np.diag([0.02, 0.04]), atol=2e-4)
    assert_law(grid)


@pytest.mark.parametrize("noise", [0.3, [0.0, 0.3]])
def test_rough_start_and_long_steps(x64, noise):
    # A box, steps far longer than cells resolve, and a drift whose paths run backward to infinity.
    process = ad.Process(lambda y, t: jnp.stack([y[1] - y[0] ** 3, -y[1]]), np.asarray(noise), 1.0)
    box = solve_2d(
        process,
        lambda x, v: 1.0 * ((np.abs(x) < 0.5) & (np.abs(v) < 0.5)),
        [0.1, 1.0],
        ranges=((-4.0, 4.0), (-3.0, 3.0)),
        cells=(120, 100),
        steps=3,
    )
    assert_law(box)


def test_rough_start_without_noise(x64):
    process = ad.Process(lambda y, t: jnp.stack([2.0 * y[0], -y[1]]), np.zeros(2), 1.0)
    box = solve_2d(
        process,
        lambda x, v: 1.0 * ((np.abs(x) < 0.5) & (np.abs(v) < 0.5)),
        [0.2, 0.6],
        ranges=((-2.5, 2.5), (-1.0, 1.0)),
        cells=(90, 40),
        steps=2,
    )
    assert_law(box)
    # A uniform box of half widths ½e^{2t} and ½e^{−t}, on cells of 0.06 and 0.05 that blur its edges.
    np.testing.assert_allclose(np.diagonal(box.cov()[-1]), np.exp([2.4, -1.2]) / 12, rtol=0.02)


def test_remap_of_rough_lines():
    # Neighbours differ by large factors, and many feet fall into one cell.
    rng = np.random.default_rng(0)
    q = np.exp(4 * rng.standard_normal((50, 30)))
    at = np.sort(rng.uniform(0, 30, (50, 31)), axis=1)
    at[:, 0], at[:, -1] = 0, 30
    cell = np.minimum(at.astype(int), 29)
    new = _remap(q, cell, at - cell)
    assert new.min() >= 0
    np.testing.assert_allclose(new.sum(axis=1), q.sum(axis=1), rtol=1e-13)
    still = np.broadcast_to(np.arange(31.0), (50, 31))
    cell = np.minimum(still.astype(int), 29)
    np.testing.assert_allclose(_remap(q, cell, still - cell), q, rtol=1e-13)


def test_double_well_reaches_its_stationary_state(x64):
    def potential(y):
        return 0.25 * (y[0] ** 2 - 1.0) ** 2 + 0.5 * (y[1] - 0.5 * y[0]) ** 2

    process = ad.Process(lambda y, t: -jax.grad(potential)(y), 1.0, 60.0)
    options = dict(ranges=((-3.2, 3.2), (-4.0, 4.0)), cells=(320, 280), steps=80)
    grid = solve_2d(process, normal(np.array([0.8, 0.0]), 0.1 * np.eye(2)), [60.0], **options)
    stationary = np.exp(-potential(np.meshgrid(grid.x1, grid.x2, indexing="ij")) / 0.5)
    stationary /= stationary.sum() * grid.area
    distance = np.sum(np.abs(grid.q[0] - stationary)) * grid.area
    assert distance < 1e-4, distance
    assert_law(grid)


def test_swimmer_against_paths():
    system, n = ad.systems.swimmer(), 200_000
    fine = 6  # cells of a bin in each direction
    ranges, bins = ((-4.8, 4.8), (-6.0, 6.0)), (32, 20)
    grid = solve_2d(
        system.process,
        lambda x, v: np.exp(-(x**2 + v**2) / 2),
        [1.0, 3.0, 5.0],
        ranges=ranges,
        cells=(bins[0] * fine, bins[1] * fine),
        steps=50,
    )
    assert_law(grid)
    v_marginal = grid.q.sum(axis=1) * (grid.x1[1] - grid.x1[0])
    np.testing.assert_allclose(v_marginal - np.exp(-0.5 * grid.x2**2) / np.sqrt(2 * np.pi), 0.0, atol=1e-6)

    key0, key = jax.random.split(jax.random.key(4))
    times = jnp.arange(1.0, 6.0)
    one = lambda y, k: ad.simulate(system.process, y, times, key=k, steps=100)  # noqa: E731
    paths = np.asarray(in_batches(one, system.y0(key0, n), jax.random.split(key, n)), float)[:, ::2]
    for k in range(3):
        p = grid.q[k].reshape(bins[0], fine, bins[1], fine).sum(axis=(1, 3)) * grid.area
        counts, _, _ = np.histogram2d(paths[:, k, 0], paths[:, k, 1], bins=bins, range=ranges)
        allowed = 4.5 * np.sqrt((p + 1 / n) / n) + 2e-3 * p.max()
        assert np.all(np.abs(counts / n - p) < allowed), np.max(np.abs(counts / n - p) / allowed)


def test_single_precision(rotating):
    _, grid, _ = solve_rotating((280, 260), 70)
    assert_law(grid)
    np.testing.assert_allclose(grid.q, rotating[1].q, rtol=0, atol=1e-5 * grid.q.max())
    y = jnp.array([grid.x1[-1], grid.x2[0]], jnp.float32)  # outermost centre
    assert grid.score_at(y, 0).dtype == jnp.float32
    assert not np.any(np.isnan(grid.score_at(y, 0)))


def test_matrix_of_uncorrelated_noise(x64):
    options = dict(ranges=((-3.0, 3.0),) * 2, cells=40, steps=5)
    grids = [
        solve_2d(ad.Process(lambda y, t: -y, np.asarray(g), 1.0), normal(MEAN0, COV0), [0.5], **options)
        for g in ([0.7, 0.5], [[0.7, 0.0], [0.0, 0.5]])
    ]
    np.testing.assert_allclose(grids[0].q, grids[1].q, rtol=1e-12)


def test_bad_arguments():
    process = ad.systems.swimmer().process
    mixing = ad.Process(lambda y, t: -y, np.array([[1.0, 0.5], [0.0, 1.0]]), 1.0)
    three = ad.Process(lambda y, t: jnp.stack([y[0], y[1], y[0]]), 1.0, 1.0)

    def unpacks(y, t):
        a, b, c = y
        return jnp.stack([b, c, a])

    for options, text in [
        (dict(times=[6.0]), "must increase within"),
        (dict(times=[2.0, 1.0]), "must increase within"),
        (dict(times=[-1.0]), "must increase within"),
        (dict(times=[np.nan]), "must increase within"),
        (dict(times=[]), "must increase within"),
        (dict(ranges=((1.0, -1.0), (-1.0, 1.0))), r"ranges\[0\]="),
        (dict(ranges=(-1.0, 1.0)), r"ranges="),
        (dict(cells=0), "cells=0"),
        (dict(cells=(10, 1)), "cells="),
        (dict(steps=0), "steps=0"),
        (dict(process=mixing), "g gᵀ is not diagonal"),
        (dict(process=three), r"states of shape \(2,\)"),
        (dict(process=ad.Process(unpacks, 1.0, 1.0)), r"states of shape \(2,\)"),
        (dict(process=ad.Process(lambda y, t: -y, np.ones(3), 1.0)), r"states of shape \(2,\)"),
        (dict(process=ad.Process(lambda y, t: 1 / y, 1.0, 1.0)), "not finite on the"),
        (dict(density=lambda x, v: x), "density must be"),
        (dict(density=lambda x, v: np.where(x > 0, np.nan, 1.0)), "density must be"),
        (dict(density=lambda x, v: 0 * x), "density must be"),
        (dict(density=lambda x, v: 1.0), "returned shape"),
    ]:
        default = dict(process=process, density=lambda x, v: np.exp(-2 * (x**2 + v**2)), times=[1.0])
        with pytest.raises(ValueError, match=text):
            solve_2d(**{**default, "ranges": ((-3.0, 3.0),) * 2, "cells": 20, "steps": 2, **options})
