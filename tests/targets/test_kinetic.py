"""The kinetic target against exact kernels and Stein's identity in the noisy coordinates: `E[ŝ_v φ] = −E[∂_v φ]`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.base.modules import replace
from autodsm.targets import Kinetic, Paths, kinetic, shifts
from autodsm.targets.kinetic import kinetic_problem
from autodsm.targets.pilot import Pilot
from autodsm.targets.shifts import Kinds
from batches import in_batches
from oracles import linear_moments

N = 50_000


def double_well(y, t):
    x, v = y
    return jnp.stack([v, x - x**3 - 0.5 * v])


def excitable(y, t):
    """FitzHugh–Nagumo, with noise in the slow variable."""
    x, w = y
    return jnp.stack([(x - x**3 / 3 - w + 0.5) / 0.1, x + 0.7 - 0.8 * w])


def across(x):  # ∂f_x/∂v of `two_bodies`
    return jnp.array([[1.2 + 0.5 * jnp.tanh(x[1]), 0.3], [-0.4 * jnp.sin(x[0]), 0.9]])


def two_bodies(y, t):
    x, v = y[:2], y[2:]
    force = jnp.stack([jnp.sin(x[1] - 2 * x[0]), jnp.tanh(x[0]) - x[1]])
    return jnp.concatenate([across(x) @ v - 0.3 * x, force - 0.5 * v + 0.2 * jnp.tanh(v[::-1])])


def fast(y, t):
    """`∂f_x/∂v` depends on v, as it does near the speed of light."""
    x, v = y
    return jnp.stack([v / jnp.sqrt(1 + 0.5 * v**2), -jnp.sin(x) - 0.5 * v])


def two_to_one(y, t):
    """More noisy coordinates than noiseless ones, in another order."""
    v, x, u = y
    return jnp.stack([-v + jnp.sin(u), v + 0.5 * u + 0.3 * jnp.sin(v) - 0.5 * jnp.tanh(x), x - u])


def pixels(y, t):
    x, v = y
    return (1 + 0.5 * t) * jnp.stack([v * (1 + 0.3 * jnp.cos(x)), jnp.tanh(x) - x - 0.7 * v])


SYSTEMS = {
    "swimmer": (ad.systems.swimmer().process, (2,)),
    "double well": (ad.Process(double_well, np.array([0.0, 0.8]), 3.0), (2,)),
    "excitable": (ad.Process(excitable, np.array([0.0, 0.3]), 1.0), (2,)),
    "two bodies": (
        ad.Process(two_bodies, jnp.array([[0, 0], [0, 0], [0.8, 0.3], [-0.2, 0.6]], float), 3.0),
        (4,),
    ),
    "fast": (ad.Process(fast, np.array([0.0, 0.9]), 3.0), (2,)),
    "two to one": (ad.Process(two_to_one, np.array([0.7, 0.0, 0.9]), 3.0), (3,)),
    "pixels": (ad.Process(pixels, lambda t: jnp.stack([0 * t, 0.6 + 0.5 * jnp.sin(2 * t)]), 2.0), (2, 3, 3)),
}
TESTS = (
    lambda y: y[0],
    lambda y: y[-1],
    lambda y: y[0] * y[-1],
    lambda y: jnp.sin(y[0] - 2 * y[-1]),
    lambda y: jnp.tanh(y[1]) ** 2,
    lambda y: jnp.cos(2 * y[0]),
)


def start(shape):
    return lambda key, n: 0.5 * jax.random.normal(key, (n, *shape)) + 0.2


def target_for(process, window=0.3, count=6):
    return Kinetic(process, Paths(process, 24), window=window, count=count)


def drawn(target, shape, times, n=N):
    x_key, key = jax.random.split(jax.random.key(0))
    draw = lambda x, k: target.draw(x, jnp.asarray(times), key=k)  # noqa: E731
    return in_batches(draw, start(shape)(x_key, n), jax.random.split(key, n))


@jax.jit
def residuals(y, s):
    y = y.reshape(*y.shape[:3], -1)[..., :2] if y.ndim > 4 else y  # of a pixel
    s = s.reshape(*s.shape[:3], -1)[..., :2] if s.ndim > 4 else s
    found = [jax.vmap(jax.vmap(jax.value_and_grad(phi)))(y) for phi in TESTS]
    return jnp.stack([value[..., None] * s + slope for value, slope in found])


def pixel(values, at):
    """A state of its own of one of the pixels."""
    return values if values.ndim == 3 else values.reshape(*values.shape[:3], -1)[..., at]


def z_scores(process, shape, draw, at=0):
    """`E[ŝ φ + ∂φ]` in standard errors, for each test function, time and noisy coordinate."""
    y, s = (pixel(values[:, :, 0], at) for values in (draw.y, draw.score))
    kinds = kinetic.kinds_of(process, shape)
    found = np.asarray(residuals(y, s), np.float64)[..., kinds.v]
    return found.mean(1) / (found.std(1) / np.sqrt(len(y)))


@pytest.mark.parametrize("name", SYSTEMS)
def test_targets_are_exact_for_coarse_chains(name):
    process, shape = SYSTEMS[name]
    times = process.t1 * np.array([0.07, 0.4, 0.98])
    draw = drawn(target_for(process), shape, times)
    z = z_scores(process, shape, draw, at=4)
    # 18 to 36 residuals: the largest of so many normal ones is below 4.5 but once in 4,000 times.
    assert np.abs(z).max() < 4.5, z


@pytest.mark.parametrize("name", ["swimmer", "two bodies"])
def test_noise_does_not_grow_with_the_number_of_steps(name):
    process, shape = SYSTEMS[name]
    v = kinetic.kinds_of(process, shape).v

    def moment(count):
        found = drawn(target_for(process, count=count), shape, process.t1 * np.array([0.1, 0.4, 0.98]), n=20_000)
        return np.mean(np.asarray(found.score[:, :, 0], float)[..., v] ** 2, axis=(0, 2))

    assert np.all(moment(24) < 1.1 * moment(6))


def without_divergence(jacobian, structure, kinds, y, K, cov):
    K_v, divergence = STEERED(jacobian, structure, kinds, y, K, cov)
    return K_v, 0.0 * divergence


def not_steered(jacobian, structure, kinds, y, K, cov):
    return K[..., kinds.v, :], jnp.zeros(len(kinds.v))


def straight(cov, goal, F, K, i):
    """K_v from 0 to 1 in equal parts, whatever becomes of K_x."""
    return jnp.linalg.inv(cov[i]) @ goal[..., -cov.shape[-1] :, :] / len(cov)


STEERED, APPLIED = shifts._steered, shifts._applied
WRONG = {
    "a missing divergence": {"_steered": without_divergence},
    "an end whose x-part is not zero": {"_steered": not_steered, "_plan": straight},
    "noise of the wrong sign": {"_applied": lambda c, w: -APPLIED(c, w)},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_targets_are_noticed(what, monkeypatch):
    process, shape = SYSTEMS["fast"]
    for name, wrong in WRONG[what].items():
        monkeypatch.setattr(shifts, name, wrong)
    draw = drawn(target_for(process, count=2), shape, [0.3, 2.9])
    assert np.abs(z_scores(process, shape, draw)).max() > 6


def oscillator():
    """Damped and driven, with noise in v that grows."""
    matrix = np.array([[-0.2, 1.3], [-2.0, -0.5]])
    g = lambda t: jnp.array([0.0, 0.5 + 0.2 * t])  # noqa: E731
    return matrix, ad.Process(lambda y, t: matrix @ y + jnp.stack([0 * t, jnp.sin(t)]), g, 3.0)


def test_linear_targets_are_the_score_of_the_chain(x64):
    """From one start: a function of the end alone, linear, with the slope −C⁻¹ of the chain's own covariance."""
    matrix, process = oscillator()
    constant = replace(process, diffusion=jnp.array([0.0, 0.7]))
    knots = jnp.linspace(0.4, 1.3, 9)
    xi = jax.random.normal(jax.random.key(0), (200, 17, 2))
    kinds = Kinds(np.array([0]), np.array([1]))
    y, s, _ = jax.vmap(lambda z: shifts.follow(constant, kinds, jnp.array([0.3, -0.4]), knots, z))(xi)
    y, s = np.asarray(y), np.asarray(s)
    design = np.column_stack([y, np.ones(len(y))])
    slope, *_ = np.linalg.lstsq(design, s[:, 1])
    np.testing.assert_allclose(design @ slope, s[:, 1], atol=1e-8)
    exact = linear_moments(lambda t: matrix, lambda t: np.zeros(2), lambda t: np.array([[0.0], [0.7]]), [0, 0], 0, 0.9)
    np.testing.assert_allclose(slope[:2], -np.linalg.inv(exact.cov)[1], rtol=2e-4)  # the chain's is of order four
    np.testing.assert_array_equal(s[:, 0], 0.0)


