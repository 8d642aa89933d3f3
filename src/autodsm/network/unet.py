"""U-Nets for images (channels, height, width): of Ho et al. (2020), and the improved one of Nichol & Dhariwal (2021).

    ddpm       the time shifts features, one head of attention at 16×16; 35.7 million parameters for CIFAR-10
    improved   the time scales and shifts normalized features, four heads; 52.5 million with three blocks and attention
               at 16×16 and 8×8; 180.5 million with 160 channels and levels (1, 2, 3, 4)

Levels halve the resolution. Each has residual blocks on the way down and one more on the way up, where features of the
way down are joined. Inside, channels are the last axis. Weights are kept in their own precision; `compute` is that of
convolutions and attention.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import as_floating, as_shape, check_count, check_key, check_name, check_number
from ..base.types import PRNGKey
from ..process.clock import Clock

_GROUPS, _GROUP = 32, 4
_EPS = 1e-6
STYLES = ("ddpm", "improved")


class _Affine(eqx.Module):
    """A convolution with a kernel of 3×3 or 1×1; 1×1 is also used on vectors."""

    weight: Float[Array, "k k inputs outputs"]
    bias: Float[Array, " outputs"]
    stride: int = eqx.field(static=True)

    def __init__(self, inputs: int, outputs: int, size: int, key: PRNGKey, *, gain: float = 1.0, stride: int = 1):
        """Uniform entries of variance gain/mean fan, as in the paper's code; gain 0 starts at zero."""
        mean_fan = 0.5 * (inputs + outputs) * size**2
        bound = math.sqrt(3.0 * gain / mean_fan)
        self.weight = bound * _uniform(key, (size, size, inputs, outputs))
        self.bias = jnp.zeros(outputs)
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        weight, bias = self.weight.astype(x.dtype), self.bias.astype(x.dtype)
        if x.ndim == 1:
            return x @ weight[0, 0] + bias
        # With a stride of two, "SAME" pads the far side of even sizes, as TensorFlow does.
        strides, layout = (self.stride, self.stride), ("NHWC", "HWIO", "NHWC")
        found = jax.lax.conv_general_dilated(x[None], weight, strides, "SAME", dimension_numbers=layout)
        return found[0] + bias


