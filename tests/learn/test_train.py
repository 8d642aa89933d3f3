"""The trainer: resumption to the bit, whatever stopped the run; draws dealt and stratified; no lost run goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autodsm as ad
import autodsm.learn.train
from autodsm.learn.choose import default_network
from autodsm.learn.objective import AbstractObjective
from autodsm.learn.train import Batch, Rounds, TrainingError, ahead, initial_state, is_traceable, round_draws
from autodsm.network import MLP, Score, UNet, trainable
from autodsm.process.clock import TimeLaw
from autodsm.run.checkpoint import Checkpoints
from autodsm.run.watch import interruption
from autodsm.targets.marginals import POINTS, Marginals

TESTS = Path(__file__).parents[1]
ROUND, STEPS, EVERY = 8, 40, 16  # checkpoints at 16, 32 and 40
BLANK = {"steps_per_s": 0.0}


def normal(key, n):
    return 0.5 + 0.5 * jax.random.normal(key, (n, 2))


def by_numpy(key, n):
    return np.asarray(normal(key, n))


def curl(y, t):
    x, v = y
    return jnp.stack([v - x, -x - jnp.sin(v)])


class Tell(AbstractObjective):
    """Its draws tell which example they are of, which of its draws they are, and the u of their time."""

    process: ad.Process
    times: object
    pairs_per_path: int = eqx.field(static=True)
    forward = None
    evaluations = 1

    def draws(self, x, *, key, u=None):
        k = jnp.arange(self.pairs_per_path)
        return jnp.full(k.shape, x[0]), k, (k + u) / self.pairs_per_path

    def at(self, score, draw):
        return 0.0

    def prepared(self, pilot):
        return self

    def draws_per_path(self, shape):
        return self.pairs_per_path

    def covers(self, x):
        return None


class Toy(Tell):
    """A regression that compiles at once."""

    def draws(self, x, *, key, u=None):
        t = (jnp.arange(self.pairs_per_path) + u) / self.pairs_per_path
        return t, x + jnp.sqrt(t)[:, None] * jax.random.normal(key, (len(t), *x.shape))

    def at(self, score, draw):
        t, y = draw
        return jnp.mean((score(y, t) + y) ** 2)


def arguments(name, **changes):
    """What `fit` is given, for a kernel from s = 0, targets along paths, or a toy."""
    if name == "toy":
        process = ad.Process(lambda y, t: -y, 1.0, 1.0)
        objective = Toy(process, TimeLaw(process), 2)
    elif name == "linear":
        process = ad.Process(lambda y, t: -y, 1.0, 1.0)
        objective = ad.LocalDSM(process, schedule=ad.FromZero())
    else:
        process = ad.Process(curl, 0.8, 1.0)
        objective = ad.PathwiseDSM(process, steps=16, pairs_per_path=4)
    clock = ad.Clock(process)
    network = Score(MLP((2,), clock, key=jax.random.key(3), width=16, depth=1), clock)
    given = dict(process=process, y0=by_numpy if name == "numpy paths" else normal, objective=objective)
    options = dict(steps=STEPS, batch_size=32, checkpoint_every=EVERY, ema=0.9, progress=False)
    return {**given, "network": network, "key": jax.random.key(0), **options, **changes}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch):
    monkeypatch.setattr("autodsm.learn.train.MAX_ROUND", ROUND)


def wait_for(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 300
        time.sleep(0.005)


@contextlib.contextmanager
def before_rounds(action):
    """Call `action(step)` just before every round, with the step at which it starts."""
    original = autodsm.learn.train.make_round

    def make_round(*args):
        run = original(*args)

        def watched(state, draws):
            action(int(state.step))
            return run(state, draws)

        return watched

    autodsm.learn.train.make_round = make_round
    try:
        yield
    finally:
        autodsm.learn.train.make_round = original


def test_steps_apart_are_the_same_steps(monkeypatch):
    """Networks with convolutions are trained step by step on CPUs: to the same weights."""
    found = []
    for apart in (False, True):
        monkeypatch.setattr("autodsm.learn.train._convolves", lambda network, apart=apart: apart)
        found.append(ad.fit(**arguments("linear")))
    told = [[(row["step"], row["loss"], row["grad_norm"]) for row in model.history] for model in found]
    np.testing.assert_allclose(told[0], told[1], rtol=1e-4)
    for a, b in zip(*(leaves(model.score) for model in found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_convolutions_are_seen():
    clock = ad.Clock(ad.vp())
    assert autodsm.learn.train._convolves(
        UNet((1, 4, 4), clock, key=jax.random.key(0), channels=4, levels=(1,), blocks=1)
    )
    assert not autodsm.learn.train._convolves(MLP((1, 4, 4), clock, key=jax.random.key(0), width=8, depth=1))


class Crash(Exception):
    pass


def run_and_crash(step, **given):
    def crash(at):
        if at == step:
            raise Crash

    with before_rounds(crash), pytest.raises(Crash):
        ad.fit(**given)


def resume(first, **given):
    """Go on with a run, which must begin at the step `first`, and not from the start."""
    started = []
    with before_rounds(started.append):
        model = ad.fit(**given)
    assert started == list(range(first, STEPS, ROUND))
    return model


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def last_state(folder, given):
    network, optimizer = given["network"], autodsm.learn.train.optimizer_for(given["steps"])
    return Checkpoints(folder / "checkpoints").restore(initial_state(network, optimizer))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


_whole: dict = {}


def same_as_uninterrupted(name, folder, model, tmp_path_factory):
    """The model, the last checkpoint and the metrics are those of a run that nothing stopped."""
    if name not in _whole:
        whole = tmp_path_factory.mktemp("whole") / "run"
        _whole[name] = whole, ad.fit(**arguments(name), out=whole)
    whole, expected = _whole[name]
    given = arguments(name)
    found, wanted = last_state(folder, given), last_state(whole, given)
    assert found.step == wanted.step == STEPS
    pairs = [(found.state, wanted.state), (model.score, expected.score), (model.last, expected.last)]
    for a, b in pairs:
        assert jax.tree.structure(eqx.filter(a, eqx.is_array)) == jax.tree.structure(eqx.filter(b, eqx.is_array))
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert x.dtype == y.dtype
            assert np.array_equal(x, y)
    assert [row["step"] for row in rows(folder)] == list(range(ROUND, STEPS + 1, ROUND))
    assert [row | BLANK for row in rows(folder)] == [row | BLANK for row in rows(whole)]
    assert rows(folder) == model.history


# What a child process runs; the round that starts at step 24 waits until a file allows it.
CHILD = f"""
import sys; sys.path.insert(0, {str(TESTS / "learn")!r})
import test_train; test_train.child(sys.argv[1], sys.argv[2])
"""


def child(name, folder):
    autodsm.learn.train.MAX_ROUND = ROUND
    go = Path(folder).parent / "go"

    def wait(step):
        if step == 24:
            print("waiting", flush=True)
            wait_for(go.exists)

    with before_rounds(wait):
        ad.fit(**arguments(name), out=folder)


def stop_child(name, folder, number) -> subprocess.Popen:
    """Run in a child until step 24, send it a signal, and wait for its end."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(TESTS.parent / ".cache" / "jax")}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, name, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **cache},
    )
    assert process.stdout is not None
    if process.stdout.readline() != "waiting\n":
        pytest.fail(process.communicate()[1])
    process.send_signal(number)
    (folder.parent / "go").touch()
    process.told = process.communicate(timeout=300)[1]  # pyright: ignore
    return process


