"""Kernels of linear processes are exact; kernels of any process are consistent Gaussians."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
import oracles

TIMES = [(0.0, 0.05), (0.0, 0.5), (0.0, 1.0), (0.3, 0.9)]


def jitted(process, **options):
    """Mean, variance and full covariance of the kernel, compiled once for all states and times."""

    def moments(y, s, t):
        kernel = ad.transition(process, y, s, t, **options)
        return kernel.mean, kernel.variance(), kernel.cov()

    compiled = jax.jit(moments)
    return lambda y, s, t: compiled(jnp.asarray(y, float), jnp.asarray(s, float), jnp.asarray(t, float))


def assert_moments(found, exact, *, rtol=1e-9):
    mean, variance, cov = found
    d = mean.size
    full = np.asarray(exact.cov) if np.ndim(exact.cov) == 2 else np.diag(np.broadcast_to(np.ravel(exact.cov), (d,)))
    atol = rtol * max(1.0, float(np.max(np.abs(full))))
    np.testing.assert_allclose(np.ravel(mean), np.ravel(exact.mean), rtol=rtol, atol=rtol * np.max(np.abs(exact.mean)))
    np.testing.assert_allclose(cov, full, rtol=rtol, atol=atol)
    np.testing.assert_allclose(np.ravel(variance), np.diag(full), rtol=rtol, atol=atol)


@pytest.mark.parametrize("expand", ["s", "t"])
def test_ornstein_uhlenbeck(expand, x64):
    y, found = np.array([1.0, -2.0]), jitted(ad.Process(lambda y, tau: -1.7 * y, 0.6, 1.0), expand=expand)
    for s, t in TIMES:
        decay = np.exp(-1.7 * (t - s))
        assert_moments(found(y, s, t), oracles.Moments(decay * y, 0.6**2 * (1 - decay**2) / 3.4))


@pytest.mark.parametrize("beta", [ad.LinearBeta(0.1, 20.0), ad.InverseBeta(), ad.CosineBeta(), ad.ConstantBeta(3.0)])
def test_vp(beta, x64):
    y, found = np.array([[1.0, -2.0], [0.3, 4.0]]), jitted(ad.vp(beta))
    for s, t in TIMES:
        end = min(t, beta.t1)
        assert_moments(found(y, s, end), oracles.vp_moments(y, float(beta.integral(end) - beta.integral(s))))


def test_ve_and_sub_vp(x64):
    y, ve, sub_vp = np.array([[1.0, -2.0], [0.3, 4.0]]), jitted(ad.ve(0.01, 50.0)), jitted(ad.sub_vp())
    for s, t in TIMES:
        assert_moments(ve(y, s, t), oracles.ve_moments(y, 0.01, 50.0, s, t))
        integral = float(ad.LinearBeta(0.1, 20.0).integral(t))
        assert_moments(sub_vp(y, 0.0, t), oracles.sub_vp_moments(y, integral))


@pytest.mark.parametrize(
    ("beta", "expand"), [(ad.ConstantBeta(4.0), "s"), (ad.ConstantBeta(4.0), "t"), (ad.LinearBeta(0.1, 10.0), "t")]
)
def test_critically_damped_langevin(beta, expand, x64):
    y = np.array([[1.0, -1.0, 0.2], [0.3, 2.0, -0.5]])
    found = jitted(ad.cld(beta, mass=0.25), expand=expand)
    for s, t in TIMES:
        mean, cov = np.zeros((2, 3)), np.zeros((6, 6))
        for i in range(3):
            exact = oracles.linear_moments(
                lambda t: float(beta(t)) * np.array([[0.0, 4.0], [-1.0, -4.0]]),
                lambda t: 0.0,
                lambda t: np.diag([0.0, np.sqrt(2.0 * float(beta(t)))]),
                y[:, i],
                s,
                t,
            )
            mean[:, i], cov[np.ix_([i, i + 3], [i, i + 3])] = exact
        assert_moments(found(y, s, t), oracles.Moments(mean, cov))


def test_random_time_dependent_linear_system(x64):
    rng = np.random.default_rng(0)
    a0, a1, c0, g0, g1 = (rng.standard_normal(shape) for shape in [(6, 6), (6, 6), (6,), (6, 4), (6, 4)])
    y = rng.standard_normal(6)

    def matrix(t, np=np):
        return a0 * np.cos(2 * t) - np.eye(6) + a1 * t

    def noise(t, np=np):
        return g0 + g1 * np.sin(3 * t)

    def offset(t, np=np):
        return c0 * np.exp(-t)

    process = ad.linear(lambda t: matrix(t, jnp), lambda t: noise(t, jnp), offset=lambda t: offset(t, jnp), t1=3.0)
    found = jitted(process)
    for s, t in [(0.0, 0.1), (0.0, 1.0), (0.0, 3.0), (1.2, 1.7)]:
        assert_moments(found(y, s, t), oracles.linear_moments(matrix, offset, noise, y, s, t))


@pytest.mark.parametrize(("enable", "rtol"), [(True, 1e-9), (False, 1e-5)])
def test_a_matrix_that_changes_sign_within_a_step(enable, rtol):
    """Nowhere large, but far from constant: powers of time about the start of a step are larger than the matrix."""
    process = ad.Process(lambda y, t: 2.3 * (t - 4.0) * y, 1.0, 8.0, structure="dense")
    exact = oracles.linear_moments(
        lambda t: np.array([[2.3 * (t - 4.0)]]), lambda t: 0.0, lambda t: np.eye(1), [0.7], 3.5, 4.5
    )
    with jax.enable_x64(enable):
        assert_moments(
            jitted(process)(np.array([0.7], np.float64 if enable else np.float32), 3.5, 4.5), exact, rtol=rtol
        )


def test_expand_s_is_exact_for_constant_matrix_and_varying_noise(x64):
    a = np.array([[0.0, 1.0], [-2.0, -0.3]])  # and b linear in time
    process = ad.linear(a, lambda t: jnp.stack([0.2 * t, 1 + t**2]), offset=lambda t: jnp.array([1.0, 2.0]) * t, t1=2.0)
    exact = oracles.linear_moments(
        lambda t: a, lambda t: np.array([1.0, 2.0]) * t, lambda t: np.diag([0.2 * t, 1 + t**2]), [1.0, -1.0], 0.0, 2.0
    )
    assert_moments(jitted(process, expand="s")([1.0, -1.0], 0.0, 2.0), exact)


def test_singular_matrix(x64):
    free = ad.linear(np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([0.0, 1.0]), t1=2.0)
    h = 0.7
    cov = np.array([[h**3 / 3, h**2 / 2], [h**2 / 2, h]])
    assert_moments(jitted(free)([1.0, 2.0], 0.1, 0.1 + h), oracles.Moments(np.array([1 + 2 * h, 2.0]), cov))


def test_coefficients_that_jump(x64):
    # The step control must find a jump and not stall on it.
    process = ad.Process(lambda y, t: -y, lambda t: jnp.where(t < 0.4, 1.0, 3.0), 1.0)
    before, after = np.exp(-2 * 0.6) - np.exp(-2.0), 1 - np.exp(-2 * 0.6)
    kernel = ad.transition(process, [1.0], 0.0, 1.0)
    np.testing.assert_allclose(kernel.variance(), [0.5 * before + 4.5 * after], rtol=1e-5)


@pytest.mark.parametrize("structure", ["elementwise", "dense"])
@pytest.mark.parametrize("frequency", [0, 1, 2, 3, 4, 6, 12, 40])
def test_oscillating_and_pulsed_coefficients(structure, frequency, x64):
    # Symmetric about the middle of the interval, so that one of the interpolant's last terms vanishes; and in a small
    # coordinate beside a large one. A pulse can only be seen within a span that it fills in part.
    def noise(t, np=np):
        shape = np.exp(-(((t - 0.5) / 0.05) ** 2)) if frequency == 0 else np.cos(2 * np.pi * frequency * t)
        return np.stack([1.0 + 0.0 * shape, 1e-3 * (1.0 + 0.9 * shape)])

    t1 = 1.0 if frequency == 0 else 8.0
    still = ad.Process(lambda y, t: jnp.zeros_like(y), lambda t: noise(t, jnp), t1, structure=structure)
    grid = (np.arange(200_000) + 0.5) / 200_000
    variance = ad.transition(still, np.zeros(2), 0.0, 1.0).variance()
    np.testing.assert_allclose(variance, np.mean(noise(grid) ** 2, axis=1), rtol=1e-8)
    pushed = ad.Process(lambda y, t: 1e3 * noise(t, jnp), 1e-9, t1, structure=structure)
    mean = ad.transition(pushed, np.zeros(2), 0.0, 1.0).mean
    np.testing.assert_allclose(mean, 1e3 * np.mean(noise(grid), axis=1), rtol=1e-8)


def test_a_drift_of_rounding_errors_is_not_resolved():
    # sin(x) − cos(x − π/2) is zero but for rounding, at every time differently.
    steps = []

    def drift(y, t):
        jax.debug.callback(lambda: steps.append(1))
        return jnp.sin(y + 1000 * t) - jnp.cos(y + 1000 * t - np.float32(np.pi / 2))

    process = ad.Process(drift, 1.0, 1.0, structure="elementwise")
    kernel = ad.transition(process, jnp.zeros(1), 0.5, 0.6)
    jax.block_until_ready(kernel.mean)
    np.testing.assert_allclose(kernel.variance(), 0.1, rtol=1e-4)
    assert 0 < len(steps) < 200


@pytest.mark.parametrize("name", ["elementwise", "dense"])
def test_what_has_no_answer_is_nan_and_ends(name):
    process = ad.Process(lambda y, t: -y, lambda t: 1 + t, 10.0, structure=name)
    mean = jax.jit(lambda y, s, t: ad.transition(process, y, s, t).mean)
    assert np.all(np.isnan(mean(jnp.array([jnp.nan, jnp.nan]), 1.0, 1.1)))
    assert np.all(np.isnan(mean(jnp.ones(2), 1.1, 1.0)))  # traced, so it cannot be refused
    assert np.all(np.isfinite(mean(jnp.ones(2), 1.0, 1.1)))


@pytest.mark.parametrize("name", ["elementwise", "dense"])
@pytest.mark.parametrize(
    ("drift", "t", "text"),
    [
        (lambda y, t: -1e9 * (1.0 + 1e-6 * t) * y, 1.0, r"from s=0.0 to t=1.0 .*rate.*1e\+09.*t below"),
        (lambda y, t: -(1.0 + 1e-9 * t) * y, 3e5, r"rate.*t below s \+ 4e\+01"),
        (lambda y, t: 10.0 * y, 10.0, "rate.*t below"),
        (lambda y, t: jnp.sqrt(jnp.abs(y - 1.0)), 1.0, "derivative of the drift is not finite"),
    ],
)
def test_a_kernel_that_is_not_finite_is_refused(name, drift, t, text):
    process = ad.Process(drift, 1.0, 1e6, structure=name)
    y = jnp.ones((2,))
    with pytest.raises(FloatingPointError, match=text):
        ad.transition(process, y, 0.0, t)
    with pytest.raises(FloatingPointError, match="not finite"):
        jax.vmap(lambda y: ad.transition(process, y, 0.0, t).mean)(y[None])
    # Compiled, it costs nothing, and whoever uses the kernel sees NaN.
    assert not np.any(np.isfinite(jax.jit(lambda y: ad.transition(process, y, 0.0, t).variance())(y)))


@pytest.mark.parametrize("span", [0.3, 40.0])
@pytest.mark.parametrize("turn", [None, 0.5])
def test_reverse_derivatives_are_exact(x64, span, turn):
    """Of the log-density of an Ornstein–Uhlenbeck kernel, for one step and for many, in all that it depends on."""
    matrix = jnp.eye(2) if turn is None else jnp.array([[1.0, turn], [-turn, 1.0]])

    def found(p):
        drift = (lambda y, t: -p["rate"] * y) if turn is None else lambda y, t: -p["rate"] * matrix @ y
        process = ad.Process(drift, p["noise"], 50.0)
        return ad.transition(process, p["y"], p["s"], p["t"]).log_prob(jnp.array([0.3, -0.2]))

    def exact(p):
        h = p["t"] - p["s"]
        mean = jax.scipy.linalg.expm(-p["rate"] * h * matrix) @ p["y"]
        variance = p["noise"] ** 2 * -jnp.expm1(-2 * p["rate"] * h) / (2 * p["rate"])
        off = jnp.array([0.3, -0.2]) - mean
        return -0.5 * jnp.sum(off**2) / variance - jnp.log(2 * jnp.pi * variance)

    given = dict(rate=1.3, noise=0.7, y=jnp.array([1.0, -0.5]), s=0.1, t=0.1 + span)
    slopes = jax.grad(found)(jax.tree.map(jnp.asarray, given))
    wanted = jax.grad(exact)(jax.tree.map(jnp.asarray, given))
    for name, value in wanted.items():
        np.testing.assert_allclose(slopes[name], value, rtol=1e-7, atol=1e-9, err_msg=name)


def test_reverse_derivatives_beside_a_coordinate_without_noise(x64):
    """At a deviation of zero, whose root has no slope."""

    def density(rate):
        process = ad.Process(lambda y, t: -rate * y, np.array([1.0, 0.0]), 1.0)
        return ad.transition(process, jnp.array([1.0, 1.0]), 0.0, 0.5).log_prob(jnp.zeros(2))

    ahead = (density(1.0 + 1e-6) - density(1.0 - 1e-6)) / 2e-6
    assert jax.grad(density)(1.0) == pytest.approx(float(ahead), rel=1e-6)


NONLINEAR = {
    "elementwise": (ad.langevin(dist.Logistic(0.0, 1.0)), (3,)),
    "blocks": (ad.Process(lambda y, t: -(jnp.sum(y**2, axis=0)) * y, np.array([[1.0, 0.2], [0.0, 1.0]]), 1.0), (2, 3)),
    "dense": (ad.systems.particles().process, (5, 2)),
    "swimmer": (ad.systems.swimmer().process, (2,)),
}


@pytest.mark.parametrize("ito", [False, True])
@pytest.mark.parametrize("name", NONLINEAR)
def test_score_is_gradient_of_log_prob(name, ito, x64):
    process, shape = NONLINEAR[name]
    y, eps = jax.random.normal(jax.random.key(0), (2, *shape))
    kernel = ad.transition(process, y, 0.2, 0.25, ito=ito)
    np.testing.assert_allclose(kernel.score(eps), jax.grad(kernel.log_prob)(kernel.sample(eps)), rtol=1e-9)


@pytest.mark.parametrize("name", NONLINEAR)
def test_log_prob_is_the_density_of_samples(name, x64):
    process, shape = NONLINEAR[name]
    y, eps = jax.random.normal(jax.random.key(0), (2, *shape))
    kernel = ad.transition(process, y, 0.2, 0.25)
    exact = dist.MultivariateNormal(np.ravel(kernel.mean), kernel.cov())
    sample = kernel.sample(eps)
    np.testing.assert_allclose(kernel.log_prob(sample), exact.log_prob(np.ravel(sample)), rtol=1e-9)


@pytest.mark.parametrize("beta", [ad.LinearBeta(0.1, 10.0), ad.InverseBeta()], ids=["linear", "inverse"])
def test_separable_closed_form(beta, x64):
    prior = dist.Logistic(0.0, 1.0)
    y = jnp.array([-3.0, -0.2, 0.0, 1.0])
    kernel = ad.transition(ad.langevin(prior, beta), y, 0.3, 0.5)
    integral = float(beta.integral(0.5) - beta.integral(0.3))
    exact = oracles.separable_moments(jax.vmap(jax.grad(prior.log_prob)), y, integral)
    np.testing.assert_allclose(kernel.mean, exact.mean, rtol=1e-10)
    np.testing.assert_allclose(kernel.variance(), exact.cov, rtol=1e-10)


def both_precisions(process, y, s, t, eps):
    """Mean, score and variance in float32, and in float64 at the same rounded arguments."""

    def compute(dtype):
        y_, s_, t_, eps_ = (jnp.asarray(np.float32(x), dtype) for x in (y, s, t, eps))
        kernel = ad.transition(process(), y_, s_, t_)
        assert kernel.mean.dtype == dtype
        return [np.asarray(x, float) for x in (kernel.mean, kernel.score(eps_), kernel.variance())]

    single = compute(jnp.float32)
    with jax.enable_x64(True):
        return single, compute(jnp.float64)


@pytest.mark.parametrize("h", [1e-1, 1e-2, 1e-3, 1e-4])
def test_swimmer_in_single_precision(h):
    for y in ([0.7, -1.2], [0.0, 0.5], [3.0, 0.1]):
        single, double = both_precisions(lambda: ad.systems.swimmer().process, y, 1.0, 1.0 + h, [0.3, -1.1])
        for a, b in zip(single, double, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3)


@pytest.mark.parametrize(("rate", "s", "h"), [(50.0, 0.5, 1.0), (500.0, 0.5, 0.1), (5e4, 0.5, 1e-3), (5e5, 9.0, 1e-4)])
def test_stiff_contraction_in_single_precision(rate, s, h):
    def make():
        return ad.linear(rate * np.array([[-1.0, 0.5], [0.0, -0.3]]), np.array([1.0, 1.0]), t1=10.0)

    single, double = both_precisions(make, [1.0, -1.0], s, s + h, [0.3, -1.1])
    for a, b in zip(single, double, strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    with jax.enable_x64(True):
        a = rate * np.array([[-1.0, 0.5], [0.0, -0.3]])
        stationary = ad.transition(make(), [1.0, -1.0], 0.0, min(2.0, 1e4 / rate)).cov()
        np.testing.assert_allclose(a @ stationary + stationary @ a.T, -np.eye(2), atol=1e-8)


def test_fewer_noises_than_coordinates(x64):
    # P = h g gᵀ has rank 1, yet the part of the score that g sees is right.
    g = np.array([[1.0], [2.0]])
    kernel = ad.transition(ad.Process(lambda y, t: jnp.zeros_like(y), g, 1.0), [0.0, 0.0], 0.0, 0.25)
    eps = jnp.array([0.8, -0.4])
    y = kernel.sample(eps)
    weight = float(y[0]) / 0.25
    np.testing.assert_allclose(y[1], 2 * y[0], atol=1e-6)
    np.testing.assert_allclose(g[:, 0] @ kernel.score(eps), -weight, rtol=1e-6)


def test_coordinates_without_noise_are_deterministic():
    process = ad.Process(lambda y, t: -y, np.array([0.0, 1.0, 0.0]), 1.0)
    for structure in ("elementwise", "dense"):
        kernel = ad.transition(
            ad.Process(process.drift, process.diffusion, 1.0, structure=structure), jnp.ones(3), 0.0, 0.5
        )
        eps = jnp.array([1.0, 2.0, 3.0])
        np.testing.assert_allclose(kernel.sample(eps)[::2], np.exp(-0.5) * np.ones(2), rtol=1e-6)
        assert np.all(kernel.score(eps)[::2] == 0)
        alone = ad.transition(ad.Process(process.drift, 1.0, 1.0), jnp.ones(1), 0.0, 0.5)
        np.testing.assert_allclose(
            kernel.log_prob(kernel.sample(eps)), alone.log_prob(alone.sample(eps[1:2])), rtol=1e-5
        )


def test_covariances_do_not_depend_on_the_mean():
    """Over h the velocity's noise reaches the position as h³/3, far below the rounding of the position itself."""
    h = 2.0**-13
    process = ad.Process(lambda y, t: jnp.stack([y[1], -y[1]]), np.array([0.0, 1.0]), 1.0)
    kernel = ad.transition(process, jnp.array([1.0, 0.5]), 0.25, 0.25 + h)
    exact = np.array([[h**3 / 3, h**2 / 2], [h**2 / 2, h]])
    np.testing.assert_allclose(kernel.cov(), exact, rtol=1e-3)
    np.testing.assert_allclose(kernel.covary(jnp.array([1.0, 0.0])), exact[0], rtol=1e-3)


