"""Beginners' mistakes: each error names the argument, what is wrong with it, and what to write instead."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.base.calls import NotTraceable, call
from autodsm.base.errors import check_key, check_times, suggest_options
from autodsm.exact.grid1d import solve_1d
from autodsm.use.flow import velocity

KEY = jax.random.key(0)
NORMAL = dist.Normal(0.0, 1.0)


@pytest.fixture(autouse=True)
def _as_users_run_it():
    """Without the checks of annotations, which in other tests come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def make(drift, diffusion=0.5):
    return ad.Process(drift, diffusion, t1=1.0)


def score(y, t):
    return -y


def y0(key, n):
    return jax.random.normal(key, (n, 2))


OU = make(lambda y, t: -y)
LOGS = make(lambda y, t: -jnp.log(y))


def branch(y, t):
    if y[0] > 0:
        return -y
    return y


def in_place(y, t):
    y[0] = 0.0
    return y


def filled(y, t):
    out = np.zeros(2)
    out[0] = -y[0]
    return out


def loop(y, t):
    while t < 1:
        t = t + 1
    return t * y


def turns(y, t):
    return sum(-y for _ in range(int(3 * t)))


def asserted(y, t):
    assert jnp.all(y > 0)
    return -y


MISTAKES = [
    (lambda y, t: -np.tanh(y), r"write jnp\.tanh instead of np\.tanh"),
    (lambda y, t: np.stack([-y[0], y[1]]), r"write jnp\.stack instead of np\.stack"),
    (lambda y, t: y * math.sin(t), r"write jnp\.sin instead of math\.sin"),
    (lambda y, t: y * math.sin(y), r"write jnp\.sin instead of math\.sin"),  # of more than one number
    (lambda y, t: y * math.erf(t), r"write jax\.scipy\.special\.erf instead of math\.erf"),
    (lambda y, t: -float(y[0]) * y, r"leave float\(\) out"),
    (lambda y, t: -y[0].item() * y, r"leave \.item\(\) and \.tolist\(\) out"),
    (lambda y, t: y * np.ones(3)[int(t)], r"jnp\.floor\(x\)\.astype\(int\) instead of int\(x\)"),
    (lambda y, t: y * [1.0, 2.0][jnp.int32(t)], r"jnp\.asarray\(table\)\[i\]"),
    (lambda y, t: max(y[0], 0.0) * y, r"jnp\.maximum\(a, b\) instead of max\(a, b\)"),
    (lambda y, t: y if t > 0.5 and y[0] > 0 else -y, r"jnp\.where\(condition, a, b\) instead of if"),
    (lambda y, t: jnp.where((y > 0) and (t > 0.5), y, -y), "write & instead of and"),
    (lambda y, t: jnp.where(0 < t < 0.5, y, -y), r"\(a < y\) & \(y < b\) instead of a < y < b"),
    (lambda y, t: y[y > 0], r"jnp\.where\(mask, a, b\) instead of y\[mask\]"),
    (branch, r"jnp\.where\(condition, a, b\) instead of if"),
    (in_place, r"y = y\.at\[i\]\.set\(value\) instead of y\[i\] = value"),
    (filled, r"jnp\.stack\(\[a, b, \.\.\.\]\)"),
    (loop, r"jax\.lax\.while_loop"),
    (turns, r"jax\.lax\.fori_loop"),
    (asserted, "leave the assertion out"),
]


@pytest.mark.parametrize(("drift", "remedy"), MISTAKES)
def test_drift_that_cannot_be_traced(drift, remedy):
    with pytest.raises(NotTraceable) as e:
        make(drift).check(np.ones(2))
    place, advice = str(e.value).rsplit("`. ", 1)
    assert re.search(remedy, advice)
    line = int(re.fullmatch(r"drift cannot be compiled by JAX, at test_errors\.py, line (\d+): `.*", place)[1])
    source, first = inspect.getsourcelines(drift)
    assert first <= line < first + len(source)
    assert e.value.__cause__ is not None  # with the traceback through the user's function


def test_other_errors_of_a_drift_are_its_own():
    with pytest.raises(NameError, match="undefined"):
        make(lambda y, t: undefined * y).check(np.ones(2))  # noqa: F821  # pyright: ignore
    with pytest.raises(ValueError, match="inhomogeneous"):
        make(lambda y, t: np.array([[1.0], [1.0, 2.0]]) * y).check(np.ones(2))
    with pytest.raises(ValueError, match="truth value"):  # of an array of numpy, which has values
        make(lambda y, t: y if np.ones(2) > 0 else -y).check(np.ones(2))


