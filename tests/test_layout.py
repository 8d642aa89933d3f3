"""The house: modules import only from those above them; the README's code runs."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "autodsm"
# Data flows down this list: a room imports only from those above it, also inside of functions.
ROOMS = [
    "base",
    "process",
    "paths",
    "kernels",
    "exact",
    "targets",
    "network",
    "data",
    "use",
    "run",
    "learn",
    "experiments",
    "app",
]


def imported_rooms(path: Path) -> set[str]:
    """The rooms of the package from which a file imports; "" stands for the package itself."""
    found = set()
    here = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            below = [*base, *(node.module.split(".") if node.module else [])]
            found |= {below[0]} if below else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autodsm":
            below = (node.module or "").split(".")[1:]
            found |= {below[0]} if below else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] if len(name) > 1 else "" for name in names if name[0] == "autodsm"}
    return found


def imports_by_text(path: Path) -> bool:
    """True for a file that imports modules whose names are computed, which `imported_rooms` does not see."""
    by_text = {"import_module", "__import__", "resolve_name", "run_module"}
    names = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(ast.parse(path.read_text()))}
    return bool(names & by_text)


def test_every_file_has_a_room():
    outside = [p.name for p in PACKAGE.glob("*.py") if p.name != "__init__.py"]
    assert not outside
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_from_rooms_above(room):
    allowed = {*ROOMS[: ROOMS.index(room) + 1]}
    wrong = {str(p.relative_to(PACKAGE)): imported_rooms(p) - allowed for p in (PACKAGE / room).rglob("*.py")}
    assert not {path: rooms for path, rooms in wrong.items() if rooms}


def test_imports_can_be_seen():
    """All but those of public names, and of experiments by their own room."""
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if imports_by_text(p)}
    assert found == {"__init__.py", "experiments/__init__.py"}


def test_the_import_test_can_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "process").mkdir()
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..use import z\n"
    text += (
        "from ..kernels.gaussian import x\nfrom .. import plot\ndef f():\n    import autodsm\nfrom .noise import y\n"
    )
    (tmp_path / "process" / "process.py").write_text(text)
    assert imported_rooms(tmp_path / "process" / "process.py") == {"use", "kernels", "plot", "", "process"}
    assert not imports_by_text(tmp_path / "process" / "process.py")
    (tmp_path / "process" / "lazy.py").write_text("import importlib\nimportlib.import_module('autodsm.app')\n")
    assert imports_by_text(tmp_path / "process" / "lazy.py")


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_readme_code_runs(capsys):
    blocks = readme_blocks()
    assert blocks
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    shown = capsys.readouterr().out.split()
    promised = [x for block in blocks for c in re.findall(r"#\s*→ (.*)", block) for x in c.split()]
    assert promised
    assert shown == promised


def test_readme_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`?make (\w+)`?", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= targets
    assert all(re.search(rf"^{t}:", makefile, flags=re.MULTILINE) for t in targets)


@pytest.mark.parametrize("n", [512, 3072, 40_000])
def test_installed_jax_reduces_products_correctly(n):
    """Some releases of jaxlib do not; with one of them no other result could be trusted."""
    left, column = np.arange(16.0, dtype=np.float32).reshape(2, 8), np.linspace(1, 2, 8, dtype=np.float32)
    found = jax.jit(lambda a, b: jnp.max(a @ jnp.broadcast_to(b[:, None], (8, n))))(left, column)
    np.testing.assert_allclose(found, np.max(left @ column), rtol=1e-5)
    rows = np.tile(np.arange(3, dtype=np.float32), (n, 1))
    found = jax.jit(jax.vmap(lambda row: jnp.sum((np.eye(3, dtype=np.float32) @ row) ** 2)))(rows)
    np.testing.assert_allclose(found, 5.0, rtol=1e-5)
