"""Noise schedules and the processes built on them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.integrate import quad

import autodsm as ad
from autodsm.process.priors import beta_integral
from batches import in_batches

BETAS = [ad.ConstantBeta(2.0), ad.LinearBeta(0.1, 10.0), ad.InverseBeta(), ad.CosineBeta()]


@pytest.mark.parametrize("beta", BETAS, ids=lambda b: type(b).__name__)
def test_integrals(beta, x64):
    for t in (0.0, 0.3, 0.9):
        exact = quad(lambda tau: float(beta(tau)), 0.0, t)[0]
        np.testing.assert_allclose(beta.integral(t), exact, atol=1e-9)
        np.testing.assert_allclose(beta_integral(lambda tau: beta(tau), t), exact, atol=1e-9)


def test_cosine_and_inverse_signal_levels(x64):
    # What these schedules were made for: exp(−∫β) is cos(πt/2) and 1 − t.
    t = np.array([0.2, 0.5, 0.9])
    np.testing.assert_allclose(np.exp(-ad.CosineBeta().integral(t)), np.cos(np.pi * t / 2), rtol=1e-12)
    np.testing.assert_allclose(np.exp(-ad.InverseBeta().integral(t)), 1 - t, rtol=1e-12)


def test_langevin_drift_of_the_logistic(x64):
    process = ad.langevin(dist.Logistic(0.0, 1.0), ad.LinearBeta(0.1, 10.0))
    y, t = jnp.array([-40.0, -1.0, 0.0, 2.0, 40.0]), 0.3
    np.testing.assert_allclose(process.drift(y, t), -(0.1 + 9.9 * t) * np.tanh(y / 2), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(process.g(t) ** 2, 2 * (0.1 + 9.9 * t), rtol=1e-12)


class Laplaceish:
    """A prior that is no numpyro distribution: log_prob alone suffices."""

    def log_prob(self, y):
        return -jnp.sum(jnp.sqrt(1 + y**2))


PRIORS = {
    "logistic": dist.Logistic(0.0, 1.0),
    "mixture": dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(jnp.array([-1.0, 1.0]), jnp.array([0.5, 0.8]))
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_langevin_leaves_its_prior_alone(name):
    prior, n = PRIORS[name], 100_000
    process = ad.langevin(prior)
    y0 = prior.sample(jax.random.key(0), (n, 1))
    keys = jax.random.split(jax.random.key(1), n)
    end = in_batches(lambda y, k: ad.simulate(process, y, [1.0], key=k), y0, keys)[:, 0, 0]
    for statistic in (lambda x: x, lambda x: x**2, lambda x: np.tanh(3 * x)):
        a, b = statistic(np.asarray(end, float)), statistic(np.asarray(y0[:, 0], float))
        assert abs(a.mean() - b.mean()) < 4 * np.sqrt((a.var() + b.var()) / n) + 2e-3


def test_any_log_prob_and_any_beta(x64):
    process = ad.langevin(Laplaceish(), lambda t: 1 + jnp.sin(t), t1=2.0)
    y = jnp.array([0.3, -2.0])
    np.testing.assert_allclose(process.drift(y, 0.5), -(1 + np.sin(0.5)) * y / np.sqrt(1 + y**2), rtol=1e-12)
    assert process.t1 == 2.0


def test_cld_is_critically_damped_and_keeps_its_stationary_law(x64):
    process = ad.cld(ad.ConstantBeta(1.5), mass=0.36)
    a = np.asarray(jax.jacfwd(lambda y: process.drift(y, 0.2))(jnp.zeros(2)))
    eigenvalues = np.linalg.eigvals(a)
    np.testing.assert_allclose(eigenvalues.real, -1.5 / 0.6, rtol=1e-6)  # a double root, −β/√M
    np.testing.assert_allclose(eigenvalues.imag, 0.0, atol=1e-6)
    stationary, Q = np.diag([1.0, 0.36]), np.diag(np.asarray(process.g(0.2)) ** 2)
    np.testing.assert_allclose(a @ stationary + stationary @ a.T + Q, 0.0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ad.langevin(3.0), "prior=3.0 must have a method log_prob"),
        (lambda: ad.langevin(dist.Normal(), ad.InverseBeta(), t1=1.0), "InverseBeta is singular at t = 1"),
        (lambda: ad.vp(ad.CosineBeta(), t1=1.5), "CosineBeta is singular"),
        (lambda: ad.vp(3.0), r"beta=3.0 must be a function of t; for a constant use ConstantBeta\(3.0\)"),
        (lambda: ad.ve(1.0, 0.5), "sigma1=0.5 must be larger than sigma0=1.0"),
        (lambda: ad.cld(mass=-1.0), "mass=-1.0"),
        (lambda: ad.linear(np.ones((2, 3)), 1.0, t1=1.0), r"matrix has shape \(2, 3\)"),
        (lambda: ad.linear(np.eye(2), 1.0, t1=1.0, offset=np.ones(3)), r"offset has shape \(3,\)"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def stationary_residual(process, log_prob, y, t):
    """`−∇·(f π) + ½ ∇·(Q ∇π)` over π, for a diagonal g, by second derivatives."""
    flat, shape = y.ravel(), y.shape
    f = lambda z: process.f(z.reshape(shape), t).ravel()  # noqa: E731
    score = jax.grad(lambda z: log_prob(z.reshape(shape)))
    q = jnp.broadcast_to(process.g(t)[:, None] ** 2, shape).ravel()
    s = score(flat)
    second = jnp.diag(jax.jacfwd(score)(flat))
    return -jnp.trace(jax.jacfwd(f)(flat)) - f(flat) @ s + 0.5 * jnp.sum(q * (second + s**2))


@pytest.mark.parametrize("friction", [None, 0.3])
@pytest.mark.parametrize("name", PRIORS)
def test_underdamped_leaves_its_law_alone(name, friction, x64):
    process = ad.underdamped(PRIORS[name], ad.LinearBeta(0.1, 10.0), mass=0.4, friction=friction)
    law = ad.WithVelocity(PRIORS[name], 0.4)
    ys = 1.5 * jax.random.normal(jax.random.key(0), (20, 2, 3))
    other = ad.WithVelocity(PRIORS[name], 0.5)
    found, wrong = (
        jax.jit(jax.vmap(lambda y, law=law: stationary_residual(process, law.log_prob, y, 0.7)))(ys)
        for law in (law, other)
    )
    np.testing.assert_allclose(found, 0.0, atol=1e-10)
    assert np.all(np.abs(wrong) > 1e-2)


def test_underdamped_of_the_normal_is_cld(x64):
    normal, cld = ad.underdamped(dist.Normal(0.0, 1.0), mass=0.3), ad.cld(mass=0.3)
    y = jax.random.normal(jax.random.key(0), (2, 4))
    np.testing.assert_allclose(normal.f(y, 0.2), cld.f(y, 0.2), rtol=1e-12)
    np.testing.assert_allclose(normal.g(0.2), cld.g(0.2), rtol=1e-12)


def test_with_velocity_samples_what_it_scores():
    law = ad.WithVelocity(dist.Normal(2.0, 0.5), 0.3)
    y = np.asarray(law.sample(jax.random.key(0), (20_000, 2, 3)))
    assert y.shape == (20_000, 2, 3)
    np.testing.assert_allclose(y.mean(axis=(0, 2)), [2.0, 0.0], atol=4.5 * 0.55 / np.sqrt(60_000))
    np.testing.assert_allclose(y.var(axis=(0, 2)), [0.25, 0.3], rtol=4.5 * np.sqrt(2 / 60_000))
    exact = dist.Normal(2.0, 0.5).log_prob(y[0, 0]).sum() + dist.Normal(0.0, np.sqrt(0.3)).log_prob(y[0, 1]).sum()
    np.testing.assert_allclose(law.log_prob(jnp.asarray(y[0])), exact, rtol=1e-5)
    whole = ad.WithVelocity(dist.MultivariateNormal(jnp.ones(3), jnp.eye(3)))
    assert whole.sample(jax.random.key(0), (5, 2, 3)).shape == (5, 2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ad.underdamped(3.0), "must have a method log_prob"),
        (lambda: ad.underdamped(dist.Normal(0.0, 1.0), mass=-1.0), "mass=-1.0"),
        (lambda: ad.underdamped(dist.Normal(0.0, 1.0), friction=0.0), "friction=0.0"),
        (lambda: ad.WithVelocity(dist.Normal(0.0, 1.0)).sample(jax.random.key(0), (4, 3)), "positions and velocities"),
    ],
)
def test_bad_velocities(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


BOUNDED = {
    "uniform": dist.Uniform(-3.5, 3.5),
    "box": dist.Uniform(-3.5, 3.5).expand([2]).to_event(1),
    "lognormal": dist.LogNormal(0.0, 1.0),
    "gamma": dist.Gamma(2.0, 1.0),
    "truncated": dist.TruncatedNormal(0.0, 1.0, low=-2.0),
    "simplex": dist.Dirichlet(jnp.ones(3)),
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("make", [ad.langevin, ad.underdamped, lambda prior: ad.ELBO(ad.vp(), prior)])
def test_priors_of_bounded_support_are_refused(make, name):
    """Noise carries paths out of the support, where such a prior has no density."""
    with pytest.raises(ValueError, match=r"prior=.* is zero outside of .*biject_to"):
        make(BOUNDED[name])


class Own:
    """A law of one's own, which does not say its support: on [low, ∞) or [low, high]."""

    def __init__(self, draw, inside):
        self.draw, self.inside = draw, inside

    def sample(self, key, shape=()):
        return self.draw(key, shape)

    def log_prob(self, y):
        return jnp.where(self.inside(y), 0.0 * y, -jnp.inf)


