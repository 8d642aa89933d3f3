"""The clock against closed forms, and the laws of training times against their densities."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.process.clock import TIME_LAWS, Clock, TimeLaw

TIMES = np.array([1e-5, 1e-3, 0.03, 0.4, 1.0])


@pytest.mark.parametrize("beta", [ad.LinearBeta(0.1, 10.0), ad.ConstantBeta(3.0), ad.CosineBeta()])
def test_closed_forms(x64, beta):
    clock = Clock(ad.vp(beta))
    times = TIMES * beta.t1
    np.testing.assert_allclose(clock(times), beta.integral(times), rtol=2e-4)
    np.testing.assert_allclose(clock.inverse(clock.log(times)), times, rtol=1e-6)


@pytest.mark.parametrize("g", [0.7, np.array([0.2, 0.7]), np.array([[0.5, 0.1], [0.0, -0.7]])], ids=np.ndim)
def test_constant_noise(x64, g):
    clock = Clock(ad.Process(lambda y, t: -y, g, 3.0))
    np.testing.assert_allclose(clock(3.0 * TIMES), 0.49 * 3.0 * TIMES, rtol=1e-9)


@pytest.mark.parametrize("unit", [1.0, 2.0**-30, 2.0**30])
def test_measures_each_coordinate_by_its_total_and_continues_as_a_power(unit):
    """Totals of .24 and .02: the shares (t/2)³ and t/2, whatever the unit of a coordinate is."""
    process = ad.Process(lambda y, t: -y, lambda t: jnp.stack([0.3 * t, unit * (0.1 + 0 * t)]), 2.0)
    clock, t = Clock(process), np.array([0.2, 2.0])
    np.testing.assert_allclose(clock.share(t), 0.5 * (t**3 / 8 + t / 2), rtol=1e-3)
    np.testing.assert_allclose(clock.share(1e-12), 0.25e-12, rtol=1e-2)
    np.testing.assert_allclose(clock.totals, [0.24, 0.02 * unit**2], rtol=1e-5)
    np.testing.assert_allclose(clock.total, max(0.24, 0.02 * unit**2), rtol=1e-5)


@pytest.mark.parametrize("kind", TIME_LAWS)
def test_density_is_that_of_the_draws(kind):
    law = TimeLaw(ad.vp(ad.LinearBeta(0.1, 10.0)), kind, t0=0.01)
    t = np.asarray(law.at((jnp.arange(100_000) + 0.5) / 100_000))
    assert t.min() >= 0.01
    assert t.max() <= 1.0
    edges = np.array([0.01, 0.02, 0.05, 0.1, 0.3, 0.7, 1.0])
    found = np.histogram(t, edges)[0] / len(t)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    for a, b, share in zip(edges[:-1], edges[1:], found, strict=True):
        inside = a + (b - a) * 0.5 * (nodes + 1)
        assert share == pytest.approx(
            0.5 * (b - a) * float(np.sum(weights * np.asarray(law.density(inside)))), abs=1e-3
        )


def test_uniform_and_mixed_differ_where_they_should():
    process = ad.vp(ad.LinearBeta(0.1, 10.0))
    u = (jnp.arange(1000) + 0.5) / 1000
    uniform, mixed = (np.asarray(TimeLaw(process, kind).at(u)) for kind in ("uniform", "mixed"))
    assert np.mean(uniform < 0.05) == pytest.approx(0.049, abs=2e-3)
    assert np.mean(mixed < 0.05) > 0.25


def test_many_coordinates_are_one_line_while_g_is_constant():
    """3×32×32: values at all 65,536 nodes would be 1.6 GB."""
    tracemalloc.start()
    clock = Clock(ad.Process(lambda y, t: -y, np.linspace(0.1, 1.0, 3072).reshape(3, 32, 32), 2.0))
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    np.testing.assert_allclose(clock(TIMES), TIMES, rtol=1e-5)


def test_no_gradient_surprises():
    law = TimeLaw(ad.vp())
    assert np.isfinite(jax.grad(lambda t: law.density(t))(0.5))


def test_bad_arguments():
    process = ad.vp()
    with pytest.raises(ValueError, match="Did you mean 'mixed'"):
        TimeLaw(process, "mixd")
    with pytest.raises(ValueError, match=r"t0=2\.0 must lie inside"):
        TimeLaw(process, t0=2.0)
    with pytest.raises(ValueError, match="diffusion is zero"):
        Clock(ad.Process(lambda y, t: -y, 0.0, 1.0))
