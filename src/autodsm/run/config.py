"""What a run was asked for, as plain data with a name for everything; and whether two runs were asked for the same.

Numbers that were given are compared exactly. Those that were computed, of a drift, of data, of the weights that a
network starts from, are compared to a tolerance: another machine rounds otherwise.
"""

import dataclasses
import functools
import inspect
import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..process.probes import spread_of
from ..process.process import Process
from .folder import RunFolder, check_free, read_json, versions

VERSION = 1
"""Of the fields below."""
TOLERANCE = 1e-4
"""Of computed numbers, as a share of the largest of their kind. Single precision on another machine differs by 10⁻⁶, or
some times that where terms cancel."""
_CHUNK = 1 << 20
"""Numbers of an array that are looked at at once: a data set may be large."""
_EMPTY = types.CellType()  # of a variable that was never set


@dataclasses.dataclass(frozen=True)
class Config:
    """What `fit` was called with, and what it chose."""

    shape: tuple[int, ...]
    """Of a state."""
    t1: float
    steps: int
    batch_size: int
    ema: float
    key: list[int]
    data: dict
    """An outline of samples of y_0."""
    objective: dict
    """`given`: an outline of the objective that was given, or None; `name`, and `reason` for it."""
    network: dict
    """`given`: whether one was; `outline`, before training; `parameters`: how many numbers are trained."""
    optimizer: dict
    prior: str | None = None
    """The kind of the prior, where one was given."""
    command: dict | None = None
    """The command that made the run, where one did."""
    version: int = VERSION
    library: dict = dataclasses.field(default_factory=versions)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)), parse_constant=str)  # JSON has no infinity

    @classmethod
    def from_json(cls, found: dict[str, Any], where: Path | str) -> "Config":
        """Of this release or an earlier one: fields that did not exist then have their defaults."""
        library = found.get("library")
        version = library.get("autodsm") if isinstance(library, dict) else None
        writer = f"written by autodsm {version}" if version else "written before files named their version"
        names = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted({*found} - {*names}):
            raise ValueError(
                f"{where} has a field {unknown[0]!r} that this release does not know; it was {writer}. Install that "
                "version, or start the run anew in another folder."
            )
        required = [name for name, field in names.items() if _required(field)]
        if missing := [name for name in required if name not in found]:
            raise ValueError(
                f"{where} has no field {missing[0]!r}; it was {writer}, or is damaged. Use the version that made the "
                "run, restore the file from a backup, or start the run anew in another folder."
            )
        kinds = {"shape": list, "t1": float, "steps": int, "batch_size": int, "ema": float | int, "key": list}
        kinds |= {name: dict for name in ("data", "objective", "network", "optimizer", "library") if name in found}
        if wrong := [name for name, kind in kinds.items() if not isinstance(found[name], kind)]:
            raise ValueError(f"{where} is damaged: its {wrong[0]} is {found[wrong[0]]!r}. Restore it from a backup.")
        if not all(type(n) is int and n > 0 for n in found["shape"]):
            raise ValueError(f"{where} is damaged: its shape is {found['shape']}. Restore it from a backup.")
        return cls(**{**found, "shape": tuple(found["shape"])})


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def open_run(path: Path, config: Config, differences: Sequence[str] = ()) -> Path:
    """The run folder: new, or that of the same run, begun before; refused where there are `differences`."""
    recorded = path / "config.json"
    if not recorded.exists():
        check_free(path)
        RunFolder.create(path, config.to_json())
        return path
    before = Config.from_json(read_json(recorded), recorded)
    if differences := [*differences, *_differences(asked(before), asked(config))]:
        raise ValueError(
            f"{path} holds a run of another configuration:\n  "
            + "\n  ".join(differences)
            + "\nName another folder, or use the configuration of that run."
        )
    return path