def test_batches_by_vmap():
    process = ad.systems.swimmer().process
    y = jax.random.normal(jax.random.key(0), (7, 2))
    s, t = jnp.linspace(0.0, 3.0, 7), jnp.linspace(0.5, 4.0, 7)
    batch = jax.jit(jax.vmap(lambda y, s, t: ad.transition(process, y, s, t).mean))(y, s, t)
    for i in range(7):
        np.testing.assert_allclose(batch[i], ad.transition(process, y[i], s[i], t[i]).mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"s": 0.5, "t": 0.5}, "t=0.5 must be later than s=0.5"),
        ({"s": 0.5, "t": 0.4}, "t=0.4 must be later than s=0.5"),
        ({"s": -0.1, "t": 0.4}, "s=-0.1 is before the start"),
        ({"s": 0.1, "t": 1.5}, "t=1.5 is after the end of the process, t1=1.0. Build the Process with a larger t1"),
        ({"s": 0.1, "t": np.array([0.5, 0.6])}, r"t has shape \(2,\); give one time, and use jax.vmap"),
        ({"s": float("nan"), "t": 0.5}, "s=nan is before the start"),
        ({"s": 0.1, "t": 0.5, "expand": "y"}, "expand='y' is not known. Choose one of: s, t"),
    ],
)
def test_bad_arguments(arguments, text):
    process = ad.Process(lambda y, t: -y, 1.0, 1.0)
    with pytest.raises(ValueError, match=text):
        ad.transition(process, jnp.ones(2), **arguments)


