"""Run folders: everything a command produced, in one place that is never overwritten.

`config.json` (what was asked for), `result.json` (numbers, versions, seed), `figures/*.png`.
"""

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path

from matplotlib.figure import Figure

_REPORTED = ("autodsm", "jax", "jaxlib", "equinox", "diffrax", "numpyro", "numpy", "scipy")


class RunFolder:
    """A new folder for one run."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path | str, config) -> "RunFolder":
        """Make `path`, which must not hold anything yet, and record the configuration, a dataclass or dict, in it."""
        path = Path(path)
        check_free(path)
        (path / "figures").mkdir(parents=True)
        folder = cls(path)
        folder._write("config.json", config if isinstance(config, dict) else dataclasses.asdict(config))
        return folder

    def save_figure(self, name: str, figure: Figure) -> Path:
        path = self.path / "figures" / f"{name}.png"
        figure.savefig(path, dpi=150)
        return path

    def save_result(self, numbers: dict, *, seed: int) -> None:
        versions = {name: importlib.metadata.version(name) for name in _REPORTED}
        versions["python"] = platform.python_version()
        self._write("result.json", {"numbers": numbers, "seed": seed, "versions": versions})

    def _write(self, name: str, content) -> None:
        (self.path / name).write_text(json.dumps(content, indent=2, default=float) + "\n")


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