def test_a_drift_that_fails_for_the_shape_of_a_state_is_told_it():
    process = ad.Process(lambda y, t: jnp.eye(2) @ y, 1.0, 1.0)
    for loss in (ad.LocalDSM(process), ad.PathwiseDSM(process)):
        with pytest.raises(ValueError, match="matmul") as e:
            loss(lambda y, t: -y, 0.5, key=jax.random.key(0))
        assert "drift was called with arguments of shape (), ()" in e.value.__notes__[0]


def test_the_innermost_function_is_named():
    def drift(y):
        return call("score", float, y)

    with pytest.raises(NotTraceable, match=r"^score cannot be compiled"):
        jax.eval_shape(lambda y: call("drift", drift, y), 1.0)


@pytest.mark.parametrize(
    ("diffusion", "remedy"),
    [
        (lambda t: np.sqrt(t), r"jnp\.sqrt instead of np\.sqrt"),
        (lambda t: math.exp(t), r"jnp\.exp instead of math\.exp"),
        (lambda t: 1.0 if t < 0.5 else 2.0, r"jnp\.where\(condition, a, b\) instead of if"),
        (math.sqrt, "use jax.numpy instead of numpy and math"),
    ],
)
def test_diffusion_that_cannot_be_traced_is_refused_at_construction(diffusion, remedy):
    with pytest.raises(NotTraceable, match=f"diffusion cannot be compiled.*{remedy}"):
        make(lambda y, t: -y, diffusion)


BRANCH = make(branch)


@pytest.mark.parametrize(
    "use",
    [
        lambda: ad.fit(BRANCH, y0, key=KEY),
        lambda: ad.simulate(BRANCH, np.ones(2), [1.0], key=KEY),
        lambda: ad.transition(BRANCH, np.ones(2), 0.1, 0.2),
        lambda: ad.linearize(BRANCH, jnp.ones(2), 0.1),
        lambda: ad.kl_bound(BRANCH, ad.ConstantGap(0.1), y0, [0.5], key=KEY, n=4),
        lambda: ad.LocalDSM(BRANCH, schedule=ad.ConstantGap(0.1), steps=4)(score, jnp.ones(2), key=KEY),
        lambda: ad.ISM(BRANCH, steps=4)(score, jnp.ones(2), key=KEY),
        lambda: ad.PathwiseDSM(BRANCH, steps=4)(score, jnp.ones(2), key=KEY),
        lambda: ad.ELBO(BRANCH, NORMAL, steps=4)(score, jnp.ones(2), key=KEY),
        lambda: ad.flow(BRANCH, score, jnp.ones(2), [0.0, 1.0]),
        lambda: ad.log_likelihood(BRANCH, score, NORMAL, jnp.ones(2)),
        lambda: ad.sample(BRANCH, score, NORMAL, 4, key=KEY, shape=(2,)),
        lambda: ad.observables.entropy_rate(BRANCH, score, np.ones((4, 2)), 0.5),
    ],
)
def test_every_use_of_a_drift_says_what_is_wrong_with_it(use):
    with pytest.raises(NotTraceable, match=r"drift cannot be compiled.*`if y\[0\] > 0:`.*jnp\.where"):
        use()


def test_score_and_network_that_cannot_be_traced():
    with pytest.raises(NotTraceable, match="score cannot be compiled"):
        ad.flow(OU, branch, jnp.ones(2), [0.0, 1.0])
    with pytest.raises(NotTraceable, match="network cannot be compiled"):
        ad.fit(OU, y0, key=KEY, network=branch)


