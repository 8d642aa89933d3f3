"""The likelihood of a generative model by the probability flow, and what a log-density is in bits.

A state x at time δ = t0 is carried to t1 by the flow, along which `d log q/dt = −∇·v`; there the prior gives its
density. Automatic differentiation misses the delta in the divergence of a drift that jumps, so such a drift is refused.
`elbo` has bounds, also for those.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import as_floating, as_shape, check_count, check_number, check_positive
from ..base.estimate import Estimate
from ..base.types import PRNGKey, StateLike
from ..process.clock import EARLIEST
from ..process.jumps import Jump, is_known, known_jump
from ..process.priors import check_log_prob, draw_prior, prior_shape
from ..process.process import Process, check_process
from .flow import flow_with_density, refuse_lost


def jump_near(process: Process, prior, shape: tuple[int, ...]) -> Jump | None:
    """A jump of the drift where the prior lies, as far as probes show."""
    with jax.ensure_compile_time_eval():
        if callable(getattr(prior, "sample", None)):
            states = np.asarray(draw_prior(prior, 64, shape, key=jax.random.key(0)))
        else:  # as far as noise carries a state from zero
            states = np.zeros((2, *shape))
    return known_jump(process, states)


def log_likelihood(
    process: Process,
    score: Callable,
    prior,
    x: StateLike,
    *,
    key: PRNGKey | None = None,
    divergence: str = "exact",
    probes: int | None = None,
    tol: float = 1e-5,
    t0: float | None = None,
) -> Float[Array, ""]:
    """log-density at x of the model's law at t0 (by default `t1/1000`): x is carried to t1 by the probability flow.

        values = jax.vmap(lambda x: log_likelihood(process, score, prior, x))(xs)

    One state. `divergence="hutchinson"` needs a `key`, takes `probes` (1), and has no bias.
    """
    check_log_prob(prior)
    check_process(process)
    x = as_floating(x, "x")
    if (own := prior_shape(prior)) is not None and own != x.shape:
        raise ValueError(f"prior has shape {own}, the state has shape {x.shape}. Give ONE state; use jax.vmap.")
    t0 = EARLIEST * process.t1 if t0 is None else t0
    check_number("t0", t0)
    if not 0 <= t0 < process.t1:
        raise ValueError(f"t0={t0} must lie in [0, t1) = [0, {process.t1}).")
    jump = jump_near(process, prior, x.shape) if is_known(process, x.shape) else None
    if jump is not None:
        raise ValueError(
            f"log_likelihood takes the divergence of the flow, and misses the delta where the drift jumps: {jump}. Use "
            'ELBO(..., kind="local-dsm"), which needs no derivative, or a prior whose log_prob is smooth.'
        )
    found = flow_with_density(
        process, score, x, [t0, process.t1], tol=tol, divergence=divergence, probes=probes, key=key
    )
    found = refuse_lost(found)
    return jnp.sum(prior.log_prob(found.y[-1])) - found.gain[-1]


class BitsPerDim(NamedTuple):
    """Bits per coordinate, with standard error, and the offset that the scaling of the data adds."""

    value: float
    stderr: float
    offset: float


def bits_per_dim(log_density: Estimate, shape: tuple[int, ...], *, levels: int, width: float) -> BitsPerDim:
    """Bits per coordinate of data of `levels` levels, dequantized by uniform noise, scaled to an interval of `width`.

        bits_per_dim(bound.average(score, xs, key=key), images.shape, levels=images.levels, width=2.0)

    `−log p/(d ln 2) + log2(levels/width)`: the offset is 8 for bytes on [0, 1], 7 on [−1, 1], where the library's
    images are. `log_density` is that of the data: a bound for states with velocities is of both, and `log q(v)` of the
    velocities that were drawn is to be taken from it first.
    """
    if not isinstance(log_density, Estimate):
        raise TypeError(f"log_density={log_density!r} must be an Estimate, such as bound.average(...) returns.")
    shape = as_shape(shape)
    if not math.isfinite(log_density.value):
        raise ValueError(f"log_density={log_density} is not finite.")
    value, none = (float(bits(x, shape, levels=levels, width=width)) for x in (log_density.value, 0.0))
    return BitsPerDim(value, log_density.stderr / (math.prod(shape) * math.log(2.0)), none)


def bits(log_densities, shape: tuple[int, ...], *, levels: int, width: float) -> np.ndarray:
    """The same for each of many log-densities."""
    check_count("levels", levels)
    check_positive("width", width)
    return np.asarray(math.log2(levels / width) - np.asarray(log_densities) / (math.prod(shape) * math.log(2.0)))
