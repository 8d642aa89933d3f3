"""Models as files, and the models of run folders.

A file holds the network with its averaged weights and with those of the last step, as data of `run.parts`; the recipe
of the process, and drift and noise at some states, by which another process is told from it; the prior and the law of
y_0 where they are known by name; the configuration and the history of the training. The network of a user's own is
its arrays by their paths; `network=` then says where they belong.

A run folder holds `model.autodsm` from its first moment. While it is not finished, the newest checkpoint has later
weights, which are put in their place.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..network import trainable
from ..process.process import Process, check_process
from ..run.archive import ArchiveError, damaged, read_archive, write_archive
from ..run.checkpoint import Checkpoints
from ..run.config import Config, Fingerprint, open_run
from ..run.folder import read_json, versions
from ..run.parts import NoProcess, NoProcessError, Reader, Unknown, Writer
from ..run.watch import read_rows
from ..targets.marginals import Marginals
from .model import Model

FILE = "model.autodsm"
_MODEL = json.dumps({"process": "model"})
_ROWS = ("step", "loss", "grad_norm", "steps_per_s")


def save(model: Model, path: Path) -> None:
    """See `Model.save`."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it, such as {path / FILE}.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist: make the folder first.")
    writer = Writer(model.process)
    fingerprint, columns = model.fingerprint, {}
    for name in _ROWS:
        columns[name] = writer.array(np.array([row.get(name, np.nan) for row in model.history], np.float64))
    document = {
        "config": model.config.to_json(),
        "step": model.step,
        "process": _process(writer, model),
        "fingerprint": {
            "t1": fingerprint.t1,
            **{name: writer.array(getattr(fingerprint, name)) for name in ("times", "states", "drift", "noise")},
        },
        "score": _network(writer, model.score),
        "last": _network(writer, model.last),
        "scales": _known(writer, model.scales),
        "prior": _known(writer, model.prior),
        "y0": _known(writer, model.y0) if not isinstance(model.y0, np.ndarray | jax.Array) else None,
        "history": columns,
    }
    write_archive(path, document, writer.arrays)


def _process(writer: Writer, model: Model):
    """The recipe, if it makes the process: one that was changed after it was made has the recipe of another."""
    if model.process is None:
        return None
    try:
        found = writer.recipe(model.process)
    except Unknown:
        return None
    made = Reader(writer.arrays).build(found)
    return None if model.fingerprint.differences(made) else found


def _known(writer: Writer, thing):
    """A law by name, or nothing."""
    try:
        return writer.describe(thing)
    except Unknown:
        return None


def _network(writer: Writer, network):
    try:
        return writer.describe(network)
    except Unknown:
        leaves = [[path, writer.array(leaf)] for path, leaf in named_arrays(network).items()]
        return {"own": type(network).__name__, "leaves": leaves}


