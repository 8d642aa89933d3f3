"""Initial states, from a sampler `y0(key, n)`, from a law with `sample` and `log_prob`, or from an array of samples.

A law has a score, `s_0 = ∇ log q_0`, which targets along paths can begin with. That needs samples and log_prob that
agree: Stein's identity, `E[s_0 φ + ∇φ] = 0`, is checked for two bounded φ of every coordinate, one odd around its
centre and one even.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.calls import accepts, signature_of
from ..base.errors import as_floating, check_count, check_key
from ..base.types import PRNGKey, State

LOOK = 256
"""Initial states that are looked at before work begins; of one number, so that a sampler is compiled once for it."""


_CHECKED = 16_384
"""Samples of a law that its score is compared with: an error of the score of a few percent is seen."""
_STEIN = 6.0
"""Standard errors of a residual beyond which it is none of chance, for any number of coordinates here."""


class Law(eqx.Module):
    """A law of y_0, as a sampler that knows its score.

    y0 = Law(numpyro.distributions.Normal(jnp.zeros(2), 1.0))
    y0(key, 100), y0.score(y)
    """

    law: Any

    def __call__(self, key: PRNGKey, n: int) -> Array:
        return self.law.sample(key, (n,))

    def score(self, y: State) -> State:
        return jax.grad(lambda y: jnp.sum(self.law.log_prob(y)))(y)

    def check(self, *, key: PRNGKey) -> None:
        """Refuse a law whose samples and log_prob disagree."""
        y = initial_states(self, _CHECKED, key=key)
        s = jax.jit(jax.vmap(self.score))(y)
        centre, width = jnp.median(y, axis=0), jnp.quantile(y, 0.84, axis=0) - jnp.quantile(y, 0.16, axis=0)
        z = (y - centre) / width
        bell = jnp.exp(-0.5 * z**2)
        odd = s * width * jnp.tanh(z) + 1.0 - jnp.tanh(z) ** 2
        even = s * width * bell - z * bell
        for residual in (np.asarray(odd, np.float64), np.asarray(even, np.float64)):
            error = residual.std(axis=0) / np.sqrt(len(residual))
            off = np.abs(residual.mean(axis=0)) / np.maximum(error, np.finfo(float).tiny)
            if not np.isfinite(residual).all() or np.any(off > _STEIN):
                where = np.unravel_index(np.argmax(np.where(np.isfinite(off), off, np.inf)), off.shape)
                raise ValueError(
                    f"y0={type(self.law).__name__}: its samples and its log_prob disagree, in coordinate "
                    f"{tuple(int(i) for i in where)} by {off[where]:.1f} standard errors of Stein's identity. Correct "
                    "one of them; for a density that jumps, as a uniform one does, give its sampler alone, "
                    "y0=lambda key, n: law.sample(key, (n,))."
                )


def as_start(y0):
    """`y0`; a `Law` if it has `sample` and `log_prob`."""
    if isinstance(y0, Law | type):
        return y0
    known = all(callable(getattr(y0, name, None)) for name in ("sample", "log_prob"))
    return Law(y0) if known else y0


def initial_states(y0, n: int, *, key: PRNGKey) -> Float[Array, "n ..."]:
    """n initial states, from a sampler `y0(key, n)` or, drawn with replacement, from an array of samples."""
    check_count("n", n)
    check_key(key)
    y0 = as_start(y0)
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
