"""What an import loads: names are there at once, their modules when they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import autodsm as ad

PACKAGE = Path(ad.__file__).parent
HEAVY = ("diffrax", "lineax", "matplotlib", "numpyro", "optax", "orbax", "scipy", "sklearn")


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import autodsm", ("jax", "equinox", "rich", "tyro", *HEAVY)),
        ("import autodsm as ad; ad.Process, ad.vp, ad.systems", HEAVY),
        ("import autodsm as ad; ad.simulate", ("diffrax", "matplotlib", "optax", "orbax", "sklearn")),
        ("import autodsm.app.cli", ("jax", "equinox", *HEAVY)),
        ("import sys; sys.argv = ['autodsm', 'list']; from autodsm.app import cli; cli.main()", HEAVY),
    ],
)
def test_what_is_not_used_is_not_imported(statement, absent):
    found = fresh(f"{statement}\nimport sys; print('loaded:', *(n for n in {absent} if n in sys.modules))")
    assert found.splitlines()[-1] == "loaded:"


def test_every_name_is_there():
    """Also when the first to ask for it is a function that is compiled: no module keeps what was traced."""
    code = """
import jax, jax.numpy as jnp
import autodsm as ad
assert set(ad.__all__) <= set(dir(ad))
jax.jit(lambda x: x if all(getattr(ad, name) is not None for name in ad.__all__) else None)(1.0)
from autodsm import *
process = Process(lambda y, t: -y, 1.0, 1.0)
flow(process, lambda y, t: -y, jnp.ones(2), jnp.array([0.1, 1.0])).block_until_ready()
simulate(process, jnp.ones(2), [1.0], key=jax.random.key(0)).block_until_ready()
print(sorted(set(ad.__all__) - set(globals())))
"""
    assert fresh(code) == "[]\n"


def test_checkers_of_types_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == set(ad.__all__) == set(ad._HOMES)


def test_names_are_those_of_their_modules():
    from autodsm.exact import gaussian
    from autodsm.learn.fit import fit

    assert ad.reference is gaussian
    assert ad.fit is fit
    assert ad.Process.__module__ == "autodsm.process.process"


@pytest.mark.parametrize(("name", "near"), [("fitt", "fit"), ("Simulate", "simulate"), ("lokaldsm", "LocalDSM")])
def test_an_unknown_name_suggests_the_nearest(name, near):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Did you mean '{near}'?"):
        getattr(ad, name)
    assert not hasattr(ad, "zzz")