@pytest.mark.parametrize(
    "use",
    [
        lambda key: ad.fit(OU, y0, key=key),
        lambda key: ad.simulate(OU, np.ones(2), [1.0], key=key),
        lambda key: ad.sample(OU, score, NORMAL, 4, key=key, shape=(2,)),
        lambda key: ad.ELBO(OU, NORMAL)(score, jnp.ones(2), key=key),
        lambda key: ad.ELBO(OU, NORMAL).average(score, jnp.ones((3, 2)), key=key),
        lambda key: ad.elbo(OU, score, NORMAL, jnp.ones(2), key=key),
        lambda key: ad.log_likelihood(OU, score, NORMAL, jnp.ones(2), key=key, divergence="hutchinson"),
        lambda key: ad.LocalDSM(OU)(score, jnp.ones(2), key=key),
        lambda key: ad.ISM(OU)(score, jnp.ones(2), key=key),
        lambda key: ad.LocalDSM(OU).prepare(y0, key=key),
        lambda key: ad.ISM(OU).prepare(y0, key=key),
        lambda key: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [0.5], key=key, n=4),
        lambda key: ad.ScheduledPairs.for_tolerance(OU, y0, 0.1, key=key),
        lambda key: ad.metrics.mmd2(np.ones((4, 2)), np.ones((4, 2)), key=key),
        lambda key: ad.metrics.sliced_wasserstein(np.ones((4, 2)), np.ones((4, 2)), key=key),
        lambda key: ad.observables.entropy_rate(OU, score, np.ones((4, 2)), 0.5, divergence="hutchinson", key=key),
        lambda key: ad.data.checkerboard(key, 4),
        lambda key: ad.systems.swimmer().y0(key, 4),
        lambda key: ad.WithVelocity(NORMAL).sample(key, (4, 2, 1)),
        lambda key: ad.network.MLP((2,), ad.Clock(OU), key=key),
        lambda key: ad.network.Equivariant((3, 2), ad.Clock(OU), key=key),
        lambda key: ad.network.UNet((1, 8, 8), ad.Clock(OU), key=key),
    ],
)
def test_number_for_a_key(use):
    with pytest.raises(TypeError, match=r"key=7 is not a random key of JAX. Write key=jax\.random\.key\(7\)"):
        use(7)


@pytest.mark.parametrize(
    "key", [KEY, jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0)), jax.random.key(0, impl="rbg")]
)
def test_keys_of_both_styles(key):
    check_key(key)
    jax.eval_shape(check_key, key)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (None, r"key=None is not.*jax\.random\.key\(0\)"),
        (np.random.default_rng(0), r"key=Generator\(PCG64\) is not"),
        (jnp.zeros(2), "is not a random key"),
        (jax.random.split(KEY, 3), r"holds 3 keys.*key\[0\]"),
        (jax.random.split(jax.random.PRNGKey(0), 3), "holds 3 keys"),
    ],
)
def test_bad_keys(key, text):
    with pytest.raises((TypeError, ValueError), match=text):
        check_key(key)


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (lambda key, n: 1.0, r"y0\(key, 256\) returned one number.*\(n, \*shape\)"),
        (lambda key, n: (jnp.ones((n, 2)), jnp.ones(n)), "returned a tuple of 2.*one array"),
        (lambda key, n: None, "returned nothing"),
        (lambda key, n: jnp.ones((5, 2)), r"returned 5 states, an array of shape \(5, 2\)"),
        (lambda n: np.ones((n, 2)), r"must be a sampler y0\(key, n\)"),
        (lambda key, n: np.random.default_rng(key).normal(size=(n, 2)), r"np\.asarray\(jax\.random\.key_data\(key\)\)"),
        (lambda key, n: np.random.default_rng(0).normal(size=(n, 2)), "the same states for two keys"),
        (lambda key, n: jax.random.normal(KEY, (n, 2)), "the same states for two keys"),
        ("data.npy", r"np\.load\('data.npy'\)"),
        (3.0, "must be a sampler"),
    ],
)
def test_bad_samplers(sampler, text):
    with pytest.raises((TypeError, ValueError), match=text):
        ad.fit(OU, sampler, key=KEY)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: ad.fit(OU, y0, key=KEY, step=2), r"fit\(\) has no option 'step'. Did you mean 'steps'"),
        (lambda: ad.fit(OU, y0, key=KEY, chekpoint_every=2), "Did you mean 'checkpoint_every'"),
        (lambda: ad.ELBO(OU, NORMAL, draw=3), r"ELBO\(\) has no option 'draw'. Did you mean 'draws'"),
        (lambda: ad.elbo(OU, score, NORMAL, jnp.ones(2), key=KEY, draw=3), r"elbo\(\).*Did you mean 'draws'"),
        (lambda: ad.LocalDSM(OU, time="uniform"), r"LocalDSM\(\) has no option 'time'. Did you mean 'times'"),
        (lambda: ad.LocalDSM(OU, control=True), "has no option 'control'. It takes: process, lam"),
        (lambda: ad.PathwiseDSM(OU, step=3), "Did you mean 'steps'"),
        (lambda: ad.TabulatedDSM(OU, yrange=(0, 1)), "Did you mean 'y_range'"),
        (lambda: ad.ISM(OU, probe=1), "Did you mean 'probes'"),
        (lambda: ad.simulate(OU, np.ones(2), [1.0], key=KEY, step=3), r"simulate\(\).*'steps'"),
        (lambda: ad.sample(OU, score, NORMAL, 4, key=KEY, shapes=(2,)), r"sample\(\).*'shape'"),
        (lambda: ad.Process(score, 0.5, T=1.0), r"Process\(\) has no option 'T'. Did you mean 't1'"),
    ],
)
def test_misspelt_options(use, text):
    with pytest.raises(TypeError, match=text):
        use()


