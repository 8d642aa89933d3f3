"""Score networks: any callable pytree `net(y, t)` that returns an array of the shape of y, for ONE state y and time t.

`Score` makes a score of it. With G the noise received so far (see `clock`) and v = spread², the variance at late times,

    plain      net(y, t)
    noise      −net(y, t) / γ(t)                  γ² = v (1 − exp(−G(t)/v))
    residual   base(y, t) + net(y, t) / γ(t)

so γ² is G at first and v at last; for Langevin dynamics, g² = 2β, and v = 1 it is 1 − exp(−2∫β). Networks are zero
before training: a residual starts at its base. What is not trained is held in a `Frozen`, and `trainable` tells it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._types import PRNGKey, State, StateLike
from ..clock import Clock
from ..errors import as_floating, check_count, check_name, check_positive, is_concrete
from .unet import UNet as UNet

_SMOOTH = ("celu", "elu", "gelu", "mish", "silu", "softplus", "tanh")
_BENT = ("hard_tanh", "leaky_relu", "relu", "relu6", "selu")
ACTIVATIONS: dict[str, Callable] = {name: getattr(jax.nn, name) for name in (*_SMOOTH, *_BENT)}
NON_SMOOTH = frozenset({*_BENT, "hard_sigmoid", "hard_silu"})
"""Names, in `jax.nn`, of activations whose first derivative jumps (that of `elu` and `celu` does not)."""

TIMES = {"both": 10, "log": 9, "raw": 1}  # and how many features each has
PARAMETERIZATIONS = ("noise", "plain", "residual")
Shape = tuple[int, ...]
_FREQUENCIES = 0.5 * np.pi * np.array([1.0, 2.0, 4.0, 8.0])


class Frozen(eqx.Module):
    """Holds what is not trained: `value` has no gradient, and `trainable` is False for all that is inside.

    self.table = Frozen(table)
    self.table.value[0]
    """

    held: Any

    @property
    def value(self):
        return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x, self.held)


def trainable(net):
    """A tree like `net` with True where an array is trained: every floating array that no `Frozen` holds.

        params, rest = eqx.partition(net, trainable(net))
        net = eqx.combine(params, rest)

    A zero gradient is not enough: weight decay would shrink an array that is only frozen.
    """

    def mark(node):
        return jax.tree.map(lambda _: False, node) if isinstance(node, Frozen) else eqx.is_inexact_array(node)

    return jax.tree.map(mark, net, is_leaf=lambda node: isinstance(node, Frozen))


def non_smooth_activation(tree) -> str | None:
    """The name of an activation in `NON_SMOOTH` that a network in the tree uses, or None.

        non_smooth_activation(MLP((2,), clock, key=key, activation="relu"))  # "relu"
        non_smooth_activation(eqx.nn.MLP(2, 2, 8, 1, key=key))  # "relu", the default there

    Found are names in a field `activation` and functions of `jax.nn` in any field; what is frozen does not count.
    """
    if isinstance(tree, Frozen):
        return None
    found = [name for name in sorted(NON_SMOOTH) if tree is getattr(jax.nn, name)]
    if is_dataclass(tree) and not isinstance(tree, type):
        found += NON_SMOOTH & {str(getattr(tree, "activation", None))}
        children = [getattr(tree, field.name, None) for field in fields(tree)]
    else:
        children = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: x is not tree) if x is not tree]
    return next(filter(None, [*found, *map(non_smooth_activation, children)]), None)


def gamma_squared(clock: Clock, spread: float, t: ArrayLike) -> Array:
    """`γ²(t)`: G at first, and no more than spread² at last."""
    v = spread**2
    return -v * jnp.expm1(-clock(t) / v)


class TimeFeatures(eqx.Module):
    """A vector for one time. "raw" is `2t/t1 − 1`, "log" is x, `sin(ωx)`, `cos(ωx)`, ω = π/2 · (1, 2, 4, 8); "both".

        features = TimeFeatures(Clock(process), "both")
        features(0.5).shape  # (10,)

    x is log G(t), shifted and scaled to be −1 at t = t1/1000 and 1 at t1; earlier times go on below −1.
    """

    clock: Frozen
    time: str = eqx.field(static=True)

    def __init__(self, clock: Clock, time: str = "both"):
        check_name("time", time, TIMES)
        self.clock, self.time = Frozen(clock), time

    def __call__(self, t) -> Float[Array, " features"]:
        clock, t = self.clock.value, jnp.asarray(t, float)
        features = [] if self.time == "log" else [2.0 * t[None] / clock.t1 - 1.0]
        if self.time != "raw":
            first, last = clock.log(1e-3 * clock.t1), clock.log(clock.t1)
            # Noise that all comes before t1/1000 leaves no range: one e-fold is the least.
            x = 1.0 + 2.0 * (clock.log(t) - last) / jnp.maximum(last - first, 1.0)
            angles = _FREQUENCIES.astype(x.dtype) * x
            features += [x[None], jnp.sin(angles), jnp.cos(angles)]
        return jnp.concatenate(features)


class _Inputs(eqx.Module):
    """Takes a state and a time; gives the standardized state and the time features."""

    features: TimeFeatures
    standard: Frozen
    shape: Shape = eqx.field(static=True)

    def __init__(self, shape: Shape, fits: Shape, clock: Clock, time: str, mean, std):
        mean, std = as_floating(mean), as_floating(std)
        try:
            mean, std = jnp.broadcast_to(mean, fits), jnp.broadcast_to(std, fits)
        except ValueError:
            raise ValueError(f"mean {mean.shape} and std {std.shape} must broadcast to the shape {fits}.") from None
        if is_concrete(std) and not np.all(np.asarray(std) > 0):
            raise ValueError(f"std={np.asarray(std)} must be above zero: the state is divided by it.")
        self.features, self.standard, self.shape = TimeFeatures(clock, time), Frozen((mean, std)), tuple(shape)

    def __call__(self, y: StateLike, t: ArrayLike) -> tuple[State, Array]:
        y = as_floating(y)
        if y.shape != self.shape:
            raise ValueError(
                f"the state has shape {y.shape}, not {self.shape}. Give ONE state; use jax.vmap for a batch."
            )
        mean, std = self.standard.value
        return ((y - mean) / std).astype(y.dtype), self.features(t).astype(y.dtype)


class _Linear(eqx.Module):
    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, gain: float, key: PRNGKey):
        """Normal entries of variance gain/inputs: 1 for LeCun, 2 for He, 0 for a layer that starts at zero."""
        entries = math.sqrt(gain / inputs) * jax.random.normal(key, (inputs + 1, outputs))
        self.weight, self.bias = entries[:-1], entries[-1]

    def __call__(self, x: Array) -> Array:
        return x @ self.weight.astype(x.dtype) + self.bias.astype(x.dtype)


class MLP(eqx.Module):
    """A plain network over the raveled state, for any shape: `depth` hidden layers of `width`.

        net = MLP((2,), Clock(process), key=key, mean=data.mean(0), std=data.std(0))
        net(y, t)  # zeros before training

    `activation` is a name in `ACTIVATIONS`, `time` is "raw", "log" or "both" (see `TimeFeatures`). `mean` and `std`
    broadcast to `shape` and are frozen; each k in `fourier` adds `sin(πkz)` and `cos(πkz)`, `z = (y − mean)/std`.

    With a `spread` the waves fade as noise of the deviation γ(t) in `Score` smooths them, by `exp(−½(πkγ/std)²)`: a
    density that has lost its edges is not learned from features that have them.
    """

    inputs: _Inputs
    layers: list[_Linear]
    fourier: tuple[float, ...] = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    spread: float | None = eqx.field(static=True)

    def __init__(
        self, shape: Shape, clock: Clock, *, key: PRNGKey, width: int = 256, depth: int = 3, activation: str = "silu",
        time: str = "both", fourier: Sequence[float | int] = (), spread: float | int | None = None,
        mean: StateLike = 0.0, std: StateLike = 1.0,
    ):  # fmt: skip
        self.inputs = _Inputs(shape, tuple(shape), clock, time, mean, std)
        self.fourier, self.activation = tuple(float(k) for k in fourier), activation
        if spread is not None:
            check_positive("spread", spread)
        self.spread = None if spread is None else float(spread)
        d = math.prod(shape)
        self.layers = _layers(d * (1 + 2 * len(self.fourier)) + TIMES[time], width, depth, d, activation, key)

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        return _apply(self.layers, self.features(y, t), self.activation).reshape(self.inputs.shape)

    def features(self, y: StateLike, t: ArrayLike) -> Float[Array, " inputs"]:
        """What the first layer sees: z, its waves, and the features of time."""
        z, times = self.inputs(y, t)
        z = jnp.ravel(z)
        waves = [wave(math.pi * k * z) for k in self.fourier for wave in (jnp.sin, jnp.cos)]
        if self.spread is not None and waves:
            std = jnp.ravel(self.inputs.standard.value[1])
            received = gamma_squared(self.inputs.features.clock.value, self.spread, t) / std**2
            heights = [jnp.exp(-0.5 * (math.pi * k) ** 2 * received).astype(z.dtype) for k in self.fourier]
            waves = [heights[i // 2] * wave for i, wave in enumerate(waves)]
        return jnp.concatenate([z, *waves, times])


class Equivariant(eqx.Module):
    """A network for n exchangeable particles in k dimensions, states (n, k): permuting them permutes the output.

        net = Equivariant((5, 2), Clock(process), key=key)
        net(y[::-1], t)  # net(y, t)[::-1]

    `m_i = 1/n Σ_j message(z_i, z_j − z_i, t)` and `out_i = update(z_i, m_i, t)`, with `z = (y − mean)/std`; the
    update has `depth` hidden layers, the message one less (but one at least). `mean` and `std` broadcast to (k,).
    """

    inputs: _Inputs
    receive: _Linear
    difference: Float[Array, "k width"]
    messages: list[_Linear]
    update: list[_Linear]
    activation: str = eqx.field(static=True)

    def __init__(
        self, shape: Shape, clock: Clock, *, key: PRNGKey, width: int = 64, depth: int = 3, activation: str = "silu",
        time: str = "both", mean: StateLike = 0.0, std: StateLike = 1.0,
    ):  # fmt: skip
        if len(shape) != 2:
            raise ValueError(f"shape={tuple(shape)} must be (n, k), n particles in k dimensions. Otherwise use MLP.")
        self.inputs, self.activation = _Inputs(shape, tuple(shape[1:]), clock, time, mean, std), activation
        k, size, keys = shape[1], TIMES[time], jax.random.split(key, 4)
        self.update = _layers(k + width + size, width, depth, k, activation, keys[0])
        self.receive = _Linear(k + size, width, 1.0, keys[1])
        self.difference = jax.random.normal(keys[2], (k, width)) / math.sqrt(k)
        self.messages = [_Linear(width, width, 2.0, each) for each in jax.random.split(keys[3], max(depth - 2, 0))]

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        z, times = self.inputs(y, t)
        nodes = jnp.concatenate([z, jnp.broadcast_to(times, (len(z), len(times)))], axis=1)
        # The first layer of a message is linear in z_i and z_j: n products instead of n².
        sent = z @ self.difference.astype(z.dtype)
        act = ACTIVATIONS[self.activation]
        pairs = act((self.receive(nodes) - sent)[:, None] + sent[None])
        for layer in self.messages:
            pairs = act(layer(pairs))
        return _apply(self.update, jnp.concatenate([nodes, jnp.mean(pairs, axis=1)], axis=1), self.activation)


class Odd(eqx.Module):
    """`½ (net(y, t) − net(−y, t))`, odd in y whatever the network is; costs two evaluations.

    net = Odd(MLP((2,), clock, key=key))
    net(-y, t)  # -net(y, t)
    """

    net: Callable

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        return 0.5 * (self.net(y, t) - self.net(-as_floating(y), t))


class Score(eqx.Module):
    """The score that a network stands for, as in the head of this file. Itself a network `(y, t) -> score`.

        score = Score(MLP((2,), clock, key=key), clock)
        score = Score(net, clock, parameterization="residual", base=lambda y, t: -y)

    `base` is any function of (y, t), such as the score of the stationary law; it is frozen. `spread` is the standard
    deviation of y at late times; for a process without a stationary law make it very large, then γ² is G.
    """

    net: Callable
    clock: Frozen
    base: Frozen | None
    parameterization: str = eqx.field(static=True)
    spread: float = eqx.field(static=True)

    def __init__(
        self, net: Callable, clock: Clock, *, parameterization: str = "noise", base: Callable | None = None,
        spread: float | int = 1.0,
    ):  # fmt: skip
        check_name("parameterization", parameterization, PARAMETERIZATIONS)
        check_positive("spread", spread)
        if (parameterization == "residual") != (base is not None):
            wanted = "'residual' needs a base(y, t), such as the score of the stationary law, and no other takes one."
            raise ValueError(f"parameterization={parameterization!r} with base={base!r}: {wanted}")
        self.net, self.clock = net, Frozen(clock)
        self.base = None if base is None else Frozen(base)
        self.parameterization, self.spread = parameterization, float(spread)

    def gamma(self, t) -> Array:
        """`γ(t)`, the scale of the noise."""
        square = gamma_squared(self.clock.value, self.spread, t)
        return jnp.sqrt(jnp.maximum(square, jnp.finfo(square.dtype).tiny))  # no 0/0 at t = 0

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        y = as_floating(y)
        out = self.net(y, t)
        if self.parameterization == "plain":
            return out
        out = out / self.gamma(t).astype(y.dtype)
        return -out if self.base is None else self.base.value(y, t) + out


def _layers(inputs: int, width: int, depth: int, outputs: int, activation: str, key: PRNGKey) -> list[_Linear]:
    """`depth` hidden layers and one that starts at zero."""
    check_count("width", width)
    check_count("depth", depth)
    check_name("activation", activation, ACTIVATIONS)
    first, *inner, last = jax.random.split(key, depth + 1)
    hidden = [_Linear(inputs, width, 1.0, first), *(_Linear(width, width, 2.0, each) for each in inner)]
    return [*hidden, _Linear(width, outputs, 0.0, last)]


def _apply(layers: list[_Linear], x: Array, activation: str) -> Array:
    for layer in layers[:-1]:
        x = ACTIVATIONS[activation](layer(x))
    return layers[-1](x)


def state_shape(score) -> Shape | None:
    """The shape of a state, if a network of this library says it."""
    known = (_Inputs, UNet)
    nodes = jax.tree.leaves(score, is_leaf=lambda node: isinstance(node, known))
    return next((node.shape for node in nodes if isinstance(node, known)), None)
