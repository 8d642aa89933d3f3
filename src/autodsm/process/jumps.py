"""Drifts that jump in the state, such as `−sign(y)`: automatic differentiation misses the delta in their derivatives.

A kink (`abs`, `max`, a ReLU) is no jump: its derivative is right almost everywhere, and that is enough. Two steps tell
them apart. The operations of the drift say whether it could jump: a comparison, a rounding or a quotient of something
that depends on the state. If one is there, lines between probe states are bisected towards the largest change of f:

    |f(b) − f(a)| → 0 as b → a  where f is continuous;  it stays where f jumps.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..base.calls import shape_of
from ..base.errors import is_concrete
from ..base.precision import double_precision
from .clock import Clock
from .probes import spread_of
from .process import Process
from .value_key import array_key, process_key

_JUMPING = frozenset(
    {"sign", "floor", "ceil", "round", "rem", "eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "top_k", "sort"}
    | {"is_finite", "atan2", "while", "pure_callback", "io_callback"}
)
_SINGULAR = frozenset({"div", "rsqrt", "tan", "log", "pow"})  # y/|y| is a sign; where nothing jumps, probes say so
_LINES = 32
"""Over the two decades of `_REACH`, one line for each factor of 1.16; all of them take a second."""
_REACH = np.geomspace(0.1, 10.0, _LINES)
"""How far probe states lie from the middle of the data, in its spread and the noise's: from near to far outside."""
_SEGMENTS = 64
"""Of each line, each bisected by itself, so that a jump is found beside steep slopes elsewhere on the line."""
_NUMBERS = 1 << 20
"""Most numbers in all probe states of one bisection; for large states there are fewer lines."""
_HALVINGS = 30
"""A segment shrinks by 10⁻⁹, to 10⁻¹¹ of a line: well above the rounding of double precision."""
_STAYS = 1e-3
"""A change that is still this share of the largest in its segment is a jump; √|y| would keep 3·10⁻⁵ of it."""
_ROUNDING = 1e-9
"""Changes below this share of the drift itself are rounding, with a margin for terms that cancel."""
_KEPT = 64
"""Looks that are remembered: each takes about a second, and a few hundred bytes."""


class Jump(NamedTuple):
    """Where a drift jumps, and by how much."""

    y: np.ndarray
    t: float
    size: np.ndarray

    def __str__(self) -> str:
        i = np.unravel_index(np.argmax(np.abs(self.size)), self.size.shape)
        where = f"y={np.array2string(self.y, precision=3)}" if self.y.size <= 8 else f"y_i={self.y[i]:.3g}"
        return f"component {tuple(map(int, i))} jumps by {self.size[i]:.3g} at {where}, t={self.t:.3g}"


_seen: dict[tuple, Jump | None] = {}
"""By the values of process and states."""


def may_jump(drift: Callable, shape: tuple[int, ...]) -> bool:
    """False only when no operation on something that depends on the state can jump."""
    example = (jax.ShapeDtypeStruct(shape, float), jax.ShapeDtypeStruct((), float))
    jaxpr = jax.make_jaxpr(drift)(*example).jaxpr
    return _may_jump(jaxpr, [True, False])[0]