def test_options_of_a_function_stay_what_they_were():
    @suggest_options("far")
    def function(a, *, near=1, **options):
        return a, near, options

    assert function(1, near=2, far=3) == (1, 2, {"far": 3})
    assert list(inspect.signature(function).parameters) == ["a", "near", "options"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        function()


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: ad.ScheduledPairs(OU, 1e-2)(-0.5), "t=-0.5 is before the start"),
        (lambda: ad.ScheduledPairs(OU, 1e-2)(np.array([0.1, np.nan])), "t=nan is not a finite number"),
        (lambda: ad.ScheduledPairs(OU, 1e-2)(1.5), "t=1.5 is after the end of the process, t1=1.0"),
        (lambda: ad.ConstantGap(0.1)(-0.5), "t=-0.5 is before the start"),
        (lambda: ad.FromZero()(float("nan")), "t=nan is not a finite"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [-0.5], key=KEY), "times=-0.5 is before"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [0.5, 5.0], key=KEY), "times=5.0 is after the end"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [np.nan], key=KEY), "times=nan is not"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [np.inf], key=KEY), "times=inf is not"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, 0.5, key=KEY), r"times has shape \(\)"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [], key=KEY), r"times has shape \(0,\)"),
        (lambda: ad.kl_bound(OU, 0.1, y0, [0.5], key=KEY), r"schedule=0.1 must be a function s\(t\)"),
        (lambda: ad.kl_bound(OU, ad.ConstantGap(0.1), y0, [0.5], key=KEY, n=-1), "n=-1 must be a whole number"),
        (lambda: ad.ScheduledPairs.for_tolerance(OU, y0, 0.1, key=KEY, times=[7.0]), "times=7.0 is after"),
        (lambda: ad.simulate(OU, np.ones(2), 1.0, key=KEY), r"times has shape \(\)"),
        (lambda: ad.simulate(OU, np.ones(2), "1.0", key=KEY), "times='1.0' must be an array of numbers"),
    ],
)
def test_bad_times(use, text):
    with pytest.raises((TypeError, ValueError), match=text):
        use()


