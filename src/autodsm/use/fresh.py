"""Fresh states of a process, with targets whose mean given the state is the score, to judge a score by.

No training saw them. Where there is a target without bias it is drawn along with each state: the kernel from t = 0 of a
linear process, the tabulated one of an elementwise drift, sums along paths for invertible noise, shifts along paths for
kinetic noise. Paths take the steps that their own means and variances need, more than those of a training: that a
training took too few of them shows. A local kernel is no such target, as it is linearized; where there is no other,
Stein's identity alone is left.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..base.compilation import SMALL, jit_once
from ..base.estimate import chunk_for, over_samples
from ..base.types import PRNGKey
from ..kernels.schedule import FromZero
from ..paths.initial import initial_states
from ..paths.simulate import simulate
from ..process.noise import is_invertible
from ..process.probes import is_linear
from ..process.process import Process
from ..process.structure import Elementwise
from ..targets import AbstractForward, AbstractTarget, Adapted, Kinetic, Local, Paths, Tabulated
from ..targets.kinetic import kinetic_problem
from ..targets.pilot import Pilot

MAX_ROWS = 4
"""Coordinates that a linear drift may couple for its kernel from t = 0 to be drawn from, as in training."""


class Fresh(NamedTuple):
    """States at each of the times, with their targets."""

    y: np.ndarray
    """(times, n, *shape)"""
    target: np.ndarray | None
    """The same; None where there is no target without bias."""
    about: str
    """How they were drawn."""
    jumps: bool
    """Whether the drift jumps, so that its derivatives are not known."""


def is_unbiased(target: Any, shape: tuple[int, ...]) -> bool:
    """Whether the mean of a target given the state is the score, up to the steps of paths."""
    if isinstance(target, Local):
        return isinstance(target.schedule, FromZero) and target.process.affine(shape)
    return isinstance(target, Adapted | Kinetic | Tabulated)


def unbiased_target(pilot: Pilot) -> tuple[AbstractTarget | None, str]:
    """A target without bias for the process of a pilot, and what it is."""
    process, shape = pilot.process, pilot.shape
    few = pilot.structure.rows <= MAX_ROWS
    if few and process.autonomous(shape) and is_linear(process, pilot.x, clock=pilot.clock):
        return Local(process, FromZero(), Paths(process, 1, clock=pilot.clock)), "the exact kernel from t = 0"
    if pilot.jump is not None:
        return None, f"Stein's identity alone: {pilot.jump}"
    if not all(is_invertible(process, shape, share * process.t1) for share in (0.5, 1.0)):
        if (problem := kinetic_problem(pilot)) is not None:
            return None, f"Stein's identity alone: {problem}"
        return Kinetic(process, pilot.paths(), clock=pilot.clock).prepared(pilot), "shifts along paths"
    if isinstance(pilot.structure, Elementwise):
        found = Tabulated.find(pilot)
        if not isinstance(found, str):
            return found, "the tabulated kernel from t = 0"
    target = Adapted(process, pilot.paths(), gaussian=True, clock=pilot.clock).prepared(pilot)
    return target, "sums along paths"


def draw_fresh(
    process: Process,
    y0,
    times: np.ndarray,
    n: int,
    *,
    key: PRNGKey,
    forward: AbstractForward | None = None,
) -> Fresh:
    """n states at each time, those of one path at all times; by `forward`, perhaps with targets, or as is best."""
    pilot_key, start_key, draw_key = jax.random.split(key, 3)
    x = initial_states(y0, n, key=start_key)
    jumps = False
    if forward is None:
        pilot = Pilot(process, y0, key=pilot_key)
        target, about = unbiased_target(pilot)
        jumps = pilot.jump is not None
    elif is_unbiased(forward, x.shape[1:]):
        target, about = forward, "targets as in training"
    else:
        target, about = None, "states as in training, and Stein's identity alone"
    chunk = chunk_for(len(times) * math.prod(x.shape[1:]) * 64)
    at = jnp.asarray(times, x.dtype)
    if isinstance(target, Kinetic):  # closed over: it looks at values of the noise
        kinetic = target
        one = lambda x, key: _drawn(kinetic, at, x, key)  # noqa: E731
    elif target is not None:
        one = eqx.Partial(_drawn, target, at)
    else:
        one = eqx.Partial(_simulated, process, at) if forward is None else eqx.Partial(_states, forward, at)
    if forward is not None and x[0].size <= SMALL:  # what a training has drawn all along: once more, and soon
        drawn = jit_once(_of_each, optimize=False)(one, x, jax.random.split(draw_key, n))
        drawn = jax.tree.map(np.asarray, drawn)
    else:
        drawn = over_samples(one, x, key=draw_key, chunk=chunk)
    found, scores = (drawn, None) if target is None else drawn
    if scores is not None:
        scores = np.moveaxis(scores, 1, 0).astype(np.float64)
    y = np.moveaxis(found, 1, 0)
    for name, values in (("states", y), ("targets", scores)):
        if values is not None and not np.isfinite(values).all():
            raise FloatingPointError(
                f"{name} of the process are not finite: paths explode, or leave the domain of the drift. Check it with "
                "ad.simulate(process, y0, [t1], key=key)."
            )
    return Fresh(y, scores, about, jumps)


def _of_each(one, x, keys):
    return jax.vmap(one)(x, keys)


def _simulated(process: Process, times, x, key):
    return simulate(process, x, times, key=key)


def _states(forward: AbstractForward, times, x, key):
    return forward.states(x, times, key=key)


def _drawn(target: AbstractTarget, times, x, key):
    draw = target.draw(x, times, key=key)
    return draw.y[:, 0], draw.score[:, 0]
