"""Which outputs of a function depend on which inputs, read off its jaxpr.

Marks are put on some coordinates of the input and followed through every operation of the traced function; an output
without a mark cannot depend on a marked input, at any state and any time. The analysis is sound: an operation it does
not know marks all of its outputs as soon as one input is marked, so dependence may be overstated, never missed.
Values that do not depend on the inputs (index arrays, constant matrices) are computed along the way, so that indexing
by them and multiplying by their zeros is understood.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..base.errors import is_concrete

_POINTWISE = frozenset(
    {"abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil"}
    | {"clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf"}
    | {"erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le"}
    | {"lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or"}
    | {"polygamma", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh"}
    | {"sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
)
_MOVING = frozenset(
    {"broadcast_in_dim", "concatenate", "expand_dims", "pad", "reshape", "rev", "slice", "split", "squeeze"}
    | {"stack", "transpose", "unstack"}
)
_INDEXED = {"dynamic_slice": 1, "gather": 1}  # marked operand, then indices that must be known
_REDUCTIONS = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
)
_CUMULATIVE = {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"}
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where a call keeps its body


def marked_outputs(fun: Callable, example: Sequence, marks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each mask over the first argument of `fun`, the mask of outputs that may depend on the marked inputs.

    `example` are shapes of all arguments (`jax.ShapeDtypeStruct`); `fun` returns one array.
    """
    closed = jax.make_jaxpr(fun)(*example)
    with jax.ensure_compile_time_eval():
        return [_run(closed.jaxpr, closed.consts, [mask, *[None] * (len(example) - 1)])[0] for mask in marks]


class _Value:
    """A value of the traced function: its marks, and the value itself where it is known."""

    def __init__(self, shape, mark=None, known=None):
        self.shape = shape
        self.mark = np.asarray(mark) if mark is not None and np.any(mark) else None
        self.known = known

    def marks(self) -> np.ndarray:
        return np.zeros(self.shape, bool) if self.mark is None else self.mark


def _run(jaxpr, consts, marks) -> list[np.ndarray]:
    inputs = [_Value(v.aval.shape, mark) for v, mark in zip(jaxpr.invars, marks, strict=True)]
    return [value.marks() for value in _evaluate(jaxpr, consts, inputs)]


def _evaluate(jaxpr, consts, inputs: list[_Value]) -> list[_Value]:
    env = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _constant(const)

    def read(atom) -> _Value:
        return _constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        for var, value in zip(eqn.outvars, _apply(eqn, operands), strict=True):
            env[var] = value
    return [read(atom) for atom in jaxpr.outvars]


def _constant(value) -> _Value:
    return _Value(np.shape(value), known=value if is_concrete(value) else None)


def _apply(eqn, operands: list[_Value]) -> list[_Value]:
    name, shapes = eqn.primitive.name, [v.aval.shape for v in eqn.outvars]
    body = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
    if body is not None and name not in ("scan", "while", "cond"):
        inner, consts = (body.jaxpr, body.consts) if isinstance(body, jex.ClosedJaxpr) else (body, [])
        if len(inner.invars) == len(operands):
            return _evaluate(inner, consts, operands)
    if all(v.mark is None for v in operands):
        known = [None] * len(shapes)
        if all(v.known is not None for v in operands) and body is None:
            result = eqn.primitive.bind(*(v.known for v in operands), **eqn.params)
            known = list(result) if eqn.primitive.multiple_results else [result]
        return [_Value(shape, known=value) for shape, value in zip(shapes, known, strict=True)]
    marks = _follow(eqn, name, operands)
    if marks is None:
        return [_Value(shape, np.ones(shape, bool)) for shape in shapes]
    several = marks if eqn.primitive.multiple_results else [marks]
    return [_Value(shape, np.asarray(mark)) for shape, mark in zip(shapes, several, strict=True)]


def _follow(eqn, name: str, operands: list[_Value]) -> Any:
    """Marks of the output (or outputs) of one operation, or None when they are not understood."""
    shape = eqn.outvars[0].aval.shape
    if name in _POINTWISE:
        if name == "mul":  # a factor that is known to be zero hides the other
            operands = [
                _Value(v.shape, v.marks() & (np.broadcast_to(np.asarray(w.known), v.shape) != 0))
                if w.known is not None and np.ndim(w.known) <= len(v.shape)
                else v
                for v, w in zip(operands, reversed(operands), strict=True)
            ]
        return np.logical_or.reduce([np.broadcast_to(v.marks(), shape) for v in operands])
    if name in _MOVING:
        return eqn.primitive.bind(*(jnp.asarray(v.marks()) for v in operands), **eqn.params)
    if name in _REDUCTIONS:
        return operands[0].marks().any(axis=tuple(eqn.params["axes"]))
    if name in _CUMULATIVE:
        return np.broadcast_to(operands[0].marks().any(axis=eqn.params["axis"], keepdims=True), shape)
    if name in _INDEXED and all(v.known is not None for v in operands[_INDEXED[name] :]):
        moved = [jnp.asarray(operands[0].marks(), jnp.float32), *(v.known for v in operands[1:])]
        return np.asarray(eqn.primitive.bind(*moved, **eqn.params)) != 0
    if name in ("scatter", "scatter-add", "scatter_add") and operands[1].known is not None:
        params = dict(eqn.params)
        old, new = (jnp.asarray(operands[i].marks(), jnp.float32) for i in (0, 2))
        placed = jax.lax.scatter_add(
            old,
            operands[1].known,
            new,
            params["dimension_numbers"],
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )
        return np.asarray(placed) != 0
    if name == "dot_general":
        # A product's entry is marked when some marked factor in its sum meets a factor not known to be zero.
        numbers = eqn.params["dimension_numbers"]

        def product(a, b):
            return (
                np.asarray(jax.lax.dot_general(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), numbers)) != 0
            )

        present = [np.ones(v.shape) if v.known is None else np.asarray(v.known) != 0 for v in operands]
        left, right = operands
        return product(left.marks(), present[1]) | product(present[0], right.marks())
    return None