def test_linear_targets_have_the_exact_score_as_mean():
    matrix, process = oscillator()
    t, n = 2.2, 100_000
    draw = drawn(target_for(process, count=12), (2,), [t], n=n)
    y, s = (np.asarray(values[:, 0, 0], float) for values in (draw.y, draw.score))
    moments = linear_moments(
        lambda t: matrix,
        lambda t: np.array([0.0, np.sin(t)]),
        lambda t: np.array([[0.0], [0.5 + 0.2 * t]]),
        [0.2, 0.2],
        0.0,
        t,
        cov=0.25 * np.eye(2),
    )
    off = s[:, 1] + (y - moments.mean) @ np.linalg.inv(moments.cov)[1]
    features = np.column_stack([np.ones(n), y - moments.mean])
    z = np.mean(off[:, None] * features, axis=0) / (np.std(off[:, None] * features, axis=0) / np.sqrt(n))
    assert np.abs(z).max() < 4


def test_units_change_nothing():
    """Other units for x, v and t: the same noise, relative to the score."""
    process, shape = SYSTEMS["fast"]
    a, c = jnp.array([20.0, 0.03]), 7.0
    other = ad.Process(lambda y, t: a / c * process.f(y / a, t / c), a / np.sqrt(c) * process.diffusion, c * process.t1)
    x, key = start(shape)(jax.random.key(0), 64), jax.random.split(jax.random.key(1), 64)
    times = jnp.array([0.3, 2.9])

    def scores(process, x, times):
        return jax.vmap(lambda x, k: target_for(process).draw(x, times, key=k))(x, key)

    first, second = scores(process, x, times), scores(other, a * x, c * times)
    np.testing.assert_allclose(second.y / a, first.y, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(second.score * a, first.score, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(second.scale / a, first.scale, rtol=1e-3)


def pilot_of(process, y0):
    return Pilot(process, y0, key=jax.random.key(0))


@pytest.mark.parametrize("length", [2.0**-30, 2.0**30])
def test_targets_are_finite_in_any_units(length):
    """The square of a position over a short time, in such units, is near the end of what single precision holds."""
    natural = SYSTEMS["two bodies"][0]
    process = ad.Process(lambda y, t: length * two_bodies(y / length, t), length * natural.diffusion, 3.0)
    times = 3.0 * np.array([1e-3, 0.04, 1.0])
    x = jnp.array([0.4, -0.3, 0.2, 0.1])
    want = target_for(natural, 0.1, 24).draw(x, times, key=jax.random.key(0))
    found = target_for(process, 0.1, 24).draw(length * x, times, key=jax.random.key(0))
    assert bool(jnp.all(jnp.isfinite(want.score)))
    np.testing.assert_allclose(found.y / length, want.y, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.score * length, want.score, rtol=1e-2, atol=1e-2)


def test_windows_are_chosen_where_noise_is_least():
    """In a double well; and the same in other units of time."""
    process, shape = SYSTEMS["double well"]
    chosen = target_for(process, window=None).prepared(pilot_of(process, start(shape)))
    slow = ad.Process(lambda y, t: process.f(y, t) / 9, process.diffusion / 3, 27.0)
    same = replace(chosen, process=slow).prepared(pilot_of(slow, start(shape)))
    assert float(same.window) == pytest.approx(float(chosen.window))


REFUSED = {
    "enters all": ad.Process(double_well, np.array([0.1, 0.8]), 3.0),
    "couples no coordinates": ad.Process(lambda y, t: -y, np.array([0.0, 0.8]), 3.0),
    "no full rank": ad.Process(lambda y, t: jnp.stack([y[1] ** 2, -y[1]]), np.array([0.0, 0.8]), 3.0),
    "singular": ad.Process(
        lambda y, t: jnp.stack([y[1] + y[2], -y[1], y[0] - y[2]]), np.array([[0.0], [1.0], [1.0]]), 3.0
    ),
    r"\(1,\) of a site": ad.Process(lambda y, t: jnp.stack([y[2], y[0], -y[2]]), np.array([0.0, 0.0, 0.8]), 3.0),
    "not the same at all": ad.Process(
        double_well, lambda t: jnp.stack([jnp.where(t < 1.5, 0.0, 1.0), jnp.ones(())]), 3.0
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_kinetic_is_refused(reason):
    process = REFUSED[reason]
    shape = (3,) if "1" in reason or reason == "singular" else (2,)
    pilot = pilot_of(process, start(shape))
    assert re.search(reason, kinetic_problem(pilot) or "")
    with pytest.raises(ValueError, match="Use LocalDSM"):
        Kinetic(process, Paths(process, 8)).prepared(pilot)


def test_kinetic_processes_are_recognized():
    for name in ("swimmer", "two bodies", "two to one", "pixels"):
        process, shape = SYSTEMS[name]
        assert kinetic_problem(pilot_of(process, start(shape))) is None, name
