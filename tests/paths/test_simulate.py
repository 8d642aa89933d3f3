"""Paths: weak orders against exact moments, adaptive error against its tolerance, and what solvers share."""

import functools
import itertools

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
import oracles
from autodsm.paths.initial import initial_states
from autodsm.paths.schemes import four_point


def paths(process, y0, times, n, *, seed=0, **options):
    """n paths from one y0, as float64."""
    keys = jax.random.split(jax.random.key(seed), n)
    y0, times = jnp.asarray(y0, jnp.float32), jnp.asarray(times, jnp.float32)
    return np.asarray(jax.jit(jax.vmap(lambda k: ad.simulate(process, y0, times, key=k, **options)))(keys), float)


def test_four_point_noise_has_five_gaussian_moments():
    x = np.asarray(four_point(jax.random.key(0), (1 << 20,)), float)
    values, counts = np.unique(np.round(x, 6), return_counts=True)
    probabilities = np.array([1, 7, 7, 1]) / 16
    assert len(values) == 4
    spread = np.sqrt(probabilities * (1 - probabilities) / len(x))
    assert np.all(np.abs(counts / len(x) - probabilities) < 4 * spread)
    moments = [np.sum(probabilities * values**k) for k in range(1, 7)]
    np.testing.assert_allclose(moments[:5], [0, 1, 0, 3, 0], atol=1e-5)
    assert 13 < moments[5] < 14
    # Neighbours from one word are independent.
    pairs = x.reshape(-1, 8)
    correlation = np.corrcoef(pairs.T) - np.eye(8)
    assert np.max(np.abs(correlation)) < 5 / np.sqrt(len(pairs))


# A linear system with time-dependent matrix noise: exact second moments, and nothing that could cancel by symmetry.
A = np.array([[-1.0, 1.5], [-1.5, -2.0]])
START = np.array([1.0, -0.5])


def noise(t, np=np):
    return np.stack([np.stack([1.0 + t, 0.5 * t]), np.stack([0.2 - t, 1.0 + 0.0 * t])])


LINEAR = ad.linear(A, lambda t: noise(t, jnp), t1=1.0)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("weak2", 2)])
def test_weak_order(solver, order):
    exact = oracles.linear_moments(lambda t: A, lambda t: 0.0, noise, START, 0.0, 1.0)
    steps = [4, 6, 8, 12] if order == 1 else [3, 4, 6, 8]  # errors well above their standard error, 2·10⁻³
    errors = []
    for n in steps:
        end = np.concatenate(
            [paths(LINEAR, START, [1.0], 1_000_000, seed=seed, solver=solver, steps=n)[:, 0] for seed in range(2)]
        )
        second = np.einsum("ni,nj->ij", end, end) / len(end)
        errors.append(np.linalg.norm(second - (exact.cov + np.outer(exact.mean, exact.mean))))
    fitted = -np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert abs(fitted - order) < 0.3, errors


@pytest.mark.parametrize("solver", ["euler", "heun", "weak2"])
def test_linear_moments(solver):
    exact = oracles.linear_moments(lambda t: A, lambda t: 0.0, noise, START, 0.0, 1.0)
    n = 200_000
    end = paths(LINEAR, START, [1.0], n, solver=solver, steps=500)[:, 0]
    deviation = np.sqrt(np.diag(exact.cov) / n)
    assert np.all(np.abs(end.mean(0) - exact.mean) < 5 * deviation)
    np.testing.assert_allclose(np.cov(end.T), exact.cov, atol=6 * np.sqrt(2 / n) * np.max(exact.cov))


@functools.cache
def relaxed(n, **options):
    """Moments at t = 1 after cubic relaxation from far away, where a fixed step would need to be tiny."""
    end = paths(ad.systems.double_well(noise=1.0).process, [4.0], [1.0], n, **options)[:, 0, 0]
    return np.array([end.mean(), np.mean(end**2)])


@pytest.mark.parametrize("solver", ["lamba", "heun", "weak2"])
def test_adaptive_error_follows_tolerance(solver):
    n, tolerances = 400_000, [0.2, 0.1, 0.05, 0.025]
    fine = relaxed(n, solver="weak2", steps=2000, seed=1)
    errors = [np.linalg.norm(relaxed(n, solver=solver, tol=tol) - fine) for tol in tolerances]
    floor = 4 * np.sqrt(2 * 1.5 / n)  # four standard errors
    assert all(error < 1.5 * tol + floor for error, tol in zip(errors, tolerances, strict=True)), errors
    seen = [(tol, error) for tol, error in zip(tolerances, errors, strict=True) if error > floor]
    assert len(seen) > 1
    slope = np.polyfit(*np.log(seen).T, 1)[0]
    assert slope > 0.6, errors


