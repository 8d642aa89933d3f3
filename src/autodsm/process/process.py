"""A diffusion: `dy = f(y, t) dt + g(t) dw` on `0 ≤ t ≤ t1`, with `y_0` given.

The noise is additive: `g` may depend on time, never on the state. `Q = g gᵀ`.
"""

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from ..base.calls import accepts, call, check_returned, shape_of, signature_of
from ..base.errors import as_floating, as_shape, check_name, check_positive, is_concrete, suggest_options
from ..base.types import State, StateLike, StructureName
from .structure import (
    MAX_DENSE,
    STRUCTURES,
    AbstractStructure,
    depends_on_time,
    expand_noise,
    infer,
    is_affine,
    noise_kind,
)

# drift -> {(g shape, shape): name of its structure, ("time", shape): autonomous?, ("state", shape): affine?}
_inferred: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Process(eqx.Module):
    """A diffusion process, given by its drift and its noise.

        process = Process(lambda y, t: y - y**3, 0.5, t1=5.0)

    **Arguments:**

    - `drift`: `f(y, t)`, written in JAX for one state of any shape; returns an array of that shape.
    - `diffusion`: `g`, as an array or a function of `t` that returns one. Its shape says what it is: a number; a
      diagonal, of the state's shape or one entry for each index of its first axis; or a matrix d×m. For a state of
      shape (K, *pixels), a K×m matrix mixes the channels of every pixel alike.
    - `t1`: the end of the time span.
    - `structure`: how the drift couples coordinates, "elementwise", "blocks" or "dense". Inferred when not given.
    """

    drift: Callable
    diffusion: Callable | Array
    t1: float = eqx.field(static=True)
    structure: StructureName | None = eqx.field(static=True)
    recipe: Any = eqx.field(static=True)
    """How it was made, a `Recipe`, where a constructor of the library did; else None."""

    @suggest_options()
    def __init__(
        self,
        drift,
        diffusion,
        t1: float,
        *,
        structure: str | None = None,
    ):
        if not callable(drift):
            raise TypeError(f"drift={drift!r} must be a function drift(y, t).")
        if not accepts(drift, 2):
            raise TypeError(f"drift must take the state and the time, drift(y, t); got {signature_of(drift)}.")
        check_positive("t1", t1, why="It is the end of the time span [0, t1].")
        if structure is not None:
            check_name("structure", structure, STRUCTURES)
        if callable(diffusion):
            if (name := _state_argument(diffusion)) is not None:
                raise TypeError(
                    f"diffusion is {signature_of(diffusion)}, and is called with the time alone, g(t). If {name} is "
                    f"the time, call it t: lambda t: ... . If {name} is the state, the noise depends on it, which is "
                    "not supported: transform the state so that g no longer depends on it."
                )
            if not accepts(diffusion, 1):
                raise TypeError(
                    f"diffusion must be a function of time alone, g(t); got {signature_of(diffusion)}. Noise that "
                    "depends on the state is not supported: transform the state so that g no longer depends on it."
                )
        else:
            with jax.ensure_compile_time_eval():  # a value, also where a process is made while something is traced
                diffusion = as_floating(diffusion, "diffusion").astype(float)
        self.drift = drift
        self.diffusion = diffusion
        self.t1 = float(t1)
        self.recipe = None
        self.structure = structure  # pyright: ignore[reportAttributeAccessIssue]
        _check_finite_noise(self)

    @property
    def constant_noise(self) -> bool:
        """True when `g` was given as an array, so that it is the same at all times."""
        return not callable(self.diffusion)

    def g(self, t) -> Array:
        """The diffusion at time `t`."""
        if not callable(self.diffusion):
            return as_floating(self.diffusion)
        return as_floating(call("diffusion", self.diffusion, jnp.asarray(t, float)), "diffusion(t)")

    def f(self, y: State, t) -> State:
        """The drift at (y, t), in the precision of the state."""
        out = call("drift", self.drift, y, t)
        check_returned("drift", out, y.shape)
        return jnp.asarray(out).astype(y.dtype)

    def noise_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one Brownian increment for a state of `shape`."""
        g_shape = self._g_shape()
        if noise_kind(g_shape, shape) != "matrix":
            return shape
        return (g_shape[1],) if g_shape[0] == math.prod(shape) else (g_shape[1], *shape[1:])

    def diffuse(self, t, dw: Array, shape: tuple[int, ...]) -> State:
        """`g(t) dw`, an array of the state's shape."""
        g = self.g(t).astype(dw.dtype)
        if noise_kind(g.shape, shape) == "matrix":
            return jnp.tensordot(g, dw, 1).reshape(shape)
        return expand_noise(g, shape) * dw

    def structure_for(self, shape: tuple[int, ...]) -> AbstractStructure:
        """The structure, declared or inferred, for states of `shape`."""
        as_shape(shape)
        g_shape = self._g_shape()
        kind = noise_kind(g_shape, shape)
        name = self.structure or self._infer(g_shape, shape)
        if name == "elementwise" and kind == "matrix":
            raise ValueError(
                f"structure='elementwise' needs a scalar or diagonal diffusion, but g has shape {g_shape} and "
                'couples coordinates. Use structure="dense" (or "blocks" for a K×m matrix).'
            )
        if name == "blocks" and (len(shape) < 2 or (kind == "matrix" and g_shape[0] != shape[0])):
            raise ValueError(
                f"structure='blocks' needs a state of shape (K, *pixels) and a diffusion that acts on the K "
                f"channels; got a state of shape {shape} and g of shape {g_shape}."
            )
        d = math.prod(shape)
        if name == "dense" and self.structure is None and d > MAX_DENSE:
            raise ValueError(
                f"the drift couples the coordinates of a state of shape {shape}, and a dense {d}×{d} Jacobian is "
                f"too large (limit {MAX_DENSE}). If each coordinate's drift depends on that coordinate alone, "
                'declare structure="elementwise"; if it couples only the channels of each pixel, give the state the '
                'shape (K, *pixels) and declare structure="blocks"; to insist, declare structure="dense".'
            )
        return STRUCTURES[name](shape)

    def check(self, y: StateLike, t: ArrayLike = 0.0) -> None:
        """Refuse a state that does not fit: wrong shapes, or a drift that is not finite at it."""
        y, t = as_floating(y, "the state"), jnp.asarray(t, float)
        shape = as_shape(y.shape)
        noise_kind(self._g_shape(), shape)
        check_returned("drift", shape_of("drift", self.drift, jax.ShapeDtypeStruct(shape, y.dtype), t), shape)
        if not is_concrete(y, t):
            return
        if not bool(jnp.all(jnp.isfinite(y))):
            raise ValueError(f"the state is not finite: y={np.asarray(y)}.")
        value = self.f(y, t)
        if is_concrete(value) and not bool(jnp.all(jnp.isfinite(value))):
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(np.asarray(value)))[0])
            raise ValueError(
                f"the drift is not finite at t={t}: component {where} is {np.asarray(value)[where]} at "
                f"y={np.array2string(np.asarray(y), threshold=8)}."
            )

    def _g_shape(self) -> tuple[int, ...]:
        return jax.eval_shape(self.g, 0.0).shape

    def autonomous(self, shape: tuple[int, ...]) -> bool:
        """True when the drift does not depend on time."""
        known = self._known()
        if ("time", shape) not in known:
            known["time", shape] = not depends_on_time(self.f, shape)
        return known["time", shape]

    def affine(self, shape: tuple[int, ...]) -> bool:
        """True when the derivative of the drift is the same at all states, as its operations show."""
        known = self._known()
        if ("state", shape) not in known:
            known["state", shape] = is_affine(self.f, shape)
        return known["state", shape]

    def _infer(self, g_shape: tuple[int, ...], shape: tuple[int, ...]) -> StructureName:
        known = self._known()
        if (g_shape, shape) not in known:
            known[g_shape, shape] = infer(self.f, g_shape, shape)
        return known[g_shape, shape]

    def _known(self) -> dict:
        """What was inferred about this drift before."""
        try:
            return _inferred.setdefault(self.drift, {})
        except TypeError:  # a drift that cannot be hashed, e.g. a module holding arrays
            return {}


