"""Calls of a user's functions, which are traced: what JAX cannot trace becomes an error that names the line and the
remedy.

    drift = lambda y, t: -np.tanh(y)
    # drift cannot be compiled by JAX, at model.py, line 3: `drift = lambda y, t: -np.tanh(y)`. Its arguments have no
    # values while it is compiled: write jnp.tanh instead of np.tanh (import jax.numpy as jnp).

The error of JAX, with the traceback through the user's function, stays as its cause.
"""

import functools
import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np

_PACKAGES = tuple(str(Path(module.__file__ or "").parent) for module in (jax, np, equinox))
_OWN, _STDLIB = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
_LIBRARIES = ("numpy", "math", "cmath", "scipy")


class NotTraceable(TypeError):
    """A function does something with its arguments that JAX cannot trace."""


class _Place(NamedTuple):
    """Where in the user's code an error came up."""

    text: str
    line: str
    part: str
    """Of the line, what was evaluated."""
    frame: FrameType


def call(name: str, function: Callable, *args):
    """`function(*args)`; if it cannot be traced, `NotTraceable` says of the argument `name` why and what to write.

    value = call("drift", drift, y, t)
    """
    try:
        return function(*args)
    except NotTraceable:
        raise
    except Exception as error:
        place = _place(error)
        remedy = _remedy(error, place)
        if remedy is None:
            shapes = ", ".join(str(getattr(arg, "shape", arg)) for arg in args)
            error.add_note(f"{name} was called with arguments of shape {shapes}, those of one state and one time.")
            raise
        where = f", at {place.text}" if place else ""
        raise NotTraceable(f"{name} cannot be compiled by JAX{where}. {remedy}") from error


def shape_of(name: str, function: Callable, *example):
    """What the function returns for arguments of these shapes, or `NotTraceable`."""
    try:
        return jax.eval_shape(function, *example)  # JAX remembers what it traced of this function
    except Exception:
        pass
    return jax.eval_shape(functools.partial(call, name, function), *example)


def check_returned(name: str, out, shape: tuple[int, ...]) -> None:
    """Refuse what a function of (y, t) returned if it is not one real array of the state's shape."""
    found = getattr(out, "shape", () if isinstance(out, int | float | complex) else None)
    if found == shape:
        if jnp.issubdtype(jnp.result_type(out), jnp.complexfloating):
            raise TypeError(
                f"{name} returned complex numbers for a real state of shape {shape}: imaginary parts would be lost. "
                "Return a real array: stack real and imaginary parts along an axis."
            )
        return
    remedy = f"It is called as {name}(y, t), with ONE state; use jax.vmap for a batch."
    if out is None:
        what, remedy = "None", "Is a return missing?"
    elif isinstance(out, list | tuple):
        what, remedy = f"a {type(out).__name__} of {len(out)}", "Put components together by jnp.stack([a, b, ...])."
    elif found is None:
        what = f"a {type(out).__name__}"
    elif found == ():
        what, remedy = "a number", f"{remedy} A constant is jnp.full_like(y, c)."
    else:
        what = f"shape {found}"
    raise ValueError(f"{name} returned {what} for a state of shape {shape}; it must return the state's shape. {remedy}")


def accepts(function: Callable, n: int) -> bool:
    """False when the function cannot be called with n arguments."""
    try:
        inspect.signature(function).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # builtins without a signature
        return True
    return True


def signature_of(function: Callable) -> str:
    """The function as it is defined, for messages."""
    return f"{getattr(function, '__name__', type(function).__name__)}{inspect.signature(function)}"


def _remedy(error: Exception, place: _Place | None) -> str | None:
    """Why the operation cannot be traced, and what to write instead; None for other errors."""
    text, errors = str(error), jax.errors
    line, part = (place.line, place.part) if place else ("", "")
    if isinstance(error, errors.TracerBoolConversionError) or ("truth value of an array" in text and _in_jax(error)):
        return _choice(line, part)
    if isinstance(error, errors.NonConcreteBooleanIndexError):
        return f"{_NO_VALUES} a mask cannot select entries; write jnp.where(mask, a, b) instead of y[mask]."
    if isinstance(error, TypeError) and "immutable" in text:
        return "JAX arrays cannot be changed in place: write y = y.at[i].set(value) instead of y[i] = value."
    if isinstance(error, ValueError) and isinstance(error.__cause__, errors.JAXTypeError):
        return f"{_NO_VALUES} a numpy array cannot hold them; build the result by jnp.stack([a, b, ...])."
    if not isinstance(error, _NEED_VALUES) and not (isinstance(error, TypeError) and "Only scalar arrays" in text):
        return None
    if place is None:
        return f"{_NO_VALUES} use jax.numpy instead of numpy and math (import jax.numpy as jnp)."
    return (
        _library_call(place.part, place.frame)
        or next((remedy for pattern, remedy in _CONVERSIONS if re.search(pattern, part)), None)
        or _library_call(line, place.frame)
        or f"{_NO_VALUES} compute with arrays by jax.numpy (import jax.numpy as jnp), as they are."
    )


