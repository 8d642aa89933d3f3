"""Entropy rates with the error of the score in theirs.

With `v_θ = f − ½ Q s_θ`, δ = s_θ − s, and D = Q/2, from the definitions of `observables`, exactly,

    dS/dt  = E[∇·v_θ] − ½B + ½E‖δ‖²_Q,                 A = E[δ·f],
    total  = E[v_θᵀ D⁻¹ v_θ] + 2A − B + ½E‖δ‖²_Q,      B = E[δᵀ Q s_θ],
    medium = E[v_θᵀ D⁻¹ f] + A.

A and B are linear in the score: Stein's identity gives them, `A = E[s_θ·f + ∇·f]`, `B = E[‖s_θ‖²_Q + ∇·(Q s_θ)]`, so
does a target ŝ, `A = E[(s_θ − ŝ)·f]`, and both together are better. `A − ½B = E[∇·v_θ + v_θ·s_θ]` is what the two forms
of dS/dt differ by. A rate so has a correction of first order, and its error is the size of it: a score whose two forms
of dS/dt disagree is not printed with the error of sampling alone.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.estimate import Estimate, chunk_for, estimate, over_samples
from ..base.types import PRNGKey, State
from ..process.noise import apply_Q, noisy, solve_noisy, trace_directions
from ..process.process import Process
from .projections import Size, least_noise

EXACT_TRACE = 64
"""Coordinates up to which divergences are exact; of more, by one random direction for each state."""


class Rate(NamedTuple):
    """A rate of entropy, with all of its error."""

    value: float
    """By the score, as `observables` has it."""
    stderr: float
    """Of sampling only."""
    correction: float
    """What the score's own error takes from it, to first order, as measured."""
    error: float
    """Of the value: sampling, the correction, its own standard error, and what is beyond first order as far as seen."""

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g} (sampling {self.stderr:.1g})"


class Derived(NamedTuple):
    """Of each state: vectors (n, d), numbers (n,). f is that of coordinates that noise enters."""

    f: np.ndarray
    Qs: np.ndarray
    fQf: np.ndarray
    """`fᵀ Q⁻¹ f`"""
    div: np.ndarray
    """`∇·f`, of all coordinates."""
    div_f: np.ndarray
    div_Qs: np.ndarray


class Rates(NamedTuple):
    """At one time."""

    system: Rate
    medium: Rate
    total: Rate
    balance: Estimate
    """`E[∇·v_θ + v_θ·s_θ]`: the two forms of dS/dt against each other; zero for the exact score."""
    still: float
    """`E(∇·v_θ + v_θ·s_θ)²/E[vᵀQ⁻¹v sᵀQs]`, at v_θ and s_θ: zero in a steady state, by an exact score."""
    velocity: Size
    """`E|v_θ − v|²/E|v|²` in the metric Q⁻¹: the share of the production that is an error of the score."""
    gain: float
    """B."""


def rates_of(
    process: Process, score: Callable, y: np.ndarray, s: np.ndarray, t: float, target, size: Size, *, key: PRNGKey
) -> Rates:
    """From states (n, *shape), their scores and targets (n, d), and the size of `E‖δ‖²_Q`."""
    at = derived(process, score, y, t, key=key)
    fs, sQs = np.sum(at.f * s, axis=1), np.sum(at.Qs * s, axis=1)
    first = np.stack([fs + at.div_f, sQs + at.div_Qs], axis=1)
    if target is not None:
        off = s - target
        first = least_noise(np.stack([np.sum(at.f * off, axis=1), np.sum(at.Qs * off, axis=1)], axis=1), first)
    A, B = first.T
    left = 0.5 * max(size.value, 0.0)
    against = 0.5 * sQs - fs  # −v·s
    residual = at.div_f - 0.5 * at.div_Qs - against
    total = 2.0 * at.fQf - 2.0 * fs + 0.5 * sQs
    production = estimate(total + 2.0 * A - B)
    return Rates(
        _rate(at.div - 0.5 * at.div_Qs, -0.5 * B, left),
        _rate(2.0 * at.fQf - fs, A, 0.0),
        _rate(total, 2.0 * A - B, left),
        estimate(residual),
        float(np.mean(residual**2) / max(np.mean(0.5 * np.maximum(total, 0.0) * sQs), 1e-300)),
        _velocity(size, Estimate(production.value + left, production.stderr)),
        float(B.mean()),
    )


def _rate(values: np.ndarray, corrections: np.ndarray, left: float) -> Rate:
    found, correction = estimate(values), estimate(corrections)
    error = math.hypot(found.stderr, correction.value, correction.stderr) + left
    return Rate(found.value, found.stderr, correction.value, error)


def _velocity(size: Size, production: Estimate) -> Size:
    """`½ E‖δ‖²_Q` over the production, by ends of both intervals."""
    surely, perhaps = production.value - 2.0 * production.stderr, production.value + 2.0 * production.stderr
    value = 0.5 * size.value / production.value if production.value > 0 else np.inf
    high = 0.5 * size.high / surely if surely > 0 else np.inf
    return Size(value, 0.5 * size.low / max(perhaps, 1e-300), high, size.p_value)


def derived(process: Process, score: Callable, y: np.ndarray, t: float, *, key: PRNGKey) -> Derived:
    """What rates are made of; NaN where Q has no inverse among the coordinates that noise enters."""
    d = math.prod(y.shape[1:])
    chunk = chunk_for(64 * d * min(d, EXACT_TRACE))
    found = over_samples(eqx.Partial(_derived, process, score, jnp.asarray(t, y.dtype)), y, key=key, chunk=chunk)
    return Derived(*(np.asarray(v, np.float64).reshape(len(y), -1) for v in found[:2]), *map(np.float64, found[2:]))


def _derived(process: Process, score: Callable, t, y: State, key) -> tuple[Array, ...]:
    mask = noisy(process, t, y.shape).astype(y.dtype)
    along = trace_directions("exact" if y.size <= EXACT_TRACE else "hutchinson", None, key, y)
    assert along is not None
    (f, Qs), push = jax.linearize(lambda y: (process.f(y, t), apply_Q(process, t, score(y, t))), y)

    def traces(e):
        of_f, of_Qs = push(e)
        return jnp.sum(e * of_f), jnp.sum(e * mask * of_f), jnp.sum(e * of_Qs)

    return mask * f, Qs, jnp.sum(f * solve_noisy(process, t, f)), *map(jnp.sum, jax.vmap(traces)(along))
