"""Run folders: everything a command produced, in one place; a new run never takes one that holds something.

`config.json` (what was asked for), `result.json` (numbers, versions, seed), `figures/*.png`. While a process works in a
folder it holds the file `lock`, which names it; the operating system releases the lock when the process ends.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

try:
    import fcntl
except ImportError:  # Windows has no such locks; there, folders are not locked
    fcntl = None

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOCK = "lock"
PATIENCE = 5.0
"""Seconds to wait for a lock: `sample` and `evaluate` hold one for less than that, a training for much longer."""
_REPORTED = ("autodsm", "jax", "jaxlib", "equinox", "diffrax", "numpyro", "numpy", "scipy")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path | str, config) -> "RunFolder":
        """Make `path`, which must not hold anything yet, and record the configuration, a dataclass or dict, in it."""
        path = Path(path)
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)  # killed here, it leaves an empty folder, which is free
        folder.write("config.json", config if isinstance(config, dict) else dataclasses.asdict(config))
        return folder

    def save_figure(self, name: str, figure: "Figure") -> Path:
        path = self.path / "figures" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=150)
        return path

    def save_result(self, numbers: dict, **about) -> None:
        """Numbers, and what there is to say about them, such as the seed; versions are those now installed, unless
        given."""
        self.write("result.json", {"numbers": numbers, "versions": versions(), **about})

    def write(self, name: str, content) -> None:
        """A file of JSON, whole or not at all; numbers that are not finite become null."""
        path = self.path / name
        partial = path.with_name(path.name + ".tmp")
        partial.write_text(json.dumps(_plain(content), indent=1) + "\n")
        partial.replace(path)


@contextlib.contextmanager
def locked(path: Path | str, patience: float = PATIENCE) -> Iterator[None]:
    """The folder `path`, held by this process alone while the block runs; refused when another process holds it."""
    file = Path(path) / LOCK
    if fcntl is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience
    while (held := _acquire(file)) is None:
        if time.monotonic() >= until:
            with contextlib.suppress(FileNotFoundError):
                holder = file.read_text().strip() or "another process"
                raise BlockingIOError(f"{path} is in use by {holder}. Wait until it ends, or name another folder.")
        time.sleep(min(0.1, patience))
    try:
        os.truncate(held, 0)
        os.write(held, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(held)


def _acquire(file: Path) -> int | None:
    """A descriptor that holds the lock, or None while another process has it."""
    assert fcntl is not None
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_ino == file.stat().st_ino:  # not a file that its holder removed meanwhile
            return held
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(held)
    return None


RESTORE = "Restore it from a backup, or start the run anew in another folder."


def read_json(path: Path, remedy: str = RESTORE, *, needs: Iterable[str] = ()) -> dict:
    """The object in a file of JSON, which has all that it `needs`; otherwise an error that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of text that is not UTF-8
        raise ValueError(f"{path} is damaged: {error}. {remedy}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds {type(found).__name__}, not an object. {remedy}")
    if missing := [name for name in needs if name not in found]:
        raise ValueError(f"{path} is damaged: it has no {missing[0]!r}. {remedy}")
    return found


def read_numbers(folder: Path) -> dict:
    """The numbers of a result.json."""
    remedy = "Restore it from a backup, or remove it: `autodsm resume` then writes it again."
    found = read_json(folder / "result.json", remedy)
    if not isinstance(found.get("numbers"), dict):
        raise ValueError(f"{folder / 'result.json'} is damaged: it has no numbers. {remedy}")
    return found["numbers"]


def versions() -> dict[str, str]:
    """Of what results depend on."""
    found = {name: importlib.metadata.version(name) for name in _REPORTED}
    return {**found, "python": platform.python_version()}


def _plain(content):
    """Dicts, lists, text and finite numbers."""
    if isinstance(content, dict):
        return {str(k): _plain(v) for k, v in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(v) for v in content]
    if isinstance(content, np.ndarray | np.generic | jax.Array):
        return _plain(content.tolist())
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    return str(content) if isinstance(content, Path) else content


def check_free(path: Path) -> None:
    """Refuse a path that holds something."""
    if path.exists() and (not path.is_dir() or any(inside.name != LOCK for inside in path.iterdir())):
        raise FileExistsError(f"{path} already exists. Nothing is overwritten: remove it, or name another folder.")


def free_path(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … (before its ending, if it has one) that does not exist."""
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return candidate