def test_full_covariance_of_an_image_is_refused():
    kernel = ad.transition(ad.vp(), jnp.ones((3, 32, 32)), 0.0, 0.5)
    with pytest.raises(ValueError, match=r"3072×3072; use variance\(\)"):
        kernel.cov()
    assert kernel.variance().shape == (3, 32, 32)


@pytest.mark.parametrize("rate", [1e-3, 1.0, 50.0, 1e4, 1e9])
def test_stiff_drifts_that_do_not_depend_on_time(rate, x64):
    """Relaxation towards a correlated Gaussian, in a number of steps that is the logarithm of the rate. A mean is right
    up to rounding of the start that it has left."""

    def check(found, mean, cov):
        np.testing.assert_allclose(np.ravel(found[0]), mean, atol=1e-11)
        np.testing.assert_allclose(found[2], cov, rtol=1e-9, atol=1e-9 * np.abs(cov).max())

    kernel = jitted(ad.Process(lambda y, t: 0.5 - rate * y, 0.6, 1.0))
    decay = np.exp(-rate)
    exact = decay * 2.0 + 0.5 * -np.expm1(-rate) / rate, 0.36 * -np.expm1(-2.0 * rate) / (2.0 * rate)
    check(kernel([2.0], 0.0, 1.0), exact[0], np.array([[exact[1]]]))

    shape = np.array([[1.0, -0.5], [-0.5, 1.0]])
    coupled = jitted(ad.Process(lambda y, t: -rate * (jnp.asarray(shape) @ y), 0.6, 1.0))
    values, vectors = np.linalg.eigh(shape)
    modes = np.exp(-rate * values)
    mean = vectors @ (modes * (vectors.T @ np.array([2.0, -1.0])))
    cov = vectors @ np.diag(0.36 * -np.expm1(-2.0 * rate * values) / (2.0 * rate * values)) @ vectors.T
    check(coupled([2.0, -1.0], 0.0, 1.0), mean, cov)


def test_derivatives_of_stiff_kernels(x64):
    """d/dθ of the variance g²(1 − e^{−2θt})/2θ, backwards."""

    def variance(theta):
        return ad.transition(ad.Process(lambda y, t: -theta * y, 0.6, 1.0), jnp.ones(1), 0.0, 1.0).variance()[0]

    for theta in (0.5, 300.0):
        exact = 0.18 * (2.0 * np.exp(-2.0 * theta) / theta - (1.0 - np.exp(-2.0 * theta)) / theta**2)
        assert float(jax.grad(variance)(theta)) == pytest.approx(exact, rel=1e-7)
