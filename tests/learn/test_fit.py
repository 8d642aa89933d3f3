"""`fit`: what it refuses, what it chooses, and trained scores against exact ones."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest

import autodsm as ad
from autodsm.learn.choose import CHOICES, choose_objective, default_network, is_image
from autodsm.learn.fit import set_up
from autodsm.learn.train import TrainingError, initial_state, make_draws, make_round
from autodsm.network import MLP, Score, TimeFeatures
from autodsm.process.probes import is_linear
from autodsm.run.checkpoint import Checkpoints
from autodsm.run.config import outline
from autodsm.targets import Adapted, Kinetic, Local, Paths, Tabulated
from autodsm.targets.marginals import POINTS, SHARES, Marginals
from autodsm.targets.pilot import Pilot
from oracles import linear_moments

OU = ad.Process(lambda y, t: -y, 1.0, 1.0)
WELL = ad.Process(lambda y, t: y - y**3, 1.0, 1.0)
KEY = jax.random.key(0)
WELL_RANGE = (-2.0, 2.0)  # one table serves all tests


def normal(key, n):
    return 0.5 + 0.5 * jax.random.normal(key, (n, 1))


def small_network(process, shape=(1,), width=16, seed=3):
    clock = ad.Clock(process)
    return Score(MLP(shape, clock, key=jax.random.key(seed), width=width, depth=1), clock)


def arguments(**changes):
    objective = ad.LocalDSM(OU, schedule=ad.FromZero())
    given = dict(process=OU, y0=normal, objective=objective, network=small_network(OU), key=jax.random.key(0))
    return {**given, "steps": 16, "batch_size": 16, "progress": False, **changes}


def forbid_training(monkeypatch):
    def make_round(*args):
        raise AssertionError("training has begun")

    monkeypatch.setattr("autodsm.learn.train.make_round", make_round)


def contents(folder):
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*") if file.is_file()}


# Another configuration in the folder of a run

DATA = np.linspace(0.0, 1.0, 1000)[:, None]
OTHER_DATA = np.where(np.arange(1000)[:, None] == 777, 0.5, DATA)  # one sample of a thousand
AT_ZERO = np.zeros((4, 1))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({}, {"steps": 32}, "steps: 16 there, 32 here"),
        ({}, {"batch_size": 32}, "batch_size: 16 there, 32 here"),
        ({}, {"learning_rate": 1e-3}, "optimizer.learning_rate: 0.003 there, 0.001 here"),
        ({}, {"ema": 0.5}, "ema: 0.999 there, 0.5 here"),
        ({}, {"key": jax.random.key(1)}, r"key\[1\]: 0 there, 1 here"),
        ({}, {"process": ad.Process(lambda y, t: -1.01 * y, 1.0, 1.0)}, "process.drift: "),
        ({"y0": AT_ZERO}, {"y0": AT_ZERO, "process": ad.Process(lambda y, t: -2 * y, 1.0, 1.0)}, "process.drift: "),
        ({}, {"process": ad.Process(lambda y, t: -y, 1.01, 1.0)}, "process.noise: "),
        ({}, {"y0": lambda key, n: 1.01 * normal(key, n)}, "data: "),
        ({"y0": DATA}, {"y0": OTHER_DATA}, "data: "),
        ({}, {"objective": ad.LocalDSM(OU, lam=0.02, steps=16)}, "objective.target.schedule.type: 'FromZero' there"),
        ({}, {"objective": ad.LocalDSM(OU, schedule=ad.FromZero(), weighting="score")}, "objective.weighting: 'percep"),
        (
            {},
            {"network": small_network(OU, seed=4)},
            r"network.net.layers\[0\].weight: other values of float32\[11, 16\]",
        ),
        ({}, {"network": small_network(OU, width=8)}, r"network.net.layers\[0\].weight: "),
        ({}, {"optimizer": optax.adam(1e-3)}, "optimizer.name: 'adamw' there, 'given' here"),
        (
            {"optimizer": optax.adam(1e-3)},
            {"optimizer": optax.adam(2e-3)},
            r"optimizer.functions\S+: -0.001 there, -0.002 here",
        ),
        (
            {"optimizer": optax.adam(optax.cosine_decay_schedule(1e-3, 16))},
            {"optimizer": optax.adam(optax.cosine_decay_schedule(1e-3, 32))},
            r"optimizer.functions\S+: 16 there, 32 here",
        ),
    ],
)
def test_another_configuration_is_refused(first, second, told, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    forbid_training(monkeypatch)
    with pytest.raises(AssertionError, match="begun"):
        ad.fit(**arguments(**first), out=folder)
    before = contents(folder)
    with pytest.raises(ValueError, match=rf"(?s)run holds a run of another configuration:.*{told}.*another folder"):
        ad.fit(**arguments(**second), out=folder)
    assert contents(folder) == before
    with pytest.raises(AssertionError, match="begun"):  # the same is accepted
        ad.fit(**arguments(**first), out=folder)


def test_a_folder_of_something_else_is_refused(tmp_path, monkeypatch):
    forbid_training(monkeypatch)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="already exists"):
        ad.fit(**arguments(), out=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_distribution_is_described_alike_in_every_process():
    """The order of its leaves follows from hashes of strings, which differ between processes."""
    code = (
        "import json, jax.numpy as jnp, numpyro.distributions as d; from autodsm.run.config import outline;"
        "parts = d.Categorical(probs=jnp.array([0.3, 0.7])), d.Logistic(jnp.array([0.0, 1.0]), 2.0);"
        "print(json.dumps(outline(d.MixtureSameFamily(*parts))))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_descriptions_tell_priors_and_closures_apart():
    def base(scale):
        return lambda y, t: -scale * y

    def circle(n):
        return circle(n - 1) if n else told

    told = circle  # two functions that hold each other
    assert outline(dist.Normal(0.0, 1.0)) == outline(dist.Normal(0.0, 1.0)) != outline(dist.Normal(0.0, 2.0))
    assert outline(base(1.0)) == outline(base(1.0)) != outline(base(2.0))
    assert outline(circle)
    laws = [dist.Normal(0.0, scale) for scale in (1.0, 1.0, 2.0)]
    bases = [jax.grad(lambda y, law=law: law.log_prob(y)) for law in laws]
    assert outline(bases[0]) == outline(bases[1]) != outline(bases[2])


# What is refused at once


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"steps": 0}, ValueError, "steps=0 must be"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every=0"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"ema": 1.0}, ValueError, "ema=1.0 must be at least 0 and below 1"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate=-1.0 must be"),
        ({"learning_rate": 1e-3, "optimizer": optax.adam(1e-3)}, ValueError, "is for the default optimizer"),
        (
            {"batch_size": 7, "objective": ad.LocalDSM(OU, pairs_per_path=4)},
            ValueError,
            "batch_size=7 is too small: one path has 4 draws of 2 evaluations. Make it at least 8",
        ),
        ({"network": lambda y, t: y[:0]}, ValueError, r"returned shape \(0,\) for a state of shape \(1,\)"),
        ({"network": lambda y, t: (y, t)}, ValueError, "network returned a tuple of 2"),
        ({"network": lambda y, t: y}, ValueError, "network has no floating arrays to train"),
        ({"network": np.zeros(3)}, TypeError, "must be callable as network"),
        ({"y0": np.array([[0.0], [np.nan]])}, ValueError, "y0 holds values that are not finite"),
        ({"y0": lambda key, n: normal(key, n) / 0.0}, ValueError, "y0 holds values that are not finite"),
        ({"y0": 3.0}, ValueError, "y0=3.0 must be a sampler"),
        ({"y0": [[1.0], [1.0, 2.0]]}, TypeError, "y0=.* must be an array of numbers"),
        ({"network": lambda y, t: 1j * y}, TypeError, "network returned complex numbers"),
        ({"y0": lambda key, n: normal(key, n + 1)}, ValueError, "returned 257 states"),
        ({"process": ad.Process(lambda y, t: y[:0], 1.0, 1.0)}, ValueError, r"drift returned shape \(0,\)"),
    ],
)
def test_what_is_refused_before_any_work(changes, error, told, tmp_path, monkeypatch):
    forbid_training(monkeypatch)
    monkeypatch.setattr("autodsm.learn.choose.Pilot", lambda *args, **options: pytest.fail("the pilot has begun"))
    with pytest.raises(error, match=told):
        ad.fit(**arguments(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_outside_the_table(tmp_path):
    objective = ad.TabulatedDSM(WELL, y_range=WELL_RANGE)
    given = arguments(process=WELL, objective=objective, network=small_network(WELL), batch_size=64)

    def late(key, n):  # the examples that are looked at beforehand are few
        x = jax.random.uniform(key, (n, 1), minval=-1.0, maxval=1.0)
        return jnp.where(jnp.arange(n)[:, None] > 300, 2.5, x)

    told = r"data lie in \[-\d.\d+, 2.5\], outside y_range=\(-2, 2\) of the tabulated kernel"
    with pytest.raises(TrainingError, match=f"the loss is not finite at step 1: {told}"):
        ad.fit(**{**given, "y0": late}, out=tmp_path / "late")
    assert Checkpoints(tmp_path / "late" / "checkpoints").steps() == []
    for y0 in (lambda key, n: 2.5 + 0.0 * late(key, n), np.full((5, 1), 2.5)):
        for network in (given["network"], None):
            with pytest.raises(ValueError, match=r"data lie in \[2.5, 2.5\], outside y_range") as error:
                ad.fit(**{**given, "y0": y0, "network": network})
            assert not isinstance(error.value, TrainingError)


# Choices


def drawn(shape):
    return np.random.default_rng(1).normal(size=(8, *shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("drift", "linear"),
    [
        (lambda y, t: -y, True),
        (lambda y, t: 0.0 * y, True),
        (lambda y, t: 3.0 - (1.0 + t) * y, True),
        (lambda y, t: 1e4 * (y[::-1] - y) + 1e4, True),
        (lambda y, t: -jnp.tanh(y), False),
        (lambda y, t: -y - 1e-3 * y**3, False),
        (lambda y, t: y - 1e-3 * y**3, False),
        (lambda y, t: -jnp.where(y > 0, y, 1.001 * y), False),
        (lambda y, t: -jnp.clip(y, -6.0, 6.0), False),
        (lambda y, t: -y - jnp.where(t < 0.01, y**3, 0.0), False),  # soon over
        (lambda y, t: jnp.stack([-1e6 * y[0], -y[1] - 1e-3 * y[1] ** 3]), False),  # beside a large one
    ],
)
def test_is_linear(drift, linear):
    assert is_linear(ad.Process(drift, 1.0, 1.0), drawn((2,))) is linear


def test_is_linear_looks_as_far_as_the_noise_goes():
    def drift(y, t):
        return -jnp.where(jnp.abs(y) < 20.0, y, 20.0 * jnp.sign(y))

    assert not is_linear(ad.Process(drift, 30.0, 1.0), np.zeros((8, 1), np.float32))


MATRIX = np.array([[-1.0, 0.8], [-0.2, -0.5]], np.float32)
UNEVEN = np.array([[1.0, 2.0**59], [-(2.0**-61), 2.0]], np.float32)  # of coordinates in units of 2^30 and 2^-30
RING = (0.5 * np.eye(20, k=1) - np.eye(20)).astype(np.float32)


@pytest.mark.parametrize(
    ("process", "shape", "target"),
    [
        (OU, (1,), Local),
        (ad.Process(lambda y, t: MATRIX @ y, 1.0, 1.0), (2,), Local),
        (ad.cld(), (2, 1), Local),
        (WELL, (3,), "tabulated"),
        (ad.Process(lambda y, t: MATRIX @ jnp.tanh(y), 1.0, 1.0), (2,), Adapted),
        (ad.Process(lambda y, t: RING @ y, 1.0, 1.0), (20,), Adapted),
        (ad.systems.swimmer().process, (2,), Kinetic),
        (ad.Process(lambda y, t: jnp.stack([y[1], jnp.sin(y[2]), -y[2]]), np.array([0.0, 0.0, 1.0]), 1.0), (3,), Local),
        (ad.Process(lambda y, t: -(y**3), np.array([0.0, 1.0]), 1.0), (2,), Local),
    ],
)
def test_the_objective_follows_the_process(process, shape, target):
    x = drawn(shape)
    objective, reason = choose_objective(Pilot(process, x if target != "tabulated" else 0.4 * np.tanh(x), key=KEY))
    if target == "tabulated":
        assert reason.startswith("TabulatedDSM")
        assert type(objective.target) is Tabulated
        return
    assert type(objective.target) is target
    if target is Local:
        assert objective.target.antithetic
        from_zero = is_linear(process, x)
        assert isinstance(objective.target.schedule, ad.FromZero) is from_zero
        assert reason.startswith("DSM from s = 0" if from_zero else "LocalDSM, antithetic pairs")


@pytest.mark.parametrize(
    ("process", "exact"),
    [
        (ad.vp(ad.InverseBeta()), True),  # fast at its end, and for a moment only
        (ad.Process(lambda y, t: -1e8 * y, 1.0, 1.0), True),  # nothing depends on time: it costs little
        (ad.Process(lambda y, t: -1e4 * y, lambda t: jnp.sqrt(1.0 + t), 1.0), False),
        (ad.Process(lambda y, t: -(1.0 + t) * (UNEVEN @ y), np.array([2.0**30, 2.0**-30]), 1.0), True),
        (ad.Process(lambda y, t: -1e3 * (1.0 + t) * (UNEVEN @ y), np.array([2.0**30, 2.0**-30]), 1.0), False),
    ],
)
def test_linear_drifts_that_are_stiff_and_depend_on_time_get_no_kernel_from_zero(process, exact):
    """Whatever the units of the coordinates are."""
    pilot = Pilot(process, np.array([2.0**30, 2.0**-30]) * drawn((2,)), key=KEY)
    found = next(choice for choice in CHOICES if choice.objective.startswith("DSM from s = 0")).make(pilot)
    assert (found is not None) is exact


def test_a_table_that_cannot_be_built_is_done_without():
    """Seventy laws are too many for tables; fit goes on without them, unless they were asked for."""
    process = ad.Process(lambda y, t: -jnp.linspace(1.0, 2.0, 70) * y**3, 1.0, 1.0)
    options = dict(key=jax.random.key(0), network=small_network(process, (70,)))
    y0 = np.tanh(drawn((70,)))
    setup = set_up(process, y0, **options)
    assert type(setup.objective.target) is Adapted
    assert "since there is no table: the coordinates follow 70 different laws" in setup.reason
    assert setup.rounds.pairs == setup.objective.pairs_per_path > 1
    with pytest.raises(ValueError, match="70 different laws"):
        set_up(process, y0, objective=ad.TabulatedDSM(process), **options)


def test_keys_of_a_run_are_used_once():
    """Examples, pilot, network and training draw from different keys."""
    seen = []

    def y0(key, n):
        if not isinstance(key, jax.core.Tracer):
            seen.append(np.asarray(jax.random.key_data(key)).tobytes())
        return normal(key, n)

    process = ad.Process(lambda y, t: -jnp.tanh(y), 1.0, 1.0)
    options = dict(width=8, depth=1, key=jax.random.key(0))
    set_up(process, y0, objective=ad.ISM(process, pairs_per_path=2), **options)
    assert len(seen) >= 3
    assert len(set(seen)) == len(seen)


# Against exact scores


@eqx.filter_jit
def evaluated(score, ys, t):
    return jax.vmap(lambda y: score(y, t))(ys)


def error(score, t, y, exact, weight=None):
    """`E|s_θ − s|² / E|s|²`."""
    found = np.asarray(evaluated(score, jnp.asarray(y, jnp.float32), jnp.float32(t)))
    weight = np.ones(len(y)) if weight is None else weight
    return float(weight @ np.sum((found - exact) ** 2, -1) / (weight @ np.sum(exact**2, -1)))


@pytest.mark.parametrize("name", ["one", "two", "pathwise"])
def test_a_gaussian_score(name):
    """`dy = A y dt + dw` from N(m, ¼): moments by the equations of `reference`."""
    A = np.array([[-1.0]]) if name == "one" else MATRIX.astype(float)
    d = len(A)
    start = np.array([1.0, -0.5])[:d]
    process = ad.Process((lambda y, t: -y) if d == 1 else (lambda y, t: MATRIX @ y), 1.0, 2.0)
    objective = None
    if name == "pathwise":
        objective = ad.PathwiseDSM(process, steps=32, pairs_per_path=8)

    def y0(key, n):
        return start.astype(np.float32) + 0.5 * jax.random.normal(key, (n, d))

    network = small_network(process, (d,), width=32)  # which knows nothing of Gaussians
    options = dict(steps=500, batch_size=128, learning_rate=1e-2, ema=0.98, progress=False)
    model = ad.fit(process, y0, key=jax.random.key(0), objective=objective, network=network, **options)
    errors = []
    for t in (0.1, 0.4, 1.0, 2.0):
        mean, cov = linear_moments(lambda s: A, lambda s: 0.0, lambda s: np.eye(d), start, 0.0, t, cov=0.25 * np.eye(d))
        y = np.random.default_rng(0).multivariate_normal(mean, cov, 4000)
        errors.append(error(model.score, t, y, -(y - mean) @ np.linalg.inv(cov)))
    assert np.mean(errors) < 1e-2


def test_the_score_of_a_double_well():
    """The whole of `fit`, with its own network, against a grid solution of the Fokker–Planck equation."""

    def y0(key, n):
        return 0.3 + 0.4 * jnp.clip(jax.random.normal(key, (n, 1)), -4.0, 4.0)

    options = dict(steps=800, batch_size=128, learning_rate=1e-2, ema=0.99, width=32, depth=2, progress=False)
    objective = ad.TabulatedDSM(WELL, y_range=WELL_RANGE)
    model = ad.fit(WELL, y0, key=jax.random.key(0), objective=objective, **options)
    times = (0.05, 0.2, 0.5, 1.0)
    grid = ad.fokker_planck.solve_1d(
        WELL, lambda x: np.exp(-0.5 * ((x - 0.3) / 0.4) ** 2), times, x_range=(-4.0, 4.0), cells=800, steps=100
    )
    x, exact = grid.x[:, None], grid.score()[..., None]
    errors = [error(model.score, t, x, s, q) for t, s, q in zip(times, exact, grid.q, strict=True)]
    guess = [error(model.score.base.held, t, x, s, q) for t, s, q in zip(times, exact, grid.q, strict=True)]
    assert np.mean(guess) > 0.2  # the Gaussian that training starts from
    assert np.mean(errors) < 2e-2


def test_a_frame_that_is_off_is_mended_in_all_of_many_coordinates():
    """Deviations a tenth too large in each of a hundred coordinates: much for a network, one number for the gain."""
    d = 100
    std = np.sqrt(0.5 + (0.25 - 0.5) * np.exp(-2.0 * SHARES))
    marginals = Marginals(jnp.zeros((POINTS, d)), jnp.asarray(np.outer(1.1 * std, np.ones(d)), float), 1.0)
    options = dict(width=64, depth=2, drift_basis=False)
    network = default_network(OU, (d,), marginals, None, key=jax.random.key(1), **options)
    options = dict(objective=ad.LocalDSM(OU, schedule=ad.FromZero()), network=network, batch_size=128, progress=False)
    model = ad.fit(OU, lambda key, n: 0.5 * jax.random.normal(key, (n, d)), key=jax.random.key(0), steps=400, **options)
    for t in (0.1, 0.4, 1.0):
        var = 0.5 + (0.25 - 0.5) * np.exp(-2.0 * t)
        y = np.sqrt(var) * np.random.default_rng(0).normal(size=(2000, d))
        assert error(network, t, y, -y / var) == pytest.approx((1.0 - 1.1**-2) ** 2, rel=0.05)  # before: .030
        assert error(model.score, t, y, -y / var) < 0.005


def test_the_mean_of_a_frame_follows_curves(x64):
    """A cubic exactly; a circle up to the remainder of a cubic through four points at distances h, ω⁴h⁴/24."""
    grid = 5.0 * SHARES
    known = [lambda t: 1.0 - 2.0 * t + 3.0 * t**2 - t**3, lambda t: np.cos(np.pi * t), lambda t: np.sin(np.pi * t)]
    mean = jnp.asarray(np.stack([f(grid) for f in known], axis=1))
    marginals = Marginals(mean, jnp.ones((POINTS, 3)), 5.0)
    times = np.concatenate([np.random.default_rng(0).uniform(0.0, 5.0, 200), [0.0, 0.01, 4.99, 5.0]])
    found = np.asarray(jax.vmap(lambda t: marginals.at(t)[0])(jnp.asarray(times)))
    np.testing.assert_allclose(found[:, 0], known[0](times), rtol=1e-10, atol=1e-10)
    remainder = (np.pi * np.diff(grid).max()) ** 4 / 24  # 2.7e-4; linearly it would be 10e-3
    for k in (1, 2):
        np.testing.assert_allclose(found[:, k], known[k](times), rtol=0, atol=remainder)


def test_the_affine_part_of_a_frame(x64):
    """`(a_t + (b_t + c_t) z)/γ` beside the network, by hand; nothing before training."""
    marginals = Marginals(jnp.full((POINTS, 3), 0.5), jnp.full((POINTS, 3), 2.0), 1.0)
    network = default_network(OU, (3,), marginals, None, key=jax.random.key(1), width=8, depth=1)
    y, t = jnp.array([1.0, -2.0, 4.0]), 0.3
    z = (y - 0.5) / 2.0
    np.testing.assert_allclose(network(y, t), -z / 2.0, rtol=1e-12)
    weights = 0.1 * (1.0 + jnp.arange(len(network.net.gain)))
    gain = weights[0] + weights[1:] @ TimeFeatures(ad.Clock(OU))(t)
    rates = np.array([1.0, 2.0, 3.0])
    place = 0.5 * t + 0.5 * np.log1p(1e3 * t) / np.log1p(1e3)
    table = np.linspace(0.0, 1.0, POINTS)[:, None] * rates  # linear in the place, as between the points
    given = (jnp.asarray(table), jnp.asarray(1.0 - table), weights)
    other = eqx.tree_at(lambda network: (network.net.shift, network.net.scale, network.net.gain), network, given)
    affine = place * rates + (1.0 - place * rates + gain) * z
    np.testing.assert_allclose(other(y, t), -z / 2.0 + affine / network.gamma(t), rtol=1e-12)


def test_a_score_obeys_steins_identities_at_all_times():
    """A frame off by waves of time, opposite ones in x and y: E[s] = 0 and E[s_i (y − m)_i] = −1 all the same.

    The waves are too short for a network of eight numbers, and for the features of time.
    """
    std = np.sqrt(0.5 + (0.25 - 0.5) * np.exp(-2.0 * SHARES))
    waves = np.outer(np.sin(12.0 * np.pi * SHARES), [0.15, -0.15])
    marginals = Marginals(jnp.asarray(waves, float), jnp.asarray(std[:, None] * (1.0 + waves), float), 1.0)
    network = default_network(OU, (2,), marginals, None, key=jax.random.key(1), width=8, depth=1, drift_basis=False)
    options = dict(objective=ad.LocalDSM(OU, schedule=ad.FromZero()), network=network, steps=1000, progress=False)
    model = ad.fit(OU, lambda key, n: 0.5 * jax.random.normal(key, (n, 2)), key=jax.random.key(0), **options)
    z = np.random.default_rng(0).normal(size=(20_000, 2))
    before, after = [], []
    for t in np.arange(0.1, 1.0, 0.05):
        y = np.sqrt(0.5 + (0.25 - 0.5) * np.exp(-2.0 * t)) * z
        for score, found in ((network, before), (model.score, after)):
            s = np.asarray(jax.vmap(lambda y, t=t, score=score: score(y, t))(jnp.asarray(y, jnp.float32)))
            found.append(np.concatenate([np.mean(s, axis=0), np.mean(s * y, axis=0) + 1.0]))
    assert np.sqrt(np.mean(np.square(before))) > 0.2
    assert np.sqrt(np.mean(np.square(after))) < 0.05


def test_waves_of_the_default_network_fade_where_noise_smooths_everything():
    prior = dist.Normal(0.0, 1.0)

    def spreads(process, shape, prior):
        marginals = Marginals(jnp.zeros((POINTS, *shape)), jnp.full((POINTS, *shape), 1.5), 1.0)
        found = default_network(process, shape, marginals, prior, key=jax.random.key(0), width=8, depth=1)
        net = found.net if prior is not None else found.net.net
        assert net.fourier
        np.testing.assert_array_equal(found.spread.value, np.full(shape, 1.5))
        return None if net.spread is None else net.spread.value.tolist()

    assert spreads(ad.vp(), (2,), prior) == [1.5, 1.5]
    assert spreads(ad.vp(), (2,), None) is None
    assert spreads(ad.cld(), (2, 1), prior) is None  # noise in the velocity alone: positions keep their edges


def test_a_large_coupled_state_takes_its_own_number_of_draws(capsys):
    """What `prepare` chooses for it is what training is planned with."""
    system = ad.systems.particles()
    network = small_network(system.process, (5, 2))
    model = ad.fit(*system[:2], key=jax.random.key(0), network=network, steps=3, batch_size=256)
    assert "PathwiseDSM" in capsys.readouterr().out
    assert model.objective.pairs_per_path == 32
    assert all(np.isfinite(row["loss"]) for row in model.history)
    objective = ad.PathwiseDSM(system.process, steps=16, pairs_per_path=24)  # more is given
    small = set_up(*system[:2], key=jax.random.key(0), objective=objective, network=network, steps=3, batch_size=48)
    assert small.rounds.pairs == small.objective.pairs_per_path == 24


def test_images_get_a_unet():
    """Towards N(0, 1), where the variance is at t1 up to exp(−10), by some 4,000 states of 64 coordinates."""
    process, prior, images = ad.vp(), dist.Normal(0.0, 1.0), ad.data.digits()
    setup = set_up(process, images, prior=prior, width=8, batch_size=8, key=jax.random.key(0))
    net = setup.network.net
    assert isinstance(net, ad.network.UNet)
    assert [len(net.down), net.enter.weight.shape[-1]] == [2, 8]  # 8×8 and 4×4
    spread = np.asarray(setup.network.spread.value)
    assert spread.shape == (1, 8, 8)
    assert np.abs(spread - 1.0).max() < 4.5 / np.sqrt(2 * 4000 * 64)
    y = jnp.ones((1, 8, 8))
    np.testing.assert_allclose(setup.network(y, 0.5), -y, rtol=1e-6)  # ∇ log of the prior, to start with
    with pytest.raises(ValueError, match="depth=2 is not for the U-Net"):
        set_up(process, images, depth=2, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((1, 8, 8), True),
        ((3, 32, 32), True),
        ((1, 9, 13), True),
        ((2, 3, 32, 32), True),  # with velocities
        ((16, 8, 8), True),
        ((64,), False),
        ((8, 8), False),
        ((50, 3), False),
        ((1, 4, 4), False),  # few enough for an MLP
        ((3, 100, 2), False),  # particles in planes
        ((100, 4, 4), False),  # small matrices
    ],
)
def test_what_an_image_is(shape, image):
    assert is_image(shape) == image


def test_moments_of_a_pilot_in_parts():
    """Of 200 coordinates the pilot goes in eight parts; together they are those of all states at once."""
    process, n = ad.vp(), 4096
    forward = Paths(process, 8)
    x = np.random.default_rng(0).normal(1.0, 0.5, (n, 200)).astype(np.float32)
    key = jax.random.key(0)
    found = Marginals.estimate(process, lambda key, n: x[:n], forward, key=key, n=n)
    times = process.t1 * jnp.maximum(jnp.asarray(SHARES), 1e-6)
    keys = jax.random.split(jax.random.split(key)[1], n)
    states = np.asarray(jax.jit(jax.vmap(lambda x, k: forward.states(x, times, key=k)[::32]))(x, keys))
    np.testing.assert_allclose(found.mean[::32], states.mean(0, np.float64), atol=1e-6)
    np.testing.assert_allclose(found.std[::32], states.std(0, np.float64), rtol=1e-5)


def test_moments_of_a_pilot_whose_parts_are_not_equal():
    """Of 200 coordinates a part has 512 states: 700 are one of 512 and one of 188."""
    process, n, key = ad.vp(), 700, jax.random.key(0)
    forward = Paths(process, 8)
    x = np.random.default_rng(0).normal(1.0, 0.5, (n, 200)).astype(np.float32)
    found = Marginals.estimate(process, lambda key, n: x[:n], forward, key=key, n=n)
    times = process.t1 * jnp.maximum(jnp.asarray(SHARES), 1e-6)
    keys = jax.random.split(jax.random.split(key)[1], n)
    states = np.asarray(jax.jit(jax.vmap(lambda x, k: forward.states(x, times, key=k)[::32]))(x, keys))
    np.testing.assert_allclose(found.mean[::32], states.mean(0, np.float64), atol=1e-6)
    np.testing.assert_allclose(found.std[::32], states.std(0, np.float64), rtol=1e-5)


def test_deviations_of_coordinates_in_different_units(x64):
    """Of one in units of 10⁻⁹, of one that is always 5, and of one that is always 0."""
    process = ad.Process(lambda y, t: -y * jnp.array([1.0, 1.0, 0.0, 0.0]), np.array([1.0, 1e-9, 0.0, 0.0]), 1.0)
    start = np.array([0.0, 0.0, 5.0, 0.0])
    found = Marginals.estimate(process, start[None], Paths(process, 32), key=jax.random.key(0))
    exact = np.sqrt(0.5 * -np.expm1(-2.0))
    np.testing.assert_allclose(found.std[-1, :2], exact * np.array([1.0, 1e-9]), rtol=4.5 / np.sqrt(2 * 4096))
    assert np.all(found.std[:, 2] > 0)
    assert np.all(found.std[:, 3] > 0)
    np.testing.assert_allclose(found.standardize(jnp.asarray(start), 0.5)[2:], 0.0, atol=1e-9)


def test_linear_processes_get_kernels_of_few_coordinates_only():
    """Two blocks of fifty: a kernel from t = 0 would hold matrices of fifty rows for every draw."""
    system = ad.systems.harmonic_particles()
    x = np.asarray(system.y0(jax.random.key(0), 8))
    assert "PathwiseDSM" in choose_objective(Pilot(system.process, x, key=KEY))[1]
    few = ad.systems.harmonic_particles(3)
    assert "from s = 0" in choose_objective(Pilot(few.process, few.y0, key=KEY))[1]


# The stationary score of the drift


def test_the_default_network_uses_the_drift_where_it_tells_the_stationary_score():
    """And is held where the training of the objective starts."""
    options = dict(key=jax.random.key(0), width=8, depth=1, batch_size=64, steps=3)
    setup = set_up(OU, normal, objective=ad.LocalDSM(OU, schedule=ad.FromZero(), t0=0.02), **options)
    network = setup.network
    np.testing.assert_allclose(network.relaxation.stationary.value(jnp.array([0.3])), -0.6, rtol=1e-6)
    assert network.t0 == 0.02
    assert set_up(OU, normal, drift_basis=False, **options).network.relaxation is None
    turned = ad.Process(lambda y, t: -(1.0 + t) * y, 1.0, 1.0)
    assert set_up(turned, normal, **options).network.relaxation is None
    with pytest.raises(ValueError, match=r"drift_basis=True needs a drift .* depends on time"):
        set_up(turned, normal, drift_basis=True, **options)
    with pytest.raises(ValueError, match="that of the given prior"):
        set_up(OU, normal, prior=dist.Normal(0.0, np.sqrt(0.5)), drift_basis=True, **options)


def test_a_score_that_is_held_where_it_is_trained_is_refused():
    with pytest.raises(ValueError, match=r"held before t0=0.001, and the objective trains it from t0=1e-05"):
        set_up(OU, normal, **{k: v for k, v in arguments().items() if k in ("key", "network")},
               objective=ad.LocalDSM(OU, schedule=ad.FromZero(), t0=1e-5))  # fmt: skip


class Known(Local):
    """The exact score of OU from N(0, ¼) or of `dy = y dt + dw` from there, at states that it has."""

    def draw(self, x, times, *, key):
        found = super().draw(x, times, key=key)
        rate = self.process.f(jnp.ones_like(x), 0.0)[0]
        variance = 0.25 * jnp.exp(2.0 * rate * times) + jnp.expm1(2.0 * rate * times) / (2.0 * rate)
        return found._replace(score=-found.y / variance.reshape(-1, *(1 for _ in found.y.shape[1:])))


@pytest.mark.parametrize("rate", [-1.0, 1.0])
def test_the_drift_as_a_base_does_no_harm(rate):
    """A base that is exact already, towards equilibrium and away from it: the gain may not make the score worse."""
    process = ad.Process(lambda y, t: rate * y, 1.0, 1.0)
    std = np.sqrt(0.25 * np.exp(2 * rate * SHARES) + np.expm1(2 * rate * SHARES) / (2 * rate))
    marginals = Marginals(jnp.zeros((POINTS, 2)), jnp.asarray(np.outer(std, np.ones(2)), float), 1.0)
    target = Known(process, ad.FromZero(), Paths(process, 8))
    errors = {}
    for basis in (True, False):
        network = default_network(
            process, (2,), marginals, None, key=jax.random.key(1), width=16, depth=1, drift_basis=basis
        )
        options = dict(objective=ad.DSM(process, target), network=network, steps=400, progress=False, ema=0.98)
        model = ad.fit(process, lambda key, n: 0.5 * jax.random.normal(key, (n, 2)), key=jax.random.key(0), **options)
        found = []
        for t in (0.01, 0.1, 0.4, 1.0):
            var = 0.25 * np.exp(2 * rate * t) + np.expm1(2 * rate * t) / (2 * rate)
            y = np.sqrt(var) * np.random.default_rng(0).normal(size=(2000, 2))
            found.append(error(model.score, t, y, -y / var))
        errors[basis] = found
    assert np.max(errors[True]) < 1e-3
    assert np.mean(errors[True]) < 2 * np.mean(errors[False]) + 1e-5


# Units: a change of them changes nothing but numbers


def in_units(process, y0, lengths, seconds):
    """The same process and initial law with coordinate i in units 1/lengths[i], and time in units 1/seconds."""
    lengths = np.asarray(lengths, np.float32)

    def scaled(g):
        return (lengths[:, None] if jnp.ndim(g) == 2 else lengths) * g / np.sqrt(seconds)

    def drift(y, t):
        return lengths * process.f(y / lengths, t / seconds) / seconds

    g = process.diffusion
    g = (lambda t: scaled(process.g(t / seconds))) if callable(g) else scaled(g)
    return ad.Process(drift, g, seconds * process.t1), lambda key, n: lengths * y0(key, n)


def first_losses(process, y0, **options):
    """What training sets up, and its first losses."""
    setup = set_up(process, y0, key=jax.random.key(0), steps=48, batch_size=64, width=16, depth=1, **options)
    draws = make_draws(setup.objective, setup.rounds, setup.rounds.round_steps)(y0, setup.key, jnp.asarray(0))
    run = make_round(setup.objective, setup.network, setup.optimizer, setup.rounds)
    return setup, np.asarray(run(initial_state(setup.network, setup.optimizer), draws)[1])


def two(key, n):
    return jnp.array([0.3, -0.2]) + 0.5 * jax.random.normal(key, (n, 2))


UNIT_CASES = {
    "TabulatedDSM": (ad.Process(lambda y, t: -jnp.tanh(y), 0.7, 2.0), two),
    # Not y[::-1], which is the same: with the compiler's options of these tests, reversals take minutes.
    "PathwiseDSM": (ad.Process(lambda y, t: y - y**3 + 0.5 * (jnp.roll(y, 1) - y), 0.7, 2.0), two),
    "DSM from s = 0": (ad.Process(lambda y, t: -jnp.array([[1.0, 0.5], [0.2, 2.0]]) @ y, 0.7, 2.0), two),
    "KineticDSM": ad.systems.swimmer()[:2],
    "LocalDSM": (ad.Process(lambda y, t: -(y**3), np.array([0.0, 0.7]), 1.0), two),
}


@pytest.mark.parametrize("name", UNIT_CASES)
def test_units_do_not_change_training(name):
    """Factors are powers of two, so that rounding is the same. Without a kernel each coordinate has its own."""
    process, y0 = UNIT_CASES[name]
    before, expected = first_losses(process, y0)
    assert before.reason.startswith(name)
    other = 2.0**-30
    count = y0(jax.random.key(0), 1).shape[-1]
    changes = [([2.0**30, other][:count], 2.0**-30), ([2.0**-30, 1.0 / other][:count], 2.0**30)]
    for lengths, seconds in changes if name == "PathwiseDSM" else changes[:1]:  # the others' pilots compile longer
        setup, losses = first_losses(*in_units(process, y0, lengths, seconds))
        assert setup.reason == before.reason
        assert setup.rounds == before.rounds
        assert setup.plan.steps == before.plan.steps
        np.testing.assert_allclose(losses, expected, rtol=1e-3)


def test_a_poor_score_is_told_at_the_end(recwarn):
    """Two steps from a frame that knows the first two moments only, of a law with two peaks; and the model's report."""

    def y0(key, n):
        return jnp.sign(jax.random.normal(key, (n, 1))) + 0.1 * jax.random.normal(key, (n, 1))

    options: dict = dict(objective=ad.LocalDSM(OU, schedule=ad.FromZero()), width=8, depth=1, steps=2, progress=False)
    with pytest.warns(UserWarning, match=r"the trained score is poor. Inconsistent: .* the squared error is"):
        ad.fit(OU, y0, key=KEY, check=True, **options)
    recwarn.clear()
    model = ad.fit(OU, y0, key=KEY, **options)  # a trial of a few steps
    assert not [each for each in recwarn if "poor" in str(each.message)]
    report = model.diagnose(key=KEY, times=[0.1], n=500, flow=False, rates=False)
    assert report.verdict == "inconsistent"