@pytest.mark.parametrize(("omega", "gamma"), [(10.0, 0.1), (3.0, 0.1)])
def test_adaptive_steps_follow_an_oscillator(omega, gamma):
    # Noise enters the velocity only, and energy errors add up over 1/γ.
    def drift(y, t):
        return jnp.stack([y[1], -(omega**2) * y[0] - gamma * y[1]])

    n, t = 20_000, 10.0
    g = np.array([0.0, np.sqrt(2 * gamma)])
    found = paths(ad.Process(drift, g, t), [0.0, 0.0], [t], n)[:, 0]
    a = np.array([[0.0, 1.0], [-(omega**2), -gamma]])
    exact = oracles.linear_moments(lambda t: a, lambda t: 0.0, lambda t: np.diag(g), [0.0, 0.0], 0.0, t)
    relative = found.var(0) / np.diag(exact.cov) - 1
    assert np.all(np.abs(relative) < 4 * np.sqrt(2 / n) + 0.01)


def test_adaptive_steps_resolve_every_coordinate():
    rates, noises, n = np.array([0.1, 50.0]), np.array([100.0, 0.01]), 20_000
    found = paths(ad.Process(lambda y, t: -rates * y, noises, 5.0), [0.0, 0.0], [5.0], n)[:, 0]
    exact = noises**2 / (2 * rates) * (1 - np.exp(-2 * rates * 5.0))
    assert np.all(np.abs(found.var(0) / exact - 1) < 4 * np.sqrt(2 / n) + 2e-3)


def test_adaptive_steps_see_noise_where_the_drift_vanishes():
    # From the fixed point y = 0 a criterion on the drift alone would take one giant step.
    process = ad.systems.ornstein_uhlenbeck(rate=4.0).process
    n = 200_000
    for solver, tol in (("weak2", 1e-2), ("lamba", 1e-2)):
        variance = paths(process, [0.0], [2.0], n, solver=solver, tol=tol).var()
        assert abs(variance / 0.25 - 1) < 1.5 * tol + 4 * np.sqrt(2 / n)


def test_default_needs_no_step_count():
    process = ad.systems.ornstein_uhlenbeck(2).process
    n, times = 100_000, [0.0, 0.5, 2.0]
    found = paths(process, [2.0, -1.0], times, n)
    for i, t in enumerate(times):
        exact = np.exp(-t) * np.array([2.0, -1.0]), 1 - np.exp(-2 * t)
        np.testing.assert_allclose(found[:, i].mean(0), exact[0], atol=4 / np.sqrt(n) + 1e-3)
        np.testing.assert_allclose(found[:, i].var(0), exact[1], atol=4 * np.sqrt(2 / n) + 1e-3)


@pytest.mark.parametrize("solver", [diffrax.Euler(), diffrax.Heun(), diffrax.ShARK(), diffrax.SRA1()], ids=repr)
def test_diffrax_solvers(solver):
    n = 4_000
    exact = oracles.linear_moments(lambda t: A, lambda t: 0.0, noise, START, 0.0, 1.0)
    end = paths(LINEAR, START, [0.4, 1.0], n, solver=solver, steps=100)[:, -1]
    np.testing.assert_allclose(end.mean(0), exact.mean, atol=5 * np.sqrt(np.max(exact.cov) / n) + 0.01)
    np.testing.assert_allclose(np.cov(end.T), exact.cov, atol=6 * np.sqrt(2 / n) * np.max(exact.cov) + 0.02)


def test_diffrax_chooses_steps_where_it_can():
    process = ad.systems.ornstein_uhlenbeck().process
    end = paths(process, [2.0], [1.0], 2_000, solver=diffrax.ShARK(), tol=1e-2)[:, 0, 0]
    assert abs(end.mean() - 2 * np.exp(-1.0)) < 4 / np.sqrt(2_000)
    with pytest.raises(ValueError, match=r"Euler\(\) cannot choose its steps: give steps"):
        ad.simulate(process, [2.0], [1.0], key=jax.random.key(0), solver=diffrax.Euler())


