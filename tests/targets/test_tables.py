"""Tables in time: fast driving, pulses, noise that grows, and the error that a table states of itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.exact.grid1d import evolve_1d
from autodsm.process.probes import is_linear
from autodsm.targets import Tabulated

START = 0.31
TIMES = np.sort(np.random.default_rng(0).uniform(0.02, 1.0, 24))


def moments(target, times):
    """Mean and deviation of the table's kernel, by quadrature over z."""
    z, weights = np.polynomial.hermite_e.hermegauss(48)
    draw = jax.vmap(
        lambda t: jax.vmap(lambda z: target._draw(target.tables, jnp.full(1, START), t, z).y[0, 0])(
            jnp.asarray(z)[:, None]
        )
    )
    y = np.asarray(draw(jnp.asarray(times, jnp.float32)), float)
    share = weights / weights.sum()
    mean = y @ share
    return mean, np.sqrt((y - mean[:, None]) ** 2 @ share)


def on_a_grid(process, times, reach=6.0, cells=4000, width=0.02):
    """The same for a narrow Gaussian in place of the point, of variance `width²`, on a fixed grid."""
    faces = np.linspace(-reach, reach, cells + 1)
    x = 0.5 * (faces[1:] + faces[:-1])
    q = evolve_1d(process, np.exp(-0.5 * ((x - START) / width) ** 2)[None], times, faces=faces, steps=100)[:, 0]
    q = q / q.sum(axis=1, keepdims=True)
    return q @ x, np.sqrt(q @ x**2 - (q @ x) ** 2)


def check(target, times, mean, std, blur=0.0):
    """Errors in deviations, against what the table states; a grid's reference has the blur of its own start."""
    found_mean, found_std = moments(target, times)
    worst = max(np.abs((found_mean - mean) / std).max(), np.abs(found_std / std - 1.0).max())
    assert target.tables.error < 0.02
    assert worst < 2.0 * target.tables.error + blur


def test_a_driven_linear_drift():
    """`m' = −m + 2 sin(10 t)`, its mean known; t1 = 5 is eight periods."""
    process = ad.Process(lambda y, t: -y + 2.0 * jnp.sin(10.0 * t), 0.7, 5.0)
    t = 5.0 * TIMES
    mean = START * np.exp(-t) + 2.0 * (np.sin(10 * t) - 10 * np.cos(10 * t) + 10 * np.exp(-t)) / 101.0
    check(Tabulated(process, (1,), y_range=(-1.0, 1.0)), t, mean, 0.7 * np.sqrt(-np.expm1(-2 * t) / 2), blur=1e-4)


def test_a_driven_bounded_force():
    process = ad.Process(lambda y, t: -jnp.tanh(y) + 2.0 * jnp.sin(10.0 * t), 0.7, 5.0)
    check(Tabulated(process, (1,), y_range=(-1.0, 1.0)), 5.0 * TIMES, *on_a_grid(process, 5.0 * TIMES), blur=6e-3)


def test_noise_that_grows():
    """The variance of VE is known, and grows by 10⁷."""
    process = ad.ve()
    g = jax.vmap(process.g)
    edges = np.concatenate([[0.0], TIMES])
    nodes, weights = np.polynomial.legendre.leggauss(16)
    at = edges[:-1, None] + np.diff(edges)[:, None] * 0.5 * (nodes + 1)
    squares = np.asarray(g(at.ravel()), float).reshape(at.shape) ** 2
    variance = np.cumsum(np.diff(edges) * 0.5 * (squares @ weights))
    check(Tabulated(process, (1,), y_range=(-1.0, 1.0)), TIMES, START, np.sqrt(variance), blur=2e-3)


def test_a_pulse():
    """Edges of the pulse are times at which the grid's steps end. At t = .4 the mean is 1.600."""
    process = ad.Process(lambda y, t: y - y**3 + 20.0 * ((t > 0.28) & (t < 0.37)), 0.5, 1.0)
    times = np.array([0.1, 0.28, 0.31, 0.34, 0.37, 0.4, 0.7, 1.0])
    target = Tabulated(process, (1,), y_range=(-1.0, 1.0))
    check(target, times, *on_a_grid(process, times), blur=6e-3)


@pytest.mark.parametrize("separable", [True, False])
def test_coordinates_that_differ_for_a_while_only_have_laws_of_their_own(separable):
    def drift(y, t):
        rate = jnp.where((t > 0.5) & (t < 0.503), jnp.array([0.0, 8.0, 0.0]), 0.0)
        return -(1.0 + (0.0 if separable else rate)) * y

    target = Tabulated(ad.Process(drift, 0.5, 1.0), (3,), y_range=(-1.0, 1.0))
    if separable:
        assert target.tables.law is None
    else:
        first, second, third = target.tables.law.tolist()
        assert first == third != second


@pytest.mark.parametrize(
    "drift",
    [
        lambda y, t: -y - jnp.where((t > 0.5) & (t < 0.9), y**3, 0.0),
        lambda y, t: -y - jnp.where((t > 0.5) & (t < 0.500001), y**3, 0.0),
        lambda y, t: -jnp.sign(y),
        lambda y, t: -y * jax.lax.stop_gradient(y) ** 2,
    ],
)
def test_drifts_that_bend_for_a_while_or_in_secret_are_not_linear(drift):
    assert not is_linear(ad.Process(drift, 0.5, 1.0), np.random.default_rng(0).normal(size=(8, 2)))


def test_linear_in_any_units():
    process = ad.Process(lambda y, t: -jnp.array([[1.0, 2.0**60], [0.0, 1.0]]) @ y, jnp.array([2.0**30, 2.0**-30]), 1.0)
    assert is_linear(process, np.array([2.0**30, 2.0**-30]) * np.random.default_rng(0).normal(size=(8, 2)))
