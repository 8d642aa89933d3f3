"""Bounds against exact likelihoods: with the exact score, only the prior's mismatch is missing."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.base.estimate import Estimate, estimate, over_samples

KEY = jax.random.key(0)
MEAN, COV = np.array([0.7, -0.4]), np.array([[0.5, 0.2], [0.2, 0.3]])
PRIOR = dist.Normal(0.0, 1.0)


@pytest.fixture(scope="module")
def vp():
    process = ad.vp()
    return process, ad.reference.gaussian_marginals(process, MEAN, COV)


def prior_gap(exact, process) -> float:
    """`KL(q_T ‖ N(0, 1))`: what the bound loses by the prior, on average over the data."""
    mean, cov = (np.asarray(v, float) for v in exact.moments(process.t1))
    return 0.5 * (np.trace(cov) + mean @ mean - len(mean) - np.linalg.slogdet(cov)[1])


@pytest.mark.parametrize("kind", ["ism", "local-dsm", "pathwise"])
def test_bound_with_the_exact_score(vp, kind):
    """For each example log p − KL(q_T‖π) on average, no more and no less: within 4.5 standard errors, and 0.02 nats."""
    process, exact = vp
    x = exact.sample(jax.random.key(1), 6000, 0.0)
    bound = ad.ELBO(process, PRIOR, kind=kind, draws=128)
    found = over_samples(lambda x, k: bound(exact.score, x, key=k) - exact.log_density(x, 0.0), x, key=KEY)
    gap = estimate(found)
    assert gap.stderr < {"ism": 0.03, "local-dsm": 0.05, "pathwise": 0.1}[kind]
    assert abs(gap.value + prior_gap(exact, process)) < 0.02 + 4.5 * gap.stderr
    assert gap.value < 4.5 * gap.stderr


def test_the_bound_loses_what_the_prior_misses(vp):
    """A prior that is wrong by a known divergence."""
    process, exact = vp
    x = exact.sample(jax.random.key(1), 6000, 0.0)
    wide = dist.Normal(0.0, 2.0)
    missing = 2 * (np.log(2.0) + 0.5 / 4 - 0.5)  # KL(N(0,1) ‖ N(0,4)), twice
    found = over_samples(
        lambda x, k: ad.elbo(process, exact.score, wide, x, key=k, draws=128) - exact.log_density(x, 0.0), x, key=KEY
    )
    gap = estimate(found)
    assert abs(gap.value + missing) < 0.03 + 4.5 * gap.stderr
    assert gap.value < -8 * gap.stderr


def test_the_decoder_alone_is_tight_and_a_bound(vp):
    """`log p(y_0|y_δ) − log q(y_δ|y_0) + log p(y_δ)`, with the exact p(y_δ), against log p(y_0)."""
    process, exact = vp
    bound = ad.ELBO(process, PRIOR)
    x = exact.sample(jax.random.key(2), 4000, 0.0)

    def gap(x, k):
        y, _, part = bound._start(exact.score, x, k)
        return part + exact.log_density(y, bound.law.t0) - exact.log_density(x, 0.0)

    gaps = np.asarray(jax.jit(jax.vmap(gap))(x, jax.random.split(KEY, len(x))), float)
    stderr = gaps.std() / np.sqrt(len(gaps))
    assert stderr < 5e-3
    assert -0.02 - 4 * stderr < gaps.mean() < 4 * stderr


def test_the_decoder_is_a_density_in_the_data(x64):
    """Of a nonlinear process: p(y_0|y_δ) integrates to one over y_0 for every y_δ, however bad the linearization."""
    process = ad.Process(lambda y, t: jnp.sin(3.0 * y) - y**3, 0.8, 1.0)
    bound = ad.ELBO(process, PRIOR, t0=0.2)  # a long first step, where linearization is poor
    score = lambda y, t: -2.0 * y  # noqa: E731
    y, grid = jnp.array([0.37]), np.linspace(-4.0, 4.0, 4001)

    def log_decoder(x):
        """What `_start` would report for y_δ = y, up to the encoder, by undoing the encoder's draw."""
        kernel = ad.transition(process, x, 0.0, 0.2)
        eps = (y - kernel.mean) / kernel.deviation
        with_noise = bound._start_from(score, x, eps)
        return with_noise[2] + kernel.log_prob(y)

    values = jax.jit(jax.vmap(log_decoder))(jnp.asarray(grid)[:, None])
    assert np.trapezoid(np.exp(np.asarray(values)), grid) == pytest.approx(1.0, abs=1e-6)


