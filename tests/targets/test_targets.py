"""Targets against exact kernels and Stein's identity: `E[ŝ φ(y)] = −E[∇φ(y)]` for all φ."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy.linalg import expm

import autodsm as ad
from autodsm.base.linalg import inverse_and_log_det
from autodsm.base.modules import replace
from autodsm.exact.grid1d import evolve_1d, transition_1d
from autodsm.exact.grid2d import solve_2d
from autodsm.targets import Local, Paths, Pathwise, Tabulated
from autodsm.targets.paths import choose_steps, time_grid
from autodsm.targets.pathwise import Weighted, choose_forgetting
from autodsm.targets.pilot import Pilot
from batches import in_batches

N = 100_000
MATRIX = jnp.array([[0.9, 0.2], [-0.3, 0.7]])


def repulsion(y):
    apart = y[:, None] - y[None]
    return 1.5 * jnp.sum(apart * jnp.exp(-jnp.sum(apart**2, -1, keepdims=True)), 1)


# Coupled, nonlinear, time-dependent, without symmetry; slopes bounded, so that coarse steps are stable.
COUPLED = {
    "tanh": (
        ad.Process(
            lambda y, t: jnp.stack(
                [jnp.tanh(2 * y[0] - y[1]) - y[0] + 0.5 * jnp.sin(3 * t), jnp.sin(y[0]) - 0.7 * y[1]]
            ),
            MATRIX,
            2.0,
        ),
        (2,),
    ),
    "ring": (
        ad.Process(
            lambda y, t: jnp.roll(jnp.tanh(y), 1) * (1 + 0.5 * t) - 0.8 * y, lambda t: 0.6 + 0.3 * jnp.sin(t), 2.0
        ),
        (3,),
    ),
    "pairs": (
        ad.Process(
            lambda y, t: -0.5 * y + repulsion(y),
            jnp.array([[0.8, 0.0, 0.3], [0.1, 0.6, 0.0]]),
            2.0,
        ),
        (2, 2),
    ),
}  # fmt: skip
TESTS = (
    lambda y: y[0],
    lambda y: y[0] * y[1],
    lambda y: jnp.sin(y[0] - 2 * y[-1]),
    lambda y: jnp.tanh(y[1]) ** 2,
)


def start(shape):
    return lambda key, n: 0.7 * jax.random.normal(key, (n, *shape)) + 0.3


def drawn(target, x, times, keys):
    return in_batches(lambda x, k: target.draw(x, jnp.asarray(times), key=k), x, keys)


def examples(shape, n=N):
    x_key, draw_key = jax.random.split(jax.random.key(0))
    return start(shape)(x_key, n), jax.random.split(draw_key, n)


@jax.jit
def residuals(y, s):
    found = [jax.vmap(jax.vmap(jax.value_and_grad(phi)))(y) for phi in TESTS]
    return jnp.stack([value[..., None] * s + slope for value, slope in found])


def z_scores(draw):
    """`E[ŝ φ + ∇φ]` in standard errors, for each test function, time and coordinate."""
    y, s = (v[:, :, 0].reshape(*v.shape[:2], -1) for v in (draw.y, draw.score))
    found = np.asarray(residuals(y, s), np.float64)  # (tests, n, times, coordinates)
    return found.mean(1) / (found.std(1) / np.sqrt(len(y)))


def stein_z_scores(target, shape, times, n=N):
    x, keys = examples(shape, n)
    return z_scores(drawn(target, x, times, keys))


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize(("window", "rates"), [(None, (0.0, 3.0)), (0.4, (3.0,))])
def test_pathwise_is_exact_for_coarse_chains(name, window, rates):
    process, shape = COUPLED[name]
    target = Pathwise(process, Paths(process, 8), window=window, gaussian=True, exact=True)
    x, keys = examples(shape, 50_000)

    @jax.jit
    def draws(rate):
        return drawn(replace(target, forgetting=rate), x, [0.33, 1.9], keys)

    for rate in rates:
        z = z_scores(draws(rate))
        # 48 to 96 residuals: the largest of so many normal ones is below 4.5 but once in 1,500 times.
        assert np.abs(z).max() < 4.5, (rate, z)


def test_a_wrong_pathwise_target_is_noticed(monkeypatch):
    process, shape = COUPLED["tanh"]
    target = Pathwise(process, Paths(process, 8), gaussian=True, exact=True)
    monkeypatch.setattr(
        "autodsm.targets.pathwise.inverse_and_log_det", lambda J: (inverse_and_log_det(J)[0], 0.0 * J[..., 0, 0])
    )
    assert np.abs(stein_z_scores(target, shape, [1.9])).max() > 6


@pytest.mark.parametrize("name", COUPLED)
def test_differential_form_is_of_third_order(x64, name):
    """Averaged over every probe of signs, which makes the trace exact, the weight after a step differs from the exact
    one by O(h⁴), the state not at all."""
    process, shape = COUPLED[name]
    d = int(np.prod(shape))
    y = jnp.asarray(np.linspace(-0.5, 0.8, d)).reshape(shape)
    probes = jnp.asarray(1.0 - 2.0 * ((np.arange(2**d)[:, None] >> np.arange(d)) & 1)).reshape(-1, *shape)
    exact, differential = (Pathwise(process, Paths(process, 32), exact=exact) for exact in (True, False))
    state = Weighted(y, 0.3 - y, jnp.asarray(0.7))

    @jax.jit
    def both(h):
        found = jax.vmap(lambda p: differential._drift(state, 0.5, 0.5 + h, p))(probes)
        return found, exact._drift(state, 0.5, 0.5 + h, None)

    errors = []
    for h in (0.08, 0.04):
        found, want = both(h)
        np.testing.assert_allclose(found.y, np.broadcast_to(want.y, found.y.shape), atol=1e-14)
        errors.append(np.abs(found.Z.mean(0) - want.Z).max())
    assert errors[0] < 1e-3
    assert np.log2(errors[0] / errors[1]) == pytest.approx(4.0, abs=0.4)


def test_differential_form_has_the_right_mean():
    process, shape = COUPLED["tanh"]
    target = Pathwise(process, Paths(process, 48), forgetting=2.0, exact=False)
    assert np.abs(stein_z_scores(target, shape, [0.5, 2.0])).max() < 4.5


@pytest.mark.parametrize("exact", [True, False])
def test_noise_of_a_step_in_a_linear_drift(x64, monkeypatch, exact):
    """Derivatives by the noise, for a matrix A that is not symmetric: what they add up to is the variance of the step,
    `∫ exp(uA) Q exp(uA)ᵀ du`, up to the O(h⁵) of Simpson's rule (and the O(h⁴) of the drift, times the noise's h) and,
    by which the target is one, `Σ Z δyᵀ = Ω`, exactly with Jacobians."""
    a, g = np.array([[-1.0, 2.0], [0.3, -0.5]]), np.array([[1.0, 0.4], [0.0, 0.7]])
    process = ad.linear(a, g, t1=2.0)
    target = Pathwise(process, Paths(process, 8), exact=exact)
    nodes, shares = np.polynomial.legendre.leggauss(12)
    errors, identities = [], []
    for h in (0.4, 0.2):
        grown = [expm(0.5 * h * (1.0 + node) * a) @ g for node in nodes]
        variance = 0.5 * h * sum(share * each @ each.T for share, each in zip(shares, grown, strict=True))

        def end(xi, h=h):
            monkeypatch.setattr(Pathwise, "_noise", lambda *_: (xi, jnp.ones((1, 2, 2))))
            path = target._path(jnp.zeros(2), jnp.array([0.5, 0.5 + h]), jax.random.key(0))
            return jax.tree.map(lambda leaf: leaf[0], path)

        slopes = jax.jacobian(end)(jnp.zeros((1, 3, 2)))
        moved, weights = (np.asarray(slope).reshape(2, 6) for slope in slopes[:2])
        errors.append(np.abs(moved @ moved.T - variance).max())
        identities.append(np.abs(weights @ moved.T - float(end(jnp.zeros((1, 3, 2))).omega) * np.eye(2)).max())
    assert errors[0] < 2e-3
    assert np.log2(errors[0] / errors[1]) == pytest.approx(5.0, abs=0.4)
    assert max(identities) < 1e-14 if exact else np.log2(identities[0] / identities[1]) > 4.4


@pytest.mark.parametrize("n", [2, 50])
def test_states_follow_a_moving_trap(n, x64, monkeypatch):
    """Particles in a rotating harmonic trap, with Jacobians (n = 2) and without. All is linear: without noise a path is
    its mean, and derivatives by the noise give variances. Both are exact, up to the scheme, at times all over the steps
    that are chosen. A shift of all particles by a hundredth of their deviation would be a tenth of that of the mean of
    fifty, and of every current."""
    system = ad.systems.harmonic_particles(n)
    target = ad.PathwiseDSM(system.process, forgetting=0.0).prepare(system.y0, key=jax.random.key(0)).target
    steps, start = len(target.forward.grid) - 1, jnp.broadcast_to(jnp.array([2.0, 0.0]), (n, 2))

    def state(x, noise, t):
        probes = jnp.ones((steps + 1, 2, n, 2))
        monkeypatch.setattr(Pathwise, "_noise", lambda self, key, count, like: (noise, probes))
        return target._along(x, t[None], jax.random.key(0)).y[0]  # `draw` lets no derivative through

    none = jnp.zeros((steps + 1, 3, n, 2))  # one step more: the time asked for ends one

    def relative(x, noise, t):  # one of the modes in which particles move against each other
        y = state(x, noise, t)
        return (y[0, 0] - y[1, 0]) / np.sqrt(2.0)

    times = jnp.linspace(0.35, 2.13, 24)
    means = jax.jit(jax.vmap(lambda t: state(start, none, t)))(times)
    slopes = jax.jit(jax.vmap(lambda t: jax.grad(relative, argnums=(0, 1))(start, none, t)))(times)
    from_start, from_noise = (np.sum(np.asarray(s) ** 2, axis=tuple(range(1, s.ndim))) for s in slopes)
    variance = 0.25**2 * from_start + from_noise
    exact = [ad.reference.harmonic_particles(float(t)) for t in times]
    np.testing.assert_allclose(means, np.stack([[e.mean] * n for e in exact]), atol=1.5e-3)
    np.testing.assert_allclose(variance, [e.fluctuation for e in exact], rtol=6e-3)


def test_paths_follow_a_moving_trap(x64):
    """As above, for paths without a weight: their mean is off by less than a hundredth of the deviation of a particle,
    √½, and by a quarter of that with steps of half the length."""
    process, y0, shape = ad.systems.harmonic_particles(50)
    still, steps = ad.Process(process.f, 1e-9, process.t1), choose_steps(process, y0, key=jax.random.key(0))
    times, start = jnp.linspace(0.35, 4.9, 64), jnp.broadcast_to(jnp.array([2.0, 0.0]), shape)
    exact = np.stack([ad.reference.harmonic_particles(float(t)).mean for t in times])
    coarse, fine = (Paths(still, n).states(start, times, key=jax.random.key(1))[:, 0] for n in (steps, 2 * steps))
    off = [np.linalg.norm(means - exact, axis=1).max() for means in (coarse, fine)]
    assert off[0] < 0.01 * np.sqrt(0.5)
    assert off[0] / off[1] == pytest.approx(4.0, rel=0.2)


@pytest.fixture(scope="module")
def five_particles():
    """The system, and the pathwise target that it gets."""
    system = ad.systems.particles()
    return system, ad.PathwiseDSM(system.process).prepare(system.y0, key=jax.random.key(2)).target


def test_steps_chosen_for_the_differential_form_leave_no_error_to_be_seen(five_particles):
    """Five repelling particles, ten coordinates: `E[ŝ·(y − m)]/d = −1`, averaged over the steps of a path."""
    (system, target), n = five_particles, 8192
    times = jnp.linspace(0.3, 10.0, 128)
    x, keys = system.y0(jax.random.key(1), n), jax.random.split(jax.random.key(2), n)
    found = drawn(target, x, times, keys)
    y, score = np.asarray(found.y[:, :, 0], np.float64), np.asarray(found.score[:, :, 0], np.float64)
    values = np.mean(np.sum(score * (y - y.mean(axis=0)), axis=(2, 3)) / 10, axis=1)
    assert abs(values.mean() + 1.0) < 4.5 * values.std() / np.sqrt(n)


def test_a_window_follows_the_steps_of_its_paths():
    process, _ = COUPLED["tanh"]
    coarse, fine = (Pathwise(process, Paths(process, steps), window=0.4) for steps in (64, 256))
    moved = eqx.tree_at(lambda target: target.forward, coarse, fine.forward)
    assert moved.window_steps == fine.window_steps > coarse.window_steps


def test_four_point_noise_changes_the_target_little():
    process, shape = COUPLED["tanh"]
    target = Pathwise(process, Paths(process, 48), forgetting=2.0)
    assert np.abs(stein_z_scores(target, shape, [0.5, 2.0])).max() < 4.5


def test_pathwise_on_a_linear_process_has_the_exact_score_as_its_mean():
    """OU from a point: the score is known, and the target's regression on y must be it, slope and intercept."""
    process = ad.systems.ornstein_uhlenbeck(rate=1.3, noise=0.8, t1=2.0).process
    target = Pathwise(process, Paths(process, 32), forgetting=1.0)
    x, t, n = jnp.array([0.7]), 1.1, N
    draw = in_batches(lambda k: target.draw(x, jnp.array([t]), key=k), jax.random.split(jax.random.key(3), n))
    y, s = (np.asarray(v[:, 0, 0, 0], float) for v in (draw.y, draw.score))
    mean, var = 0.7 * np.exp(-1.3 * t), 0.64 / 2.6 * (1 - np.exp(-2.6 * t))
    slope, intercept = np.polyfit(y - mean, s, 1)
    error = np.std(s + (y - mean) / var) / np.sqrt(n)
    assert abs(intercept) < 4 * error
    assert abs(slope + 1 / var) < 4 * error / np.std(y)