def named_arrays(tree) -> dict[str, Any]:
    """The arrays of a tree by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or ".": leaf for path, leaf in leaves if eqx.is_array(leaf) or _is_numpy(leaf)}


def _is_numpy(leaf) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


def load(path: Path | str, *, process: Process | None = None, network=None, prior=None, y0=None) -> Model:
    """The model in a file of `Model.save`, or in the folder of a run, finished or not.

        model = load("swimmer.autodsm")
        model = load("runs/swimmer", process=process)

    Nothing in a file is executed. What a file cannot hold is given again, where it is needed: `process`, of a drift of
    your own, which must be that of the training; `network`, of your own, with the same arrays; `prior` and `y0`.
    """
    path = Path(path)
    folder, file = path if path.is_dir() else None, _file_of(path)
    document, arrays = read_archive(file)
    if process is not None:
        check_process(process)
    try:
        config = Config.from_json(document["config"], file)
        fingerprint = _fingerprint(document["fingerprint"], arrays, config)
        given = _given_process(process, document, arrays, fingerprint, file)
        reader = Reader(arrays, NoProcess() if given is None else given)
        model = Model(
            score=_built(reader, document["score"], network, file),
            last=_built(reader, document["last"], network, file),
            history=_rows(document["history"], arrays),
            config=config,
            step=_count(document["step"]),
            fingerprint=fingerprint,
            process=given,
            prior=reader.build(document["prior"]) if prior is None else prior,
            y0=reader.build(document["y0"]) if y0 is None else y0,
            scales=_scales(reader.build(document["scales"])),
        )
        _check_call(model)
    except (ArchiveError, _Refused):
        raise
    except Exception as error:  # whatever data that make no sense bring about, there is one thing to say of them
        raise damaged(file, f"{type(error).__name__}: {error}") from error
    return model if folder is None else _newest(folder, model)


def lacking(path: Path | str, *, score_alone: bool = False) -> set[str]:
    """What `load` has to be given, of process, network, prior and y0: for everything, or for the score alone."""
    file = _file_of(Path(path))
    document, _ = read_archive(file)
    try:
        found = {"network"} if "own" in document["score"] else set()
        if document["process"] is None and (not score_alone or _MODEL in json.dumps(document["score"])):
            found |= {"process"}
        if score_alone:
            return found
        prior = document["prior"] is None and document["config"].get("prior") is not None
        return found | ({"prior"} if prior else set()) | ({"y0"} if document["y0"] is None else set())
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from error


class _Refused(ValueError):
    """What was given does not fit an intact file."""


def _file_of(folder: Path) -> Path:
    """The file of a model, itself or in the folder of a run."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not the folder of a run, nor the file of a model: it does not exist.")
    if not folder.is_dir():
        return folder
    if (folder / FILE).is_file():
        return folder / FILE
    recorded = folder / "config.json"
    if not recorded.is_file():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json.")
    if "experiment" in read_json(recorded):
        raise ValueError(f"{folder} is a run of `autodsm reproduce`, not of a training: it holds no model to use.")
    Config.from_json(read_json(recorded), recorded)
    raise ValueError(f"{folder} has no {FILE}: it was interrupted before its training began. Start it again.")


def _fingerprint(found: dict, arrays: list[np.ndarray], config: Config) -> Fingerprint:
    parts = {name: arrays[_count(found[name])] for name in ("times", "states", "drift", "noise")}
    fingerprint = Fingerprint(float(found["t1"]), **parts)
    n, times = len(fingerprint.states), len(fingerprint.times)
    shapes = [fingerprint.states.shape, fingerprint.drift.shape, fingerprint.noise.shape[:1]]
    if shapes != [(n, *config.shape), (n, times, *config.shape), (times,)] or fingerprint.t1 != config.t1:
        raise ValueError("its states and drifts have other shapes")
    return fingerprint


def _given_process(given, document: dict, arrays, fingerprint: Fingerprint, file: Path) -> Process | None:
    if given is None and document["process"] is None:
        return None
    made = Reader(arrays).build(document["process"]) if given is None else given
    if not isinstance(made, Process):
        raise TypeError("its process is none")
    # A process of this release's own making needs no check.
    if given is None and document["library"].get("autodsm") == versions()["autodsm"]:
        return made
    if differences := fingerprint.differences(made):
        remedy = "Give the process of the training." if given is not None else "Install the version that wrote it."
        raise _Refused(f"{file} is a model of another process:\n  " + "\n  ".join(differences) + f"\n{remedy}")
    return made


def _built(reader: Reader, found: dict, network, file: Path):
    if "own" not in found:
        if network is not None:
            raise _Refused(f"network=... is for a model of your own network, and {file} holds its own. Leave it out.")
        return reader.build(found)
    if network is None:
        raise _Refused(
            f"the network in {file}, {found['own']}, is your own: give one with the same arrays, "
            "ad.load(path, network=network)."
        )
    return _filled(network, {path: reader.arrays[_count(i)] for path, i in found["leaves"]}, file)


def _filled(network, arrays: dict[str, np.ndarray], file: Path):
    """A network with other values in its arrays, as it is used: without dropout."""
    there = {path: (str(array.dtype), array.shape) for path, array in arrays.items()}
    here = {path: (str(leaf.dtype), leaf.shape) for path, leaf in named_arrays(network).items()}
    for path in here | there:
        if there.get(path) != here.get(path):
            shown = [
                "absent" if one is None else f"{one[0]} of shape {one[1]}" for one in (there.get(path), here.get(path))
            ]
            raise _Refused(f"{file} is of another network: {path} is {shown[0]} there, {shown[1]} here.")
    remaining = iter([arrays[path] for path in named_arrays(network)])

    def place(leaf):
        if _is_numpy(leaf):
            return next(remaining).copy()
        if not eqx.is_array(leaf):
            return leaf
        with jax.enable_x64(True):
            return jnp.asarray(next(remaining))

    return eqx.nn.inference_mode(jax.tree.map(place, network))


