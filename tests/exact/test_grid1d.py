"""The one-dimensional grid solver against exact densities."""

import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.exact.grid1d import solve_1d


def normal(x, mean, var):
    return np.exp(-0.5 * (x - mean) ** 2 / var) / np.sqrt(2 * np.pi * var)


def solve_ou(cells, steps):
    system = ad.systems.ornstein_uhlenbeck(rate=1.3, noise=0.8)
    grid = solve_1d(system.process, lambda x: normal(x, 1.0, 0.2), [0.7], x_range=(-5.0, 5.0), cells=cells, steps=steps)
    decay = np.exp(-1.3 * 0.7)
    var = 0.2 * decay**2 + 0.64 / 2.6 * (1 - decay**2)
    return grid, normal(grid.x, decay, var), -(grid.x - decay) / var


def test_ornstein_uhlenbeck(x64):
    grid, q, score = solve_ou(800, 100)
    np.testing.assert_allclose(grid.q[0], q, atol=2e-4)
    inside = q > 1e-3
    np.testing.assert_allclose(grid.score()[0][inside], score[inside], atol=3e-3)
    assert abs(grid.q.sum() * (grid.x[1] - grid.x[0]) - 1) < 1e-10


def test_second_order(x64):
    errors = [np.max(np.abs(grid.q[0] - q)) for grid, q, _ in (solve_ou(n, n // 5) for n in (100, 200, 400))]
    slopes = np.log2(np.array(errors[:-1]) / errors[1:])
    np.testing.assert_allclose(slopes, 2.0, atol=0.2)


def test_double_well_reaches_its_stationary_state(x64):
    process = ad.systems.double_well(noise=0.7, t1=200.0).process
    grid = solve_1d(process, lambda x: normal(x, 0.5, 0.1), [200.0], x_range=(-3.5, 3.5), cells=1000, steps=400)
    stationary = np.exp((grid.x**2 - grid.x**4 / 2) / 0.49)
    stationary /= stationary.sum() * (grid.x[1] - grid.x[0])
    np.testing.assert_allclose(grid.q[0], stationary, atol=1e-4)
    assert grid.q.min() >= 0


def test_without_noise_and_in_small_units(x64):
    # Pure advection f = 1 moves the density; with D = 10⁻¹³ and lengths of 10⁻⁶, it spreads by 2Dt.
    moving = ad.Process(lambda y, t: jnp.ones_like(y), 0.0, 1.0)
    grid = solve_1d(moving, lambda x: normal(x, 0, 0.01), [0.5], x_range=(-1.0, 2.0), cells=3000, steps=1000)
    dx = grid.x[1] - grid.x[0]
    assert np.sum(grid.x * grid.q[0]) * dx == pytest.approx(0.5, abs=1e-6)
    slow = ad.Process(lambda y, t: 0 * y, np.sqrt(2e-13), 1.0)
    grid = solve_1d(slow, lambda x: normal(x, 0, 1e-14), [1.0], x_range=(-4e-6, 4e-6), cells=800)
    assert np.sum(grid.x**2 * grid.q[0]) * (grid.x[1] - grid.x[0]) == pytest.approx(2.1e-13, rel=1e-3)


def test_domain_without_zero():
    process = ad.Process(lambda y, t: 1 / y, 1.0, 1.0)
    grid = solve_1d(process, lambda x: normal(x, 3, 0.1), [0.1], x_range=(0.5, 6.0), cells=200)
    assert np.all(np.isfinite(grid.q))


def test_bad_arguments():
    process = ad.systems.double_well().process
    for options, text in [
        (dict(times=[6.0]), "must increase within"),
        (dict(times=[2.0, 1.0]), "must increase within"),
        (dict(times=[]), "must increase within"),
        (dict(x_range=(1.0, -1.0)), "x_range"),
        (dict(cells=0), "cells=0"),
    ]:
        with pytest.raises(ValueError, match=text):
            solve_1d(process, lambda x: normal(x, 0, 1), **{"times": [1.0], "x_range": (-3.0, 3.0), **options})


def test_entropy_and_current_of_a_gaussian(x64):
    """OU from N(1, 0.25): S = ½ log 2πe σ², J = v q with v = m' + ½ (log σ²)' (x − m)."""
    process = ad.systems.ornstein_uhlenbeck(rate=1.3, noise=0.8, t1=2.0).process
    times = np.array([0.3, 1.0])
    grid = solve_1d(process, lambda x: np.exp(-2 * (x - 1) ** 2), times, x_range=(-4.0, 5.0), cells=2000)
    limit = 0.64 / 2.6
    mean, var = np.exp(-1.3 * times), limit + (0.25 - limit) * np.exp(-2.6 * times)
    np.testing.assert_allclose(grid.entropy(), 0.5 * np.log(2 * np.pi * np.e * var), atol=1e-4)
    off = grid.x - mean[:, None]
    q = np.exp(-(off**2) / (2 * var[:, None])) / np.sqrt(2 * np.pi * var[:, None])
    growth = -2.6 * (var - limit) / var
    velocity = -1.3 * mean[:, None] + 0.5 * growth[:, None] * off
    np.testing.assert_allclose(grid.current(process), velocity * q, atol=1e-3)
