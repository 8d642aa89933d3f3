"""Schedules: the general inversion against closed forms, and the KL bound against exact values."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
import oracles
from autodsm.exact.grid1d import solve_1d
from autodsm.experiments import local_kernels as demo

LOGISTIC = dist.Logistic(0.0, 1.0)
CLOSED = {
    "linear": (ad.LinearBeta(0.1, 10.0), lambda t, ell: oracles.linear_beta_schedule(t, ell, 0.1, 10.0)),
    "inverse": (ad.InverseBeta(), oracles.inverse_beta_schedule),
    "cosine": (ad.CosineBeta(), oracles.cosine_beta_schedule),
    "constant": (ad.ConstantBeta(2.0), lambda t, ell: np.maximum(0.0, t - ell / 2.0)),
}


@pytest.mark.parametrize("lam", [1e-3, 5e-2, 0.5])
@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms(name, lam, x64):
    beta, closed = CLOSED[name]
    process = ad.langevin(LOGISTIC, beta)  # g² = 2β, so ∫β = λ/2
    t = np.linspace(1e-4, process.t1, 200)
    found = jax.vmap(ad.ScheduledPairs(process, lam))(t)
    np.testing.assert_allclose(found, closed(t, lam / 2), atol=1e-10)
    assert np.all(found < t)
    assert np.all(found >= 0)
    assert np.any(found == 0)


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_in_single_precision(name):
    beta, closed = CLOSED[name]
    process = ad.langevin(LOGISTIC, beta)
    t = np.linspace(0.05, process.t1, 50, dtype=np.float32)
    found = jax.jit(jax.vmap(ad.ScheduledPairs(process, 1e-2)))(t)
    # G(t) is rounded at its own size, up to 14 here, and s inherits that error divided by β.
    np.testing.assert_allclose(found, closed(t, 5e-3), atol=5e-6)


def test_any_g_solves_its_equation(x64):
    process = ad.Process(lambda y, t: -y, lambda t: 0.3 + jnp.abs(jnp.sin(7 * t)) + jnp.where(t > 1.3, 2.0, 0.0), 2.0)
    pairs = ad.ScheduledPairs(process, 0.2)
    for t in (0.05, 0.7, 1.31, 1.9):
        s = float(pairs(t))
        grid = np.linspace(s, t, 200_001)
        integral = np.trapezoid(np.asarray(process.g(grid)) ** 2, grid)
        assert integral == pytest.approx(0.2, rel=1e-4) if s > 0 else integral < 0.2


def test_matrix_noise_uses_the_largest_entry(x64):
    g0 = np.array([[1.0, 0.2], [0.3, 0.4]])

    def noise(t):
        return g0 * jnp.stack([jnp.cos(t), 1 + t])[:, None]

    pairs = ad.ScheduledPairs(ad.Process(lambda y, t: -y, noise, 3.0), 0.1)
    for t in (0.4, 1.0, 2.9):  # one row has the more noise early, the other late
        s = float(pairs(t))
        tau = np.linspace(s, t, 20_001)
        g = np.asarray(jax.vmap(noise)(tau))
        Q = g @ g.swapaxes(1, 2)
        assert np.max(np.trapezoid(np.abs(Q), tau, axis=0)) == pytest.approx(0.1, rel=1e-6)


def test_constant_vector_noise_and_other_schedules(x64):
    pairs = ad.ScheduledPairs(ad.systems.swimmer().process, 0.02)
    np.testing.assert_allclose(pairs(2.0), 2.0 - 0.02 / 0.2, rtol=1e-12)
    assert float(pairs(0.05)) == 0.0
    np.testing.assert_allclose(ad.ConstantGap(0.1)(jnp.array([0.05, 0.5])), [0.0, 0.4], rtol=1e-12)
    assert float(ad.FromZero()(0.7)) == 0.0


def test_many_noises_and_small_units():
    rng = np.random.default_rng(0)
    g0 = rng.standard_normal((40, 40)).astype(np.float32)
    growth = np.linspace(0.0, 1.0, 40, dtype=np.float32)[:, None]
    pairs = ad.ScheduledPairs(ad.Process(lambda y, t: -y, lambda t: 1e-7 * g0 * (1 + t * growth), 1.0), 1e-13)
    tau = np.linspace(float(pairs(0.9)), 0.9, 2001)
    g = g0 * (1 + tau[:, None, None] * growth)
    largest = np.max(np.trapezoid(np.abs(g @ g.swapaxes(1, 2)), tau, axis=0))  # over all entries, also off the diagonal
    assert 1e-14 * largest == pytest.approx(1e-13, rel=1e-4)


def test_several_times_at_once():
    pairs = ad.ScheduledPairs(ad.langevin(LOGISTIC), 1e-2)
    t = jnp.array([0.2, 0.5, 1.0])
    np.testing.assert_allclose(pairs(t), [float(pairs(x)) for x in t], rtol=1e-6)
    with pytest.raises(ValueError, match=r"t=1.5 is after the end of the process, t1=1.0"):
        pairs(1.5)


def test_s_stays_below_t_when_the_gap_is_under_the_resolution():
    pairs = ad.ScheduledPairs(ad.systems.double_well(t1=100.0).process, 1e-8)
    t = jnp.float32(99.0)
    assert float(pairs(t)) < float(t)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: ad.ScheduledPairs(p, 0.0), "lam=0.0 must be a finite number above zero"),
        (lambda p: ad.ScheduledPairs(p, -1.0), "lam=-1.0"),
        (lambda p: ad.ConstantGap(0.0), "gap=0.0"),
        (lambda p: ad.ScheduledPairs(ad.Process(p.drift, 0.0, 1.0), 0.1), "there is no noise to schedule"),
        (lambda p: ad.ScheduledPairs.for_tolerance(p, np.zeros((3, 1)), 0.0, key=jax.random.key(0)), "tol=0.0"),
    ],
)
def test_bad_schedules(make, text):
    with pytest.raises(ValueError, match=text):
        make(ad.systems.double_well().process)


def test_kl_bound_of_a_quadratic_drift(x64):
    # f = c y²: the linearization misses c u², so the bound is ∫ c² E[u⁴]/(2g²) = ½ c² g² h³ as h → 0.
    c, g, h = 0.8, 0.6, 1e-3
    process = ad.Process(lambda y, t: c * y**2, g, 1.0)
    found = ad.kl_bound(process, ad.ConstantGap(h), np.array([[0.3]]), [h], key=jax.random.key(0), n=20_000)
    exact = 0.5 * c**2 * g**2 * h**3
    assert abs(found.bound[0] - exact) < 4 * found.stderr[0]
    assert found.stderr[0] < 0.05 * exact


def test_kl_bound_in_single_precision():
    """Of a drift that misses its linearization by 10¹², squares of which are beyond single precision."""
    process = ad.Process(lambda y, t: y**2, 1.0, 1.0)
    y0 = np.array([[1e6], [1e7]], np.float32)
    found = ad.kl_bound(process, ad.ConstantGap(1e-8), y0, [1e-8], key=jax.random.key(0), n=64)
    assert 0 < found.stderr[0] < found.bound[0]
    with pytest.raises(FloatingPointError, match="the KL bound is not finite"):
        ad.kl_bound(process, ad.ConstantGap(2e-12), 1e4 * y0, [2e-12], key=jax.random.key(0), n=64)


def test_kl_bound_holds_and_scales(x64):
    """The bound is above the true divergence, computed on a grid, and grows with λ."""
    process, t = ad.langevin(demo.prior()), 0.4
    grid = solve_1d(process, demo.initial_density, [t], x_range=(-6.0, 6.0), cells=600)
    x, dx = jnp.asarray(grid.x), grid.x[1] - grid.x[0]
    bounds = []
    for lam in (0.25, 0.5, 1.0):
        pairs = ad.ScheduledPairs(process, lam)
        s = pairs(t)
        before = solve_1d(process, demo.initial_density, [float(s)], x_range=(-6.0, 6.0), cells=600)
        kernels = jax.vmap(lambda y, s=s: ad.transition(process, y[None], s, t))(x)
        densities = jax.vmap(lambda k: jax.vmap(lambda z: jnp.exp(k.log_prob(z[None])))(x))(kernels)
        local = before.q[0] @ np.asarray(densities) * dx
        inside = grid.q[0] > 1e-12
        true = np.sum(np.where(inside, grid.q[0] * np.log(np.maximum(grid.q[0], 1e-300) / local), 0.0)) * dx
        found = ad.kl_bound(process, pairs, demo.draw_initial, [t], key=jax.random.key(1), n=4000)
        assert 0 < true < found.bound[0] - 4 * found.stderr[0]
        bounds.append(float(found.bound[0]))
    assert bounds[0] < bounds[1] < bounds[2]


def test_for_tolerance_finds_the_largest_lambda():
    process, key = ad.langevin(LOGISTIC), jax.random.key(0)
    samples = ad.data.checkerboard(jax.random.key(1), 500)
    pairs = ad.ScheduledPairs.for_tolerance(process, samples, 1e-4, key=key, times=[0.3, 1.0], n=256)

    def worst(lam):
        return ad.kl_bound(process, ad.ScheduledPairs(process, lam), samples, [0.3, 1.0], key=key, n=256).bound.max()

    assert worst(float(pairs.lam)) <= 1e-4 < worst(1.02 * float(pairs.lam))


def test_for_tolerance_of_a_linear_process_starts_at_zero():
    system = ad.systems.ornstein_uhlenbeck(2, rate=50.0)
    pairs = ad.ScheduledPairs.for_tolerance(system.process, system.y0, 1e-6, key=jax.random.key(0), n=16)
    assert float(pairs(4.9)) == 0.0


def test_kl_bound_needs_noise_everywhere():
    system = ad.systems.swimmer()
    with pytest.raises(ValueError, match=r"singular at t=2.5.*Choose λ directly"):
        ad.kl_bound(system.process, ad.FromZero(), system.y0, [1.0], key=jax.random.key(0))
    matrix = ad.Process(lambda y, t: -(y**3), np.array([[1.0], [1.0]]), 1.0)
    with pytest.raises(ValueError, match="singular"):
        ad.kl_bound(matrix, ad.FromZero(), np.zeros((4, 2)), [1.0], key=jax.random.key(0))
    rough = ad.Process(lambda y, t: 500 * jnp.sin(500 * y), 1.0, 1.0)
    with pytest.raises(ValueError, match="is not met by any λ down to"):
        ad.ScheduledPairs.for_tolerance(rough, np.zeros((4, 1)), 1e-12, key=jax.random.key(0), n=8, times=[0.01])
