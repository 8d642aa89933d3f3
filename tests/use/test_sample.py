"""Samples made with exact scores must have the exact law."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.exact.products import solve_products
from autodsm.use.flow import flow_with_density
from autodsm.use.metrics import mmd2

KEY = jax.random.key(0)
N = 8_000


def linear_cases() -> dict:
    """Processes with a Gaussian start, and their marginals."""
    ou = ad.systems.ornstein_uhlenbeck(2, t1=1.0).process
    mean, cov = np.array([0.7, -0.4]), np.array([[0.5, 0.2], [0.2, 0.3]])
    phase = np.array([[0.5], [0.0]])
    return {
        "OU": (ou, mean, cov),
        "VP": (ad.vp(), mean, cov),
        "CLD": (ad.cld(), phase, np.diag([0.3, 0.25])),
        "matrix noise": (ad.linear(-np.eye(2), np.array([[0.8, 0.0], [0.4, 0.6]]), t1=1.0), mean, cov),
    }


CASES = ("OU", "VP", "CLD", "matrix noise")
METHODS = {
    "fixed": dict(method="sde", steps=200),
    "adaptive": dict(method="sde", tol=2e-3),
    "corrected": dict(method="sde", steps=60, corrector=1),
    "ode": dict(method="ode"),
}


def moment_z_scores(y: np.ndarray, mean: np.ndarray, cov: np.ndarray, extra: float = 0.0) -> np.ndarray:
    """How many standard errors the sample moments are off; `extra` allows for a relative discretization error."""
    flat = y.reshape(len(y), -1).astype(float)
    off = flat - mean.reshape(-1)
    products = np.einsum("ni,nj->nij", off, off)
    scale = np.sqrt(np.outer(np.diag(cov), np.diag(cov)))
    first = (np.abs(off.mean(0)) - extra * np.sqrt(np.diag(cov))) / (off.std(0) / np.sqrt(len(y)))
    second = (np.abs(products.mean(0) - cov) - extra * scale) / (products.std(0) / np.sqrt(len(y)))
    return np.concatenate([first, second.ravel()])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_samples_of_gaussians(name, method):
    process, mean, cov = linear_cases()[name]
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    t0 = 0.02 * process.t1
    y = ad.sample(
        process, exact.score, lambda k, n: exact.sample(k, n, process.t1), N, key=KEY, t0=t0, **METHODS[method]
    )
    assert y.shape == (N, *mean.shape)
    want, spread = (np.asarray(v) for v in exact.moments(t0))
    # Discretization: allowances, not bounds. At tol = 0.01 the adaptive steps were 2 to 8 % off in variance.
    allowed = {"fixed": 0.003, "adaptive": 0.02, "corrected": 0.02, "ode": 0.0}[method]
    assert moment_z_scores(y, want, spread, allowed).max() < 4.5
    truth = exact.sample(jax.random.key(1), 1500, t0)
    assert mmd2(y[:1500], truth, key=KEY).p_value > 0.005


def test_a_wrong_score_is_noticed():
    process, mean, cov = linear_cases()["OU"]
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    prior = lambda k, n: exact.sample(k, n, process.t1)  # noqa: E731
    y = ad.sample(process, lambda y, t: 0.9 * exact.score(y, t), prior, N, key=KEY, t0=0.02)
    assert moment_z_scores(y, *(np.asarray(v) for v in exact.moments(0.02)), 0.003).max() > 6
    assert mmd2(y[:1500], exact.sample(jax.random.key(1), 1500, 0.02), key=KEY).p_value < 0.05


@pytest.fixture(scope="module")
def mixture():
    """A mixture of two Gaussians under Langevin dynamics towards a logistic law."""
    process = ad.langevin(dist.Logistic(0.0, 0.7))
    gauss = [lambda x, m=m: np.exp(-((x - m) ** 2) / (2 * 0.3**2)) for m in (-1.0, 1.2)]
    times = np.geomspace(1e-3, 1.0, 400)
    found = solve_products(
        process, [0.3, 0.7], [[gauss[0], gauss[1]], [gauss[1], gauss[0]]], times, x_range=(-14.0, 14.0), cells=3000,
        steps=40,
    )  # fmt: skip
    return process, found


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_a_mixture_under_a_nonlinear_process(mixture, method):
    process, exact = mixture
    y = ad.sample(process, exact.score_at, dist.Logistic(0.0, 0.7), N, shape=(2,), key=KEY, t0=0.01, **METHODS[method])
    # Moments and masses of the exact law at t0, from its grid. The prior is that of t → ∞, which β has nearly reached.
    x = np.asarray(exact.x)
    q = np.stack([np.interp(0.01, exact.times, c) for c in np.asarray(exact.factors).reshape(400, -1).T]).reshape(
        2, 2, -1
    )
    joint = np.einsum("c,cx,cy->xy", np.asarray(exact.weights), q[:, 0], q[:, 1]) * (x[1] - x[0]) ** 2
    assert joint.sum() == pytest.approx(1.0, abs=1e-4)
    quadrants = np.array([[joint[np.ix_(a, b)].sum() for b in (x < 0, x >= 0)] for a in (x < 0, x >= 0)])
    found = np.array([[np.mean((a(y[:, 0])) & (b(y[:, 1]))) for b in (lambda v: v < 0, lambda v: v >= 0)]
                      for a in (lambda v: v < 0, lambda v: v >= 0)])  # fmt: skip
    allowed = {"fixed": 0.01, "adaptive": 0.03, "corrected": 0.03, "ode": 0.01}[method]
    assert np.all(np.abs(found - quadrants) < 4.5 * np.sqrt(quadrants * (1 - quadrants) / N) + 0.3 * allowed)
    mean, second = (joint.sum(1) * x).sum(), (joint.sum(1) * x**2).sum()
    assert abs(y[:, 0].mean() - mean) < 4.5 * y[:, 0].std() / np.sqrt(N) + allowed
    assert abs((y[:, 0] ** 2).mean() - second) < 4.5 * (y[:, 0] ** 2).std() / np.sqrt(N) + allowed


@pytest.mark.parametrize("name", CASES)
def test_flow_carries_the_exact_density(x64, name):
    """log q along the flow against the known one, forwards and backwards, to 1e-4."""
    process, mean, cov = linear_cases()[name]
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    forwards = [0.05 * process.t1, 0.3 * process.t1, process.t1]
    for times in (forwards, forwards[::-1]):
        y0 = exact.sample(KEY, 5, times[0])
        found = jax.vmap(lambda y, t=times: flow_with_density(process, exact.score, y, t, tol=1e-8))(y0)
        start = jax.vmap(lambda y, t=times: exact.log_density(y, t[0]))(y0)
        for i, t in enumerate(times):
            want = jax.vmap(lambda y, t=t: exact.log_density(y, t))(found.y[:, i])
            np.testing.assert_allclose(start + found.gain[:, i], want, atol=1e-4)


@pytest.mark.parametrize("x64", [True, False])
def test_moments_lose_nothing_by_terms_left_out(x64):
    """An Ornstein–Uhlenbeck process, in closed form: to the precision of numbers, in single
    precision by fewer terms than 97."""
    with jax.enable_x64(x64):
        process = ad.systems.ornstein_uhlenbeck(1, rate=1.3, noise=0.8, t1=2.0).process
        exact = ad.reference.gaussian_marginals(process, [1.0], [[0.4]])
        assert x64 or len(exact.coefficients) < 40
        for t in (0.0, 0.4, 2.0):
            decay, mean, cov = np.exp(-2.6 * t), *(np.ravel(x)[0] for x in exact.moments(t))
            want = [np.sqrt(decay), 0.4 * decay + 0.64 / 2.6 * (1 - decay)]
            np.testing.assert_allclose([mean, cov], want, rtol=1e-10 if x64 else 1e-6)


def test_the_exact_flow_of_a_gaussian(x64):
    """Along the flow a standardized coordinate stays where it is."""
    process = ad.systems.ornstein_uhlenbeck(1, rate=1.3, noise=0.8, t1=2.0).process
    exact = ad.reference.gaussian_marginals(process, [1.0], [[0.4]])
    times = [0.0, 0.5, 2.0]
    path = ad.flow(process, exact.score, [1.7], times, tol=1e-9)
    standardized = [float((path[i, 0] - m[0]) / np.sqrt(P[0, 0])) for i, (m, P) in enumerate(map(exact.moments, times))]
    np.testing.assert_allclose(standardized, standardized[0], atol=1e-7)


def test_the_flow_does_not_depend_on_units(x64):
    """An Ornstein–Uhlenbeck flow in closed form, `y ∝ σ(t)`, its two coordinates in different units."""

    def solve(unit, time):
        process = ad.Process(lambda y, t: -y / time, unit * np.sqrt(2 / time), 2.0 * time)

        def score(y, t):
            return -y / unit**2 / (1.0 - 0.75 * jnp.exp(-2 * t / time))

        start = jnp.array([0.7, -0.4]) * unit
        ends = [flow_with_density(process, score, start, np.array(times) * time) for times in ([0, 2], [2, 0.002])]
        alone = (
            ad.flow(process, score, start, np.array([0, 2]) * time)[-1] / start
        )  # no density to keep its steps short
        ratios = [np.asarray(end.y[-1] / start) for end in ends]
        return np.stack([*ratios, np.asarray(alone)]), np.array([end.gain[-1] for end in ends])

    deviation = np.sqrt(1.0 - 0.75 * np.exp(-2 * np.array([0.0, 2.0, 2.0, 0.002])))
    exact = deviation[1::2] / deviation[::2]
    plain, _ = solve(np.ones(2), 1.0)
    small, large = 2.0**-30, 2.0**30
    for unit, time in (([small, small], 1.0), ([large, small], 1.0), ([1.0, 1.0], small), ([1.0, small], large)):
        ratio, gain = solve(np.array(unit), time)
        np.testing.assert_allclose(ratio, exact[[[0, 0], [1, 1], [0, 0]]], rtol=1e-4)
        np.testing.assert_allclose(gain, -2 * np.log(exact), atol=1e-4)
        np.testing.assert_allclose(ratio, plain, rtol=1e-9)


def test_samples_with_their_densities():
    process, mean, cov = linear_cases()["VP"]
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    found = ad.sample(process, exact.score, dist.Normal(0.0, 1.0), 64, shape=(2,), key=KEY, method="ode",
                      log_density=True, t0=0.02)  # fmt: skip
    want = jax.vmap(lambda y: exact.log_density(y, 0.02))(jnp.asarray(found.y))
    # One probe is exact here but for the correlation: off-diagonal entries of the Jacobian come with random signs.
    few = ad.sample(process, exact.score, dist.Normal(0.0, 1.0), 64, shape=(2,), key=KEY, method="ode",
                    log_density=True, divergence="hutchinson", t0=0.02)  # fmt: skip
    np.testing.assert_allclose(few.y, found.y, atol=1e-4)
    off = few.log_density - found.log_density
    assert off.std() > 1e-2
    assert abs(off.mean()) < 4.5 * off.std() / 8
    # The prior N(0,1) is not exactly the law at t1: e^{−½∫β} = .0066 of the mean is left.
    np.testing.assert_allclose(found.log_density, want, atol=0.02)


def test_states_on_the_way():
    process, mean, cov = linear_cases()["OU"]
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    prior = lambda k, n: exact.sample(k, n, process.t1)  # noqa: E731
    times = [0.8, 0.4, 0.1]
    for options in (dict(steps=100), dict(tol=1e-2), dict(method="ode")):
        y = ad.sample(process, exact.score, prior, 4000, key=KEY, times=times, **options)
        assert y.shape == (3, 4000, 2)
        for i, t in enumerate(times):
            assert moment_z_scores(y[i], *(np.asarray(v) for v in exact.moments(t)), 0.02).max() < 4.5


def test_chunks_do_not_change_samples():
    process, mean, cov = linear_cases()["OU"]
    exact = ad.reference.gaussian_marginals(process, mean, cov)
    prior = lambda k, n: exact.sample(k, n, process.t1)  # noqa: E731
    whole = ad.sample(process, exact.score, prior, 50, key=KEY, steps=20)
    parts = ad.sample(process, exact.score, prior, 50, key=KEY, steps=20, chunk=16, progress=True)
    np.testing.assert_allclose(whole, parts, rtol=1e-5, atol=1e-6)


def test_images_and_blocks():
    """Elementwise 3×8×8, and CLD over pixels with a stationary start, where the score is the prior's at all times."""
    images = ad.vp()
    y = ad.sample(images, lambda y, t: -y, dist.Normal(0.0, 1.0), 200, shape=(3, 8, 8), key=KEY, steps=50)
    assert y.shape == (200, 3, 8, 8)
    assert abs(y.var() - 1.0) < 4 * np.sqrt(2 / y.size) + 0.01
    phase, spread = ad.cld(), jnp.array([1.0, 0.5]).reshape(2, 1, 1) * jnp.ones((2, 4, 4))
    for options in (dict(steps=100), dict(method="ode")):
        y = ad.sample(phase, lambda y, t: -y / spread**2, dist.Normal(0.0, spread), 500, key=KEY, **options)
        for i, want in enumerate((1.0, 0.25)):
            assert abs(y[:, i].var() / want - 1.0) < 4 * np.sqrt(2 / (500 * 16)) + 0.01


