"""A network for particles: permuting them permutes its output."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..base.errors import as_shape, check_key
from ..base.types import PRNGKey, State, StateLike
from ..process.clock import Clock
from .base import ACTIVATIONS, Shape
from .mlp import TIMES, Inputs, Linear, apply_layers, layers


class Equivariant(eqx.Module):
    """A network for n exchangeable particles in k dimensions, states (n, k): permuting them permutes the output.

        net = Equivariant((5, 2), Clock(process), key=key)
        net(y[::-1], t)  # net(y, t)[::-1]

    `m_i = 1/n Σ_j message(z_i, z_j − z_i, t)` and `out_i = update(z_i, m_i, t)`, with `z = (y − mean)/std`; the
    update has `depth` hidden layers, the message one less (but one at least). `mean` and `std` broadcast to (k,).
    """

    inputs: Inputs
    receive: Linear
    difference: Float[Array, "k width"]
    messages: list[Linear]
    update: list[Linear]
    activation: str = eqx.field(static=True)

    def __init__(
        self, shape: Shape, clock: Clock, *, key: PRNGKey, width: int = 64, depth: int = 3, activation: str = "silu",
        time: str = "both", mean: StateLike = 0.0, std: StateLike = 1.0,
    ):  # fmt: skip
        check_key(key)
        shape = as_shape(shape)
        if len(shape) != 2:
            raise ValueError(f"shape={tuple(shape)} must be (n, k), n particles in k dimensions. Otherwise use MLP.")
        self.inputs, self.activation = Inputs(shape, tuple(shape[1:]), clock, time, mean, std), activation
        k, size, keys = shape[1], TIMES[time], jax.random.split(key, 4)
        self.update = layers(k + width + size, width, depth, k, activation, keys[0])
        self.receive = Linear(k + size, width, 1.0, keys[1])
        self.difference = jax.random.normal(keys[2], (k, width)) / math.sqrt(k)
        self.messages = [Linear(width, width, 2.0, each) for each in jax.random.split(keys[3], max(depth - 2, 0))]

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        z, times = self.inputs(y, t)
        nodes = jnp.concatenate([z, jnp.broadcast_to(times, (len(z), len(times)))], axis=1)
        # The first layer of a message is linear in z_i and z_j: n products instead of n².
        sent = z @ self.difference.astype(z.dtype)
        act = ACTIVATIONS[self.activation]
        pairs = act((self.receive(nodes) - sent)[:, None] + sent[None])
        for layer in self.messages:
            pairs = act(layer(pairs))
        return apply_layers(self.update, jnp.concatenate([nodes, jnp.mean(pairs, axis=1)], axis=1), self.activation)
