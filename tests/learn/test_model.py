"""Models that are kept, opened elsewhere, and asked for what they are good for."""

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.learn.axes import check_axes, path_like
from autodsm.learn.model import Model
from autodsm.learn.saved import FILE
from autodsm.network import MLP, Score
from autodsm.run.archive import ArchiveError
from autodsm.run.config import Config, Fingerprint

KEPT = Path(__file__).parent / "kept"
OWN = ad.Process(lambda y, t: -y, 1.0, 1.0)
VP = ad.vp(ad.LinearBeta(0.1, 10.0))
POINT = jnp.array([0.3, -0.4])
STEPS = 16


def normal(key, n):
    return 0.5 + 0.5 * jax.random.normal(key, (n, 2))


def mlp(process, seed=0):
    return MLP((2,), ad.Clock(process), key=jax.random.key(seed), width=8, depth=1)


def arguments(process, **changes):
    objective = ad.LocalDSM(process, schedule=ad.FromZero())
    given = dict(network=Score(mlp(process), ad.Clock(process)), objective=objective, key=jax.random.key(0))
    return {"process": process, "y0": normal, **given, "steps": STEPS, "batch_size": 16, "progress": False, **changes}


class Mine(eqx.Module):
    net: MLP
    scale: np.ndarray

    def __call__(self, y, t):
        return self.net(y, t) - y * self.scale


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run of a drift of the user's own."""
    folder = tmp_path_factory.mktemp("own") / "run"
    return folder, ad.fit(**arguments(OWN), out=folder)


@pytest.fixture(scope="module")
def generative(tmp_path_factory):
    """A model of shipped parts, saved."""
    model = ad.fit(**arguments(VP, prior=dist.Normal(0.0, 1.0)))
    file = tmp_path_factory.mktemp("vp") / "vp.autodsm"
    model.save(file)
    return file, model


def same(one, two):
    for t in (0.0, 0.01, 0.7):
        np.testing.assert_array_equal(one.score(POINT, t), two.score(POINT, t))
        np.testing.assert_array_equal(one.last(POINT, t), two.last(POINT, t))