def test_pathwise_refuses_singular_noise():
    system = ad.systems.swimmer()
    with pytest.raises(ValueError, match=r"pathwise target divides by the noise.*Use LocalDSM"):
        Pathwise(system.process, Paths(system.process, 8)).draw(jnp.zeros(2), jnp.ones(1), key=jax.random.key(0))
    with pytest.raises(ValueError, match="forgetting=-1"):
        Pathwise(system.process, Paths(system.process, 8), forgetting=-1.0)


def test_forgetting_is_chosen_near_twice_the_contraction_rate():
    """OU started in its stationary law: weights older than the memory only add noise."""
    system = ad.systems.ornstein_uhlenbeck(rate=2.0, noise=2.0, t1=4.0)
    target = Pathwise(system.process, Paths(system.process, 64))
    chosen = choose_forgetting(target, system.y0, key=jax.random.key(0)) * 4.0  # of ∫g²; g² = 4
    assert 1.0 < chosen < 16.0


def scalar_kernels(process, starts, times, width, cells=8000):
    """q(y_t|y_0) of a scalar process on a fixed fine grid, from narrow Gaussians in place of points; with its cells."""
    faces = np.linspace(-12.0, 12.0, cells + 1)
    x = 0.5 * (faces[1:] + faces[:-1])
    first = np.exp(-0.5 * ((x - np.array(starts)[:, None]) / width) ** 2)
    return x, evolve_1d(process, first, times, faces=faces, steps=400)


