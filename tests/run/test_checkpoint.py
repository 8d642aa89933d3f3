"""Checkpoints: exact, atomic, and never believed without a check."""

import logging
import os
import signal
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autodsm.run.checkpoint import CheckpointError, Checkpoints

SMALL = {"weight": np.arange(12.0).reshape(3, 4), "step": np.array(0)}


def state_at(step):
    """A state that tells its step, large enough that its arrays are the largest file."""
    noise = np.random.default_rng(step).normal(size=20_000).astype(np.float32)
    return {"weight": jnp.asarray(noise), "moments": [jnp.full(3, 1.0 * step)], "step": jnp.asarray(step)}


def same_bits(a, b):
    def leaf(x, y):
        assert type(x) is type(y)
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            assert x == y

    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(leaf, a, b)


def blank(x):
    """A leaf like x without its content."""
    if isinstance(x, jax.Array):
        return jnp.zeros_like(x)
    return np.zeros_like(x) if isinstance(x, np.ndarray) else type(x)(0)


def files(folder):
    return sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["[b]", "what?", "a*b"])
def test_names_of_folders_are_no_patterns(tmp_path, name):
    (tmp_path / "aXb").mkdir()
    checkpoints = Checkpoints(tmp_path / name / "checkpoints")
    checkpoints.save(1, state_at(1))
    same_bits(checkpoints.restore(jax.tree.map(blank, state_at(1))).state, state_at(1))
    assert (tmp_path / name / "checkpoints" / "00000001" / "arrays" / "manifest.ocdbt").is_file()


def test_round_trip_is_exact_to_the_bit(tmp_path, x64):
    nan_with_payload = np.array([0x7FC12345, 0xFF800001, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    state = {
        "float32": jnp.asarray([1 / 3, -0.0, jnp.inf], jnp.float32),
        "float64": jnp.asarray([[1 / 3], [5e-324]]),
        "bfloat16": jnp.asarray([1 / 3, -0.0, 1e38], jnp.bfloat16),
        "int32": jnp.asarray([-(2**31), 2**31 - 1], jnp.int32),
        "key": jax.random.key_data(jax.random.key(7)),
        "bool": jnp.asarray([True, False]),
        "scalars": (jnp.asarray(3, jnp.int32), jnp.asarray(1 / 3), jnp.asarray(True), np.float32(0.1)),
        "numpy": [nan_with_payload, np.zeros(5), np.asfortranarray(np.arange(6).reshape(2, 3))],
        "empty": jnp.zeros((0, 3)),
        "numbers": (200, 0.1, True),
        "odd/name": {"": jnp.ones(2), "a.b['c']": jnp.zeros(2)},
        "nothing": None,
    }
    Checkpoints(tmp_path / "c").save(200, state)
    restored = Checkpoints(tmp_path / "c").restore(jax.tree.map(blank, state))
    assert restored.step == 200
    assert restored.skipped == []
    same_bits(restored.state, state)


def test_a_network_and_its_optimizer(tmp_path):
    def start(seed):
        network = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(seed))
        arrays, _ = eqx.partition(network, eqx.is_array)
        return network, optax.adam(1e-3).init(arrays), jnp.asarray(seed)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, start(1))
    network, *rest = checkpoints.restore(start(2)).state
    same_bits(eqx.filter((network, *rest), eqx.is_array), eqx.filter(start(1), eqx.is_array))
    assert network.activation is start(2)[0].activation  # not stored: taken from `like`


def test_restore_to_shapes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state_at(3))
    same_bits(checkpoints.restore(jax.eval_shape(lambda: state_at(3))).state, state_at(3))


def test_a_bare_array(tmp_path):
    Checkpoints(tmp_path).save(0, jnp.arange(3))
    same_bits(Checkpoints(tmp_path).restore(jnp.zeros(3, int)).state, jnp.arange(3))


