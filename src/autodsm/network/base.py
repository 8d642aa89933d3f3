"""Score networks: any callable pytree `net(y, t)` that returns an array of the shape of y, for ONE state y and time t.

`Score` makes a score of it. With G the noise received so far (see `clock`) and v = spread², the variance at late times,
of all coordinates or of each,

    plain      net(y, t)
    noise      −net(y, t) / γ(t)                  γ² = v (1 − exp(−G(t)/v))
    residual   base(y, t) + net(y, t) / γ(t)

so γ² is G at first and v at last; for Langevin dynamics, g² = 2β, and v = 1 it is 1 − exp(−2∫β). Networks are zero
before training: a residual starts at its base. What is not trained is held in a `Frozen`, and `trainable` tells it.

A score is used from t0 on, where its training starts. Before t0, where 1/γ would grow without end, it is held at its
value at t0; or it is on the line in t from the known score of y_0 to that value.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from ..base.errors import as_floating, check_name, check_number, is_concrete
from ..base.types import State, StateLike
from ..process.clock import EARLIEST, Clock

_SMOOTH = ("celu", "elu", "gelu", "mish", "silu", "softplus", "tanh")
_BENT = ("hard_tanh", "leaky_relu", "relu", "relu6", "selu")
ACTIVATIONS: dict[str, Callable] = {name: getattr(jax.nn, name) for name in (*_SMOOTH, *_BENT)}
NON_SMOOTH = frozenset({*_BENT, "hard_sigmoid", "hard_silu"})
"""Names, in `jax.nn`, of activations whose first derivative jumps (that of `elu` and `celu` does not)."""

PARAMETERIZATIONS = ("noise", "plain", "residual")
Shape = tuple[int, ...]


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


def gamma_squared(clock: Clock, spread: ArrayLike, t: ArrayLike) -> Array:
    """`γ²(t)`: G at first, and no more than spread² at last; of every coordinate, where each has a spread."""
    v = jnp.asarray(spread, float) ** 2
    if v.ndim == 0:
        return -v * jnp.expm1(-clock(t) / v)
    ratios = jnp.broadcast_to(clock.totals_of(v.shape) / v, v.shape)
    # A coordinate without noise of its own receives that of others, in proportion to theirs.
    others = jnp.sum(ratios) / jnp.maximum(jnp.sum(ratios > 0), 1)
    return -v * jnp.expm1(-clock.share(t) * jnp.where(ratios > 0, ratios, others))


def _spread(value: StateLike) -> Frozen:
    found = as_floating(value)
    if is_concrete(found) and not (np.all(np.isfinite(found)) and np.all(np.asarray(found) > 0)):
        shown = np.asarray(found).tolist()
        raise ValueError(f"spread={shown} must be finite and above zero: it is the standard deviation at late times.")
    return Frozen(found)


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

    **Arguments:**

    - `base`: any function of (y, t), such as the score of the stationary law; it is frozen.
    - `spread`: the standard deviation of y at late times, one number or one for each coordinate; for a process without
      a stationary law make it very large, then γ² is G.
    - `t0`: where training starts, by default t1/1000; an earlier time counts as t0.
    - `start`: `start(y)`, the score of the law of y_0 where it is known; it is frozen.
    - `relaxation`: of the base towards the score of a stationary law, a `Relaxation`.
    """

    net: Callable
    clock: Frozen
    base: Frozen | None
    spread: Frozen
    start: Frozen | None
    relaxation: Callable | None
    parameterization: str = eqx.field(static=True)
    t0: float = eqx.field(static=True)

    def __init__(
        self, net: Callable, clock: Clock, *, parameterization: str = "noise", base: Callable | None = None,
        spread: StateLike = 1.0, t0: float | None = None, start: Callable | None = None,
        relaxation: Callable | None = None,
    ):  # fmt: skip
        check_name("parameterization", parameterization, PARAMETERIZATIONS)
        if (parameterization == "residual") != (base is not None):
            wanted = "'residual' needs a base(y, t), such as the score of the stationary law, and no other takes one."
            raise ValueError(f"parameterization={parameterization!r} with base={base!r}: {wanted}")
        if relaxation is not None and base is None:
            raise ValueError("relaxation is that of a base, and there is none: give base=... or no relaxation.")
        t0 = EARLIEST * clock.t1 if t0 is None else t0
        check_number("t0", t0)
        if not (is_concrete(t0) and 0 < t0 < clock.t1):
            raise ValueError(f"t0={t0} must lie inside (0, t1) = (0, {clock.t1}): the score is held before it.")
        self.net, self.clock = net, Frozen(clock)
        self.base = None if base is None else Frozen(base)
        self.start = None if start is None else Frozen(start)
        self.relaxation, self.t0 = relaxation, float(t0)
        self.parameterization, self.spread = parameterization, _spread(spread)

    def gamma(self, t) -> Array:
        """`γ(t)`, the scale of the noise, of the shape of `spread`."""
        square = gamma_squared(self.clock.value, self.spread.value, t)
        return jnp.sqrt(jnp.maximum(square, jnp.finfo(square.dtype).tiny))  # no 0/0 at t = 0

    def __call__(self, y: StateLike, t: ArrayLike) -> State:
        y = as_floating(y)
        found = self._trained(y, jnp.maximum(t, self.t0))
        if self.start is None:
            return found
        part = jnp.clip(jnp.asarray(t, y.dtype) / self.t0, 0.0, 1.0)
        # Where it is not used the score of y_0 may be infinite.
        first = jnp.where(part < 1.0, self.start.value(y), found)
        return first + part * (found - first)

    def _trained(self, y: State, t) -> State:
        out = self.net(y, t)
        if self.parameterization == "plain":
            return out
        out = out / self.gamma(t).astype(y.dtype)
        if self.base is None:
            return -out
        base = self.base.value(y, t)
        return out + (base if self.relaxation is None else self.relaxation(y, t, base))