class _Norm(eqx.Module):
    """Group norm, in single precision whatever the features are: up to 32 groups, each of at least four channels.

    A group of one channel would take away what the time adds to it, and leave a network that does not know the time.
    """

    scale: Float[Array, " channels"]
    shift: Float[Array, " channels"]
    groups: int = eqx.field(static=True)

    def __init__(self, channels: int):
        self.scale, self.shift = jnp.ones(channels), jnp.zeros(channels)
        most = min(_GROUPS, max(1, channels // _GROUP))
        self.groups = next(groups for groups in range(most, 0, -1) if channels % groups == 0)

    def __call__(self, x: Array) -> Array:
        z = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        z = z - self._mean(z)
        return (z * (self.scale * jax.lax.rsqrt(self._mean(z * z) + _EPS)) + self.shift).astype(x.dtype)

    def _mean(self, z: Array) -> Array:
        """Of its group, for each channel. Over pixels first: features keep their layout, which is faster on CPUs."""
        groups = jnp.mean(z, axis=(0, 1)).reshape(self.groups, -1)
        return jnp.repeat(jnp.mean(groups, axis=1), groups.shape[1])


class _Residual(eqx.Module):
    """Two convolutions and a shortcut; the time shifts the features between them, or scales and shifts them."""

    norms: tuple[_Norm, _Norm]
    first: _Affine
    second: _Affine
    time: _Affine
    shortcut: _Affine | None
    dropout: eqx.nn.Dropout
    scales: bool = eqx.field(static=True)

    def __init__(self, inputs: int, outputs: int, times: int, key: PRNGKey, *, dropout: float, scales: bool):
        keys = jax.random.split(key, 4)
        self.norms = _Norm(inputs), _Norm(outputs)
        self.first = _Affine(inputs, outputs, 3, keys[0])
        self.second = _Affine(outputs, outputs, 3, keys[1], gain=0.0)
        self.time = _Affine(times, (1 + scales) * outputs, 1, keys[2])
        self.shortcut = None if inputs == outputs else _Affine(inputs, outputs, 1, keys[3])
        self.dropout = eqx.nn.Dropout(dropout)
        self.scales = scales

    def __call__(self, x: Array, times: Array, key: PRNGKey) -> Array:
        z = self.first(jax.nn.silu(self.norms[0](x)))
        of_time = self.time(jax.nn.silu(times))
        if self.scales:
            scale, shift = jnp.split(of_time, 2)
            z = self.norms[1](z) * (1 + scale) + shift
        else:
            z = self.norms[1](z + of_time)
        z = self.second(self.dropout(jax.nn.silu(z), key=key))
        return z + (x if self.shortcut is None else self.shortcut(x))


class _Attention(eqx.Module):
    """Every pixel looks at all."""

    norm: _Norm
    inner: tuple[_Affine, _Affine, _Affine]
    outer: _Affine
    heads: int = eqx.field(static=True)

    def __init__(self, channels: int, heads: int, key: PRNGKey):
        *inner, outer = jax.random.split(key, 4)
        self.norm = _Norm(channels)
        query, keys, values = (_Affine(channels, channels, 1, each) for each in inner)
        self.inner = query, keys, values
        self.outer = _Affine(channels, channels, 1, outer, gain=0.0)
        self.heads = heads

    def __call__(self, x: Array) -> Array:
        z = self.norm(x)
        q, k, v = (f(z).reshape(x.shape[0] * x.shape[1], self.heads, -1) for f in self.inner)
        scores = jnp.einsum("qhc,khc->hqk", q, k) / math.sqrt(q.shape[2])
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        return x + self.outer(jnp.einsum("hqk,khc->qhc", weights, v).reshape(x.shape))


class _Stage(eqx.Module):
    """A residual block, and attention after it where there is any."""

    residual: _Residual
    attention: _Attention | None

    def __call__(self, x: Array, times: Array, key: PRNGKey) -> Array:
        x = self.residual(x, times, key)
        return x if self.attention is None else self.attention(x)


class UNet(eqx.Module):
    """A U-Net over one image: `net(y, t)` has the shape of y, and is zero before training.

        net = UNet((3, 32, 32), Clock(process), key=key)            # Ho et al., 35.7 million parameters
        net = UNet((1, 8, 8), Clock(process), key=key, channels=32, levels=(1, 2), attention=(4,))

    **Arguments:**

    - `shape`: (channels, height, width); more leading axes, such as positions and velocities, are channels too.
    - `channels`, `levels`: features at full resolution, and their multiples at each halving.
    - `blocks`: residual blocks of a level, on the way down.
    - `attention`: resolutions (heights) with attention, beside the lowest; by default 16, where there is one of it.
    - `style`: "ddpm" or "improved"; `heads`: of attention, by default one or four.
    - `dropout`: in training. Masks follow from the time, so that a resumed run repeats them, and that both states of
      an antithetic pair see the same. `fit` returns scores without; `eqx.nn.inference_mode(net)` is what it uses.
    - `compute`: precision of convolutions and attention, e.g. jnp.bfloat16; weights and output stay as they are.
    - `remat`: recompute the features of a block instead of keeping them: a gradient then keeps a fifth of the numbers
      (19 % for 1.5 million parameters on CIFAR-10). For accelerators: XLA undoes it on CPUs.
    """

    enter: _Affine
    times: tuple[_Affine, _Affine]
    down: list[list[_Stage]]
    shrink: list[_Affine]
    middle: tuple[_Residual, _Attention, _Residual]
    up: list[list[_Stage]]
    grow: list[_Affine]
    norm: _Norm
    leave: _Affine
    shape: tuple[int, ...] = eqx.field(static=True)
    t1: float = eqx.field(static=True)
    compute: Any = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    def __init__(
        self,
        shape: tuple[int, ...],
        clock: Clock,
        *,
        key: PRNGKey,
        channels: int = 128,
        levels: Sequence[int] = (1, 2, 2, 2),
        blocks: int = 2,
        attention: Sequence[int] | None = None,
        style: str = "ddpm",
        heads: int | None = None,
        dropout: float = 0.1,
        compute: Any = None,
        remat: bool = False,
    ):
        check_key(key)
        _check(shape, channels, levels, blocks, style, attention, heads, dropout)
        heights = [shape[-2] >> i for i in range(len(levels))]
        attention = [height for height in (16,) if height in heights] if attention is None else list(attention)
        if absent := [height for height in attention if height not in heights]:
            raise ValueError(f"attention={absent} are not among the resolutions of this network, {heights}.")
        heads = (1 if style == "ddpm" else 4) if heads is None else heads
        keys = _keys(key)
        wide = 4 * channels
        self.times = _Affine(channels, wide, 1, next(keys)), _Affine(wide, wide, 1, next(keys))
        self.enter = _Affine(math.prod(shape[:-2]), channels, 3, next(keys))
        height, now, kept = shape[-2], channels, [channels]

        def residual(inputs: int, outputs: int) -> _Residual:
            return _Residual(inputs, outputs, wide, next(keys), dropout=dropout, scales=style == "improved")

        def stage(inputs: int, outputs: int) -> _Stage:
            looks = height in attention
            return _Stage(residual(inputs, outputs), _Attention(outputs, heads, next(keys)) if looks else None)

        self.down, self.shrink, self.up, self.grow = [], [], [], []
        for i, multiple in enumerate(levels):
            line = []
            for _ in range(blocks):
                line.append(stage(now, channels * multiple))
                now = channels * multiple
                kept.append(now)
            self.down.append(line)
            if i < len(levels) - 1:
                self.shrink.append(_Affine(now, now, 3, next(keys), stride=2))
                kept.append(now)
                height //= 2
        self.middle = residual(now, now), _Attention(now, heads, next(keys)), residual(now, now)
        for i, multiple in reversed(list(enumerate(levels))):
            line = []
            for _ in range(blocks + 1):
                line.append(stage(now + kept.pop(), channels * multiple))
                now = channels * multiple
            self.up.append(line)
            if i > 0:
                self.grow.append(_Affine(now, now, 3, next(keys)))
                height *= 2
        self.norm = _Norm(now)
        self.leave = _Affine(now, math.prod(shape[:-2]), 3, next(keys), gain=0.0)
        self.shape, self.t1, self.compute, self.remat = tuple(shape), float(clock.t1), compute, remat

    def __call__(self, y, t) -> Array:
        y = as_floating(y)
        if y.shape != self.shape:
            raise ValueError(f"the image has shape {y.shape}, not {self.shape}. Give ONE image; use jax.vmap.")
        dtype = y.dtype if self.compute is None else self.compute
        keys = _keys(_mask_key(t))
        times = _waves(1000.0 * jnp.asarray(t, jnp.float32) / self.t1, self.enter.weight.shape[-1]).astype(dtype)
        times = self.times[1](jax.nn.silu(self.times[0](times)))
        run = _checkpointed if self.remat else _plain
        x = self.enter(jnp.moveaxis(y.astype(dtype).reshape(-1, *self.shape[-2:]), 0, -1))
        kept = [x]
        for i, line in enumerate(self.down):
            for stage in line:
                x = run(stage, x, times, next(keys))
                kept.append(x)
            if i < len(self.shrink):
                x = self.shrink[i](x)
                kept.append(x)
        first, attention, second = self.middle
        x = run(second, attention(run(first, x, times, next(keys))), times, next(keys))
        for i, line in enumerate(self.up):
            for stage in line:
                x = run(stage, jnp.concatenate([x, kept.pop()], axis=-1), times, next(keys))
            if i < len(self.grow):
                x = self.grow[i](jnp.repeat(jnp.repeat(x, 2, axis=0), 2, axis=1))
        x = self.leave(jax.nn.silu(self.norm(x)))
        return jnp.moveaxis(x, -1, 0).astype(y.dtype).reshape(y.shape)


def _uniform(key: PRNGKey, shape: tuple[int, ...]) -> Array:
    """Between −1 and 1: the first of a power of four of them, since the code for each number of them takes longer to
    compile than to run."""
    size = math.prod(shape)
    some = 4 ** math.ceil(math.log(size, 4))
    return jax.random.uniform(key, (some,), minval=-1.0, maxval=1.0)[:size].reshape(shape)


def _keys(key: PRNGKey) -> Iterator[PRNGKey]:
    """As many as are taken."""
    return (jax.random.fold_in(key, i) for i in itertools.count())


def _plain(block: Callable, x, times, key):
    return block(x, times, key)


_checkpointed = eqx.filter_checkpoint(_plain)


def _waves(t: Array, size: int) -> Float[Array, " size"]:
    """Sines and cosines of t, of wavelengths from 2π to 20,000π."""
    rates = jnp.exp(-np.log(10_000.0) * jnp.arange(size // 2) / (size // 2 - 1))
    return jnp.concatenate([jnp.sin(t * rates), jnp.cos(t * rates)])


def _mask_key(t) -> PRNGKey:
    """A key that no two times share."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(t, jnp.float32), jnp.uint32)
    return jax.random.fold_in(jax.random.key(0), bits)


def _check(shape, channels, levels, blocks, style, attention, heads, dropout) -> None:
    if len(as_shape(shape)) < 3:
        raise ValueError(f"shape={tuple(shape)} must be (channels, height, width) of an image, or (…, height, width).")
    check_count("channels", channels)
    check_count("blocks", blocks)
    check_name("style", style, STYLES)
    if channels % 4 or channels < 4:
        raise ValueError(f"channels={channels} must be a multiple of four.")
    if not (isinstance(levels, Sequence) and levels and all(isinstance(m, int) and m > 0 for m in levels)):
        raise ValueError(f"levels={levels!r} must be multiples of the channels, one for each resolution.")
    part = 2 ** (len(levels) - 1)
    if shape[-2] % part or shape[-1] % part:
        raise ValueError(
            f"an image of {shape[-2]}×{shape[-1]} cannot be halved {len(levels) - 1} times for levels={tuple(levels)}. "
            "Take fewer levels, or pad the images."
        )
    if heads is not None:
        check_count("heads", heads)
        if channels % heads:
            raise ValueError(f"heads={heads} must divide channels={channels}.")
    if attention is not None and not isinstance(attention, Sequence):
        raise TypeError(f"attention={attention!r} must be a list of resolutions, such as (16,).")
    check_number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must be at least 0 and below 1.")