def test_float64_survives_a_single_precision_session(tmp_path):
    with jax.enable_x64(True):
        state = {"a": jnp.asarray([1 / 3])}
        Checkpoints(tmp_path).save(1, state)
    restored = Checkpoints(tmp_path).restore({"a": jax.ShapeDtypeStruct((1,), np.float64)})
    same_bits(restored.state, state)


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "deep" / "c", keep=2)
    assert checkpoints.steps() == []
    for step in (0, 5, 99_999_999, 100_000_000):  # by number, not by name
        checkpoints.save(step, state_at(step))
    assert checkpoints.steps() == [99_999_999, 100_000_000]
    assert sorted(p.name for p in checkpoints.path.iterdir()) == ["100000000", "99999999"]
    same_bits(checkpoints.restore(state_at(0)).state, state_at(100_000_000))
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_the_older_are_removed_only_after_the_new_one_is_complete(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state_at(1))
    monkeypatch.setattr("autodsm.run.checkpoint._sums", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(2, state_at(2))
    monkeypatch.undo()
    assert checkpoints.steps() == [1]
    same_bits(checkpoints.restore(state_at(0)).state, state_at(1))


def test_a_step_saved_again_replaces_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state_at(1))
    for content in range(2, 6):
        checkpoints.save(2, state_at(content))
        assert checkpoints.steps() == [1, 2]
        same_bits(checkpoints.restore(state_at(0)).state, state_at(content))
    assert len(list(tmp_path.iterdir())) == 2


DAMAGES = {
    "a file deleted": lambda folder: files(folder)[len(files(folder)) // 2].unlink(),
    "arrays deleted": lambda folder: files(folder)[-1].unlink(),
    "arrays truncated": lambda folder: os.truncate(files(folder)[-1], files(folder)[-1].stat().st_size // 2),
    "arrays emptied": lambda folder: os.truncate(files(folder)[-1], 0),
    "a bit flipped": lambda folder: flip(files(folder)[-1], files(folder)[-1].stat().st_size // 2),
    "metadata deleted": lambda folder: (folder / "arrays" / "_METADATA").unlink(),
    "leaves deleted": lambda folder: (folder / "leaves.json").unlink(),
    "leaves changed": lambda folder: flip(folder / "leaves.json", 40),
    "sums deleted": lambda folder: (folder / "SHA256SUMS").unlink(),
    "sums changed": lambda folder: flip(folder / "SHA256SUMS", 3),
    "sums truncated": lambda folder: os.truncate(folder / "SHA256SUMS", 30),
    "all deleted": lambda folder: [file.unlink() for file in files(folder)],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, state_at(10))
    checkpoints.save(20, state_at(20))
    DAMAGES[damage](tmp_path / "00000020")
    restored = checkpoints.restore(state_at(0))
    assert restored.step == 10
    same_bits(restored.state, state_at(10))
    [(step, reason)] = restored.skipped
    assert step == 20
    assert "damaged or missing: " in reason or "SHA256SUMS" in reason
    checkpoints.save(15, state_at(15))  # the run goes on behind the damaged one, which then is in the way
    assert checkpoints.steps() == [10, 15]
    assert checkpoints.restore(state_at(0)).skipped == []


def test_damage_to_any_file_is_noticed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, SMALL)
    checkpoints.save(2, SMALL)
    for file in files(tmp_path / "00000002"):
        content = file.read_bytes()
        for harm in (file.unlink, lambda f=file: os.truncate(f, f.stat().st_size - 1), lambda f=file: flip(f, 0)):
            harm()
            assert [step for step, _ in checkpoints.restore(SMALL).skipped] == [2], file
            file.write_bytes(content)
    assert checkpoints.restore(SMALL).step == 2


def test_arrays_that_are_not_those_saved_are_noticed(tmp_path, monkeypatch):
    """Even when every file is as written: what is read has to be what was given."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, SMALL)
    monkeypatch.setattr(
        "autodsm.run.checkpoint._read", lambda folder, leaves: {**SMALL, "weight": SMALL["weight"] + 1e-9}
    )
    with pytest.raises(CheckpointError, match="step 1: the arrays read are not those that were saved"):
        checkpoints.restore(SMALL)


def test_none_intact(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state_at(step))
        flip(files(tmp_path / f"0000000{step}")[-1], 100)
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(state_at(0))
    for part in (str(tmp_path), "step 2: damaged or missing: arrays/", "step 1: damaged or missing: arrays/", "backup"):
        assert part in str(error.value)


@pytest.mark.parametrize("folder", ["absent", "."])
def test_none_at_all(tmp_path, folder):
    with pytest.raises(CheckpointError, match=f"{tmp_path}.* holds no checkpoint"):
        Checkpoints(tmp_path / folder).restore(SMALL)


@pytest.mark.parametrize(
    ("like", "told"),
    [
        (
            {**SMALL, "weight": np.zeros((5, 4))},
            r"\['weight'\] is float64 of shape \(3, 4\) there, float64 of shape \(5, 4",
        ),
        (
            {**SMALL, "step": np.zeros((), np.int32)},
            r"\['step'\] is int64 of shape \(\) there, int32 of shape \(\) here",
        ),
        ({**SMALL, "bias": np.zeros(4)}, r"\['bias'\] is absent there, float64 of shape \(4,\) here"),
        ({"step": SMALL["step"]}, r"\['weight'\] is float64 of shape \(3, 4\) there, absent here"),
    ],
)
def test_a_different_network_is_refused(tmp_path, like, told):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, like)  # an older one that would fit is not used: the newest is not damaged
    checkpoints.save(2, SMALL)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/00000002 is of a different network: {told}"):
        checkpoints.restore(like)


def test_a_run_does_not_go_back_behind_an_intact_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(20, SMALL)
    with pytest.raises(CheckpointError, match="00000020 is later than step 10"):
        checkpoints.save(10, SMALL)
    with pytest.raises(ValueError, match="step=-1"):
        checkpoints.save(-1, SMALL)


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, SMALL)
    for name in ("tmp-new", "tmp-00000000"):
        (tmp_path / name / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
        (tmp_path / name / "arrays.orbax-checkpoint-tmp" / "d").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoints.steps() == [1]
    assert checkpoints.restore(SMALL).step == 1
    checkpoints.save(2, SMALL)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001", "00000002", "notes.txt"]


ENDLESS = """
import itertools, sys
import numpy as np
from autodsm.run.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in itertools.count():
    checkpoints.save(step, {"a": np.full(200_000, step, np.float32), "step": np.array(step)})
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03])
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path, delay):
    like = {"a": np.zeros(200_000, np.float32), "step": np.array(0)}
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):
        told = int(process.stdout.readline())
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    told = max([told, *map(int, process.communicate(timeout=300)[0].split())])
    assert process.returncode == -signal.SIGKILL
    checkpoints = Checkpoints(tmp_path, keep=2)
    step, state, skipped = checkpoints.restore(like)
    assert skipped == []
    assert step in (told, told + 1)
    assert np.all(state["a"] == step)
    assert state["step"] == step
    checkpoints.save(step + 1, like)
    assert len(list(tmp_path.iterdir())) == 2  # whatever the kill left is gone