def test_a_model_of_shipped_parts_needs_nothing(generative, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file, model = generative
    again = ad.load(file)
    same(model, again)
    assert again.history == model.history
    assert again.config == model.config
    assert again.step == STEPS
    assert repr(again) == repr(model)
    options = dict(key=jax.random.key(1), steps=3)
    np.testing.assert_array_equal(again.sample(5, **options), model.sample(5, **options))
    again.save(tmp_path / "copy.autodsm")
    assert (tmp_path / "copy.autodsm").read_bytes() == file.read_bytes()


def test_a_repr_says_what_it_is(generative):
    said = repr(generative[1])
    for text in ("vp(beta=LinearBeta", "(2,)", "MLP, 1 hidden layer of 8", "DSM, as given", "16 of 16 steps", "loss"):
        assert text in said


def test_a_drift_of_the_users_is_asked_for_where_it_is_needed(own):
    folder, model = own
    again = ad.load(folder)
    same(model, again)
    assert (again.process, again.t1, again.shape) == (None, 1.0, (2,))
    with pytest.raises(ValueError, match=r"flow needs the drift, which is your own.*ad.load\(path, process=process\)"):
        again.flow(POINT, [0.0, 1.0])
    with pytest.raises(ValueError, match="this model has none: a physical system is carried forwards"):
        model.sample(3, key=jax.random.key(0))
    rounded = ad.Process(lambda y, t: -(y * 3.0) / 3.0, 1.0, 1.0)
    found = ad.load(folder, process=rounded).velocity(POINT, 0.5)
    np.testing.assert_allclose(found, model.velocity(POINT, 0.5), rtol=1e-5)


@pytest.mark.parametrize(
    ("process", "text"),
    [
        (ad.Process(lambda y, t: -1.01 * y, 1.0, 1.0), r"process.drift: component \(0,\) is .* there, .* here"),
        (ad.Process(lambda y, t: -y, 1.01, 1.0), "process.noise: 1 there, 1.01 here"),
        (ad.Process(lambda y, t: -y, jnp.ones(2), 1.0), r"process.noise: of shape \(\) there, \(2,\) here"),
        (ad.Process(lambda y, t: -y, 1.0, 2.0), "process.t1: 1.0 there, 2.0 here"),
        (ad.systems.particles(t1=1.0).process, "process: it does not take states of shape"),
    ],
)
def test_another_process_is_refused(own, process, text):
    with pytest.raises(ValueError, match=f"(?s)model of another process.*{text}.*Give the process of the training"):
        ad.load(own[0], process=process)


def test_a_network_and_a_prior_of_the_users(tmp_path):
    class Law:
        def sample(self, key, shape):
            return jax.random.normal(key, shape)

        def log_prob(self, y):
            return -0.5 * y**2

    mine = Mine(mlp(VP), np.ones(2, np.float32))
    model = ad.fit(**arguments(VP, network=mine, prior=Law()))
    file = tmp_path / "mine.autodsm"
    model.save(file)
    with pytest.raises(ValueError, match=r"the network .*, Mine, is your own.*network=network"):
        ad.load(file)
    with pytest.raises(ValueError, match=r"of another network: .net.layers\[0\].weight is float32 of shape"):
        ad.load(file, network=Mine(MLP((2,), ad.Clock(VP), key=jax.random.key(0), width=4, depth=1), mine.scale))
    again = ad.load(file, network=Mine(mlp(VP, seed=5), np.zeros(2, np.float32)))
    same(model, again)
    with pytest.raises(ValueError, match="sample needs the prior, Law, which is your own"):
        again.sample(3, key=jax.random.key(0))
    assert ad.load(file, network=mine, prior=Law()).sample(3, key=jax.random.key(0), steps=2).shape == (3, 2)


def test_an_interrupted_run_is_a_model(tmp_path, monkeypatch):
    """Of its newest checkpoint, whether a signal or a kill ended it."""

    class Stop(Exception):
        pass

    def stop(step, score):
        if step >= 8:
            raise Stop

    folder = tmp_path / "run"
    monkeypatch.setattr("autodsm.learn.train.MAX_ROUND", 4)
    with pytest.raises(Stop):
        ad.fit(**arguments(OWN), out=folder, checkpoint_every=4, each_round=stop)
    model = ad.load(folder)
    assert (model.step, model.config.steps, len(model.history)) == (4, 16, 1)
    assert "4 of 16 steps" in repr(model)
    assert np.any(model.score(POINT, 0.5) != ad.load(folder / FILE).score(POINT, 0.5))  # that is of step 0


def test_a_changed_drift_is_told_from_rounding(own):
    """A run goes on where all that was computed is what it was, up to rounding; and is not trained again."""
    folder, model = own
    before = (folder / FILE).read_bytes()
    shifted = jax.tree.map(lambda x: x * (1 + 1e-6) if eqx.is_inexact_array(x) else x, mlp(OWN))
    rounded = ad.Process(lambda y, t: -(y * 3.0) / 3.0, 1.0, 1.0)
    again = ad.fit(**arguments(rounded, network=Score(shifted, ad.Clock(OWN))), out=folder)
    same(model, again)
    assert (folder / FILE).read_bytes() == before
    with pytest.raises(
        ValueError, match=r"(?s)another configuration:.*process.drift: component .* is .* there, .* here"
    ):
        ad.fit(**arguments(ad.Process(lambda y, t: -1.01 * y, 1.0, 1.0)), out=folder)


def test_a_copied_run_goes_on_on_an_older_machine(own, tmp_path):
    """Its instructions round otherwise, so that initial weights are not the same to the bit."""
    shutil.copytree(own[0], tmp_path / "copy")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_model as tests, autodsm as ad;"
    code += "print('at step', ad.fit(**tests.arguments(tests.OWN), out=sys.argv[1]).step)"
    environment = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"}
    command = [sys.executable, "-c", code, str(tmp_path / "copy")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"at step {STEPS}" in done.stdout


# Files that last


def test_the_kept_file_gives_the_kept_scores():
    """A file of the first format, with a network of most parts, and a process and a start by name."""
    model = ad.load(KEPT / "model-1.autodsm")
    kept = np.load(KEPT / "scores-1.npz")
    found = [[f(y, t) for y, t in zip(kept["y"], kept["t"], strict=True)] for f in (model.score, model.last)]
    np.testing.assert_allclose(found, kept["scores"], rtol=1e-4, atol=1e-5)  # rounding of another machine
    assert model.process.recipe.name == "double_well"
    assert (KEPT / "model-1.autodsm").stat().st_size < 50_000


def test_configurations_of_other_releases():
    found = ad.load(KEPT / "model-1.autodsm").config.to_json()
    assert Config.from_json(found, "config.json").to_json() == found
    for name in ("command", "prior", "version", "library"):  # have defaults
        found.pop(name)
    assert Config.from_json(found, "config.json").prior is None
    with pytest.raises(ValueError, match=r"c.json has a field 'colour'.*written by autodsm 9.0"):
        Config.from_json({**found, "colour": "red", "library": {"autodsm": "9.0"}}, "c.json")
    with pytest.raises(ValueError, match=r"c.json has no field 'steps'"):
        Config.from_json({k: v for k, v in found.items() if k != "steps"}, "c.json")


def test_another_process_opens_models_and_runs_exports(generative, tmp_path):
    """The same scores to the bit; and exports where this library cannot be imported."""
    file, model = generative
    y, t = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32), np.float32([0.01, 0.3, 0.9])
    np.savez(tmp_path / "at.npz", y=y, t=t)
    model.export(tmp_path / "score")
    model.export(tmp_path / "sampler", sampler=True, steps=20)
    code = """
import sys, numpy as np, jax, jax.export
sys.modules["autodsm"] = None
try:
    import autodsm
    raise SystemExit("it can be imported")
except ImportError:
    pass
at = np.load("at.npz")
read = lambda name: jax.export.deserialize(bytearray(open(name, "rb").read()))
scores = read("score").call(at["y"], at["t"])
starts = np.random.default_rng(1).normal(size=(500, 2)).astype(np.float32)
drawn = read("sampler").call(starts, np.array([0, 7], np.uint32))
del sys.modules["autodsm"]
import autodsm
model = autodsm.load(sys.argv[1])
loaded = [np.asarray(model.score(y, t)) for y, t in zip(at["y"], at["t"])]
np.savez("found.npz", scores=scores, drawn=drawn, loaded=loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], cwd=tmp_path, env={**os.environ}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found, wanted = np.load(tmp_path / "found.npz"), np.stack([model.score(*each) for each in zip(y, t, strict=True)])
    np.testing.assert_array_equal(found["loaded"], wanted)
    np.testing.assert_allclose(found["scores"], wanted, rtol=1e-4, atol=1e-5)
    drawn = model.sample(500, key=jax.random.key(0), steps=20)
    for power in (1, 2):
        a, b = found["drawn"] ** power, drawn**power
        assert np.all(np.abs(a.mean(0) - b.mean(0)) < 4.5 * np.hypot(a.std(0), b.std(0)) / np.sqrt(500))
    with pytest.raises(ValueError, match="steps=5 is for a sampler"):
        model.export(tmp_path / "score", steps=5)


def rewritten(file, change):
    """A file whose document is another."""
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    document = json.loads(content["document.json"])
    change(document)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, json.dumps(document) if name == "document.json" else data)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("score"),
        lambda d: d.update(score=None),
        lambda d: d.update(score={"part": "Clock", "fields": {}}),
        lambda d: d["score"].update(part="Odd"),
        lambda d: d["score"]["fields"].update(net={"array": 10**9}),
        lambda d: d["score"]["fields"].update(net={"part": "subprocess.run", "fields": {}}),
        lambda d: d["score"]["fields"].update(t0="soon"),
        lambda d: d["score"]["fields"]["net"]["fields"].update(layers=[]),
        lambda d: d["config"].update(shape=[2, 1000]),
        lambda d: d["config"].update(shape=[-1]),
        lambda d: d.update(step="many"),
        lambda d: d.update(history={}),
        lambda d: d.update(process={"process": "breakpoint", "arguments": {}}),
        lambda d: d.update(prior={"law": "Delta", "parameters": {}}),
        lambda d: d["fingerprint"].update(states=0),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(generative, tmp_path, change):
    file = tmp_path / "changed.autodsm"
    file.write_bytes(generative[0].read_bytes())
    rewritten(file, change)
    with pytest.raises((ArchiveError, ValueError), match=r"changed\.autodsm is damaged"):
        ad.load(file)


# What a model does


def test_methods_are_the_functions():
    """With an exact score: an Ornstein-Uhlenbeck process that is not in equilibrium."""
    system = ad.systems.ornstein_uhlenbeck(2, std0=0.5, t1=1.0)
    exact = ad.reference.gaussian_marginals(system.process, np.zeros(2), 0.25 * np.eye(2))
    x = np.asarray(system.y0(jax.random.key(0), 4))
    config = Config((2,), 1.0, 1, 1, 0.0, [0], {}, {"reason": "known"}, {"name": "exact", "parameters": 0}, {})
    fingerprint = Fingerprint.of(system.process, x)
    model = Model(exact.score, exact.score, [], config, 1, fingerprint, system.process, dist.Normal(), system.y0)
    at = jnp.stack([POINT, -POINT])
    v = ad.observables.velocity(OWN_ROOT2, exact.score, POINT, 0.5)
    np.testing.assert_allclose(model.velocity(at, 0.5)[0], v, rtol=1e-5)
    carried = ad.flow(system.process, exact.score, POINT, [0.1, 1.0])
    np.testing.assert_allclose(model.flow(at, [0.1, 1.0])[0], carried, rtol=1e-5)
    one = ad.log_likelihood(system.process, exact.score, dist.Normal(), POINT)
    np.testing.assert_allclose(model.log_prob(at), [one, one], rtol=1e-5)
    with pytest.raises(ValueError, match=r"y has shape \(3,\); a state has shape \(2,\)"):
        model.velocity(jnp.zeros(3), 0.5)
    key, variance = jax.random.key(1), float(exact.moments(0.7)[1][0, 0])
    found = model.entropy(0.7, key=key, n=1000)
    assert abs(found.value - np.log(2 * np.pi * np.e * variance)) < 4.5 * found.stderr + 1e-3
    rates = model.entropy_production(0.7, key=key, n=1000)
    for rate, wanted in ((rates.system, 2 / variance - 2), (rates.total, 2 * variance * (1 / variance - 1) ** 2)):
        assert abs(rate.value - wanted) < 4.5 * rate.stderr + 1e-3


OWN_ROOT2 = ad.Process(lambda y, t: -y, np.sqrt(2.0), 1.0)


# Axes of y0


def paths(n, times, d, rng=None):
    """An Ornstein-Uhlenbeck path in equilibrium: neighbours have the correlation exp(−1/10)."""
    rng = np.random.default_rng(0) if rng is None else rng
    y = [rng.normal(size=(n, d))]
    for _ in range(times - 1):
        y.append(np.exp(-0.1) * y[-1] + np.sqrt(1 - np.exp(-0.2)) * rng.normal(size=(n, d)))
    return np.stack(y, axis=1).astype(np.float32)


def test_an_array_of_paths_is_refused_where_it_cannot_be_states():
    swimmer = ad.systems.swimmer().process
    x = paths(64, 10, 2)
    with pytest.raises(ValueError, match=r"y0 has shape \(n, 10, 2\).*states of shape \(2,\).*y0\[:, 0\].*reshape"):
        ad.fit(swimmer, x, key=jax.random.key(0), progress=False)
    with pytest.raises(ValueError, match="does not fit a state of shape"):  # no remedy where there is none
        check_axes(ad.Process(lambda y, t: -y, jnp.ones(3), 1.0), x)


def test_an_array_of_paths_is_noticed_where_it_could_be_states():
    anything = ad.Process(lambda y, t: y - y**3, 0.7, 1.0)
    assert "a state of shape (10, 2)" in path_like(anything, paths(256, 10, 2))
    assert path_like(ad.systems.double_well(2).process, paths(256, 40, 1))


def test_states_of_two_axes_are_left_alone():
    anything, rng = ad.Process(lambda y, t: y - y**3, 0.7, 1.0), np.random.default_rng(1)
    particles = rng.normal(size=(256, 8, 2)) + 2.0 * rng.normal(size=(256, 1, 2))  # alike, wherever they are
    chain = ad.Process(lambda y, t: jnp.roll(y, 1, axis=0) - y, 0.7, 1.0)  # coupled: its order means something
    for process, x in (
        (anything, rng.normal(size=(256, 8, 2))),
        (anything, particles),
        (anything, np.stack([particles[:, 0], particles[:, 0]], axis=1)),
        (chain, paths(256, 10, 2)),
        (anything, paths(256, 10, 2)[:, 0]),
        (ad.systems.particles(8).process, particles),
    ):
        check_axes(process, np.asarray(x, np.float32))
        assert path_like(process, np.asarray(x, np.float32)) is None


def test_series_towards_a_prior_are_meant(monkeypatch):
    x = paths(256, 10, 2)
    options = dict(key=jax.random.key(0), network=lambda y, t: y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="no floating arrays"):
            ad.fit(VP, x, prior=dist.Normal(), **options)
    with pytest.warns(UserWarning, match="nothing is wrong"), pytest.raises(ValueError, match="no floating arrays"):
        ad.fit(VP, x, **options)