def _rows(found: dict, arrays: list[np.ndarray]) -> list[dict]:
    columns = [arrays[_count(found[name])].tolist() for name in _ROWS]
    rows = [dict(zip(_ROWS, values, strict=True)) for values in zip(*columns, strict=True)]
    return [{**row, "step": int(row["step"])} for row in rows]


def _scales(found) -> Marginals | None:
    if not isinstance(found, Marginals | None):
        raise TypeError("its scales are none")
    return found


def _count(found) -> int:
    if type(found) is not int or found < 0:
        raise ValueError(f"{found!r} is no number of an array, or of steps")
    return found


def _check_call(model: Model) -> None:
    """Whether what was built takes a state, and returns one; of what lacks a drift this is seen when it is used."""
    y, t = jax.ShapeDtypeStruct(model.shape, jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    for network in (model.score, model.last):
        with contextlib.suppress(NoProcessError):
            if jax.eval_shape(network, y, t).shape != model.shape:
                raise ValueError("its network does not return a state")


def _newest(folder: Path, model: Model) -> Model:
    """The model with the weights of the newest checkpoint of its run, where that is later."""
    store = Checkpoints(folder / "checkpoints")
    if max(store.steps(), default=0) <= model.step:
        return model
    step, arrays = store.arrays()
    if step <= model.step:
        return model

    def at(network, part: str):
        params, static = eqx.partition(network, trainable(network))
        weights = {path: arrays[f".{part}" + ("" if path == "." else path)] for path in named_arrays(params)}
        return eqx.combine(_filled(params, weights, folder), static)

    history = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] <= step]
    return dataclasses.replace(
        model, score=at(model.score, "ema"), last=at(model.last, "params"), step=step, history=history
    )


def begin(path: Path, model: Model, network) -> Any:
    """Make the folder of a run, or open that of the same run begun before. Returns the network that it trains.

    What the pilot found when the run began, such as the scales of the states, stays as it was: on another machine it
    would be a little otherwise, and the weights were trained with it.
    """
    file, before = path / FILE, None
    if file.is_file() and (path / "config.json").is_file():
        document, arrays = read_archive(file)
        try:
            config = Config.from_json(document["config"], file)
            before = _fingerprint(document["fingerprint"], arrays, config)
        except (KeyError, TypeError, IndexError) as error:
            raise damaged(file, f"{type(error).__name__}: {error}") from error
    assert model.process is not None
    open_run(path, model.config, [] if before is None else before.differences(model.process))
    if before is None:
        if Checkpoints(path / "checkpoints").steps():
            raise ValueError(
                f"{path} has checkpoints, and no {FILE}. Restore it from a backup, or start anew elsewhere."
            )
        save(model, file)
        return network
    own = model.score if "own" in document["score"] else None
    stored = load(file, process=model.process, network=own).score
    _, rest = eqx.partition(stored, trainable(stored))
    params, fixed = eqx.partition(network, trainable(network))
    old, new = named_arrays(rest), named_arrays(fixed)
    if {name: leaf.shape for name, leaf in old.items()} != {name: leaf.shape for name, leaf in new.items()}:
        return network
    leaves, structure = jax.tree_util.tree_flatten_with_path(fixed)
    kept = [old.get(jax.tree_util.keystr(path) or ".", leaf) for path, leaf in leaves]
    return eqx.combine(params, jax.tree.unflatten(structure, kept))


def finish(path: Path, model: Model) -> None:
    """Put a trained model into the file of its run, if it is not there already."""
    if read_archive(path / FILE)[0].get("step") != model.step:
        save(model, path / FILE)


def update(path: Path, model: Model) -> None:
    """Bring the file of a run up to its newest checkpoint."""
    own = model.score if "own" in read_archive(path / FILE)[0]["score"] else None
    finish(path, load(path, process=model.process, network=own, prior=model.prior, y0=model.y0))
