"""Grids refuse what they would answer wrongly: no density, no times, walls that are felt, cells too wide."""

import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.exact.grid1d import evolve_1d, solve_1d
from autodsm.exact.grid2d import solve_2d
from autodsm.exact.products import solve_products

OU = ad.Process(lambda y, t: -y, 1.0, 2.0)
NAN = float("nan")


def bell(*x, width=0.5, at=0.0):
    return np.exp(-0.5 * sum((x - at) ** 2 for x in x) / width**2)


def line(**options):
    given = dict(process=OU, density=bell, times=[1.0], x_range=(-5.0, 5.0), cells=100, steps=20)
    return solve_1d(**{**given, **options})


def plane(x_range=(-5.0, 5.0), **options):
    given = dict(process=OU, density=bell, times=[1.0], ranges=(x_range, (-5.0, 5.0)), cells=100, steps=5)
    return solve_2d(**{**given, **options})


def product(density=bell, **options):
    given = dict(process=OU, weights=[1.0], densities=[[density] * 2], times=[1.0], x_range=(-5.0, 5.0), cells=100)
    return solve_products(**{**given, "steps": 2, **options})


SOLVERS = [line, plane, product]


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(density=lambda *x: bell(*x) - 0.01), "density.*non-negative"),
        (dict(density=lambda *x: bell(*x) * np.where(x[0] > 0, NAN, 1.0)), "density.*finite"),
        (dict(density=lambda *x: 0.0 * bell(*x)), "density.*positive"),
        (dict(density=lambda *x: 1.0), "density.*shape"),
        (dict(times=[NAN]), "times="),
        (dict(times=[NAN, 1.0]), "times="),
        (dict(times=[0.5, np.inf]), "times="),
        (dict(cells=1), "cells=1"),
        (dict(x_range=(-5.0, NAN)), "rang"),
        (dict(x_range=(-np.inf, 5.0)), "rang"),
        (dict(process=ad.Process(lambda y, t: -y / (y > -3.0), 1.0, 2.0)), "drift is not finite on the grid"),
    ],
)
def test_arguments_without_an_answer(solve, options, text):
    with pytest.raises(ValueError, match=text):
        solve(**options)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize(("low", "high", "end"), [(-0.5, 5.0, "lower"), (-5.0, 0.5, "upper")])
def test_a_range_that_loses_the_density(solve, low, high, end):
    """Of deviation .707 in the end: no flux leaves, so that mass would pile up at the wall."""
    with pytest.raises(ValueError, match=rf"(?s){end} end.*wider"):
        solve(density=lambda *x: bell(*x, width=0.1), x_range=(low, high))


@pytest.mark.parametrize(("reach", "right"), [(2.0, False), (2.9, True)])
def test_the_error_of_a_range_that_is_accepted_is_small(x64, reach, right):
    """Of a stationary start of deviation .707: with walls at 2.8 deviations the variance is off by 5 %, at 4.1 not."""
    start = lambda x: bell(x, width=np.sqrt(0.5))  # noqa: E731
    if not right:
        with pytest.raises(ValueError, match="end of x_range"):
            line(density=start, x_range=(-reach, reach), cells=200)
        return
    grid = line(density=start, x_range=(-reach, reach), cells=200)
    assert np.sum(grid.x**2 * grid.q[0]) * (grid.x[1] - grid.x[0]) == pytest.approx(0.5, rel=1e-3)


def test_a_wall_that_is_felt_for_a_while():
    """A force pushes the density against the wall and back: at the times asked for nothing is there."""
    swing = ad.Process(lambda y, t: 6 * np.pi * jnp.cos(np.pi * t) * jnp.ones_like(y), 0.1, 1.0)
    with pytest.raises(ValueError, match="upper end of x_range"):
        line(process=swing, x_range=(-3.0, 3.0), times=[1.0], cells=300)


@pytest.mark.parametrize("solve", SOLVERS)
def test_cells_wider_than_the_density(solve):
    with pytest.raises(ValueError, match=r"(?s)in the start.*cells"):
        solve(density=lambda *x: bell(*x, width=0.03, at=0.05))
    # One of two peaks, and a density that only becomes narrow, drawn together almost without noise.
    with pytest.raises(ValueError, match=r"(?s)in the start.*cells"):
        solve(density=lambda *x: 40 * bell(*x, width=0.05, at=2.05) + bell(*x))
    with pytest.raises(ValueError, match=r"(?s)at t=.*cells"):
        solve(process=ad.Process(lambda y, t: -10.0 * (y - 0.05), 0.05, 2.0))


def test_densities_that_were_computed_elsewhere():
    faces = np.linspace(-5.0, 5.0, 101)
    x = 0.5 * (faces[1:] + faces[:-1])
    both = np.stack([bell(x), bell(x, at=4.9)])
    with pytest.raises(ValueError, match="upper end"):
        evolve_1d(OU, both, [0.5], faces=faces, steps=5)
    with pytest.raises(ValueError, match="non-negative"):
        evolve_1d(OU, -both, [0.5], faces=faces, steps=5)


def test_cells_whose_fluxes_are_felt():
    """An oscillator with little noise in its velocity: with 80 cells the variance of the place was off by .28."""
    matrix, offset = np.array([[0.0, 1.0], [-1.0, -1.1]]), np.array([0.0, 1.4])
    process = ad.Process(lambda y, t: matrix @ y + offset, np.array([0.0, 0.36]), 1.0)
    start = lambda x, v: np.exp(-2 * ((x + 0.7) ** 2 + (v - 0.2) ** 2))  # noqa: E731
    options = dict(ranges=((-4.2, 2.8), (-3.3, 6.7)), steps=20)
    with pytest.raises(ValueError, match="cells=80 of coordinate 1 are too wide"):
        ad.fokker_planck_2d.solve_2d(process, start, [1.0], cells=80, **options)
    cov = ad.fokker_planck_2d.solve_2d(process, start, [1.0], cells=(160, 400), **options).cov()[0]
    exact = ad.reference.gaussian_marginals(process, np.array([-0.7, 0.2]), 0.25 * np.eye(2)).moments(1.0)[1]
    np.testing.assert_allclose(cov, exact, rtol=0.05, atol=0.003)