_STATES = frozenset({"position", "state", "x", "y"})
"""Names that the argument of a diffusion has where it stands for the state."""


def _state_argument(diffusion: Callable) -> str | None:
    """The name of the one argument of a diffusion, if it is that of a state."""
    try:
        parameters = list(inspect.signature(diffusion).parameters.values())
    except (TypeError, ValueError):  # builtins without a signature
        return None
    # Names of positional-only arguments, as of jnp.sqrt, say nothing.
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return needed[0] if len(needed) == 1 and needed[0].lower() in _STATES else None


def check_process(process: object) -> None:
    """Refuse what is not a process: its drift alone, or a system, which holds one."""
    if isinstance(process, Process):
        return
    if isinstance(getattr(process, "process", None), Process):
        raise TypeError(
            f"process is a {type(process).__name__}, which holds one: give its .process, and its .y0 where initial "
            "states are asked for."
        )
    raise TypeError(f"process={process!r} must be an autodsm.Process: Process(drift, diffusion, t1).")


def _check_finite_noise(process: Process) -> None:
    jax.eval_shape(process.g, 0.0)
    times = np.linspace(0.0, process.t1, 33) if callable(process.diffusion) else [0.0]
    with jax.ensure_compile_time_eval():
        values = [process.g(t) for t in times]
    if not is_concrete(values):
        return
    for t, g in zip(times, values, strict=True):
        if not np.all(np.isfinite(np.asarray(g))):
            raise ValueError(
                f"diffusion is not finite at t={t:g}: g={np.asarray(g)}. Is it the root of a negative rate? A schedule "
                "that is singular at its end needs t1 before it, e.g. t1=0.999 for β = 1/(1−t)."
            )
