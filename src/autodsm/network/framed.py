"""A network in the frame of the marginals: inputs of order one at every time, and an affine part of its own."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..base.modules import replace
from ..process.clock import Clock
from ..targets.marginals import Marginals
from .base import Frozen
from .mlp import TIMES, TimeFeatures


class Framed(eqx.Module):
    """A network in the frame of the marginals, with an affine part: `net(z, t) + a_t + (b_t + c_t) z`.

    z = (y − m_t)/s_t; a and b, of every coordinate, are tables over the times of the marginals; c, one for all, is
    linear in the features of time, which tell early times apart. All are zero before training. Where their gradients
    vanish the score obeys Stein's identities E[s] = 0 and E[s_i (y − m_t)_i] = −1 at all times, however little of it
    the network has learned, and so its flow carries means and variances as the process does.
    """

    net: Callable
    shift: Float[Array, "points ..."]
    scale: Float[Array, "points ..."]
    gain: Float[Array, " features"]
    features: TimeFeatures
    marginals: Frozen

    def __init__(self, net: Callable, clock: Clock, marginals: Marginals):
        self.net, self.features = net, TimeFeatures(clock)
        self.marginals = Frozen(replace(marginals, inverse=None))  # the frame of each coordinate
        self.shift, self.scale = jnp.zeros_like(marginals.mean), jnp.zeros_like(marginals.std)
        self.gain = jnp.zeros(TIMES[self.features.time] + 1)

    def __call__(self, y, t):
        marginals = self.marginals.value
        z = marginals.standardize(y, t)
        shift, scale = (marginals.between(table, t) for table in (self.shift, self.scale))
        gain = self.gain[0] + self.features(t) @ self.gain[1:]
        return self.net(z, t) + (shift + (scale + gain) * z).astype(z.dtype)