def test_shape_from_the_network():
    process = ad.vp()
    clock = ad.Clock(process)
    score = ad.network.Score(ad.network.MLP((3,), clock, key=KEY, width=8, depth=1), clock)
    assert ad.sample(process, score, dist.Normal(0.0, 1.0), 7, key=KEY, steps=3).shape == (7, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prior=dist.Normal(jnp.zeros(3), 1.0)), r"score returned shape \(2,\) for a state of shape \(3,\)"),
        (dict(prior=dist.Normal(jnp.zeros(3), 1.0), shape=(2,)), r"prior has shape \(3,\), a state has shape \(2,\)"),
        (dict(shape=None), "give shape"),
        (dict(score=lambda y, t: y[:1]), r"score returned shape \(1,\) for a state of shape \(2,\)"),
        (dict(t0=1.5), r"t0=1.5 must lie inside \(0, t1\)"),
        (dict(times=[0.1, 0.5]), "must decrease"),
        (dict(times=[0.5, 0.1], t0=0.1), "exclude each other"),
        (dict(method="odee"), "Did you mean 'ode'"),
        (dict(method="ode", steps=10), 'is for method="sde"'),
        (dict(method="ode", corrector=1), "fixed steps"),
        (dict(log_density=True), 'needs method="ode"'),
        (dict(n=0), "n=0 must be a whole number"),
    ],
)
def test_bad_input(change, message):
    given = dict(process=ad.vp(), score=lambda y, t: -y, prior=dist.Normal(0.0, 1.0), n=4, key=KEY, shape=(2,))
    if "shape" not in change and "prior" in change:
        given.pop("shape")
        given["score"] = lambda y, t: -y[:2]
    given |= change
    with pytest.raises(ValueError, match=message):
        ad.sample(given.pop("process"), given.pop("score"), given.pop("prior"), given.pop("n"), **given)


