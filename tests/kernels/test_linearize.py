"""The Taylor operators, and the local order of what they leave out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
import oracles


def drift(y, t):
    return jnp.sin(t) * jnp.stack([y[0] * y[1] - y[0] ** 3, jnp.exp(-(y[0] ** 2)) + t * y[1] ** 2])


G = np.array([[1.0, 0.3], [0.0, 0.5]])


def test_operators_against_autodiff(x64):
    process, y, s, tau = ad.Process(drift, G, 2.0), jnp.array([0.4, -0.7]), 0.6, 0.9
    A, b = ad.linearize(process, y, s, expand="t").coefficients(tau)
    np.testing.assert_allclose(A, jax.jacfwd(drift)(y, tau), rtol=1e-12)
    np.testing.assert_allclose(b, drift(y, tau), rtol=1e-12)
    A, b = ad.linearize(process, y, s, expand="s").coefficients(tau)
    np.testing.assert_allclose(A, jax.jacfwd(drift)(y, s), rtol=1e-12)
    np.testing.assert_allclose(b, drift(y, s) + 0.3 * jax.jacfwd(drift, argnums=1)(y, s), rtol=1e-12)


@pytest.mark.parametrize("expand", ["s", "t"])
def test_ito_term_against_hessian(expand, x64):
    process, y, s, tau = ad.Process(drift, lambda t: (1 + t) * G, 2.0), jnp.array([0.4, -0.7]), 0.6, 0.9
    _, with_term = ad.linearize(process, y, s, expand=expand, ito=True).coefficients(tau)
    _, without = ad.linearize(process, y, s, expand=expand).coefficients(tau)
    at = s if expand == "s" else tau
    Q = (1 + (s if expand == "s" else 0.5 * (s + tau))) ** 2 * G @ G.T
    expected = 0.5 * (tau - s) * np.einsum("ij,kij->k", Q, jax.hessian(drift)(y, at))
    np.testing.assert_allclose(with_term - without, expected, rtol=1e-10)


# Local orders of mean and covariance, without and with the Itô term; see the docstring of `kernel`.
ORDERS = {
    "double-well": {"h": (2e-2, 1e-2, 5e-3), "mean": (2, 3), "cov": 3},
    "swimmer": {"h": (4e-4, 2e-4, 1e-4), "mean": (3, 3), "cov": 4},
    "particles": {"h": (2e-3, 1e-3, 5e-4), "mean": (2, 3), "cov": 3},
}


@functools.cache
def exact_moments(name):
    system = ad.systems.SYSTEMS[name]()
    y = system.y0(jax.random.key(3), 1)[0]
    return system.process, y, oracles.semigroup_moments(system.process, y, 0.3, order=ORDERS[name]["cov"])


@pytest.mark.parametrize("ito", [False, True])
@pytest.mark.parametrize("expand", ["s", "t"])
@pytest.mark.parametrize("name", ORDERS)
def test_local_order(name, expand, ito, x64):
    process, y, exact = exact_moments(name)
    mean_errors, cov_errors = [], []
    for h in ORDERS[name]["h"]:
        kernel, truth = ad.transition(process, y, 0.3, 0.3 + h, expand=expand, ito=ito), exact(h)
        mean_errors.append(np.max(np.abs(np.ravel(kernel.mean) - truth.mean)))
        cov_errors.append(np.max(np.abs(kernel.cov() - truth.cov)))
    log_h = np.log(ORDERS[name]["h"])
    assert abs(np.polyfit(log_h, np.log(mean_errors), 1)[0] - ORDERS[name]["mean"][ito]) < 0.1
    assert abs(np.polyfit(log_h, np.log(cov_errors), 1)[0] - ORDERS[name]["cov"]) < 0.1


def test_semigroup_reference_converges_to_a_linear_process(x64):
    a, g = np.array([[-1.0, 0.5], [0.2, -0.7]]), np.array([[1.0, 0.0], [0.3, 0.5]])
    y = jnp.array([1.0, -2.0])
    found = oracles.semigroup_moments(ad.linear(a, g, t1=1.0), y, 0.0, order=3)
    errors = []
    for h in (0.02, 0.01):
        exact = oracles.linear_moments(lambda t: a, lambda t: 0.0, lambda t: g, y, 0.0, h)
        errors.append([np.max(np.abs(found(h).mean - exact.mean)), np.max(np.abs(found(h).cov - exact.cov))])
    np.testing.assert_allclose(np.log2(np.divide(*errors)), [4.0, 4.0], atol=0.1)  # errors of O(h⁴)
    assert np.max(errors) < 1e-6
