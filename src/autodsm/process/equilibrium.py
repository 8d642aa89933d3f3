"""The score of the stationary law, read off the drift.

Where f and Q do not depend on time, Q has an inverse and `Q⁻¹f` is a gradient, the law with the score `s* = 2 Q⁻¹ f` is
stationary, if it is a law: its probability current `(f − ½ Q s*) q` is zero everywhere. `Q⁻¹f` is a gradient where its
Jacobian is symmetric, `wᵀ Q⁻¹A v = vᵀ Q⁻¹A w` for all v, w; probed with v, w of covariance Q both sides have no units.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.precision import double_precision
from ..base.types import State
from .noise import is_invertible, solve_Q
from .process import Process
from .structure import noise_kind

ASYMMETRY = 1e-3
"""Largest asymmetry of a Jacobian, as a share of its size, that is taken for the rounding of a symmetric one."""


class EquilibriumScore(eqx.Module):
    """`2 Q⁻¹ f` at one state."""

    process: Process
    inverse: Array | None
    """`Q⁻¹` in the layout of the structure, where g is a matrix."""

    def __init__(self, process: Process, shape: tuple[int, ...]):
        self.process, self.inverse = process, None
        with jax.ensure_compile_time_eval():
            if noise_kind(process.g(0.0).shape, shape) == "matrix":
                Q = np.asarray(process.structure_for(shape).noise_cov(process.g(0.0)), float)
                units = np.sqrt(np.diagonal(Q, axis1=-2, axis2=-1))
                units = units[..., :, None] * units[..., None, :]
                self.inverse = jnp.asarray(np.linalg.inv(Q / units) / units, float)

    def __call__(self, y: State) -> State:
        f = self.process.f(y, 0.0)
        if self.inverse is None:
            return 2.0 * solve_Q(self.process, 0.0, f)
        structure = self.process.structure_for(y.shape)
        return 2.0 * structure.join(structure.matvec(self.inverse.astype(y.dtype), structure.split(f)))


def equilibrium_score(process: Process, states: np.ndarray) -> EquilibriumScore | str:
    """`s*`, or why it does not exist, looked at in `states`, (n, *shape)."""
    shape = states.shape[1:]
    if not (process.constant_noise and process.autonomous(shape)):
        return "the drift or the noise depends on time"
    if not is_invertible(process, shape, 0.0):
        return "noise enters only some directions"
    found, size = _asymmetry(process, states)
    if not np.isfinite(found + size):
        return "the drift or its derivative is not finite at some state"
    if size == 0:
        return "the drift does not depend on the state"
    if found > ASYMMETRY * size:
        return f"Q⁻¹f is no gradient: its Jacobian is asymmetric by {found / size:.2g} of its size"
    return EquilibriumScore(process, shape)


def _asymmetry(process: Process, states: np.ndarray) -> tuple[float, float]:
    """Root mean squares of `wᵀ Q⁻¹A v − vᵀ Q⁻¹A w` and of `wᵀ Q⁻¹A v`."""
    shape = states.shape[1:]
    noise = np.random.default_rng(0).normal(size=(2, len(states), *process.noise_shape(shape)))

    def one(y, z, u):
        v, w = (process.diffuse(0.0, x, shape) for x in (z, u))

        def along(x):
            f, slope = jax.jvp(lambda y: process.f(y, 0.0), (y,), (x,))
            return solve_Q(process, 0.0, jnp.where(jnp.all(jnp.isfinite(f)), slope, jnp.nan))

        return jnp.sum(w * along(v)), jnp.sum(v * along(w))

    with double_precision():
        pairs = np.stack([np.asarray(x, float) for x in jax.jit(jax.vmap(one))(np.asarray(states, float), *noise)])
    return float(np.sqrt(np.mean((pairs[0] - pairs[1]) ** 2))), float(np.sqrt(np.mean(pairs**2)))