def test_laws_of_ones_own_are_looked_at_beyond_their_samples():
    uniform = Own(
        lambda key, shape: jax.random.uniform(key, shape, minval=-3.5, maxval=3.5), lambda y: jnp.abs(y) < 3.5
    )
    with pytest.raises(ValueError, match=r"prior=Own is zero at y=.*whole line"):
        ad.langevin(uniform)
    with pytest.raises(ValueError, match=r"prior=Own is zero at y=.*whole line"):
        ad.ELBO(ad.vp(), Own(jax.random.exponential, lambda y: y > 0))
    ad.langevin(Own(jax.random.normal, jnp.isfinite))


def test_a_bounded_prior_may_be_transformed_to_the_whole_line(x64):
    """The uniform law in the coordinate of its logit is the logistic law, and the drift is that of the logistic."""
    prior = BOUNDED["uniform"]
    unbounded = dist.TransformedDistribution(prior, dist.transforms.biject_to(prior.support).inv)
    y = jnp.array([-3.0, 0.2, 5.0])
    np.testing.assert_allclose(
        ad.langevin(unbounded).f(y, 0.3), ad.langevin(dist.Logistic(0.0, 1.0)).f(y, 0.3), rtol=1e-9
    )
    for law in (*PRIORS.values(), dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)), dist.StudentT(3.0)):
        ad.langevin(law)
