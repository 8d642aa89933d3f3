"""Shared fixtures. Tests run in float32, as users do, unless they ask for `x64`."""

import os
from pathlib import Path

# Most of the time goes into compilation. These settings save half of it, and what is compiled runs as fast.
os.environ["XLA_FLAGS"] = (
    f"--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import pytest

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
# Not those below: reading one back can wait for ever (jaxlib 0.10 on two cores), and most are quicker to compile.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_collection_modifyitems(items):
    """The file that takes longest comes first, so that no process waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_experiments.py")


@pytest.fixture(scope="module", autouse=True)
def _forget():
    """Compiled functions are kept for as long as a file runs; all of them together take gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    """Double precision for the length of a test."""
    with jax.enable_x64(True):
        yield