def test_ism_and_local_bounds_agree_until_lambda_grows():
    """A nonlinear process and a score that is not exact: equal within errors at λ = 1e-3, apart at λ = 0.3."""
    prior, t0 = dist.Normal(0.0, 1.0), 0.05
    process = ad.Process(lambda y, t: -(y**3), 0.8, 1.0)
    score = lambda y, t: -jnp.tanh(3.0 * y) / (0.3 + t)  # noqa: E731
    x = jax.random.uniform(jax.random.key(3), (6000, 2), minval=-1.0)

    def mean(kind: str, seed: int, **options) -> Estimate:
        bound = ad.ELBO(process, prior, kind=kind, t0=t0, draws=64, **options)
        return bound.average(score, x, key=jax.random.key(seed))

    ism, near, far = mean("ism", 1), mean("local-dsm", 2, lam=1e-3), mean("local-dsm", 3, lam=0.3)
    other = mean("pathwise", 4)

    def apart(a: Estimate, b: Estimate) -> float:
        return abs(a.value - b.value) / np.hypot(a.stderr, b.stderr)

    assert apart(ism, near) < 4.5
    assert apart(ism, other) < 4.5
    assert apart(ism, far) > 6


@pytest.mark.parametrize("name", ["VP", "CLD", "nonlinear"])
def test_flow_likelihood_is_exact(x64, name):
    if name == "nonlinear":  # a mixture of two Gaussians, whose density is known on a grid at all times
        process = ad.langevin(dist.Logistic(0.0, 0.7))
        parts = [lambda x, m=m: np.exp(-((x - m) ** 2) / (2 * 0.4**2)) for m in (-1.0, 1.2)]
        times = np.geomspace(0.05, 1.0, 500)
        grid = dict(x_range=(-14.0, 14.0), cells=6000, steps=60)
        exact = ad.products.solve_products(process, [0.3, 0.7], [parts, parts[::-1]], times, **grid)
        x = jnp.array([[-1.1, 1.0], [0.3, -0.2], [1.4, -0.9], [0.1, 1.5]])
        want = jax.vmap(lambda y: exact.log_density(y, 0))(x)
        prior = SimpleNamespace(log_prob=lambda y: exact.log_density(y, 499))
        found = jax.vmap(lambda x: ad.log_likelihood(process, exact.score_at, prior, x, t0=0.05, tol=1e-7))(x)
    else:
        process = ad.vp() if name == "VP" else ad.cld()
        mean, cov = (MEAN, COV) if name == "VP" else (np.array([[0.5], [0.0]]), np.diag([0.3, 0.25]))
        exact = ad.reference.gaussian_marginals(process, mean, cov)
        end = exact.moments(process.t1)
        prior = dist.MultivariateNormal(*end) if name == "VP" else Flat(end)
        x = exact.sample(KEY, 5, 0.01)
        want = jax.vmap(lambda y: exact.log_density(y, 0.01))(x)
        found = jax.vmap(lambda x: ad.log_likelihood(process, exact.score, prior, x, t0=0.01, tol=1e-8))(x)
    np.testing.assert_allclose(found, want, atol=1e-4)


class Flat:
    """A Gaussian prior over states of shape (2, 1)."""

    def __init__(self, moments):
        self.law = dist.MultivariateNormal(*moments)

    def log_prob(self, y):
        return self.law.log_prob(y.reshape(-1))


def test_hutchinson_agrees_in_mean(x64):
    """On a process with a coupled drift, so that single probes are off."""
    process = ad.linear(np.array([[-1.0, 1.5], [1.0, -2.0]]), np.array([1.0, 0.6]), t1=1.0)
    exact = ad.reference.gaussian_marginals(process, MEAN, COV)
    prior = dist.MultivariateNormal(*exact.moments(1.0))
    x = jnp.array([0.3, -0.1])
    want = float(exact.log_density(x, 0.0))

    def one(k):
        return ad.log_likelihood(process, exact.score, prior, x, t0=0.0, divergence="hutchinson", key=k)

    found = np.asarray(jax.vmap(one)(jax.random.split(KEY, 400)))
    assert found.std() > 0.03
    assert abs(found.mean() - want) < 4 * found.std() / np.sqrt(len(found))


