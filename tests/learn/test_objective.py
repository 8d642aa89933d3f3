"""Lemma 1: all objectives are the same function of the network, up to a constant; and their gradients agree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.network import MLP, Score
from autodsm.process.clock import Clock
from autodsm.targets import Paths, Tabulated
from batches import in_batches

KEY = jax.random.key(0)
ELEMENTWISE = ad.langevin(dist.Logistic(0.3, 0.8), ad.LinearBeta(0.1, 10.0))
COUPLED = ad.Process(
    lambda y, t: jnp.stack([jnp.tanh(2 * y[0] - y[1]) - y[0] + 0.5 * jnp.sin(3 * t), jnp.sin(y[0]) - 0.7 * y[1]]),
    jnp.array([[0.9, 0.2], [-0.3, 0.7]]),
    2.0,
)
LINEAR = ad.linear(jnp.array([[-1.0, 0.6], [0.0, -0.5]]), jnp.array([[0.8, 0.1], [0.0, 0.6]]), t1=2.0)


def data(key, n):
    return jnp.clip(0.6 * jax.random.normal(key, (n, 2)), -1.9, 1.9) + jnp.array([0.2, -0.1])


class Fixed(eqx.Module):
    """A small nonlinear network with two numbers to differentiate by."""

    theta: jax.Array

    def __call__(self, y, t):
        a, b = self.theta
        return jnp.stack([-a * jnp.tanh(y[0] + 0.5 * y[1]) + 0.2 * t, b * jnp.sin(y[0] * y[1]) - 0.7 * y[1]])


def value_and_gradient(objective, n, seed=0):
    """Mean and standard error of (loss difference to the zero network, ∂/∂a, ∂/∂b), over n examples."""
    x_key, u_key, key = jax.random.split(jax.random.key(seed), 3)
    x = data(x_key, n)
    u = (jax.random.permutation(u_key, n) + 0.5) / n
    net = Fixed(jnp.array([0.8, 0.5]))

    def one(x, k, u):
        draws = objective.draws(x, key=k, u=u)
        loss = lambda net: jnp.mean(jax.vmap(lambda draw: objective.at(net, draw))(draws))  # noqa: E731
        value, grad = eqx.filter_value_and_grad(loss)(net)
        return jnp.concatenate([(value - loss(lambda y, t: jnp.zeros_like(y)))[None], grad.theta])

    found = np.asarray(in_batches(one, x, jax.random.split(key, n), u), np.float64)
    return found.mean(0), found.std(0) / np.sqrt(n)


def agree(first, second, k=4.5):
    (a, da), (b, db) = first, second
    return np.abs(a - b) / np.hypot(da, db) < k


COMMON = dict(times="uniform", t0=0.05)


@pytest.fixture(scope="module")
def coupled_ism():
    return value_and_gradient(ad.ISM(COUPLED, steps=96, pairs_per_path=8, **COMMON), 40_000, seed=1)


@pytest.fixture(scope="module")
def elementwise_ism():
    return value_and_gradient(ad.ISM(ELEMENTWISE, steps=64, pairs_per_path=8, **COMMON), 40_000, seed=1)


@pytest.mark.parametrize(
    "objective",
    [
        ad.LocalDSM(COUPLED, 1e-2, steps=96, weighting="likelihood", **COMMON),
        ad.LocalDSM(COUPLED, 1e-2, steps=96, weighting="likelihood", variance_reduction="control", **COMMON),
        ad.LocalDSM(COUPLED, 3e-2, steps=96, weighting="likelihood", variance_reduction="none", **COMMON),
        ad.PathwiseDSM(COUPLED, steps=96, weighting="likelihood", **COMMON),
        ad.PathwiseDSM(COUPLED, steps=96, weighting="score", **COMMON),
        ad.ISM(COUPLED, steps=96, divergence="hutchinson", probes=2, **COMMON),
    ],
    ids=["antithetic", "control", "none", "pathwise", "pathwise score", "hutchinson"],
)
def test_lemma_1_coupled(objective, coupled_ism):
    (value, stderr) = value_and_gradient(objective, 20_000)
    if getattr(objective, "weighting", "") == "score":  # a mean over t, not an integral
        value, stderr = 1.95 * value, 1.95 * stderr
    assert agree((value, stderr), coupled_ism).all(), (value, stderr, coupled_ism)


@pytest.mark.parametrize("weighting", ["likelihood", "score"])
@pytest.mark.parametrize("times", ["uniform", "mixed"])
def test_lemma_1_elementwise_tabulated(weighting, times, elementwise_ism):
    objective = ad.TabulatedDSM(ELEMENTWISE, (-2.5, 2.5), weighting=weighting, times=times, t0=0.05)
    value, stderr = value_and_gradient(objective, 200_000)
    if weighting == "score":
        value, stderr = 0.95 * value, 0.95 * stderr
    assert agree((value, stderr), elementwise_ism).all(), (value, stderr, elementwise_ism)


def test_lemma_1_elementwise_other_routes(elementwise_ism):
    table = Tabulated(ELEMENTWISE, (2,), y_range=(-2.5, 2.5))
    for objective in (
        ad.LocalDSM(ELEMENTWISE, 1e-2, forward=table, weighting="likelihood", **COMMON),
        ad.PathwiseDSM(ELEMENTWISE, steps=64, weighting="likelihood", **COMMON),
        ad.ISM(ELEMENTWISE, forward=table, **COMMON),
    ):
        assert agree(value_and_gradient(objective, 20_000), elementwise_ism).all()


def test_a_linear_process_from_zero_is_exact():
    """DSM from s = 0 and ISM have the same mean for a linear process; here without a step size anywhere in DSM."""
    dsm = ad.LocalDSM(LINEAR, schedule=ad.FromZero(), weighting="likelihood", **COMMON)
    assert dsm.draws_per_path((2,)) == 1
    ism = ad.ISM(LINEAR, forward=dsm.target, **COMMON)
    assert agree(value_and_gradient(dsm, 100_000), value_and_gradient(ism, 20_000, seed=1)).all()


def test_the_comparison_notices_a_wrong_target(coupled_ism):
    """A target scaled by 1.1 is far outside the errors."""
    wrong = ad.Process(COUPLED.drift, 1.05 * COUPLED.diffusion, 2.0)
    objective = ad.PathwiseDSM(wrong, steps=96, weighting="likelihood", **COMMON)
    assert not agree(value_and_gradient(objective, 20_000), coupled_ism).all()


def test_elbo_of_a_gaussian_model():
    """OU with the exact score: −loss is a bound on log p, tight but for the start before t0 and the prior mismatch.

    x ~ N(0, 1) under dy = −y dt + √2 dw is stationary: −E[loss] = E log p(x) + (a piece before t0 that vanishes).
    """
    process = ad.Process(lambda y, t: -y, np.sqrt(2.0), 2.0)
    prior = dist.Normal(0.0, 1.0)
    objective = ad.LocalDSM(process, schedule=ad.FromZero(), weighting="likelihood", prior=prior, t0=1e-3)
    n = 200_000
    x_key, key = jax.random.split(KEY)
    x = jax.random.normal(x_key, (n, 1))
    u = (jnp.arange(n) + 0.5) / n
    loss = jax.jit(jax.vmap(lambda x, k, u: objective(lambda y, t: -y, x, key=k, u=u)))
    values = np.asarray(loss(x, jax.random.split(key, n), u), float)
    exact = -0.5 * np.log(2 * np.pi * np.e)
    # E[∇·f − ½‖s‖²_Q + s·Qŝ] = −1 − E y² + 2·1 = 0: the integral vanishes, log π remains.
    assert abs(-values.mean() - exact) < 4 * values.std() / np.sqrt(n)


def test_perceptual_weight_asks_for_the_noise():
    objective = ad.LocalDSM(ad.vp(), schedule=ad.FromZero(), variance_reduction="none")
    x = jnp.array([0.3, -1.0, 0.5])
    (draw, _) = objective.draws(x, key=KEY)
    draw = jax.tree.map(lambda v: v[0], draw)
    score = lambda y, t: 0.3 * y  # noqa: E731
    sigma = np.sqrt(-np.expm1(-ad.LinearBeta(0.1, 20.0).integral(draw.t)))
    eps = -draw.score[0] * sigma
    expected = 0.5 * np.mean((sigma * 0.3 * draw.y[0] + eps) ** 2)
    assert float(objective.at(score, (draw, 0.0))) == pytest.approx(float(expected), rel=1e-4)


def test_coordinates_without_noise_are_not_trained():
    system = ad.systems.swimmer()
    for weighting in ("perceptual", "likelihood", "score"):
        objective = ad.LocalDSM(system.process, 1e-2, steps=32, weighting=weighting)
        loss = lambda a, o=objective: o(lambda y, t: a * y, jnp.array([0.5, 1.0]), key=KEY)  # noqa: E731
        grad = jax.jit(jax.grad(loss))(jnp.ones(2))
        assert grad[0] == 0
        assert grad[1] != 0


def test_antithetic_pairs_and_controls_lower_the_variance():
    spread = {}
    for reduction in ("none", "control", "antithetic"):
        objective = ad.LocalDSM(COUPLED, 1e-3, steps=96, weighting="score", variance_reduction=reduction)
        spread[reduction] = value_and_gradient(objective, 4000)[1][1:]
    assert np.all(spread["antithetic"] < 0.3 * spread["none"])
    assert np.all(spread["control"] < 0.3 * spread["none"])


def test_ism_warns_of_kinks():
    process = ad.vp()
    clock = Clock(process)
    objective = ad.ISM(process, steps=16)
    with pytest.warns(UserWarning, match="implicit score matching with the activation 'relu'"):
        objective(Score(MLP((2,), clock, key=KEY, activation="relu"), clock), jnp.zeros(2), key=KEY)


@pytest.mark.parametrize("g", [np.array([0.0, 0.6]), np.array([[0.0], [0.6]])], ids=["diagonal", "matrix"])
def test_ism_takes_derivatives_only_where_noise_enters(g):
    """The same loss as with all derivatives, `½ s·Qs + Σ_i (Q ∂s)_ii`, by one of two."""
    process = ad.Process(lambda y, t: jnp.stack([y[1] - y[0] ** 3, -0.1 * y[1]]), g, 2.0)
    plain = ad.ISM(process, steps=16, pairs_per_path=4)
    prepared = plain.prepare(data, key=KEY)
    assert prepared.noisy == (1,)
    assert ad.ISM(COUPLED, steps=16).prepare(data, key=KEY).noisy is None
    net, x = Fixed(jnp.array([0.8, 0.5])), jnp.array([0.4, -0.3])
    np.testing.assert_allclose(prepared(net, x, key=KEY), plain(net, x, key=KEY), rtol=1e-6)


def test_preparing_fills_what_was_left_open():
    objective = ad.PathwiseDSM(COUPLED).prepare(data, key=KEY)
    assert objective.pairs_per_path == 32
    some = ad.PathwiseDSM(COUPLED, steps=8)
    assert some.prepare(data, key=KEY, batch_size=20).pairs_per_path == 20
    many = ad.PathwiseDSM(COUPLED, steps=8, pairs_per_path=64)
    assert many.prepare(data, key=KEY, batch_size=40).pairs_per_path == 64  # as given; it is refused where it matters
    assert objective.target.forward.steps != 256
    assert objective.target.profile.kind == "matrix"
    given = ad.PathwiseDSM(COUPLED, steps=40, profile="diagonal").prepare(data, key=KEY)
    assert given.target.forward.steps == Paths(COUPLED, 40).steps
    assert given.target.profile.kind == "diagonal"
    table = ad.TabulatedDSM(ELEMENTWISE).prepare(np.array([[-1.0, 0.5], [1.6, 0.0]]), key=KEY)
    low, high, *_ = table.target.tables.spans[0]
    assert -1.008 < low < -1.0015
    assert 1.6015 < high < 1.608
    again = ad.TabulatedDSM(ELEMENTWISE).prepare(np.array([[-0.9999, 0.5], [1.6001, 0.0]]), key=KEY)
    assert again.target.tables is table.target.tables  # of nearly the same range: no new one
    wide = ad.TabulatedDSM(ELEMENTWISE).prepare(lambda k, n: jax.random.normal(k, (n, 2)), key=KEY)
    assert 6 < wide.target.tables.spans[0].high < 20
    tight = ad.TabulatedDSM(ELEMENTWISE).prepare(ad.data.checkerboard, key=KEY)
    assert tight.target.tables.spans[0][:2] == pytest.approx((-2, 2), abs=0.02)


def test_a_table_is_built_for_the_shape_of_the_state():
    """Not for a scalar in its place: a coupling or a difference between coordinates would not be seen in one."""
    ring = ad.Process(lambda y, t: jnp.roll(jnp.tanh(y), 1) - y, 1.0, 1.0)
    with pytest.raises(ValueError, match="couples coordinates"):
        ad.TabulatedDSM(ring, (-1.0, 1.0))(lambda y, t: y, jnp.zeros(3), key=KEY)
    two = ad.TabulatedDSM(ad.Process(lambda y, t: -jnp.array([0.5, 2.0]) * y, 1.0, 1.0), (-1.0, 1.0))
    draws = jax.jit(jax.vmap(lambda k: two.draws(jnp.ones(2), key=k, u=jnp.asarray(0.99))[0]))
    draw = draws(jax.random.split(KEY, 4096))
    t = float(draw.t[0, 0])
    # Antithetic pairs of a Gaussian kernel have its mean as theirs; the table's own error is far below 1 %.
    np.testing.assert_allclose(draw.y.mean((0, 1, 2)), np.exp([-0.5 * t, -2.0 * t]), rtol=0.01)


def test_pairs_from_zero():
    assert ad.LocalDSM(LINEAR, schedule=ad.FromZero(), pairs_per_path=3).pairs_per_path == 3
    with pytest.raises(ValueError, match="needs neither forward"):
        ad.LocalDSM(LINEAR, schedule=ad.FromZero(), steps=8)


def test_bad_arguments():
    for build, text in [
        (lambda: ad.LocalDSM(COUPLED, 1e-2, weighting="likelyhood"), "Did you mean 'likelihood'"),
        (lambda: ad.LocalDSM(COUPLED, 1e-2, variance_reduction="anti"), "variance_reduction='anti'"),
        (lambda: ad.LocalDSM(COUPLED, 1e-2, schedule=ad.FromZero()), "exclude each other"),
        (lambda: ad.LocalDSM(COUPLED, 1e-2, forward=Paths(COUPLED, 8), steps=4), "steps=4 is for simulated paths"),
        (lambda: ad.LocalDSM(COUPLED, -1.0), "lam=-1.0"),
        (lambda: ad.PathwiseDSM(COUPLED, steps=0), "steps=0"),
        (lambda: ad.PathwiseDSM(COUPLED, profile="diag"), "Did you mean 'diagonal'"),
        (lambda: ad.ISM(COUPLED, divergence="exakt"), "Did you mean 'exact'"),
        (lambda: ad.ISM(COUPLED, probes=2), 'probes=2 has no meaning for divergence="exact"'),
        (lambda: ad.ISM(ad.vp()).prepare(np.zeros((9, 3, 32, 32)), key=KEY), 'Use divergence="hutchinson"'),
        (lambda: ad.LocalDSM(COUPLED, 1e-2, prior=dist.Normal(0, 1)), "prior is only used by"),
        (lambda: ad.TabulatedDSM(ELEMENTWISE)(lambda y, t: y, jnp.zeros(2), key=KEY), "range of the tabulated kernel"),
        (lambda: ad.LocalDSM(COUPLED, 1e-2, pairs_per_path=0), "pairs_per_path=0"),
    ]:
        with pytest.raises(ValueError, match=text):
            build()


def test_options_of_an_earlier_version_name_their_successor():
    for name in ("forgetting", "window", "exact"):
        with pytest.raises(TypeError, match=rf"no option '{name}' any more.*profile=\"matrix\""):
            ad.PathwiseDSM(COUPLED, **{name: 1.0})
    with pytest.raises(TypeError, match="no option 'forgetting' any more"):
        ad.ELBO(COUPLED, dist.Normal(0.0, 1.0), forgetting=1.0)


@pytest.mark.parametrize("jit", [False, True])
def test_path_that_explodes_is_an_error(jit):
    """Of a loss for which the steps were given: eight explicit ones, for a rate of 10⁴."""
    process = ad.Process(lambda y, t: -1e4 * y, 0.7, t1=1.0)
    objective = ad.PathwiseDSM(process, steps=8)
    run = eqx.filter_jit(objective) if jit else objective
    with pytest.raises(RuntimeError, match=r"states or targets of the loss are not finite.*objective\.prepare"):
        run(lambda y, t: -y, jnp.ones(2), key=jax.random.key(0))