@pytest.mark.parametrize("options", [dict(steps=40), dict(tol=1e-2), dict(method="ode")])
def test_a_score_that_is_not_finite_says_where(options):
    score = lambda y, t: jnp.where(t < 0.5, jnp.nan, -y)  # noqa: E731
    with pytest.raises(FloatingPointError, match=r"score is not finite at t=0\.4\d*, for \d+ of"):
        ad.sample(ad.vp(), score, dist.Normal(0.0, 1.0), 8, shape=(2,), key=KEY, **options)
    with pytest.raises(FloatingPointError, match=r"not finite at t=0\.4"):
        ad.flow(ad.vp(), score, jnp.ones(2), [1.0, 0.01])
    with pytest.raises(FloatingPointError, match=r"not finite at t=0, for 1 of 1"):  # singular at the end
        ad.flow(ad.vp(), lambda y, t: -y / t, jnp.ones(2), [1.0, 0.0])


def test_flow_refuses():
    ou = ad.systems.ornstein_uhlenbeck(2, t1=1.0).process
    score = lambda y, t: -y  # noqa: E731
    with pytest.raises(ValueError, match=r"leave the span of the process, \[0, 1\]"):
        ad.flow(ou, score, jnp.ones(2), [0.0, 1.5])
    with pytest.raises(ValueError, match="must increase, or decrease"):
        ad.flow(ou, score, jnp.ones(2), [0.0, 0.5, 0.2])
    with pytest.raises(ValueError, match='Use divergence="hutchinson"'):
        flow_with_density(ou, score, jnp.zeros(3072), [0.0, 1.0])
    with pytest.raises(ValueError, match="give key"):
        flow_with_density(ou, score, jnp.zeros(2), [0.0, 1.0], divergence="hutchinson")
