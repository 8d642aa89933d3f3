"""What a score says of a physical system: velocity, current, density, entropy and its production.

With `v = f − ½ Q s`, D = Q/2 and averages over samples of q_t:

    current                       j = v q
    entropy of the system         S = −E[log q],      dS/dt = E[∇·v] = −E[v·s]
    total entropy production      E[vᵀ D⁻¹ v] ≥ 0
    entropy given to the medium   total − dS/dt = E[vᵀ D⁻¹ f]

Their standard errors are of sampling only: with n states they fall as n^{−½}, whatever the score is worth. Rates with
the score's own error in theirs are in the report of `diagnose`, see `rates`.

The second form of dS/dt needs the score of every coordinate, the first only that of those with noise, which is all that
exists for degenerate noise; total and medium need an invertible D, and are refused by name without. Automatic
differentiation misses the delta in ∇·v where a drift jumps: the first form, and densities along the flow, are refused
for such a drift.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.errors import as_double, as_floating, check_callable, check_name, check_number
from ..base.estimate import Estimate, estimate, over_samples
from ..base.types import PRNGKey, State
from ..process.jumps import known_jump
from ..process.noise import check_divergence, check_invertible, solve_Q, trace_directions
from ..process.process import Process, check_process
from .flow import check_score, flow_with_density, lost, velocity

__all__ = [
    "Density",
    "EntropyProduction",
    "average",
    "current",
    "entropy",
    "entropy_production",
    "entropy_rate",
    "free_energy",
    "log_density",
    "velocity",
]

_LOOK = 64
"""Samples around which a jump of the drift is looked for: of their middle and spread a tenth is enough."""


def current(process: Process, score: Callable, y: State, t, log_density) -> State:
    """`j = v q` at one state, given log q there."""
    return velocity(process, score, y, t) * jnp.exp(log_density)


class Density(NamedTuple):
    """States along the flow and log-densities there."""

    y: np.ndarray
    """(times, n, *shape)"""
    log_density: np.ndarray
    """(times, n)"""


def log_density(
    process: Process,
    score: Callable,
    ys,
    log_densities,
    times,
    *,
    divergence: str = "exact",
    probes: int | None = None,
    key: PRNGKey | None = None,
    tol: float = 1e-5,
    chunk: int = 4096,
) -> Density:
    """The density at the states that samples are carried to by the probability flow.

        found = log_density(process, score, y0, log_q0, [0.0, 1.0, 5.0])

    `ys` are n samples at `times[0]`, (n, *shape), `log_densities` those of their law there. `divergence="hutchinson"`
    draws its probes with `key`, others for each sample.
    """
    check_process(process)
    ys, start = as_floating(ys, "ys"), _finite("log_densities", log_densities)
    if ys.ndim == 0:
        raise ValueError(f"ys={ys} must be samples, stacked along a first axis.")
    if start.shape != (len(ys),):
        raise ValueError(f"log_densities has shape {start.shape}; give one number for each of the {len(ys)} samples.")
    check_divergence(divergence, probes)
    if divergence == "hutchinson" and key is None:
        raise ValueError('divergence="hutchinson" draws random probes: give key=...')

    _check_jumps(process, ys, "log_density takes the divergence of the flow", "There is no other form.")
    carry = eqx.Partial(_carry, process, score, jnp.asarray(times, ys.dtype), tol, divergence, probes)
    found = over_samples(carry, ys, key=key if divergence == "hutchinson" else None, chunk=chunk)
    if not np.all(np.isfinite(found.gain)):
        raise lost(process, score, ys[:256], np.asarray(times, float))
    return Density(np.moveaxis(found.y, 1, 0), start + found.gain.T)


def entropy(log_densities) -> Estimate:
    """`S = −E[log q]`, from log-densities at samples of q; `stderr` is of sampling only."""
    found = estimate(_finite("log_densities", log_densities))
    return Estimate(-found.value, found.stderr)


def entropy_rate(
    process: Process,
    score: Callable,
    ys,
    t: float,
    *,
    form: str = "divergence",
    divergence: str = "exact",
    probes: int | None = None,
    key: PRNGKey | None = None,
    chunk: int = 4096,
) -> Estimate:
    """`dS/dt` at t, over samples (n, *shape) of q_t.

    `form="divergence"` is E[∇·v], for any noise; `"score"` is −E[v·s], cheaper, for scores of all coordinates. `stderr`
    is of sampling only; the two forms differ by an error of the score.
    """
    ys = _check(process, score, ys, t)
    check_name("form", form, ("divergence", "score"))
    at = jnp.asarray(t, ys.dtype)
    if form == "score":
        check_invertible(process, ys.shape[1:], what='form="score"', remedy='Use form="divergence".', at=t)
        return estimate(over_samples(eqx.Partial(_against_score, process, score, at), ys, chunk=chunk))
    _check_jumps(process, ys, 'form="divergence" derives the velocity', 'Use form="score", where noise is invertible.')
    rate = eqx.Partial(_divergence_of_velocity, process, score, at, divergence, probes)
    return estimate(over_samples(rate, ys, key=key if divergence == "hutchinson" else None, chunk=chunk))


class EntropyProduction(NamedTuple):
    """Rates of entropy: of the system, of the medium, and their sum; `stderr` of each is of sampling only."""

    system: Estimate
    medium: Estimate
    total: Estimate


def entropy_production(process: Process, score: Callable, ys, t: float, *, chunk: int = 4096) -> EntropyProduction:
    """Entropy rates at t, over samples (n, *shape) of q_t; for invertible noise."""
    ys = _check(process, score, ys, t)
    shape, at = ys.shape[1:], jnp.asarray(t, ys.dtype)
    check_invertible(
        process,
        shape,
        what="entropy production",
        remedy="The rate of the system alone exists: use entropy_rate.",
        at=t,
    )

    found = over_samples(eqx.Partial(_rates, process, score, at), ys, chunk=chunk)
    return EntropyProduction(*(estimate(values) for values in found))


def average(function: Callable[[State], Array], ys, *, chunk: int = 4096) -> Estimate:
    """`E[function(y)]` of a number-valued function over samples (n, *shape)."""
    check_callable("function", function, "function(y) of one state")
    return estimate(_finite("function(y)", over_samples(function, as_floating(ys, "ys"), chunk=chunk)))


def free_energy(energy: Callable[[State], Array], temperature: float, ys, log_densities) -> Estimate:
    """`F = E[U + T log q]` from samples and log-densities there. In equilibrium, `q ∝ e^{−U/T}`, it is `−T log Z` with
    no variance."""
    check_callable("energy", energy, "energy(y) of one state")
    check_number("temperature", temperature)
    values = _finite("energy(y)", over_samples(energy, as_floating(ys, "ys")))
    log_q = _finite("log_densities", log_densities)
    if log_q.shape != values.shape:
        raise ValueError(
            f"log_densities has shape {log_q.shape}; give one number for each of the {len(values)} samples."
        )
    return estimate(values + temperature * log_q)


def _finite(name: str, values) -> np.ndarray:
    """Numbers in double precision, one or more for each sample."""
    values = as_double(values, name)
    if bad := int(np.sum(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))) if values.ndim else 0:
        raise ValueError(f"{name} is not finite for {bad} of {len(values)} samples.")
    return values


def _check_jumps(process: Process, ys, what: str, remedy: str) -> None:
    """Refuse a drift that jumps near the samples where its derivative is taken."""
    if (jump := known_jump(process, np.asarray(ys[:_LOOK], float))) is not None:
        raise ValueError(f"{what}, and misses the delta where the drift jumps: {jump}. {remedy}")


def _check(process: Process, score: Callable, ys, t: float) -> Array:
    check_process(process)
    check_number("t", t)
    ys = as_floating(ys, "ys")
    if ys.ndim < 1 or len(ys) < 2:
        raise ValueError(f"ys has shape {ys.shape}; give several samples of the state at t, stacked.")
    if not 0 <= t <= process.t1 * (1 + 1e-6):
        raise ValueError(f"t={t} is outside the span of the process, [0, {process.t1}].")
    _finite("ys", ys)
    check_score(score, ys.shape[1:], ys.dtype)
    finite = over_samples(eqx.Partial(_is_finite, score, jnp.asarray(t, ys.dtype)), ys)
    if bad := int(np.sum(~finite)):
        raise FloatingPointError(f"the score is not finite at t={t:g}, for {bad} of {len(ys)} samples.")
    return ys


# Functions of one sample, the last argument but a key.


def _carry(process: Process, score: Callable, times, tol, divergence, probes, y: State, key=None):
    return flow_with_density(process, score, y, times, tol=tol, divergence=divergence, probes=probes, key=key)


def _is_finite(score: Callable, t, y: State) -> Array:
    return jnp.all(jnp.isfinite(score(y, t)))


def _against_score(process: Process, score: Callable, t, y: State) -> Array:
    return -jnp.sum(velocity(process, score, y, t) * score(y, t))


def _divergence_of_velocity(process: Process, score: Callable, t, divergence, probes, y: State, key=None) -> Array:
    along = trace_directions(divergence, probes, key, y)
    assert along is not None
    _, push = jax.linearize(lambda y: velocity(process, score, y, t), y)
    return jnp.sum(jax.vmap(lambda e: jnp.sum(e * push(e)))(along))


def _rates(process: Process, score: Callable, t, y: State) -> tuple[Array, Array, Array]:
    v, s = velocity(process, score, y, t), score(y, t)
    forced = 2.0 * solve_Q(process, t, v)
    return -jnp.sum(v * s), jnp.sum(forced * process.f(y, t)), jnp.sum(forced * v)
