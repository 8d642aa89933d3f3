"""The configuration of a run as plain data, and how two of them differ."""

import functools
import hashlib
import inspect
import json
import types
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..process.probes import spread_of
from ..process.process import Process
from .folder import RunFolder, check_free, read_json

_EMPTY = types.CellType()  # of a variable that was never set


def open_run(path: Path, config: dict) -> Path:
    """The run folder: new, or that of the same run, begun before."""
    recorded = path / "config.json"
    if not recorded.exists():
        check_free(path)
        RunFolder.create(path, config)
        return path
    before = read_json(recorded)
    now = json.loads(json.dumps(config))
    if differences := list(_differences(before, now)):
        raise ValueError(
            f"{path} holds a run of another configuration:\n  "
            + "\n  ".join(differences)
            + "\nName another folder, or use the configuration of that run."
        )
    return path


def _differences(before, now, where: str = ""):
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{where}.{name}" if where else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{where}[{i}]")
    elif before != now:
        yield f"{where}: {before!r} there, {now!r} here"


def describe(tree, above: tuple = ()) -> Any:
    """A module as plain data: names, numbers, and a digest for each array; a function's name, and what it closes over.

    Optimizers and the bases of residual networks are closures, told apart by what they hold.
    """
    from numpyro.distributions import Distribution  # here: a process without a prior needs none

    inner = functools.partial(describe, above=(*above, tree))
    if isinstance(tree, eqx.Module):
        values = {name: inner(getattr(tree, name, None)) for name in tree.__dataclass_fields__ if name != "process"}
        return {"type": type(tree).__name__, **values}
    if isinstance(tree, Distribution):  # by name: the order of its leaves differs from one interpreter to the next
        names = sorted(type(tree).gather_pytree_data_fields())
        return {"type": type(tree).__name__, **{name: inner(getattr(tree, name, None)) for name in names}}
    if isinstance(tree, jax.Array | np.ndarray):
        return float(tree) if tree.ndim == 0 else f"{tree.dtype}{list(tree.shape)} {digest(tree)}"
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


def digest(values) -> str:
    return hashlib.sha256(np.ascontiguousarray(np.asarray(values)).tobytes()).hexdigest()[:12]


def fingerprint(process: Process, x: np.ndarray) -> dict:
    """What tells one process from another: its span, and drift and noise at some states and times.

    Also at states beside those given: all that start from 0 may have no drift there. They lie as far away as the data
    spread and the noise carries them, each coordinate in its own unit.
    """
    times = [0.25 * process.t1, 0.75 * process.t1]
    noise = [np.asarray(process.g(t), float) for t in times]
    rng = np.random.default_rng(0)
    beside = x + spread_of(process, x, rng) * rng.normal(size=x.shape)
    states = np.concatenate([x, beside.astype(x.dtype)])
    drift = [np.asarray(process.f(jnp.asarray(y), t), float) for y in states for t in times]
    return {"t1": process.t1, "drift": _digest_of_digits(drift), "noise": _digest_of_digits(noise)}


def _digest_of_digits(values) -> str:
    """A digest of numbers (n, *shape) to about five digits of the largest of each coordinate, which rounding on another
    machine does not change."""
    values = np.asarray(values, float)
    largest = np.abs(values).max(axis=0)
    unit = np.where(largest > 0, 10.0 ** (np.floor(np.log10(np.where(largest > 0, largest, 1.0))) - 4), 1.0)
    return digest([unit, *np.round(values / unit)])