@pytest.mark.parametrize("name", ["linear", "paths"])
def test_a_killed_run_is_resumed_to_the_bit(name, tmp_path, tmp_path_factory):
    folder = tmp_path / "run"
    assert stop_child(name, folder, signal.SIGKILL).returncode == -signal.SIGKILL
    assert [row["step"] for row in rows(folder)] == [8, 16, 24]
    assert Checkpoints(folder / "checkpoints").steps() == [16]
    model = resume(16, **arguments(name), out=folder)
    same_as_uninterrupted(name, folder, model, tmp_path_factory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_round(number, tmp_path, tmp_path_factory):
    folder = tmp_path / "run"
    stopped = stop_child("numpy paths", folder, number)
    assert stopped.returncode != 0
    assert f"KeyboardInterrupt: stopped at step 32 of 40; saved. Resume: autodsm resume {folder}" in stopped.told
    assert Checkpoints(folder / "checkpoints").steps() == [16, 32]
    model = resume(32, **arguments("numpy paths"), out=folder)
    same_as_uninterrupted("numpy paths", folder, model, tmp_path_factory)


@pytest.mark.parametrize("step", [8, 24])
def test_a_crash_before_the_first_checkpoint_and_a_torn_line(step, tmp_path, tmp_path_factory):
    folder = tmp_path / "run"
    run_and_crash(step, **arguments("toy"), out=folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 32, "lo')
    # How often to save may change.
    model = resume(step // EVERY * EVERY, **arguments("toy", checkpoint_every=EVERY + step), out=folder)
    same_as_uninterrupted("toy", folder, model, tmp_path_factory)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, tmp_path_factory):
    folder = tmp_path / "run"
    run_and_crash(32, **arguments("paths"), out=folder)
    files = [file for file in (folder / "checkpoints" / "00000032").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.warns(UserWarning, match=r"checkpoint 32 in .*run is damaged \(.*\); going on from step 16"):
        model = resume(16, **arguments("paths"), out=folder)
    same_as_uninterrupted("paths", folder, model, tmp_path_factory)


def contents(folder):
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*") if file.is_file()}


def test_a_finished_run_is_not_trained_again(tmp_path, tmp_path_factory):
    folder = tmp_path / "run"
    ad.fit(**arguments("toy"), out=folder)
    before = contents(folder)
    model = resume(STEPS, **arguments("toy"), out=folder)
    assert contents(folder) == before
    same_as_uninterrupted("toy", folder, model, tmp_path_factory)


@pytest.mark.parametrize("looks", [1, 2, 3, 4, 5])
def test_saved_means_saved_whenever_the_signal_comes(looks, tmp_path, monkeypatch):
    """An event that is set between two looks at it; also in the last round."""

    class Event:
        count = 0

        def is_set(self):
            self.count += 1
            return self.count >= looks

    monkeypatch.setattr("autodsm.learn.train.interruption", lambda enabled: contextlib.nullcontext(Event()))
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step \d+ of 40; saved") as stop:
        ad.fit(**arguments("toy", checkpoint_every=1000), out=tmp_path / "run")
    step = int(str(stop.value).split()[3])
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [step]


def test_signals_are_caught_only_inside_and_the_second_acts_at_once():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruption(enabled=True) as event:
        signal.raise_signal(signal.SIGTERM)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with interruption(enabled=False):
        assert signal.getsignal(signal.SIGTERM) == before[1]


def test_a_run_in_a_thread(tmp_path):
    found = []
    given = arguments("toy", out=tmp_path / "run")
    thread = threading.Thread(target=lambda: found.append(ad.fit(**given)))
    thread.start()
    thread.join(300)
    assert len(found[0].history) == STEPS // ROUND


# Loss that is not finite


def spoil(at, value=np.nan):
    """An optimizer whose update number `at` (from 1) is not finite."""

    def update(updates, count, params=None):
        return jax.tree.map(lambda u: jnp.where(count + 1 == at, value, -1e-3 * u), updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


@pytest.mark.parametrize(
    ("at", "told", "kept"),
    [
        (1, "the loss is not finite at step 2 ", []),
        (19, "the loss is not finite at step 20 ", [16]),
        (16, "the gradient or the update of the weights is not finite at step 16 ", []),  # must not be saved at 16
        (STEPS, "the gradient or the update of the weights is not finite at step 40 ", [16, 32]),
    ],
)
def test_a_diverging_optimizer(at, told, kept, tmp_path):
    with pytest.raises(TrainingError) as error:
        ad.fit(**arguments("toy", optimizer=spoil(at)), out=tmp_path / "run")
    assert told in str(error.value)
    assert "worst example: y_0 = [" in str(error.value)
    assert "Lower the learning rate" in str(error.value)
    store = Checkpoints(tmp_path / "run" / "checkpoints")
    assert store.steps() == kept
    if kept:
        state = store.restore(initial_state(arguments("toy")["network"], spoil(at))).state
        assert all(np.isfinite(leaf).all() for leaf in leaves(state))


def test_a_learning_rate_far_too_large():
    with pytest.raises(TrainingError, match=r"(?s)not finite at step [2-9].*Lower the learning rate"):
        ad.fit(**arguments("toy", optimizer=optax.sgd(1e30)))


def test_a_drift_that_blows_up_somewhere():
    bad = 1.75
    process = ad.Process(lambda y, t: -y / jnp.where(y < bad, 1.0, 0.0), 0.01, 1.0)
    with pytest.raises(ValueError, match="derivatives are not finite along pilot paths"):
        ad.fit(**arguments("toy", process=process, objective=ad.PathwiseDSM(process, steps=8, pairs_per_path=4)))
    objective = ad.ISM(process, steps=8, pairs_per_path=4)  # whose pilot looks at no derivative
    with pytest.raises(TrainingError) as error:
        ad.fit(**arguments("toy", process=process, objective=objective))
    assert "the loss is not finite at step" in str(error.value)
    assert "the drift may blow up, or the path needs more steps" in str(error.value)
    start = str(error.value).split("y_0 = [")[1].split("]")[0].split()
    assert max(map(float, start)) > bad  # the example that did it: with noise this small, all others stay below


# Draws


@pytest.mark.parametrize(("steps", "paths", "pairs"), [(8, 6, 4), (8, 5, 8), (3, 6, 4), (1, 4, 4), (16, 32, 1)])
def test_draws_are_dealt_and_stratified(steps, paths, pairs):
    objective = Tell(ad.Process(lambda y, t: -y, 1.0, 1.0), None, pairs)
    rounds = Rounds(steps, steps, paths, pairs, 0.9)
    n = steps * paths
    found = round_draws(objective, Batch(jnp.arange(float(n))[:, None]), jax.random.key(1), 0, rounds, steps)
    example, pair, u = (np.asarray(v) for v in found)
    assert example.shape == (steps, paths * pairs)
    # All of them, and each once
    assert sorted(zip(example.ravel(), pair.ravel(), strict=True)) == [(i, k) for i in range(n) for k in range(pairs)]
    # Those of one example lie in steps as different as can be
    for i in range(n):
        places = np.sort(np.nonzero(example == i)[0])
        assert np.bincount(places).max() == -(-pairs // steps)
    # One time of every step in each stratum
    size = paths * pairs
    for row in u:
        assert sorted(np.floor(row * size).astype(int)) == list(range(size))
    # An example's own times differ by 1/pairs, and which it gets is random
    own = np.sort(u[example == 0])
    np.testing.assert_allclose(np.diff(own), 1.0 / pairs, atol=1e-6)
    if pairs == 1:
        assert len({tuple(np.argsort(row)) for row in u}) > 1


def test_times_are_uniform_and_independent_of_examples():
    """Over many rounds: mean of u and its correlation with the place of the example, in standard errors."""
    objective = Tell(ad.Process(lambda y, t: -y, 1.0, 1.0), None, 1)
    rounds, count = Rounds(8, 8, 4, 1, 0.9), 500
    x = Batch(jnp.linspace(-1.0, 1.0, 32)[:, None])
    draw = jax.jit(lambda step: round_draws(objective, x, jax.random.key(2), step, rounds, 8))
    example, _, u = (np.asarray(v).ravel() for v in jax.vmap(draw)(8 * jnp.arange(count)))
    assert len(np.unique(u)) > 0.99 * u.size * (1 - u.size / 2**24)  # every round has its own
    # Within a stratum u is uniform with variance 1/(12 · 4²); the strata are even.
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * 16 * u.size)
    assert abs(np.mean((u - 0.5) * example)) < 4 * np.std(u) * np.std(example) / np.sqrt(u.size)


def test_times_of_an_objective_are_stratified():
    process = ad.Process(lambda y, t: -y, 1.0, 1.0)
    objective = ad.PathwiseDSM(process, steps=8, pairs_per_path=4, times="uniform", t0=0.2)
    draw = jax.jit(lambda key: round_draws(objective, normal, key, 0, Rounds(8, 8, 6, 4, 0.9), 8))
    t = np.asarray(draw(jax.random.key(1))[0].t)
    counts = [np.histogram(row, np.linspace(0.2, 1.0, 25))[0] for row in t]
    assert np.all(np.asarray(counts) == 1)


# Samplers


def test_what_can_be_compiled():
    data = np.zeros((4, 2))
    assert is_traceable(normal)
    assert is_traceable(data)
    assert not is_traceable(by_numpy)
    assert not is_traceable(lambda key, n: np.random.default_rng(int(jax.random.bits(key))).normal(size=(n, 2)))
    assert not is_traceable(lambda key, n: data[: key.nothing])
    # A draw that does not follow from the key must not be compiled in.
    assert not is_traceable(lambda key, n: np.random.default_rng().normal(size=(n, 2)))


def test_a_sampler_may_use_jax_or_numpy():
    a, b = (ad.fit(**arguments("toy", y0=y0)) for y0 in (normal, by_numpy))
    assert any(np.any(x != 0) for x in leaves(eqx.filter(a.last, trainable(a.last))))
    for x, y in zip(leaves(a.last), leaves(b.last), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)


def test_an_array_of_samples():
    data = by_numpy(jax.random.key(5), 50)
    models = [ad.fit(**arguments("toy", y0=y0)) for y0 in (data, jnp.asarray(data), data.tolist())]
    for model in models[1:]:
        for x, y in zip(leaves(models[0].last), leaves(model.last), strict=True):
            assert np.array_equal(x, y)
    assert models[0].history[-1]["loss"] < models[0].history[0]["loss"]


def test_a_sampler_with_a_state_of_its_own_is_asked_every_round(tmp_path):
    rng, asked = np.random.default_rng(0), []

    def y0(key, n):
        asked.append(rng.normal(size=(n, 2)))
        return asked[-1]

    ad.fit(**arguments("toy", y0=y0))
    assert len([x for x in asked if len(x) == ROUND * 16]) == STEPS // ROUND
    with pytest.raises(ValueError, match=r"two different draws for one key.*could not be resumed"):
        ad.fit(**arguments("toy", y0=y0), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Averages, frozen arrays, silence


def test_the_score_uses_averaged_weights():
    """An optimizer that adds one at each step makes the averages known."""
    add = optax.GradientTransformation(lambda p: None, lambda g, s, p=None: (jax.tree.map(jnp.ones_like, g), s))
    given = arguments("toy", optimizer=add, steps=16)
    model = ad.fit(**given)
    mean = 0.0
    for n in range(16):
        decay = min(0.9, (1 + n) / (10 + n))
        mean = decay * mean + (1 - decay) * (n + 1)
    mask = trainable(given["network"])
    first, last, score = (leaves(eqx.filter(net, mask)) for net in (given["network"], model.last, model.score))
    for p0, p, q in zip(first, last, score, strict=True):
        np.testing.assert_allclose(p, p0 + 16, rtol=1e-5)
        np.testing.assert_allclose(q, p0 + mean, rtol=1e-5)
    model = ad.fit(**arguments("toy", ema=0.0))
    for p, q in zip(leaves(model.last), leaves(model.score), strict=True):
        assert np.array_equal(p, q)


def test_what_is_frozen_stays_although_weights_decay():
    process = arguments("toy")["process"]
    marginals = Marginals(jnp.zeros((POINTS, 2)), jnp.full((POINTS, 2), 2.0), process.t1)
    network = default_network(process, (2,), marginals, None, key=jax.random.key(0), width=16, depth=1)
    decaying = optax.adamw(1e-2, weight_decay=10.0)
    model = ad.fit(**arguments("toy", network=network, optimizer=decaying))
    mask = trainable(network)
    for net in (model.score, model.last):
        frozen = [leaves(eqx.filter(n, mask, inverse=True)) for n in (network, net)]
        assert len(frozen[0]) > 4
        assert all(np.array_equal(a, b) for a, b in zip(*frozen, strict=True))
        moved = [leaves(eqx.filter(n, mask)) for n in (network, net)]
        assert all(np.any(a != b) for a, b in zip(*moved, strict=True))


def test_silence(capsys, recwarn, tmp_path):
    ad.fit(**arguments("toy"), out=tmp_path / "run")
    assert capsys.readouterr() == ("", "")
    assert not recwarn.list
    ad.fit(**arguments("toy", progress=True))
    assert "objective: Toy, as given" in capsys.readouterr().out


# The next round's draws, made by another thread


def test_items_come_in_order_and_the_next_is_made_meanwhile():
    made, begun = [], [threading.Event() for _ in range(4)]

    def make(i):
        begun[i].set()
        made.append(threading.current_thread())
        return jnp.asarray(float(i))

    for i, value in enumerate(ahead(make, range(4))):
        assert float(value) == i
        assert i == 3 or begun[i + 1].wait(30)  # while this one is still in use
    assert threading.current_thread() not in made
    assert list(ahead(make, range(0))) == []


def test_another_thread_computes_in_the_same_precision(x64):
    (value,) = ahead(lambda i: jnp.ones(()), range(1))
    assert value.dtype == jnp.float64
    with jax.enable_x64(False):
        (value,) = ahead(lambda i: jnp.ones(()), range(1))
    assert value.dtype == jnp.float32


def test_what_goes_wrong_in_another_thread_is_raised_here():
    def make(i):
        if i == 1:
            raise ZeroDivisionError("of the sampler")
        return i

    found = []
    with pytest.raises(ZeroDivisionError, match="of the sampler"):
        found.extend(ahead(make, range(3)))
    assert found == [0]
    before = threading.active_count()
    with contextlib.closing(ahead(lambda i: i, range(100))) as values:
        assert next(values) == 0
    assert threading.active_count() == before  # stopped early, nothing is left running