SHARDED = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from autodsm.run.checkpoint import Checkpoints
sharding = NamedSharding(jax.make_mesh((2,), ("batch",)), PartitionSpec("batch"))
state = {"a": jax.device_put(jnp.arange(8.0), sharding), "b": jnp.ones(2)}
Checkpoints(sys.argv[1]).save(1, state)
restored = Checkpoints(sys.argv[1]).restore(jax.tree.map(jnp.zeros_like, state)).state
assert restored["a"].sharding == sharding and not restored["b"].committed
assert jnp.array_equal(restored["a"], state["a"])
"""


def test_arrays_on_several_devices(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", SHARDED, str(tmp_path)], check=True, env=environment, timeout=300)
    same_bits(Checkpoints(tmp_path).restore({"a": jnp.zeros(8), "b": jnp.zeros(2)}).state["a"], jnp.arange(8.0))


def test_silence(tmp_path, capfd, caplog):
    checkpoints = Checkpoints(tmp_path)
    with caplog.at_level(logging.INFO):  # as in a program that shows its own messages
        for step in (1, 2):
            checkpoints.save(step, SMALL)
        flip(files(tmp_path / "00000002")[-1], 10)
        checkpoints.restore(SMALL)
    assert [record for record in caplog.records if record.name.startswith(("absl", "orbax"))] == []
    assert capfd.readouterr() == ("", "")
    command = [sys.executable, "-c", ENDLESS.replace("itertools.count()", "range(2)"), str(tmp_path / "fresh")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("0\n1\n", "")


def test_orbax_is_imported_only_when_needed():
    code = "import sys, autodsm.run.checkpoint; assert not any(m.startswith('orbax') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
