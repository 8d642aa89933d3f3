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
# Data flows down this list.
PACKAGES = ("experiments", "network", "targets")
ORDER = [
    "_types",
    "errors",
    "linalg",
    "coupling",
    "structure",
    "process",
    "priors",
    "systems",
    "linearize",
    "moments",
    "kernel",
    "simulate",
    "schedule",
    "noise",
    "clock",
    "fokker_planck",
    "fokker_planck_2d",
    "targets",
    "marginals",
    "network",
    "objective",
    "ism",
    "cifar10",
    "data",
    "products",
    "estimate",
    "probability_flow",
    "sample",
    "likelihood",
    "observables",
    "metrics",
    "run",
    "checkpoint",
    "watch",
    "record",
    "train",
    "defaults",
    "fit",
    "reference",
    "plot",
    "experiments",
    "results",
    "problems",
    "training",
    "using",
    "cli",
]


def imported_modules(path: Path) -> set[str]:
    """Top-level autodsm modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = path.parent
            for _ in range(node.level - 1):
                base = base.parent
            if node.level and base == PACKAGE:
                found |= {node.module.split(".")[0]} if node.module else {a.name for a in node.names}
            elif not node.level and (node.module or "").startswith("autodsm"):
                found |= {(node.module + ".").split(".")[1] or "__init__"}
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "autodsm"]
            found |= {(name + ".__init__").split(".")[1] for name in names}
    return found


def modules() -> list[tuple[str, Path]]:
    files = [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]
    return [(p.relative_to(PACKAGE).parts[0].removesuffix(".py"), p) for p in sorted(files)]


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda x: str(getattr(x, "name", x)))
def test_imports_point_upwards(module, path):
    assert module in ORDER, f"{module} has no place in the house"
    above = {*ORDER[: ORDER.index(module)], *([module] if module in PACKAGES else [])}
    assert imported_modules(path) <= above


def test_the_import_test_can_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "process.py").write_text("from .kernel import x\nfrom . import plot\nimport autodsm as ad\n")
    assert imported_modules(tmp_path / "process.py") == {"kernel", "plot", "__init__"}


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
