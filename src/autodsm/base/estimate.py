"""Numbers with standard errors."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .errors import as_double, check_count, check_key
from .types import PRNGKey

_NUMBERS = 1 << 22  # in a chunk


class Estimate(NamedTuple):
    """A mean over samples, and its standard error, of sampling only: not of a score or whatever else is averaged."""

    value: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.stderr:.1g}"


def estimate(values) -> Estimate:
    """The mean of independent values, one number for each, summed in double precision."""
    values = as_double(values, "values")
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"values has shape {values.shape}; an estimate needs one number for each of several samples.")
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def chunk_for(numbers: int) -> int:
    """How many samples to treat at once when each needs that many numbers."""
    return int(np.clip(_NUMBERS // max(1, numbers), 1, 4096))


@eqx.filter_jit
def _mapped(function: Callable, *batch):
    return jax.vmap(function)(*batch)


def over_samples(function: Callable, ys, *, key: PRNGKey | None = None, chunk: int = 4096):
    """`function(y)` at each of the samples, or `function(y, key)` with keys of their own; arrays, made in chunks.

    A function that is a module, such as `eqx.Partial(f, score, t)`, is compiled once for all values of its arrays; any
    other at each call.
    """
    check_count("chunk", chunk)
    if key is not None:
        check_key(key)
    run = eqx.Partial(_mapped, function) if isinstance(function, eqx.Module) else jax.jit(jax.vmap(function))
    n = len(ys)
    rest = () if key is None else (jax.random.split(key, n),)
    chunk = max(1, min(chunk, n))
    pieces = []
    for i in range(0, n, chunk):
        taken = np.minimum(np.arange(i, i + chunk), n - 1)  # the last chunk is filled up: one compilation serves all
        found = run(jnp.asarray(ys[taken]), *(k[taken] for k in rest))
        pieces.append(jax.tree.map(np.asarray, found))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *pieces)