def test_times_that_are_traced_or_at_the_ends_are_taken():
    check_times("t", np.array([0.0, 1.0 + 5e-7]), 1.0)
    assert jax.jit(lambda t: ad.ConstantGap(0.1)(t))(0.5) < 0.5


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: ad.Process(score, 0.5, t1="1.0"), "t1='1.0' must be a finite number above zero"),
        (lambda: ad.Process(score, "0.5", t1=1.0), "diffusion='0.5' must be an array of numbers"),
        (lambda: ad.Process(score, None, t1=1.0), "diffusion=None must be an array of numbers"),
        (lambda: ad.Process(score, lambda t: None, t1=1.0), r"diffusion\(t\)=None must be an array"),
        (lambda: ad.Process(score, lambda y, t: y, t1=1.0), "function of time alone.*depends on the state"),
        (lambda: ad.Process(lambda y: y, 0.5, t1=1.0), r"drift must take the state and the time.*<lambda>\(y\)"),
        (lambda: ad.Process(lambda y, t, a: y, 0.5, t1=1.0), r"drift must take.*<lambda>\(y, t, a\)"),
        (lambda: make(lambda y, t: [y[0], y[1]]).check(np.ones(2)), r"drift returned a list of 2.*jnp\.stack"),
        (lambda: make(lambda y, t: 1.0).check(np.ones(2)), r"drift returned a number.*jnp\.full_like"),
        (lambda: make(lambda y, t: None).check(np.ones(2)), "drift returned None for.*return missing"),
        (lambda: make(lambda y, t: 1.0).f(jnp.ones(2), 0.0), "drift returned a number"),
        (lambda: ad.simulate(OU, [1.0, [2.0, 3.0]], [1.0], key=KEY), "y0=.* must be an array of numbers"),
        (lambda: ad.simulate(OU, y0, [1.0], key=KEY), "y0=<function.*must be an array of numbers"),
        (lambda: ad.simulate(score, np.ones(2), [1.0], key=KEY), r"process=.*must be an autodsm\.Process"),
        (lambda: ad.fit(ad.systems.swimmer(), y0, key=KEY), "process is a System.*give its .process"),
        (lambda: ad.fit(OU, y0, key=KEY, objective=ad.LocalDSM), r"objective=.*LocalDSM\(process\)"),
        (lambda: ad.fit(OU, y0, key=KEY, network=ad.network.MLP), "network=MLP is a class"),
        (lambda: ad.langevin(dist.Normal), r"prior=Normal is a class.*Normal\(0\.0, 1\.0\)"),
        (lambda: ad.sample(OU, score, NORMAL, -4, key=KEY), "n=-4 must be a whole number of at least 1"),
        (lambda: ad.data.checkerboard(KEY, -4), "n=-4 must be a whole number"),
        (lambda: ad.sample(OU, score, NORMAL, 4, key=KEY, shape=0.5), r"shape=0\.5 must be the shape of a state"),
        (
            lambda: ad.sample(OU, score, lambda n: n, 4, key=KEY, shape=(2,)),
            r"prior is <lambda>\(n\); .*prior\(key, n\)",
        ),
        (lambda: ad.fit(OU, y0, key=KEY, batch_size=0.5), "batch_size=0.5 must be a whole number"),
        (lambda: ad.simulate(OU, np.ones(2), [1.0], key=KEY, solver=1e3), "solver=1000.0 is not known.*weak2"),
        (lambda: ad.simulate(OU, np.ones(0), [1.0], key=KEY), r"shape=\(0,\) must be the shape of a state"),
        (lambda: ad.systems.particles(3).process.check(np.ones(3)), r"that of 3 particles is \(3, 2\)"),
        (lambda: ad.linear(np.eye(2), 1.0, t1=1.0).check(1.0), r"matrix of shape \(2, 2\) is \(2,\)"),
        (lambda: ad.transition(OU, np.ones(2), 0.1, 0.2, ito=0.5), "ito=0.5 must be True or False"),
        (lambda: ad.LocalDSM(OU, ito=0.5), "ito=0.5 must be True or False"),
        (lambda: velocity(OU, None, np.ones(2), 0.1), r"score=None must be a function score\(y, t\)"),
        (lambda: solve_1d(OU, lambda: 1.0, [1.0], x_range=(-4, 4)), r"density is <lambda>\(\); .*density\(x\)"),
        (lambda: ad.linearize(LOGS, -np.ones(2), 0.1), r"drift is not finite at t=0\.1.*component \(0,\)"),
    ],
)
def test_bad_arguments(use, text):
    with pytest.raises((TypeError, ValueError), match=text):
        use()


def test_lists_are_states():
    """Where an array is taken, a list that makes one is too."""
    np.testing.assert_array_equal(
        ad.simulate(OU, [1.0, 2.0], [1.0], key=KEY, steps=2),
        ad.simulate(OU, np.array([1.0, 2.0]), [1.0], key=KEY, steps=2),
    )


@pytest.mark.parametrize(
    "loss", [ad.LocalDSM(OU, schedule=ad.FromZero()), ad.ISM(OU, steps=4), ad.ELBO(OU, NORMAL, steps=4)]
)
def test_loss_of_a_batch_says_that_it_takes_one_example(loss):
    network = ad.network.MLP((2,), ad.Clock(OU), key=KEY, width=4)
    with pytest.raises(ValueError, match=r"x has shape \(7, 2\), and one example has shape \(2,\).*takes one example"):
        loss(network, jnp.ones((7, 2)), key=KEY)