def asked(config: Config) -> dict[str, Any]:
    """What a configuration asks for, without what was chosen, who made it, and when."""
    found = config.to_json()
    for name in ("command", "version", "library"):
        del found[name]
    return {**found, "objective": found["objective"].get("given"), "network": found["network"].get("outline")}


def _differences(before, now, where: str = "") -> Iterator[str]:
    """Of fields that both have: one that a later release added says nothing about an earlier run."""
    if isinstance(before, dict) and isinstance(now, dict):
        if "sketch" in before and "sketch" in now:
            yield from _differing_arrays(before, now, where)
            return
        for name in sorted({*before} & {*now}):
            yield from _differences(before[name], now[name], f"{where}.{name}" if where else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{where}[{i}]")
    elif before != now:
        yield f"{where}: {_short(before)} there, {_short(now)} here"


def _differing_arrays(before: dict, now: dict, where: str) -> Iterator[str]:
    if before["array"] != now["array"]:
        yield f"{where}: {before['array']} there, {now['array']} here"
        return
    old, new = np.array(before["sketch"], float), np.array(now["sketch"], float)
    if not np.all(np.abs(old - new) <= TOLERANCE * max(old[0], new[0])):
        yield f"{where}: other values of {now['array']}, of size {old[0]:.6g} there, {new[0]:.6g} here"


def _short(value) -> str:
    if isinstance(value, dict):
        value = value.get("type") or value.get("name") or value.get("array") or value
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def outline(tree, above: tuple = ()) -> Any:
    """A thing that was given, as plain data by which another is told from it: a module by its fields, an array by its
    shape and a sketch, a function by its name and what it closes over.

    Optimizers and the bases of residual networks are closures, told apart by what they hold.
    """
    from numpyro.distributions import Distribution  # here: a process without a prior needs none

    inner = functools.partial(outline, above=(*above, tree))
    if isinstance(tree, eqx.Module):
        values = {name: inner(getattr(tree, name, None)) for name in tree.__dataclass_fields__ if name != "process"}
        return {"type": type(tree).__name__, **values}
    if isinstance(tree, Distribution):  # by name: the order of its leaves differs from one interpreter to the next
        names = sorted(type(tree).gather_pytree_data_fields())
        return {"type": type(tree).__name__, **{name: inner(getattr(tree, name, None)) for name in names}}
    if isinstance(tree, jax.Array | np.ndarray):
        return float(tree) if tree.ndim == 0 else sketch(tree)
    if isinstance(tree, list | tuple):
        return [inner(v) for v in tree]
    if isinstance(tree, dict):
        return {str(k): inner(v) for k, v in tree.items()}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    name = getattr(tree, "__qualname__", type(tree).__name__)
    held = [] if any(tree is thing for thing in above) else _held(tree)  # functions may hold each other in a circle
    return {"name": name, "holds": [inner(v) for v in held]} if held else name


def _held(thing) -> list:
    """What a function closes over or is bound to; the leaves of a pytree."""
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, thing.keywords]
    if inspect.ismethod(thing):
        return [thing.__self__]
    if leaves := [leaf for leaf in jax.tree.leaves(thing) if leaf is not thing]:
        return leaves
    thing = inspect.unwrap(thing) if callable(thing) else thing
    cells = [cell.cell_contents for cell in getattr(thing, "__closure__", None) or () if cell != _EMPTY]
    return [*(getattr(thing, "__defaults__", None) or ()), *cells]


def sketch(values) -> dict[str, Any]:
    """An array by its shape and three numbers in its units: its root mean square, and two sums of its entries with
    random signs, over the root of their number. Another array of the same kind has other sums; rounding has not."""
    values = np.asarray(values)
    kind = f"{values.dtype}{list(values.shape)}"
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":  # such as a random key
        return {"array": kind, "sketch": [0.0, 0.0, 0.0]}
    flat, rng, found = values.ravel(), np.random.default_rng(0), np.zeros(3)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        signs = 1.0 - 2.0 * rng.integers(0, 2, size=(2, part.size), dtype=np.int8)
        with np.errstate(all="ignore"):  # what is not finite is found below
            found += np.sum(part**2), *(signs @ part)
    found /= max(flat.size, 1)
    found = np.array([np.sqrt(found[0]), *(found[1:] * np.sqrt(flat.size))])
    return {"array": kind, "sketch": found.tolist() if np.all(np.isfinite(found)) else [0.0, 0.0, 0.0]}


