"""Checkpoints: the arrays of a training state on disk, whole or not at all, and checked when they are read.

    RUN/checkpoints/00000200/arrays/      the arrays, as orbax writes them, named by their path in the state
                             leaves.json  path, shape and dtype of every array, and the SHA-256 of their contents
                             SHA256SUMS   of every file; also for `sha256sum -c`

A checkpoint is written under a temporary name and renamed when it is complete. Nothing is pickled.
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import check_count

_STORED = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


class CheckpointError(ValueError):
    """There is no intact checkpoint, or it does not fit the state or the run."""


class Restored(NamedTuple):
    """A state read back; `skipped` lists (step, reason) of the newer checkpoints that were damaged."""

    step: int
    state: Any
    skipped: list[tuple[int, str]]


class Checkpoints:
    """The newest `keep` checkpoints of a run, written by one process (of any number of devices).

    checkpoints = Checkpoints("runs/a/checkpoints")
    checkpoints.save(200, state)
    step, state, skipped = checkpoints.restore(state)

    Stored are the arrays and numbers of a state; all else (functions, strings) is taken from the state given to
    `restore`. Keys go in as `jax.random.key_data`.
    """

    def __init__(self, path: Path | str, keep: int = 3):
        check_count("keep", keep)
        self.path = Path(path).absolute()
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return sorted({_step(folder) for folder in self._folders()})

    def save(self, step: int, state) -> None:
        """Write the state, and return when that is done. A process killed meanwhile leaves the older checkpoints."""
        if jax.process_count() > 1:
            raise CheckpointError("Checkpoints are written by one process, and this run has several.")
        if step < 0:
            raise ValueError(f"step={step} must not be negative.")
        later = [folder for folder in self._folders() if _step(folder) > step]
        if intact := [folder for folder in later if not _damage(folder)]:
            raise CheckpointError(f"{intact[-1]} is later than step {step}. Go on from there, or name another folder.")
        arrays = {name: np.asarray(jax.device_get(leaf)) for name, leaf in _named_leaves(state).items()}
        for leftover in self.path.glob("tmp-*"):
            shutil.rmtree(leftover)
        # A step saved again gets a longer name, so that the first stays until the second is complete.
        same = [folder.name + "+" for folder in self._folders() if _step(folder) == step]
        _write(self.path / "tmp-new", arrays)
        (self.path / "tmp-new").rename(self.path / [f"{step:08d}", *same][-1])
        latest = {_step(folder): folder for folder in self._folders() if folder not in later}
        for folder in set(self._folders()).difference(list(latest.values())[-self.keep :]):
            # Renamed first: removal is not atomic, and half of a checkpoint must not look like one.
            shutil.rmtree(folder.rename(self.path / f"tmp-{folder.name}"))

    def restore(self, like) -> Restored:
        """The newest intact checkpoint, as a state of the structure, shapes, dtypes and placement of `like`.

        `like` holds arrays or `jax.ShapeDtypeStruct`s. A damaged checkpoint is passed over for the one before it.
        """
        step, arrays, skipped = self._newest(lambda folder, leaves: _check_fit(folder, leaves, like))
        return Restored(step, _rebuild(like, arrays), skipped)

    def arrays(self) -> tuple[int, dict[str, np.ndarray]]:
        """The step of the newest intact checkpoint, and its arrays by their paths in the state."""
        return self._newest(lambda folder, leaves: None)[:2]

    def _newest(self, check: Callable[[Path, list], None]) -> tuple[int, dict[str, np.ndarray], list[tuple[int, str]]]:
        skipped = []
        for folder in reversed(self._folders()):
            if not (reason := _damage(folder)):
                table = json.loads((folder / "leaves.json").read_text())
                check(folder, table["leaves"])
                arrays = _read(folder, table["leaves"])
                if _table(arrays) == table:
                    return _step(folder), arrays, skipped
                reason = "the arrays read are not those that were saved"
            skipped.append((_step(folder), reason))
        if not skipped:
            raise CheckpointError(f"{self.path} holds no checkpoint. Check the path, or start the run anew.")
        tried = "".join(f"  step {step}: {reason}\n" for step, reason in skipped)
        raise CheckpointError(f"No checkpoint in {self.path} is intact:\n{tried}Use a backup, or start anew elsewhere.")

    def _folders(self) -> list[Path]:
        found = [folder for folder in self.path.glob("*") if re.fullmatch(r"\d+\+*", folder.name)]
        return sorted(found, key=lambda folder: (_step(folder), len(folder.name)))


def _step(folder: Path) -> int:
    return int(folder.name.rstrip("+"))


def _named_leaves(state) -> dict[str, Any]:
    """The arrays and numbers of a state by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path) or ".": leaf for path, leaf in leaves if isinstance(leaf, _STORED)}


