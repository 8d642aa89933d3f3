"""Whether the first axis of y0 alone counts samples: an array of paths, (paths, times, d), is no array of states.

Its second axis is taken for a part of the state, (times, d). That is a mistake for certain where the process takes
states of shape (d,) and none of shape (times, d). Where it takes both, as a drift that acts on each number alone does,
it may well be meant so: particles that do not interact, or whole series under a process of noise. Then the data can
only speak for one reading: entries that follow each other are alike, and the more so the nearer they are, which those
of particles are not. So `fit` warns, where no prior says that whole series are to be generated.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..process.process import Process

_SHORTEST = 4
"""Entries along an axis, at least, that are taken for times: of fewer, none are far apart."""
_ALIKE = 0.5
"""Correlation of neighbours, at least. Between the times of a path that is sampled well it is close to 1."""
_SIGMAS = 6.0
"""Standard errors by which neighbours are more alike than entries far apart: none of chance."""


def check_axes(process: Process, x: np.ndarray) -> None:
    """Refuse states that the process does not take; of an array of paths, say what it was taken for."""
    try:
        process.check(jnp.asarray(x[0]))
    except (ValueError, TypeError) as error:
        if x.ndim < 3 or not _takes(process, x[0, 0]):
            raise
        raise ValueError(
            f"y0 has shape (n, {', '.join(map(str, x.shape[1:]))}): its first axis counts samples, so that a state "
            f"would have shape {x.shape[1:]}, which the process does not take. It takes states of shape "
            f"{x.shape[2:]}. {_remedy(x)}"
        ) from error


def path_like(process: Process, x: np.ndarray) -> str | None:
    """Why examples (n, *shape) look like paths of a process of smaller states, or None."""
    if x.ndim < 3 or x.shape[1] < _SHORTEST or not _takes(process, x[0, 0]) or not _by_rows(process, x[0]):
        return None
    std = x.std(axis=0)
    z = ((x - x.mean(axis=0)) / np.where(std > 0, std, np.inf)).astype(np.float64)  # what does not vary says nothing
    far = x.shape[1] // 2
    near = (z[:, :-far] * z[:, 1 : x.shape[1] - far + 1]).reshape(len(z), -1).mean(axis=1)
    apart = (z[:, :-far] * z[:, far:]).reshape(len(z), -1).mean(axis=1)
    error = (near - apart).std() / np.sqrt(len(z))
    if near.mean() < _ALIKE or not (near - apart).mean() > _SIGMAS * error:
        return None
    return (
        f"y0 is taken for samples of a state of shape {x.shape[1:]}. Neighbours along its first axis are alike "
        f"(correlation {near.mean():.2f}, and {apart.mean():.2f} of those {far} apart), and the process acts on each "
        f"by itself. {_remedy(x)} If a state is such a series as a whole, nothing is wrong."
    )


def _remedy(x: np.ndarray) -> str:
    return (
        f"If the second axis of y0 is time, give the initial states alone, y0[:, 0]; if its {x.shape[1]} entries are "
        f"samples of one law, give y0.reshape(-1, {', '.join(map(str, x.shape[2:]))})."
    )


def _takes(process: Process, y: np.ndarray) -> bool:
    try:
        process.check(jnp.asarray(y))
    except Exception:  # whatever a drift does with a state of another shape
        return False
    return True


def _by_rows(process: Process, y: np.ndarray) -> bool:
    """True when drift and noise do with each row of a state what they do with a state of that shape."""
    t = 0.5 * process.t1
    try:
        apart = jax.vmap(lambda row: process.f(row, t))(jnp.asarray(y))
        noise = process.noise_shape(y.shape) == (len(y), *process.noise_shape(y.shape[1:]))
    except Exception:
        return False
    return noise and bool(np.allclose(process.f(jnp.asarray(y), t), apart, rtol=1e-4))