@dataclasses.dataclass(frozen=True, eq=False)
class Fingerprint:
    """What tells one process from another: its span, and drift and noise at some states and times."""

    t1: float
    times: np.ndarray
    """(times,)"""
    states: np.ndarray
    """(n, *shape)"""
    drift: np.ndarray
    """(n, times, *shape)"""
    noise: np.ndarray
    """(times, *shape of g)"""

    @classmethod
    def of(cls, process: Process, x: np.ndarray) -> "Fingerprint":
        """At the states x, and at states beside them: all that start from 0 may have no drift there. They lie as far
        away as the data spread and the noise carries them, each coordinate in its own unit."""
        rng = np.random.default_rng(0)
        beside = x + spread_of(process, x, rng) * rng.normal(size=x.shape)
        return cls.at(process, np.concatenate([x, beside.astype(x.dtype)]))

    @classmethod
    def at(cls, process: Process, states: np.ndarray, times: np.ndarray | None = None) -> "Fingerprint":
        times = np.array([0.25, 0.75]) * process.t1 if times is None else times
        noise = np.array([np.asarray(process.g(t), np.float64) for t in times.tolist()])
        process.check(jnp.asarray(states[0]))
        drift = jax.jit(jax.vmap(jax.vmap(process.f, in_axes=(None, 0)), in_axes=(0, None)))(states, times)
        return cls(process.t1, times, states, np.asarray(drift, np.float64), noise)

    def differences(self, process: Process) -> list[str]:
        """What is otherwise in another process, in words; nothing, where rounding explains it."""
        if abs(process.t1 - self.t1) > 1e-12 * self.t1:
            return [f"process.t1: {self.t1} there, {process.t1} here"]
        try:
            other = Fingerprint.at(process, self.states, self.times)
        except (TypeError, ValueError) as error:
            return [f"process: it does not take states of shape {self.states.shape[1:]} ({error})"]
        if self.noise.shape != other.noise.shape:
            return [f"process.noise: of shape {self.noise.shape[1:]} there, {other.noise.shape[1:]} here"]
        wrong = _apart(self.noise, other.noise, axes=(0,))
        found = [f"process.noise: {self._first(wrong, self.noise, other.noise, 0)}"] if wrong.any() else []
        wrong = _apart(self.drift, other.drift, axes=(0, 1))
        if wrong.any():
            i = int(np.argwhere(wrong)[0][0])
            y = np.array2string(self.states[i], threshold=8, precision=4)
            found.append(f"process.drift: {self._first(wrong, self.drift, other.drift, 1)}, y={y}")
        return found

    def _first(self, wrong: np.ndarray, there: np.ndarray, here: np.ndarray, axis: int) -> str:
        """The first number that differs, and how many do."""
        i = tuple(int(j) for j in np.argwhere(wrong)[0])
        component = f"component {i[axis + 1 :]} is " if len(i) > axis + 1 else ""
        more = f" ({int(wrong.sum())} of {wrong.size} numbers differ)"
        return f"{component}{there[i]:.6g} there, {here[i]:.6g} here{more}, at t={self.times[i[axis]]:g}"


def _apart(a: np.ndarray, b: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Where two arrays differ by more than the tolerance, of the largest number over the axes."""
    largest = np.maximum(np.abs(a), np.abs(b)).max(axis=axes, keepdims=True)
    return ~((np.abs(a - b) <= TOLERANCE * largest) | (np.isnan(a) & np.isnan(b)) | (a == b))