def test_swimmer_velocity_stays_standard_normal():
    system, n = ad.systems.swimmer(), 200_000
    y0 = system.y0(jax.random.key(1), n)
    keys = jax.random.split(jax.random.key(2), n)
    times = jnp.array([1.0, 3.0, 5.0])
    v = np.asarray(jax.jit(jax.vmap(lambda y, k: ad.simulate(system.process, y, times, key=k)))(y0, keys))[:, :, 1]
    assert np.all(np.abs(v.mean(0)) < 4 / np.sqrt(n))
    assert np.all(np.abs(v.var(0) - 1) < 4 * np.sqrt(2 / n) + 1e-3)
    assert np.all(np.abs((v**4).mean(0) - 3) < 4 * np.sqrt(96 / n) + 1e-2)


@pytest.mark.parametrize("solver", ["weak2", "euler"])
def test_noise_of_every_shape(solver):
    shape, n = (2, 4), 100_000
    mixing = np.array([[1.0, 0.0, 0.5], [0.7, 0.2, 0.0]])
    full = np.random.default_rng(0).standard_normal((8, 3))
    cases = {
        "scalar": (0.5, 0.25 * np.eye(8)),
        "channel": (np.array([0.0, 2.0]), np.diag([0.0] * 4 + [4.0] * 4)),
        "channel matrix": (mixing, np.kron(mixing @ mixing.T, np.eye(4))),
        "full matrix": (full, full @ full.T),
    }
    for g, Q in cases.values():
        process = ad.Process(lambda y, t: jnp.zeros_like(y), g, 1.0)
        end = paths(process, np.zeros(shape), [0.5], n, solver=solver, steps=7)[:, 0].reshape(n, 8)
        np.testing.assert_allclose(np.cov(end.T), 0.5 * Q, atol=6 * np.sqrt(2 / n) * max(0.5 * np.max(Q), 1e-9))


def test_long_runs_are_drawn_in_pieces_and_stay_right():
    # 300 noises of 4 numbers are drawn in pieces of 64 steps, with a rest.
    process, n = ad.systems.ornstein_uhlenbeck(4).process, 20_000
    end = paths(process, np.zeros(4), [3.0], n, steps=300)[:, 0]
    np.testing.assert_allclose(np.cov(end.T), (1 - np.exp(-6)) * np.eye(4), atol=6 * np.sqrt(2 / n))


def test_start_time_and_repeated_times():
    process = ad.Process(lambda y, t: jnp.full_like(y, t), 1e-6, 4.0)
    path = ad.simulate(process, [1.0], [1.0, 1.0, 2.0], key=jax.random.key(0), t0=1.0)
    np.testing.assert_allclose(path[:, 0], [1.0, 1.0, 2.5], atol=1e-4)


def test_same_key_same_path():
    system = ad.systems.swimmer()
    first, second = (ad.simulate(system.process, [0.5, 1.0], [1.0], key=jax.random.key(3), steps=20) for _ in range(2))
    assert np.array_equal(first, second)


def test_gradients_flow_only_when_asked():
    process = ad.systems.ornstein_uhlenbeck().process

    def end(y, **options):
        return ad.simulate(process, y[None], [1.0], key=jax.random.key(0), **options)[0, 0]

    exact = (1 - 0.01 + 0.5e-4) ** 100
    np.testing.assert_allclose(jax.grad(end)(jnp.array(1.0), steps=100, differentiable=True), exact, rtol=1e-5)
    assert jax.grad(end)(jnp.array(1.0), steps=100) == 0.0
    with pytest.raises(ValueError, match="differentiable=True needs a fixed number of steps"):
        end(jnp.array(1.0), differentiable=True)
    by_diffrax = jax.grad(end)(jnp.array(1.0), steps=100, solver=diffrax.Euler(), differentiable=True)
    np.testing.assert_allclose(by_diffrax, 0.99**100, rtol=1e-4)


def test_wrong_paths_are_refused():
    """Paths that run away in finite time; and a linear drift with steps too long for an explicit scheme."""
    away, stiff = ad.Process(lambda y, t: y**3, 1.0, 5.0), ad.Process(lambda y, t: -1e4 * y, 1.0, 1.0)
    steep = ad.Process(lambda y, t: -100 * y, 1.0, 1.0)
    for process, options, text in [
        (away, {}, "not finite"),
        (stiff, dict(steps=1000), "not finite"),
        (steep, dict(steps=8), "steps=8 are too few"),
        (steep, dict(steps=8, solver="euler"), "steps=8 are too few"),
    ]:
        with pytest.raises(FloatingPointError, match=text):
            ad.simulate(process, [2.0], [process.t1], key=jax.random.key(0), **options)
        with pytest.raises(RuntimeError, match=text):  # traced, so that the check is made as it runs
            paths(process, [2.0], [process.t1], 3, **options)


