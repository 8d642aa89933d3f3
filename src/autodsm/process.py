"""A diffusion: `dy = f(y, t) dt + g(t) dw` on `0 ≤ t ≤ t1`, with `y_0` given.

The noise is additive: `g` may depend on time, never on the state. `Q = g gᵀ`.
"""

import inspect
import math
import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from ._types import State, StateLike, StructureName
from .errors import as_floating, check_name, check_positive, is_concrete
from .structure import (
    MAX_DENSE,
    STRUCTURES,
    AbstractStructure,
    depends_on_time,
    expand_noise,
    infer,
    noise_kind,
)

# drift -> {(g shape, shape): name of its structure, ("time", shape): whether it is autonomous}
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
        if not _accepts(drift, 2):
            raise TypeError(f"drift must take the state and the time, drift(y, t); got {_signature(drift)}.")
        check_positive("t1", t1, why="It is the end of the time span [0, t1].")
        if structure is not None:
            check_name("structure", structure, STRUCTURES)
        if callable(diffusion):
            if not _accepts(diffusion, 1):
                raise TypeError(
                    f"diffusion must be a function of time alone, g(t); got {_signature(diffusion)}. Noise that "
                    "depends on the state is not supported: transform the state so that g no longer depends on it."
                )
        else:
            diffusion = jnp.asarray(diffusion, dtype=float)
        self.drift = drift
        self.diffusion = diffusion
        self.t1 = float(t1)
        self.structure = structure  # pyright: ignore[reportAttributeAccessIssue]
        _check_finite_noise(self)

    @property
    def constant_noise(self) -> bool:
        """True when `g` was given as an array, so that it is the same at all times."""
        return not callable(self.diffusion)

    def g(self, t) -> Array:
        """The diffusion at time `t`."""
        g = self.diffusion(jnp.asarray(t, float)) if callable(self.diffusion) else self.diffusion
        return jnp.asarray(g) * 1.0  # integers become floats

    def f(self, y: State, t) -> State:
        """The drift at (y, t), in the precision of the state."""
        return jnp.asarray(self.drift(y, t)).astype(y.dtype)

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
        y, t = as_floating(y), jnp.asarray(t, float)
        shape = y.shape
        noise_kind(self._g_shape(), shape)
        out = jax.eval_shape(self.drift, jax.ShapeDtypeStruct(shape, y.dtype), t)
        if not hasattr(out, "shape") or out.shape != shape:
            got = getattr(out, "shape", type(out).__name__)
            raise ValueError(
                f"drift returned shape {got} for a state of shape {shape}; it must return the state's shape. "
                "The drift is called with ONE state; use jax.vmap for a batch."
            )
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
            known["time", shape] = not depends_on_time(self.drift, shape)
        return known["time", shape]

    def _infer(self, g_shape: tuple[int, ...], shape: tuple[int, ...]) -> StructureName:
        known = self._known()
        if (g_shape, shape) not in known:
            known[g_shape, shape] = infer(self.drift, g_shape, shape)
        return known[g_shape, shape]

    def _known(self) -> dict:
        """What was inferred about this drift before."""
        try:
            return _inferred.setdefault(self.drift, {})
        except TypeError:  # a drift that cannot be hashed, e.g. a module holding arrays
            return {}


def check_invertible(
    process: Process, shape: tuple[int, ...], *, what: str, remedy: str, at: float | None = None
) -> None:
    """Refuse a process whose `g gᵀ` has no inverse, for something that divides by it."""
    for t in (0.5 * process.t1, process.t1) if at is None else (at,):
        if not is_invertible(process, shape, t):
            raise ValueError(
                f"{what} divides by the noise, and g gᵀ is singular at t={t}: some coordinates have no noise of their "
                f"own. {remedy}"
            )


def is_invertible(process: Process, shape: tuple[int, ...], t: float) -> bool:
    """True when every coordinate has noise of its own at t, so that `g gᵀ` has an inverse."""
    with jax.ensure_compile_time_eval():
        g = np.asarray(process.g(t), float)
    if noise_kind(g.shape, shape) == "matrix":
        return bool(np.linalg.matrix_rank(g) == g.shape[0])
    return bool(np.all(g != 0))


def _accepts(fun: Callable, n: int) -> bool:
    try:
        inspect.signature(fun).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # builtins without a signature
        return True
    return True


def _signature(fun: Callable) -> str:
    return f"{getattr(fun, '__name__', type(fun).__name__)}{inspect.signature(fun)}"


def _check_finite_noise(process: Process) -> None:
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