def test_bits_per_dim():
    found = ad.bits_per_dim(Estimate(-2.0 * np.log(2.0), 0.1 * np.log(2.0)), (2,), levels=256, width=2.0)
    assert found == pytest.approx((8.0, 0.05, 7.0))
    # Uniform over all levels: log p = −d log(width) exactly codes log2(levels) bits.
    for width in (1.0, 2.0):
        uniform = Estimate(-12 * np.log(width), 0.0)
        assert ad.bits_per_dim(uniform, (3, 4), levels=256, width=width).value == pytest.approx(8.0)


def test_a_wrong_score_loses_its_fisher_divergence():
    """Stationary N(0, 1) and the score −a y: the bound is below log p by `½ ∫ β (a − 1)² d dt`."""
    process = ad.vp(ad.LinearBeta(0.1, 2.0))
    x = jax.random.normal(jax.random.key(7), (4000, 2))
    bound = ad.ELBO(process, PRIOR, draws=128, decoder=False)
    found = over_samples(lambda x, k: bound(lambda y, t: -1.5 * y, x, key=k) - jnp.sum(PRIOR.log_prob(x)), x, key=KEY)
    gap = estimate(found)
    want = -0.5 * 0.25 * 2 * (1.05 - 0.0001)  # ∫β from δ to 1
    assert abs(gap.value - want) < 4.5 * gap.stderr + 1e-3
    assert gap.value < -6 * gap.stderr


def test_bad_input():
    process, score = ad.vp(), lambda y, t: -y
    with pytest.raises(ValueError, match=r"lam=0.1 has no meaning for kind='ism'"):
        ad.ELBO(process, PRIOR, lam=0.1)
    with pytest.raises(ValueError, match=r"steps=9 has no meaning for kind='tabulated'"):
        ad.ELBO(process, PRIOR, kind="tabulated", steps=9, y_range=(-1.0, 1.0), shape=(2,))
    with pytest.raises(ValueError, match=r"shape=\(2,\) has no meaning for kind='ism'"):
        ad.ELBO(process, PRIOR, shape=(2,))
    with pytest.raises(ValueError, match='probes=3 has no meaning for divergence="exact"'):
        ad.ELBO(process, PRIOR, probes=3)
    with pytest.raises(ValueError, match='probes=3 has no meaning for divergence="exact"'):
        ad.log_likelihood(process, score, PRIOR, jnp.zeros(2), probes=3)
    with pytest.raises(ValueError, match=r"3072 derivatives .* Use divergence=\"hutchinson\""):
        ad.elbo(process, score, PRIOR, jnp.zeros((3, 32, 32)), key=KEY)
    with pytest.raises(ValueError, match=r"width=0\.0 must be"):
        ad.bits_per_dim(Estimate(0.0, 1.0), (2,), levels=256, width=0.0)
    with pytest.raises(FloatingPointError, match="bound is not finite for 3 of 3 examples"):
        ad.ELBO(process, PRIOR, draws=4).average(lambda y, t: y * jnp.nan, jnp.ones((3, 2)), key=KEY)
    with pytest.raises(ValueError, match=r"prior has shape \(3,\), the state has shape \(2,\)"):
        ad.log_likelihood(process, score, dist.Normal(jnp.zeros(3), 1.0), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"prior has shape \(3,\), the example has shape \(2,\)"):
        ad.elbo(process, score, dist.Normal(jnp.zeros(3), 1.0), jnp.zeros(2), key=KEY)
    with pytest.raises(TypeError, match="log_prob"):
        ad.ELBO(process, None)
    with pytest.raises(ValueError, match="Did you mean 'ism'"):
        ad.elbo(process, score, PRIOR, jnp.zeros(2), key=KEY, kind="imm")
    with pytest.raises(ValueError, match="needs y_range"):
        ad.elbo(process, score, PRIOR, jnp.zeros(2), key=KEY, kind="tabulated")
    with pytest.raises(ValueError, match='Use divergence="hutchinson"'):
        ad.log_likelihood(process, score, PRIOR, jnp.zeros(3072))
    with pytest.raises(ValueError, match=r"t0=2.0 must lie in"):
        ad.log_likelihood(process, score, PRIOR, jnp.zeros(2), t0=2.0)
    with pytest.raises(ValueError, match="score returned shape"):
        ad.elbo(process, lambda y, t: y[:1], PRIOR, jnp.zeros(2), key=KEY)
    with pytest.raises(TypeError, match=r"shape=\(0,\) must be the shape of a state"):
        ad.ELBO(process, PRIOR).values(score, np.zeros((48, 0)), key=KEY)


