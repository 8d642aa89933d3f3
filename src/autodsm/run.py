"""Run folders: everything a command produced, in one place; a new run never takes one that holds something.

`config.json` (what was asked for), `result.json` (numbers, versions, seed), `figures/*.png`.
"""

import dataclasses
import importlib.metadata
import json
import math
import platform
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

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

    def save_figure(self, name: str, figure: Figure) -> Path:
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
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} already exists. Nothing is overwritten: remove it, or name another folder.")


def free_path(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, … (before its ending, if it has one) that does not exist."""
    candidate, n = path, 1
    while candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.stem}-{n}{path.suffix}")
    return candidate