PROCESSES = {
    "logistic": ad.langevin(dist.Logistic(0.0, 1.0)),
    "double well": ad.Process(lambda y, t: y - y**3, 0.7, 1.0),
    "driven": ad.Process(lambda y, t: jnp.sin(2 * y) - y + jnp.cos(3 * t), lambda t: 0.5 + 0.4 * t, 1.0),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_tabulated_moments_and_stein_by_quadrature(name):
    """No random numbers: z on a fine grid with its normal weights."""
    process = PROCESSES[name]
    target = Tabulated(process, (1,), y_range=(-2.0, 2.0))
    z = np.linspace(-5.5, 5.5, 2201)
    weight = np.exp(-0.5 * z**2) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    at = jax.jit(jax.vmap(lambda y0, t, z: target._draw(target.tables, y0, t, z), in_axes=(None, None, 0)))
    nodes, shares = np.polynomial.hermite_e.hermegauss(5)
    middles, times, width = (-1.73, 0.31), (0.05, 0.3, 1.0), 0.02
    x, kernels = scalar_kernels(process, middles, times, width)
    dx = x[1] - x[0]
    for y0, kernel in zip(middles, np.moveaxis(kernels, 1, 0), strict=True):
        for t, q in zip(times, kernel, strict=True):
            std = np.sqrt(np.sum(q * x**2) * dx - (np.sum(q * x) * dx) ** 2)
            # The reference starts from a narrow Gaussian: so does the table, by quadrature over y_0.
            starts = y0 + width * nodes
            draws = [at(jnp.array([y], jnp.float32), t, jnp.asarray(z[:, None], jnp.float32)) for y in starts]
            y, s = (np.stack([np.asarray(d[k][:, 0, 0], float) for d in draws]) for k in (1, 2))
            mass = shares[:, None] / shares.sum() * weight
            for phi in (lambda y: y, lambda y: y**2, np.sin):
                expected = np.sum(q * phi(x)) * dx
                assert np.sum(mass * phi(y)) == pytest.approx(expected, abs=3e-3 * std)
            for phi, slope in ((lambda y: y, np.ones_like), (np.sin, np.cos), (lambda y: y**2, lambda y: 2 * y)):
                residual = np.sum(mass * (s * phi(y) + slope(y)))
                assert abs(residual) < 4e-3 * max(np.sqrt(np.sum(mass * slope(y) ** 2)), 1.0)


def test_tabulated_is_exact_for_a_gaussian_kernel():
    process = ad.vp(ad.LinearBeta(0.1, 10.0))
    target = Tabulated(process, (3,), y_range=(-2.0, 2.0))
    x, z = jnp.array([-1.9, 0.1, 1.2]), jnp.array([0.5, -2.2, 3.1])
    for t in (1e-4, 1e-3, 0.05, 0.4, 1.0):
        draw = target._draw(target.tables, x, jnp.asarray(t), z)
        total = 0.1 * t + 4.95 * t**2
        std = np.sqrt(-np.expm1(-total))
        np.testing.assert_allclose((draw.y[0] - np.exp(-0.5 * total) * x) / std, z, atol=2e-3)
        np.testing.assert_allclose(draw.score[0] * std, -z, atol=2e-3)
        np.testing.assert_allclose(draw.scale, std, rtol=1e-3)


def test_tabulated_clock():
    assert Tabulated(PROCESSES["logistic"], (1,), y_range=(-2.0, 2.0)).tables.separable
    assert not Tabulated(PROCESSES["driven"], (1,), y_range=(-2.0, 2.0)).tables.separable


def test_tabulated_tells_laws_apart():
    process = ad.Process(lambda y, t: -jnp.array([0.5, 2.0, 0.5]) * y, 1.0, 2.0)
    target = Tabulated(process, (3,), y_range=(-1.0, 1.0))
    assert target.tables.law.tolist() in ([0, 1, 0], [1, 0, 1])
    draw = target._draw(target.tables, jnp.ones(3), jnp.asarray(1.0), jnp.zeros(3))
    np.testing.assert_allclose(draw.y[0], np.exp([-0.5, -2.0, -0.5]), rtol=2e-3)
    many = ad.Process(lambda y, t: -jnp.arange(100.0) * y, 1.0, 2.0)
    with pytest.raises(ValueError, match="100 different laws"):
        Tabulated(many, (100,), y_range=(-1.0, 1.0))


def test_tabulated_refusals():
    with pytest.raises(ValueError, match=r"couples coordinates\. Use PathwiseDSM"):
        Tabulated(COUPLED["ring"][0], (3,), y_range=(-1.0, 1.0))
    with pytest.raises(ValueError, match=r"y_range=\(1\.0, -1\.0\)"):
        Tabulated(PROCESSES["logistic"], (1,), y_range=(1.0, -1.0))
    target = Tabulated(PROCESSES["logistic"], (1,), y_range=(-2.0, 2.0))
    assert "outside y_range=(-2, 2)" in target.covers(np.array([[0.0], [2.5]]))
    assert target.covers(np.array([[0.0], [1.5]])) is None
    draw = target.draw(jnp.array([2.5]), jnp.array([0.5]), key=jax.random.key(0))
    assert np.isnan(draw.y).all()


def test_tables_are_built_once():
    process = ad.langevin(dist.Logistic(0.0, 1.0))
    first = Tabulated(process, (1,), y_range=(-1.0, 1.0)).tables
    assert Tabulated(process, (1,), y_range=(-1.0, 1.0)).tables is first
    assert Tabulated(process, (1,), y_range=(-1.5, 1.0)).tables is not first


def test_tables_of_one_drift_with_several_noises():
    """Ornstein–Uhlenbeck, mean and deviation known. One object with several values, as memory that is used again is."""

    class Noise:
        def __call__(self, t):
            return jnp.asarray(self.value)

    def drift(y, t):
        return -y

    noise = Noise()
    for noise.value in (0.3, 0.6, 1.2):
        target = Tabulated(ad.Process(drift, noise, 1.0), (1,), y_range=(-1.0, 1.0))
        draw = target._draw(target.tables, jnp.ones(1), jnp.asarray(1.0), jnp.zeros(1))
        assert float(draw.scale[0]) == pytest.approx(noise.value * np.sqrt(-np.expm1(-2.0) / 2), rel=1e-3)
        assert float(draw.y[0, 0]) == pytest.approx(np.exp(-1.0), rel=1e-3)


def test_equal_processes_share_tables():
    def built(rate):
        rates = jnp.array([rate, 2.0])
        return Tabulated(ad.Process(lambda y, t: -rates * y, 1.0, 1.0), (2,), y_range=(-1.0, 1.0)).tables

    assert built(1.0) is built(1.0)
    assert built(1.0) is not built(1.0 + 1e-6)


def test_a_sharper_drift_gets_more_starts():
    smooth, sharp = (
        Tabulated(process, (1,), y_range=(-2.0, 2.0)).tables
        for process in (PROCESSES["logistic"], ad.Process(lambda y, t: y - y**3, 1.0, 2.0))
    )
    assert smooth.residual.shape[2] < sharp.residual.shape[2]
    assert max(smooth.error, sharp.error) < 0.005


def test_moving_frame_keeps_mass_and_moments():
    times = np.exp(np.linspace(np.log(1e-6), np.log(3.0), 301))
    found = transition_1d(lambda y, t: y - y**3, lambda t: 0.49, np.array([-1.5, 0.0, 4.0]), times, cells=800)
    dx, xi = found.faces[1] - found.faces[0], 0.5 * (found.faces[1:] + found.faces[:-1])
    np.testing.assert_allclose(found.q.sum(-1) * dx, 1.0, atol=1e-10)
    np.testing.assert_allclose((found.q * xi).sum(-1) * dx, 0.0, atol=0.02)
    np.testing.assert_allclose((found.q * xi**2).sum(-1) * dx, 1.0, atol=0.05)


def test_paths_have_the_right_law_at_any_time():
    system = ad.systems.ornstein_uhlenbeck(rate=1.3, noise=0.8, t1=2.0)
    paths = Paths(system.process, 24)
    times, n = jnp.array([1.77, 0.013, 0.5]), N
    x = jnp.array([0.7])
    y = jax.jit(jax.vmap(lambda k: paths.states(x, times, key=k)))(jax.random.split(jax.random.key(0), n))[..., 0]
    mean, var = 0.7 * np.exp(-1.3 * times), 0.64 / 2.6 * (1 - np.exp(-2.6 * times))
    assert np.all(np.abs(y.mean(0) - mean) < 4 * np.sqrt(var / n) + 2e-3)
    assert np.all(np.abs(y.var(0) / var - 1) < 4 * np.sqrt(2 / n) + 5e-3)


def test_steps_follow_the_stiffness():
    start_law = start((1,))
    slow, fast = (ad.Process(lambda y, t, a=a: -a * y, 1.0, 1.0) for a in (2.0, 40.0))
    few, many = (choose_steps(p, start_law, key=jax.random.key(0)) for p in (slow, fast))
    assert few < 32
    assert 4 * few < many
    grid = time_grid(ad.vp(ad.LinearBeta(0.1, 20.0)), 10)
    assert grid[0] == 0
    assert grid[-1] == pytest.approx(1.0)
    assert np.all(np.diff(grid) > 0)
    assert np.diff(grid).max() > 1.4 * (grid[-1] - grid[-2])


@pytest.mark.parametrize("along", [lambda paths: paths, lambda paths: Pathwise(paths.process, paths)])
def test_paths_survive_far_starts(along):
    """A cubic drift from 20 deviations out, with steps that would be a hundred times too long there."""
    process = ad.Process(lambda y, t: -(y**3), 1.0, 5.0)
    paths = along(Paths(process, 48))
    y = jax.vmap(lambda k: paths.states(jnp.array([20.0]), jnp.array([0.3, 5.0]), key=k))(
        jax.random.split(jax.random.key(0), 4096)
    )
    exact = 1 / np.sqrt(2 * 0.3 + 1 / 400)  # without noise, which adds little by then
    assert np.isfinite(y).all()
    assert float(y[:, 0].mean()) == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("antithetic", [False, True])
def test_local_target_is_the_kernel_score(antithetic):
    process, shape = COUPLED["tanh"]
    target = Local(process, ad.ScheduledPairs(process, 0.1), Paths(process, 32), antithetic=antithetic)
    draw = target.draw(jnp.array([0.3, -0.2]), jnp.array([0.7, 1.4]), key=jax.random.key(1))
    assert draw.y.shape == (2, 1 + antithetic, 2)
    if antithetic:
        np.testing.assert_allclose(draw.y.mean(1), draw.anchor, atol=1e-6)
        np.testing.assert_allclose(draw.score[:, 0], -draw.score[:, 1], atol=1e-6)
    z = stein_z_scores(Local(process, ad.ScheduledPairs(process, 0.01), Paths(process, 64)), shape, [0.5, 1.5])
    assert np.abs(z).max() < 4.5


def test_paths_of_sharp_laws_take_short_steps():
    """The swimmer stays near v = x³, which no noise in x blurs: how near is what a coarse path gets wrong first."""
    system, n = ad.systems.swimmer(), 100_000
    times = [3.0, 5.0]
    normal = lambda x, v: np.exp(-(x**2 + v**2) / 2)  # noqa: E731
    grid = solve_2d(system.process, normal, times, ranges=((-4.8, 4.8), (-6.0, 6.0)), cells=(384, 300), steps=100)
    off = (grid.x2[None] - grid.x1[:, None] ** 3) ** 2
    exact = grid.area * np.sum(grid.q * off, axis=(1, 2))
    keys, starts = jax.random.split(jax.random.key(1), n), system.y0(jax.random.key(0), n)

    def found(paths):
        states = in_batches(lambda x, k: paths.states(x, jnp.asarray(times), key=k), starts, keys)
        squares = np.asarray((states[..., 1] - states[..., 0] ** 3) ** 2, float)
        return (squares.mean(axis=0) - exact) / (squares.std(axis=0) / np.sqrt(n))

    assert np.all(np.abs(found(Pilot(*system[:2], key=jax.random.key(2)).paths())) < 4.5)
    assert np.abs(found(Paths(system.process, 24))).max() > 5  # so the test can fail


def test_flows_of_the_scores_of_paths_keep_variances(five_particles):
    """The flow of a score carries states by the true drift, where those it learned from took steps of a scheme: if the
    two disagree by little in a unit of time, they do by ten times as much after ten. In states and scores of paths,
    `d log Var/dt = (2 E[f·(y − m)] − g² E[ŝ·(y − m)])/Var` for a component, and E[ŝ·(y − m)] = −1 for an exact score;
    averaged here from t = 2 to 10, four turns of the trap.
    """
    ((process, y0, _), pathwise), n = five_particles, 40_000
    times = np.linspace(2.0, 10.0, 33)
    x, keys = y0(jax.random.key(0), n), jax.random.split(jax.random.key(1), n)
    local = ad.LocalDSM(process).prepare(y0, key=jax.random.key(2)).target

    def deviation(draw):
        """In standard errors; and these, in percent of the variance in a unit of time."""

        def one(x, k):
            y, pull = draw(x, jnp.asarray(times), k)
            return y, jax.vmap(process.f)(y, jnp.asarray(times)), pull

        y, f, pull = (np.asarray(v, float) for v in in_batches(one, x, keys, size=500))
        y = y - y.mean(axis=0)
        variance = y.var(axis=0)
        rates = (2 * f * y - float(process.g(0.0)) ** 2 * (-1.0 if pull.ndim == 1 else pull * y)) / variance
        weights = np.array([0.5, *np.ones(31), 0.5]) / 32
        turned = np.log(variance[-1] / variance[0]) / 8
        grown = turned + (y[:, -1] ** 2 / variance[-1] - y[:, 0] ** 2 / variance[0]) / 8
        gone = (np.tensordot(rates, weights, (1, 0)) - grown).mean(axis=(1, 2))
        error = gone.std() / np.sqrt(n)
        return gone.mean() / error, 100 * error

    def weighted(x, times, key):
        found = pathwise.draw(x, times, key=key)
        return found.y[:, 0], found.score[:, 0]

    def states_of(forward):  # with the exact score of their law
        return lambda x, times, key: (forward.states(x, times, key=key), jnp.zeros(()))

    for draw in (states_of(local), weighted):
        found, error = deviation(draw)
        assert abs(found) < 4.5
        assert error < 0.15
    assert deviation(states_of(Paths(process, 176)))[0] < -9  # that change means and variances by less than .5 %


def test_many_coupled_coordinates_form_no_matrix():
    """Fifty particles that feel their centre, two blocks of fifty coordinates: no value as large as a Jacobian."""
    trap = ad.systems.harmonic_particles(50)
    target = Pathwise(trap.process, Paths(trap.process, 8))
    draw = jax.jit(lambda x, k: target.draw(x, jnp.array([1.0]), key=k))
    text = draw.lower(jnp.zeros((50, 2)), jax.random.key(0)).as_text()
    assert "tensor<50x2xf32>" in text
    assert "50x50" not in text
    few = ad.systems.harmonic_particles(4)
    assert Pathwise(few.process, Paths(few.process, 8))._forms_jacobian((4, 2))


def test_steps_beyond_the_limit_are_refused():
    """One coordinate is a thousand times as fast as the other, and needs more steps than there may be."""
    rates = jnp.array([2e5, 1.0])
    process = ad.Process(lambda y, t: -rates * y * (1 + 0.1 * jnp.sum(y**2)), 1.0, t1=1.0)
    with pytest.raises(ValueError, match="steps"):
        choose_steps(process, lambda key, n: jax.random.normal(key, (n, 2)), key=jax.random.key(0))