@pytest.mark.parametrize("kind", ["ism", "local-dsm", "pathwise"])
def test_a_time_at_the_very_start(monkeypatch, kind):
    """A draw may fall on δ itself, where a kernel from δ has no width."""
    monkeypatch.setattr("autodsm.use.elbo.jax.random.uniform", lambda *a, **k: jnp.zeros(()))
    options = dict(kind=kind, draws=4, decoder=False)
    assert np.isfinite(ad.elbo(ad.vp(), lambda y, t: -y, PRIOR, jnp.ones(2), key=KEY, **options))


CORRELATED = np.array([[0.8, 0.0], [0.5, 0.4]])


@pytest.mark.parametrize("kind", ["ism", "local-dsm"])
@pytest.mark.parametrize("name", ["auxiliary velocity", "correlated noise", "image"])
def test_bounds_of_other_states_and_noises(name, kind):
    """With the exact score and the exact law as prior nothing is lost: no noise in half of the coordinates, noise that
    mixes them, a state of three axes."""
    if name == "auxiliary velocity":
        process, mean = ad.cld(), np.array([0.5, -0.3])
        cov = np.diag([0.3, 0.25])
    elif name == "correlated noise":
        turn = jnp.array([[-1.0, 0.7], [-0.7, -0.5]])
        process, mean, cov = ad.Process(lambda y, t: turn @ y, CORRELATED, 1.0), MEAN, COV
    else:
        process, mean = ad.vp(), np.linspace(-0.5, 0.5, 4).reshape(1, 2, 2)
        cov = np.diag([0.2, 0.3, 0.4, 0.5])
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    prior = SimpleNamespace(log_prob=lambda y: exact.log_density(y, process.t1))
    bound = ad.ELBO(process, prior, kind=kind, t0=0.05, draws=128, decoder=False)
    y = exact.sample(jax.random.key(1), 4000, 0.05)
    gap = estimate(
        over_samples(lambda y, k: bound(exact.score, y, key=k) - exact.log_density(y, 0.05), y, key=KEY, chunk=500)
    )
    assert gap.stderr < 0.15
    assert abs(gap.value) < 4.5 * gap.stderr + 0.01


def test_paths_of_a_fast_process_are_fine_enough():
    """With the score of the prior the bound is log π from any start. Steps too long where the noise is strong raise it:
    errors of a path add up over the times it relaxes, here twenty."""
    prior = dist.MixtureSameFamily(dist.Categorical(jnp.array([0.5, 0.5])), dist.Normal(jnp.array([-0.5, 0.5]), 0.7))
    process = ad.langevin(prior, ad.LinearBeta(0.1, 20.0))
    slope = jax.grad(lambda y: jnp.sum(prior.log_prob(y)))
    xs = jax.random.uniform(jax.random.key(0), (600, 64), minval=-1.0, maxval=1.0)
    exact = jax.vmap(lambda x: jnp.sum(prior.log_prob(x)))(xs)

    def gap(steps):
        bound = ad.ELBO(process, prior, draws=256, steps=steps, divergence="hutchinson", decoder=False)
        values = bound.values(lambda y, t: slope(y), xs, key=jax.random.key(1), chunk=600)
        return estimate(values - np.asarray(exact))

    fine, coarse = gap(512), gap(1)  # the second steps from draw to draw
    assert fine.stderr < 1.0
    assert abs(fine.value) < 4.5 * fine.stderr
    assert coarse.value > 4.5 * coarse.stderr


LAPLACE = dist.Laplace(0.0, 1.0)


def laplace_score(y, t):
    return -jnp.sign(y)


@pytest.mark.parametrize("decoder", [True, False])
def test_bound_of_a_drift_that_jumps(decoder):
    """The stationary Laplace law, whose score is known. Kernels of width √λ blur the jump: 0.4 √λ of the density there
    is missed, and so 0.4 √λ ∫β = 0.064 nats."""
    x = LAPLACE.sample(jax.random.key(1), (20_000, 1))
    bound = ad.ELBO(ad.langevin(LAPLACE), LAPLACE, kind="local-dsm", decoder=decoder)
    gaps = bound.values(laplace_score, x, key=KEY) - np.asarray(LAPLACE.log_prob(x)[:, 0])
    gap = estimate(gaps)
    assert gap.stderr < 0.06
    assert abs(gap.value + 0.064) < 0.064 + 4.5 * gap.stderr


