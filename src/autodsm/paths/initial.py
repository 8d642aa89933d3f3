"""Initial states, from a sampler `y0(key, n)` or from an array of samples."""

import jax
from jaxtyping import Array, Float

from ..base.calls import accepts, signature_of
from ..base.errors import as_floating, check_count, check_key
from ..base.types import PRNGKey

LOOK = 256
"""Initial states that are looked at before work begins; of one number, so that a sampler is compiled once for it."""


def initial_states(y0, n: int, *, key: PRNGKey) -> Float[Array, "n ..."]:
    """n initial states, from a sampler `y0(key, n)` or, drawn with replacement, from an array of samples."""
    check_count("n", n)
    check_key(key)
    if callable(y0):
        return _drawn(y0, n, key)
    samples = as_floating(y0, "y0")
    if samples.ndim == 0 or len(samples) == 0:
        raise ValueError(f"y0 has shape {samples.shape}; samples must be stacked along a first axis.")
    return samples[jax.random.randint(key, (n,), 0, len(samples))]


def _drawn(y0, n: int, key: PRNGKey) -> Float[Array, "n ..."]:
    if not accepts(y0, 2):
        raise TypeError(f"y0 must be a sampler y0(key, n) of a key and a number of states; got {signature_of(y0)}.")
    try:
        found = y0(key, n)
    except TypeError as error:
        if "SeedSequence" not in str(error):
            raise
        raise TypeError(
            "y0(key, n) gave its key to a generator of numpy, which takes numbers: write "
            "np.random.default_rng(np.asarray(jax.random.key_data(key)))."
        ) from error
    if found is None or isinstance(found, tuple):
        kind = "nothing" if found is None else f"a tuple of {len(found)}"
        raise TypeError(f"y0(key, {n}) returned {kind}; a sampler must return one array of n states, (n, *shape).")
    samples = as_floating(found, f"y0(key, {n})")
    if samples.ndim == 0:
        raise ValueError(f"y0(key, {n}) returned one number; a sampler must return n states, (n, *shape).")
    if len(samples) != n:
        raise ValueError(
            f"y0(key, {n}) returned {len(samples)} states, an array of shape {samples.shape}; a sampler must return n "
            "of them, (n, *shape)."
        )
    return samples