_NEED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_NO_VALUES = "Its arguments have no values while it is compiled:"
_CONVERSIONS = (
    (r"\b(item|tolist)\(\)", f"{_NO_VALUES} leave .item() and .tolist() out; arrays are computed with as they are."),
    (r"\bfloat\(", f"{_NO_VALUES} leave float() out; arrays are computed with as they are."),
    (r"\bint\(", f"{_NO_VALUES} write jnp.floor(x).astype(int) instead of int(x), and jax.lax.fori_loop for a loop."),
    (r"[\w\])]\[", f"{_NO_VALUES} an index needs a JAX array, jnp.asarray(table)[i]."),
)


def _choice(line: str, part: str) -> str:
    if found := re.search(r"\b(max|min)\(", part):
        right = {"max": "jnp.maximum", "min": "jnp.minimum"}[found[1]]
        return f"{_NO_VALUES} write {right}(a, b) instead of {found[1]}(a, b) (import jax.numpy as jnp)."
    if re.search(r"\b(and|or|not)\b", part) or re.search(r"[<>]=?[^<>]+[<>]", part):
        return (
            f"{_NO_VALUES} write & instead of and, | instead of or, ~ instead of not, (a < y) & (y < b) instead of "
            "a < y < b; and jnp.where(condition, a, b) instead of if."
        )
    if re.match(r"\s*while\b", line):
        return f"{_NO_VALUES} write jax.lax.while_loop(condition, body, start) instead of while."
    if re.match(r"\s*assert\b", line):
        return f"{_NO_VALUES} leave the assertion out."
    return f"{_NO_VALUES} write jnp.where(condition, a, b) instead of if (import jax.numpy as jnp)."


def _library_call(text: str, frame: FrameType) -> str | None:
    """The remedy for a function of numpy, math or scipy that the text calls: the same function of JAX."""
    for dotted in re.findall(r"[A-Za-z_][\w.]*(?=\()", text):
        function: Any = _value(dotted, frame)
        home = "numpy" if isinstance(function, np.ufunc) else getattr(function, "__module__", None) or ""
        if not callable(function) or home.split(".")[0] not in _LIBRARIES:
            continue
        name = dotted.split(".")[-1]
        if callable(getattr(jnp, name, None)):
            return f"{_NO_VALUES} write jnp.{name} instead of {dotted} (import jax.numpy as jnp)."
        if callable(getattr(jax.scipy.special, name, None)):
            return f"{_NO_VALUES} write jax.scipy.special.{name} instead of {dotted}."
        return f"{_NO_VALUES} write functions of jax.numpy instead of {dotted}."
    return None


def _value(dotted: str, frame: FrameType) -> Any:
    """What a name in the user's function means; an attribute is looked up in modules alone, where nothing is run."""
    first, *rest = dotted.split(".")
    value = {**frame.f_builtins, **frame.f_globals, **frame.f_locals}.get(first)
    for name in rest:
        value = getattr(value, name, None) if isinstance(value, ModuleType) else None
    return value


def _place(error: Exception) -> _Place | None:
    """The innermost line of the user's in the traceback."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    summaries = traceback.extract_tb(error.__traceback__)
    for (frame, _), found in zip(reversed(frames), reversed(summaries), strict=True):
        if _is_foreign(found.filename):
            continue
        line = linecache.getline(found.filename, found.lineno or 0).rstrip()
        part = line
        if found.colno is not None and found.end_colno is not None and found.end_lineno == found.lineno:
            part = line.encode()[found.colno : found.end_colno].decode(errors="replace")
        text = f"{Path(found.filename).name}, line {found.lineno}" + (f": `{line.strip()}`" if line else "")
        return _Place(text, line, part, frame)
    return None


def _in_jax(error: Exception) -> bool:
    """True when JAX itself raised it."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PACKAGES[0])


def _is_foreign(filename: str) -> bool:
    """True for lines of this library, of JAX and of Python: the user's are above them."""
    of_python = filename.startswith(_STDLIB) and "site-packages" not in filename
    return of_python or filename.startswith((_OWN, *_PACKAGES))
