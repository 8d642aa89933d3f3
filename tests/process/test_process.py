"""Process: what it accepts, how it reads the shape of g, and how it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.process.noise import is_invertible
from autodsm.process.structure import STRUCTURES


def drift(y, t):
    return -y


@pytest.mark.parametrize(
    ("g", "shape", "increment"),
    [
        (0.5, (3,), (3,)),
        (np.arange(1.0, 4.0), (3,), (3,)),
        (np.ones((3, 2)), (3,), (2,)),
        (np.ones((2, 4, 4)), (2, 4, 4), (2, 4, 4)),
        (np.array([0.0, 1.0]), (2, 4, 4), (2, 4, 4)),
        (np.ones((2, 3)), (2, 4, 4), (3, 4, 4)),
        (np.ones((32, 5)), (2, 4, 4), (5,)),
    ],
)
def test_shape_of_g_says_what_it_is(g, shape, increment):
    process = ad.Process(drift, g, 1.0)
    assert process.noise_shape(shape) == increment
    dw = jax.random.normal(jax.random.key(0), increment)
    found = process.diffuse(0.3, dw, shape)
    # The same product with the full d×m matrix, written out. Q = G Gᵀ must agree with the structure's.
    identity = np.eye(dw.size).reshape(dw.size, *increment)
    full = np.stack([np.ravel(process.diffuse(0.3, jnp.asarray(e), shape)) for e in identity], axis=1)
    np.testing.assert_allclose(np.ravel(found), full @ np.ravel(dw), rtol=1e-5, atol=1e-6)
    cov = STRUCTURES["dense"](shape).noise_cov(process.g(0.3))
    np.testing.assert_allclose(cov, full @ full.T, rtol=1e-5, atol=1e-6)


def test_g_as_function_of_time_and_integers():
    process = ad.Process(drift, lambda t: jnp.stack([t, 2 * t]), 2.0)
    np.testing.assert_allclose(process.g(1.5), [1.5, 3.0])
    assert not process.constant_noise
    assert ad.Process(drift, 2, 1.0).g(0.0).dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ad.Process(3.0, 1.0, 1.0), "drift=3.0 must be a function"),
        (lambda: ad.Process(lambda y: y, 1.0, 1.0), "drift must take the state and the time"),
        (lambda: ad.Process(drift, lambda y, t: y, 1.0), "function of time alone.*depends on the state"),
        (lambda: ad.Process(drift, lambda y: 0.3 * y, 1.0), "If y is the time, call it t.*If y is the state"),
        (lambda: ad.Process(drift, 1.0, 0.0), "t1=0.0 must be a finite number above zero"),
        (lambda: ad.Process(drift, 1.0, float("inf")), "t1=inf must be a finite"),
        (lambda: ad.Process(drift, 1.0, 1.0, structure="elementwize"), "Did you mean 'elementwise'"),
        (lambda: ad.Process(drift, lambda t: 1 / (1 - t), 1.0), "not finite at t=1: .*t1=0.999"),
        (lambda: ad.Process(drift, float("nan"), 1.0), "not finite at t=0"),
        (lambda: ad.vp(lambda t: (t - 0.5) ** 2 - 0.1), r"not finite at t=0\.\d+.*root of a negative rate"),
    ],
)
def test_bad_process(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def test_a_function_of_time_may_be_any():
    """The name of an argument that no user chose says nothing."""
    for diffusion in (lambda t: t, lambda s: s, jnp.sqrt, lambda time, y=2.0: time * y):
        assert ad.Process(drift, diffusion, 1.0).g(1.0) in (1.0, 2.0)


def test_shipped_processes_say_how_they_were_made():
    beta = ad.LinearBeta(0.2, 8.0)
    assert ad.vp(beta, t1=0.5).recipe.arguments == {"beta": beta, "t1": 0.5}
    swimmer = ad.systems.swimmer(gamma=0.2).process.recipe
    assert (swimmer.name, swimmer.arguments["gamma"], swimmer.arguments["D"]) == ("swimmer", 0.2, 1.0)
    assert ad.Process(drift, 1.0, 1.0).recipe is None


@pytest.mark.parametrize(
    ("process", "y", "text"),
    [
        (ad.Process(lambda y, t: y[:1], 1.0, 1.0), np.ones(2), r"drift returned shape \(1,\).*shape \(2,\)"),
        (ad.Process(lambda y, t: (y, y), 1.0, 1.0), np.ones(2), "drift returned a tuple of 2.*jnp.stack"),
        (
            ad.Process(drift, np.ones(3), 1.0),
            np.ones(2),
            r"shape \(3,\) does not fit a state of shape \(2,\)",
        ),
        (ad.Process(drift, np.ones((4, 4)), 1.0), np.ones((4, 4)), "could be a diagonal or a matrix"),
        (
            ad.Process(lambda y, t: jnp.log(y), 1.0, 1.0),
            np.array([1.0, -1.0]),
            r"component \(1,\) is nan at y=",
        ),
        (ad.Process(drift, 1.0, 1.0), np.array([1.0, np.inf]), "the state is not finite"),
    ],
)
def test_bad_state(process, y, text):
    with pytest.raises(ValueError, match=text):
        process.check(y)
    with pytest.raises(ValueError, match=text):
        ad.transition(process, y, 0.1, 0.2)
    with pytest.raises(ValueError, match=text):
        ad.simulate(process, y, jnp.array([1.0]), key=jax.random.key(0))


@pytest.mark.parametrize("make", [ad.vp, ad.sub_vp, ad.ve, ad.cld, lambda: ad.langevin(dist.Logistic(0.0, 1.0))])
def test_processes_can_be_built_inside_jit(make):
    def inside(y, key):
        process = make()
        s = ad.ScheduledPairs(process, 1e-2)(0.5)
        y_s = ad.simulate(process, y, s[None], key=key, steps=5)[0]
        return ad.transition(process, y_s, s, 0.5).mean

    assert np.all(np.isfinite(jax.jit(inside)(jnp.ones((2, 3)), jax.random.key(0))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_precision_follows_the_state(dtype, x64):
    # float64 constants in the drift or the noise must neither crash nor widen a float32 state.
    process = ad.Process(lambda y, t: -np.float64(2.0) * y, lambda t: np.array([1.0, 2.0]) * t, 1.0)
    y = jnp.ones(2, dtype)
    assert ad.transition(process, y, 0.2, 0.4).mean.dtype == jnp.float32
    for options in ({}, {"steps": 3}, {"solver": "heun", "steps": 3}):
        assert ad.simulate(process, y, [0.5], key=jax.random.key(0), **options).dtype == jnp.float32


def test_dependence_on_time_is_read_off_the_drift():
    assert ad.Process(lambda y, t: -y, lambda t: 1 + t, 1.0).autonomous((3,))
    assert not ad.Process(lambda y, t: -y * t, 1.0, 1.0).autonomous((3,))
    assert not ad.Process(lambda y, t: jnp.where(t > 0.9, 0.0, -y), 1.0, 1.0).autonomous((3,))


def test_complex_states_and_drifts_are_refused():
    """Their imaginary part would be lost without a word."""
    rotation = ad.Process(lambda y, t: 1j * y, 0.5, t1=1.0)
    with pytest.raises(TypeError, match="complex"):
        rotation.check(jnp.ones(2))
    with pytest.raises(TypeError, match="complex"):
        ad.simulate(ad.Process(lambda y, t: -y, 0.5, t1=1.0), jnp.ones(2) + 1j, [1.0], key=jax.random.key(0))
    with pytest.raises(TypeError, match="score returned complex"):
        ad.flow(ad.Process(lambda y, t: -y, 0.5, t1=1.0), lambda y, t: 1j * y, jnp.ones(2), [0.0, 1.0])


@pytest.mark.parametrize("units", [(1.0, 1.0), (2.0**30, 2.0**-30)])
def test_noise_has_an_inverse_in_any_units(units):
    scale = np.array(units)[:, None]
    for root, invertible in (([[1.0, 0.0], [0.5, 0.7]], True), ([[1.0, 0.5], [2.0, 1.0]], False)):
        process = ad.Process(lambda y, t: -y, scale * np.array(root), 1.0)
        assert is_invertible(process, (2,), 0.5) is invertible
