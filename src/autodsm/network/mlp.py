"""The multilayer perceptron, and the features of time and state that it sees."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..base.errors import as_floating, as_shape, as_time, check_count, check_key, check_name, is_concrete
from ..base.types import PRNGKey, State, StateLike
from ..process.clock import Clock
from .base import ACTIVATIONS, Frozen, Shape, _spread, gamma_squared

TIMES = {"both": 10, "log": 9, "raw": 1}  # and how many features each has


_FREQUENCIES = 0.5 * np.pi * np.array([1.0, 2.0, 4.0, 8.0])
"""Over x from −1 to 1 the slowest wave is half a period long, so that its sine tells all times apart; the fastest is
four periods long."""


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
        if not isinstance(clock, Clock):
            raise TypeError(f"clock={clock!r} must be a Clock(process).")
        self.clock, self.time = Frozen(clock), time

    def __call__(self, t) -> Float[Array, " features"]:
        clock, t = self.clock.value, as_time(t)
        features = [] if self.time == "log" else [2.0 * t[None] / clock.t1 - 1.0]
        if self.time != "raw":
            first, last = clock.log(1e-3 * clock.t1), clock.log(clock.t1)
            # Noise that all comes before t1/1000 leaves no range: one e-fold is the least.
            x = 1.0 + 2.0 * (clock.log(t) - last) / jnp.maximum(last - first, 1.0)
            angles = _FREQUENCIES.astype(x.dtype) * x
            features += [x[None], jnp.sin(angles), jnp.cos(angles)]
        return jnp.concatenate(features)


class Inputs(eqx.Module):
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


class Linear(eqx.Module):
    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, gain: float, key: PRNGKey):
        """Normal entries of variance gain/inputs: 1 for LeCun, 2 for He, 0 for a layer that starts at zero."""
        if gain == 0:
            entries = jnp.zeros((inputs + 1, outputs))
        else:
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

    With a `spread` (a number, or one for each coordinate) the waves fade as noise of the deviation γ(t) in `Score`
    smooths them, by `exp(−½(πkγ/std)²)`: a density that has lost its edges is not learned from features that have them.
    """

    inputs: Inputs
    layers: list[Linear]
    fourier: tuple[float, ...] = eqx.field(static=True)
    activation: str = eqx.field(static=True)
    spread: Frozen | None

    def __init__(
        self, shape: Shape, clock: Clock, *, key: PRNGKey, width: int = 256, depth: int = 3, activation: str = "silu",
        time: str = "both", fourier: Sequence[float | int] = (), spread: StateLike | None = None,
        mean: StateLike = 0.0, std: StateLike = 1.0,
    ):  # fmt: skip
        check_key(key)
        shape = as_shape(shape)
        if np.ndim(fourier) != 1:
            raise TypeError(f"fourier={fourier!r} must be a list of wave numbers, such as (1.0, 2.0).")
        self.inputs = Inputs(shape, shape, clock, time, mean, std)
        self.fourier, self.activation = tuple(float(k) for k in fourier), activation
        self.spread = None if spread is None else _spread(spread)
        d = math.prod(shape)
        self.layers = layers(d * (1 + 2 * len(self.fourier)) + TIMES[time], width, depth, d, activation, key)

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        return apply_layers(self.layers, self.features(y, t), self.activation).reshape(self.inputs.shape)

    def features(self, y: StateLike, t: ArrayLike) -> Float[Array, " inputs"]:
        """What the first layer sees: z, its waves, and the features of time."""
        z, times = self.inputs(y, t)
        z = jnp.ravel(z)
        waves = [wave(math.pi * k * z) for k in self.fourier for wave in (jnp.sin, jnp.cos)]
        if self.spread is not None and waves:
            std = jnp.ravel(self.inputs.standard.value[1])
            received = jnp.ravel(gamma_squared(self.inputs.features.clock.value, self.spread.value, t)) / std**2
            heights = [jnp.exp(-0.5 * (math.pi * k) ** 2 * received).astype(z.dtype) for k in self.fourier]
            waves = [heights[i // 2] * wave for i, wave in enumerate(waves)]
        return jnp.concatenate([z, *waves, times])


def layers(inputs: int, width: int, depth: int, outputs: int, activation: str, key: PRNGKey) -> list[Linear]:
    """`depth` hidden layers and one that starts at zero."""
    check_count("width", width)
    check_count("depth", depth)
    check_name("activation", activation, ACTIVATIONS)
    first, *inner, last = jax.random.split(key, depth + 1)
    hidden = [Linear(inputs, width, 1.0, first), *(Linear(width, width, 2.0, each) for each in inner)]
    return [*hidden, Linear(width, outputs, 0.0, last)]


def apply_layers(layers: list[Linear], x: Array, activation: str) -> Array:
    for layer in layers[:-1]:
        x = ACTIVATIONS[activation](layer(x))
    return layers[-1](x)