def _table(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    leaves = [[name, list(array.shape), array.dtype.name] for name, array in arrays.items()]
    digest = hashlib.sha256(json.dumps(leaves).encode())
    for array in arrays.values():
        digest.update(array.tobytes())
    return {"leaves": leaves, "sha256": digest.hexdigest()}


def _write(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    folder.mkdir(parents=True)
    stored = {name: array for name, array in arrays.items() if array.size}  # orbax refuses empty arrays
    with _orbax() as (ocp, checkpointer), _without_patterns(folder) as place:
        checkpointer.save(place / "arrays", ocp.args.PyTreeSave(stored))
    (folder / "leaves.json").write_text(json.dumps(_table(arrays), indent=1) + "\n")
    (folder / "SHA256SUMS").write_text("".join(_sums(folder)))


def _read(folder: Path, leaves: list) -> dict[str, np.ndarray]:
    arrays = {name: np.empty(shape, jnp.dtype(dtype)) for name, shape, dtype in leaves}
    with _orbax() as (ocp, checkpointer), _without_patterns(folder) as place:
        wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name, array in arrays.items() if array.size}
        return arrays | checkpointer.restore(place / "arrays", ocp.args.PyTreeRestore(restore_args=wanted))


def _rebuild(like, arrays: dict[str, np.ndarray]) -> Any:
    """The arrays in the structure of `like`, each as the type and on the devices of the leaf there."""
    remaining = iter([arrays[name] for name in _named_leaves(like)])

    def place(leaf):
        if not isinstance(leaf, _STORED):
            return leaf
        array = next(remaining)
        if isinstance(leaf, np.ndarray):
            return array.copy()
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return type(leaf)(array.item())
        with jax.enable_x64(True):  # the dtype as it was saved, whatever the setting now
            placed = jnp.array(array)  # a copy, which may be donated
        return jax.device_put(placed, leaf.sharding if getattr(leaf, "committed", True) else None)

    return jax.tree.map(place, like)


def _check_fit(folder: Path, saved: list, like) -> None:
    """Refuse a checkpoint of other leaves than those of `like`, naming the first that differs."""
    old = {name: f"{dtype} of shape {tuple(shape)}" for name, shape, dtype in saved}
    leaves = _named_leaves(like).items()
    new = {name: f"{np.dtype(getattr(x, 'dtype', type(x)))} of shape {np.shape(x)}" for name, x in leaves}
    for name in new | old:
        there, here = old.get(name, "absent"), new.get(name, "absent")
        if there != here:
            remedy = "Use the settings of that run, or start anew in another folder."
            raise CheckpointError(f"{folder} is of a different network: {name} is {there} there, {here} here. {remedy}")


def _damage(folder: Path) -> str:
    """What is wrong with the files of a checkpoint; nothing when each is as it was written."""
    try:
        written = (folder / "SHA256SUMS").read_text(errors="replace").splitlines(keepends=True)
        wrong = {line[66:].strip() or "SHA256SUMS" for line in set(written) ^ set(_sums(folder))}
    except OSError as error:
        return f"it cannot be read ({error})"
    return f"damaged or missing: {', '.join(sorted(wrong))}" if wrong else ""


def _sums(folder: Path) -> list[str]:
    """SHA-256 of every file, as lines of sha256sum; but not of hidden files, which a file manager may leave."""
    files = sorted(file for file in folder.rglob("[!.]*") if file.is_file() and file.name != "SHA256SUMS")
    return [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.relative_to(folder).as_posix()}\n" for f in files]


@contextlib.contextmanager
def _without_patterns(folder: Path) -> Generator[Path]:
    """The folder by a path without `*?[`, which orbax takes for patterns: it would find none of the arrays that it has
    written, and leave them out of the checkpoint without a word."""
    if not set("*?[") & set(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "checkpoint"
        link.symlink_to(folder, target_is_directory=True)
        yield link


@contextlib.contextmanager
def _orbax():
    """Orbax, imported when it is needed since that takes long, and a checkpointer; both silent."""
    import orbax.checkpoint as ocp
    from absl import logging as absl_logging  # orbax reports through it

    logger = absl_logging.get_absl_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            yield ocp, checkpointer
    finally:
        logger.setLevel(level)