def test_paths_that_grow_or_are_coarse_are_not_refused():
    """Growth that is right, an oscillator without noise of its own in one coordinate, and a strong force from rest."""
    growing = ad.Process(lambda y, t: 2 * y, 1.0, 20.0)
    assert np.all(paths(growing, [1.0], [20.0], 100, steps=200) ** 2 > 1e20)
    pushed = ad.Process(lambda y, t: jnp.stack([y[1], 30.0 - y[1]]), np.array([0.0, 3.0]), 2.0)
    assert np.all(np.isfinite(paths(pushed, [0.0, 0.0], [0.1, 2.0], 20_000, steps=20)))
    well = ad.systems.double_well(2, t1=5.0).process
    assert np.all(np.isfinite(paths(well, [0.0, 3.0], [1.0, 5.0], 20_000, steps=25)))


def test_diffrax_noise_of_many_times(x64):
    """The quadratic variation of Brownian motion over n intervals is 1 ± √(2/n)."""
    process, n = ad.Process(lambda y, t: 0 * y, 1.0, 1.0), 80_000
    times = np.arange(1, n + 1) / n
    path = ad.simulate(process, [0.0], times, key=jax.random.key(0), solver=diffrax.Euler(), steps=1)[:, 0]
    assert abs(np.sum(np.diff(path, prepend=0.0) ** 2) - 1) < 4.5 * np.sqrt(2 / n)


def test_diffrax_steps_do_not_depend_on_units(x64):
    def solve(unit, time):
        process = ad.Process(lambda y, t: -4 * y / time, unit / np.sqrt(time), 1.0 * time)
        y0 = jnp.array([2.0, -1.0]) * unit
        path = ad.simulate(process, y0, [time], key=jax.random.key(1), solver=diffrax.ShARK(), tol=1e-3)
        return np.asarray(path[0] / unit)

    for unit, time in (([2.0**-30, 2.0**-30], 1.0), ([2.0**30, 2.0**-30], 2.0**-30), ([1.0, 1.0], 2.0**30)):
        np.testing.assert_allclose(solve(np.array(unit), time), solve(np.ones(2), 1.0), rtol=1e-9)


def test_initial_states():
    samples = np.arange(10.0)[:, None]
    drawn = initial_states(samples, 50, key=jax.random.key(0))
    assert drawn.shape == (50, 1)
    assert set(np.ravel(drawn)) <= set(range(10))
    with pytest.raises(ValueError, match="a sampler must return n"):
        initial_states(lambda key, n: samples, 50, key=jax.random.key(0))
    with pytest.raises(ValueError, match="must be stacked"):
        initial_states(np.float32(1.0), 5, key=jax.random.key(0))


BAD = {
    "t after the end": (dict(times=[6.0]), "times up to 6.0 from t0=0.0 leave the span"),
    "decreasing": (dict(times=[2.0, 1.0]), "must increase"),
    "before t0": (dict(times=[0.5], t0=1.0), "not begin before t0=1.0"),
    "no list": (dict(times=1.0), "must be a list of at least one time"),
    "unknown solver": (dict(solver="hein"), "solver='hein' is not known. Did you mean 'heun'"),
    "steps": (dict(steps=0), "steps=0 must be a whole number"),
    "both": (dict(steps=5, tol=1e-2), "exclude each other"),
    "a class": (dict(solver=diffrax.Heun, steps=5), r"is a class: pass an instance, Heun\(\)"),
    "nan": (dict(times=[float("nan")]), "must increase and not begin before"),
    "tol": (dict(tol=-1.0), "tol=-1.0 must be a finite number above zero"),
    "lamba with steps": (dict(solver="lamba", steps=5), "chooses its own steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, text = BAD[name]
    with pytest.raises(ValueError, match=text):
        ad.simulate(ad.systems.swimmer().process, [0.0, 0.0], **{"times": [1.0], "key": jax.random.key(0), **options})


def test_four_point_law_is_complete_in_each_place():
    word = np.asarray(four_point(jax.random.key(5), (8 * 4096,))).reshape(-1, 8)
    for place, value in itertools.product(range(8), np.unique(np.round(word, 5))):
        assert np.any(np.isclose(word[:, place], value, atol=1e-4))