def find_jump(process: Process, x, *, clock: Clock | None = None) -> Jump | None:
    """A jump of the drift, looked for around the states x, (n, *shape), and as far as noise carries them; or None.

    jump = find_jump(process, x)
    """
    x = np.asarray(x, float)
    shape = x.shape[1:]
    if not may_jump(process.drift, shape):
        return None
    # A drift that is not finite somewhere is refused where it matters; here it is no jump.
    with jax.ensure_compile_time_eval(), double_precision(), np.errstate(invalid="ignore"):
        rng = np.random.default_rng(0)
        lines = int(np.clip(_NUMBERS // (_SEGMENTS * max(1, math.prod(shape))), 4, _LINES))
        every = (lines, *(1 for _ in shape))
        reach = rng.permutation(_REACH)[:lines].reshape(every) * spread_of(process, x, rng, clock=clock)
        ends = [x.mean(axis=0) + reach * rng.normal(size=(lines, *shape)) for _ in range(2)]
        t = process.t1 * rng.uniform(size=lines)
        at = np.linspace(0.0, 1.0, _SEGMENTS + 1).reshape(1, -1, *(1 for _ in shape))
        points = ends[0][:, None] * (1.0 - at) + ends[1][:, None] * at
        a, b = (p.reshape(-1, *shape) for p in (points[:, :-1], points[:, 1:]))
        return _bisect(jax.jit(jax.vmap(process.f)), a, b, np.repeat(t, _SEGMENTS))


def known_jump(process: Process, x) -> Jump | None:
    """`find_jump`, remembered by the values of process and states."""
    x = np.asarray(x, float)
    shape = x.shape[1:]
    with jax.ensure_compile_time_eval():
        key, place = process_key(process, shape), array_key(x)
        if key is None:
            return find_jump(process, x)
        if (key, place) not in _seen:
            _seen[key, place] = find_jump(process, x)
            if len(_seen) > _KEPT:
                del _seen[next(iter(_seen))]
        return _seen[key, place]


def is_known(process: Process, shape: tuple[int, ...]) -> bool:
    """True when the drift can be evaluated now: none of its parameters is traced."""
    example = (jax.ShapeDtypeStruct(shape, float), jax.ShapeDtypeStruct((), float))
    shape_of("drift", process.drift, *example)
    parts = eqx.filter(process, eqx.is_array)
    return is_concrete(parts) and is_concrete(jax.make_jaxpr(process.drift)(*example).consts)


def _bisect(f: Callable, a: np.ndarray, b: np.ndarray, t: np.ndarray) -> Jump | None:
    f_a, f_b = np.asarray(f(a, t)), np.asarray(f(b, t))
    rounding = _ROUNDING * np.max(np.abs(f_a), axis=0) + np.finfo(float).tiny
    largest = np.abs(f_b - f_a)
    for _ in range(_HALVINGS):
        middle = 0.5 * (a + b)
        f_m = np.asarray(f(middle, t))
        left, right = np.abs(f_m - f_a), np.abs(f_b - f_m)
        largest = np.maximum(largest, np.maximum(left, right))
        # A change matters in the units of its own coordinate, and one of rounding does not.
        in_left, in_right = (_most(side / np.maximum(largest, rounding)) for side in (left, right))
        to_left = (in_left >= in_right).reshape(-1, *(1 for _ in a.shape[1:]))
        a, f_a = np.where(to_left, a, middle), np.where(to_left, f_a, f_m)
        b, f_b = np.where(to_left, middle, b), np.where(to_left, f_m, f_b)
    change = np.abs(f_b - f_a)
    stays = (change > _STAYS * largest) & (change > rounding)
    if not stays.any():
        return None
    i = int(np.argmax(_most(np.where(stays, change / np.maximum(largest, rounding), 0.0))))
    return Jump(b[i], float(t[i]), np.where(stays[i], f_b[i] - f_a[i], 0.0))


def _most(values: np.ndarray) -> np.ndarray:
    return values.reshape(len(values), -1).max(axis=1)


def _may_jump(jaxpr, depends: list[bool]) -> tuple[bool, list[bool]]:
    """Whether an operation could jump, and which outputs depend on the state."""
    marked = {var for var, mark in zip(jaxpr.invars, depends, strict=True) if mark}

    def is_marked(atom) -> bool:
        return not isinstance(atom, jex.Literal) and atom in marked

    for eqn in jaxpr.eqns:
        marks = [is_marked(atom) for atom in eqn.invars]
        if not any(marks):
            continue
        outputs = [True] * len(eqn.outvars)
        if bodies := list(_bodies(eqn.params)):
            for body in bodies:
                # A call passes its operands on; a loop carries marks from one turn to the next.
                same = len(bodies) == 1 and eqn.primitive.name != "scan" and len(body.invars) == len(marks)
                found, inner = _may_jump(body, marks if same else [True] * len(body.invars))
                if found:
                    return True, outputs
                outputs = inner if same and len(inner) == len(outputs) else outputs
        elif _can_jump(eqn, marks):
            return True, outputs
        marked |= {var for var, mark in zip(eqn.outvars, outputs, strict=True) if mark}
    return False, [is_marked(atom) for atom in jaxpr.outvars]


def _can_jump(eqn, marks: list[bool]) -> bool:
    name = eqn.primitive.name
    if name in ("div", "pow"):
        return marks[1] or name == "pow"
    if name == "integer_pow":
        return eqn.params["y"] < 0
    if name == "convert_element_type":  # of a float into an integer or a truth
        return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating) and not jnp.issubdtype(
            eqn.params["new_dtype"], jnp.inexact
        )
    return name in _JUMPING or name in _SINGULAR


def _bodies(params: dict):
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, jex.ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, jex.Jaxpr):
                yield one