@pytest.mark.parametrize("kind", ["ism", "pathwise"])
def test_bounds_that_derive_a_jump_are_refused(kind):
    bound, x = ad.ELBO(ad.langevin(LAPLACE), LAPLACE, kind=kind), jnp.ones((8, 1))
    with pytest.raises(ValueError, match=r'kind=.*jumps by.*kind="local-dsm"'):
        bound.average(laplace_score, x, key=KEY)
    with pytest.raises(ValueError, match="jumps by"):
        jax.jit(lambda x: bound(laplace_score, x, key=KEY))(x[0])


def test_log_likelihood_of_a_drift_that_jumps_is_refused():
    with pytest.raises(ValueError, match="jumps by"):
        ad.log_likelihood(ad.langevin(LAPLACE), laplace_score, LAPLACE, jnp.ones(1))


def test_a_jump_is_looked_for_where_each_prior_lies():
    process = ad.Process(lambda y, t: -y + jnp.where(y > 100.0, 3.0, 0.0), 1.0, 1.0)
    near, far = dist.Normal(0.0, 1.0), dist.Normal(100.0, 1.0)
    assert np.isfinite(ad.log_likelihood(process, lambda y, t: -y, near, jnp.ones(1)))
    with pytest.raises(ValueError, match="jumps by"):
        ad.log_likelihood(process, lambda y, t: 100.0 - y, far, jnp.full(1, 100.0))


class Rate(eqx.Module):
    """A drift that holds an array, and so has no hash."""

    rate: jax.Array

    def __call__(self, y, t):
        return -self.rate * y


def test_a_drift_that_is_a_module():
    process = ad.Process(Rate(jnp.array(1.0)), np.sqrt(2.0), 1.0)
    exact = float(PRIOR.log_prob(0.3))
    assert float(ad.log_likelihood(process, lambda y, t: -y, PRIOR, jnp.array([0.3]))) == pytest.approx(exact, abs=1e-3)
    bound = ad.ELBO(process, PRIOR, kind="ism", draws=2, steps=4)
    assert np.isfinite(bound(lambda y, t: -y, jnp.array([0.3]), key=KEY))


@pytest.mark.parametrize("kind", ["ism", "local-dsm", "pathwise"])
def test_a_bound_is_derived_in_a_parameter_of_the_drift(x64, kind):
    """Backwards, against differences of the same draws."""

    def value(rate):
        process = ad.Process(lambda y, t: -rate * y, np.sqrt(2.0), 1.0)
        bound = ad.ELBO(process, PRIOR, kind=kind, draws=3, steps=6, decoder=kind == "ism")
        return bound(lambda y, t: -1.2 * y, jnp.array([0.8]), key=KEY)

    compiled = jax.jit(value)
    difference = (compiled(1.3 + 1e-5) - compiled(1.3 - 1e-5)) / 2e-5
    assert float(jax.jit(jax.grad(value))(1.3)) == pytest.approx(float(difference), rel=1e-6)


def test_the_pathwise_bound_chooses_its_weights():
    """Over twelve relaxation times the bound varies less than with those of a process without drift; means agree."""
    process = ad.Process(lambda y, t: -4.0 * y, np.sqrt(8.0), 3.0)
    score, x = lambda y, t: -y, jax.random.normal(jax.random.key(1), (512, 1))
    bound = ad.ELBO(process, PRIOR, kind="pathwise", draws=8, steps=48, decoder=False)
    found = bound.average(score, x, key=KEY)
    plain = estimate(jax.jit(jax.vmap(lambda x, k: bound(score, x, key=k)))(x, jax.random.split(KEY, len(x))))
    assert bound.prepare(x, key=KEY).target.profile is not None
    assert found.stderr < 0.9 * plain.stderr
    assert abs(found.value - plain.value) < 4.5 * np.hypot(found.stderr, plain.stderr)


def test_what_cannot_be_derived_says_so():
    def tabulated(rate):
        process = ad.Process(lambda y, t: -rate * y, 1.0, 1.0)
        return ad.ELBO(process, PRIOR, kind="tabulated", y_range=(-5.0, 5.0), shape=(1,))(
            lambda y, t: -y, jnp.ones(1), key=KEY
        )

    def noisy(noise):
        process = ad.Process(lambda y, t: -y, noise, 1.0)
        return ad.ELBO(process, PRIOR)(lambda y, t: -y, jnp.ones(1), key=KEY)

    with pytest.raises(ValueError, match=r'tables.*traced.*kind="local-dsm"'):
        jax.grad(tabulated)(1.0)
    with pytest.raises(ValueError, match=r"diffusion.*traced.*drift"):
        jax.grad(noisy)(1.0)
