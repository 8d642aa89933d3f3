"""Checks of arguments, and how their errors are worded: the argument, its value, the remedy."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .calls import accepts, signature_of

P = ParamSpec("P")
T = TypeVar("T")


def as_floating(value, name: str = "value") -> jax.Array:
    """An array of the value, in single precision at least."""
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        if isinstance(error, jax.errors.JAXTypeError):
            raise
        raise TypeError(f"{_given(name, value)} must be an array of numbers.") from error
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} has shape {value.shape} and is complex, and a state is real. Stack real and imaginary parts along "
            "an axis: jnp.stack([z.real, z.imag])."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(float)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def as_double(value, name: str = "value") -> np.ndarray:
    """A numpy array of the value, in double precision."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # such as rows of different lengths
        if isinstance(error, jax.errors.JAXTypeError):
            raise
        raise TypeError(f"{_given(name, value)} must be an array of real numbers.") from error
    if not (jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "biu"):
        raise TypeError(f"{_given(name, value)} must be an array of real numbers.")
    return array.astype(np.float64)


def as_shape(shape, name: str = "shape") -> tuple[int, ...]:
    """The shape of a state."""
    whole = isinstance(shape, tuple | list) and all(isinstance(n, int | np.integer) for n in shape)
    if not whole or any(isinstance(n, bool) or n < 1 for n in shape):
        raise TypeError(f"{_given(name, shape)} must be the shape of a state, a tuple of whole numbers above zero.")
    return tuple(int(n) for n in shape)


def as_time(t, name: str = "t") -> jax.Array:
    """One time."""
    t = as_floating(t, name)
    if t.ndim != 0:
        raise ValueError(f"{name} has shape {t.shape}; give one time, and use jax.vmap for several.")
    return t.astype(float)


def is_concrete(*values) -> bool:
    """True when no value is a tracer, so that it may be looked at."""
    return not any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(values))


def unknown_name(argument: str, name: object, options: Iterable[str]) -> ValueError:
    """The error for a name that is not among `options`; suggests the nearest."""
    options = sorted(options)
    near = difflib.get_close_matches(str(name), options, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{argument}={name!r} is not known.{hint} Choose one of: {', '.join(options)}.")


def check_name(argument: str, name: object, options: Iterable[str]) -> None:
    options = list(options)
    if not isinstance(name, str) or name not in options:
        raise unknown_name(argument, name, options)


def suggest_options(
    *forwarded: str | Callable, gone: dict[str, str] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function refuse unknown options by name, and suggest the nearest.

        @suggest_options("times", "t0")
        def loss(process, *, steps=3, **options): ...

        loss(process, time="uniform")  # loss() has no option 'time'. Did you mean 'times'?

    `forwarded` are the names that `**options` may hold, or a function with them among its own; `gone` are options of an
    earlier version, and what to use instead.
    """

    def keywords(function: Callable) -> list[str]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind in kinds and p.name != "self"]

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = keywords(function)
        for more in forwarded:
            known += [more] if isinstance(more, str) else [name for name in keywords(more) if name not in known]
        shown = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> T:
            for name in options:
                if name in (gone or {}):
                    raise TypeError(f"{shown}() has no option {name!r} any more. {(gone or {})[name]}")
                if name not in known:
                    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
                    hint = f"Did you mean {near[0]!r}?" if near else f"It takes: {', '.join(known)}."
                    raise TypeError(f"{shown}() has no option {name!r}. {hint}")
            return function(*args, **options)

        return checked

    return decorate


def check_key(key: object) -> None:
    """Refuse what is not one random key of JAX, new or old style: numbers, None, generators of numpy, several keys."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and shape is not None:
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            batch = shape
        elif dtype == np.uint32 and len(shape) >= 1:
            batch = shape[:-1]
        else:
            batch = None
        if batch == ():
            return
        if batch is not None:
            raise ValueError(f"key holds {math.prod(batch)} keys, and one is needed: give key[0], or use jax.vmap.")
    seed = key if isinstance(key, int) else 0
    raise TypeError(f"{_given('key', key)} is not a random key of JAX. Write key=jax.random.key({seed}).")


def check_positive(argument: str, value, *, why: str = "") -> None:
    """Refuse a concrete value that is not a finite positive number."""
    if not is_concrete(value):
        return
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise ValueError(f"{_given(argument, value)} must be a finite number above zero.{' ' + why if why else ''}")


def check_number(argument: str, value) -> None:
    """Refuse a concrete value that is not one finite number."""
    if is_concrete(value) and not (_is_number(value) and math.isfinite(value)):
        raise TypeError(f"{_given(argument, value)} must be a finite number.")


def check_callable(argument: str, value, call: str) -> None:
    """Refuse what cannot be called as `call` is written, such as "score(y, t)"."""
    if not callable(value):
        raise TypeError(f"{_given(argument, value)} must be a function {call}.")
    n = 1 + call[: call.index(")")].count(",")
    if not accepts(value, n):
        raise TypeError(f"{argument} is {signature_of(value)}; it must be a function {call}.")


def check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{_given(argument, value)} must be True or False.")


def check_count(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{argument}={value!r} must be a whole number of at least 1.")


def check_times(argument: str, times, t1: float = math.inf) -> None:
    """Refuse concrete times that are not numbers in [0, t1]."""
    if not is_concrete(times):
        return
    values = np.asarray(times)
    if not (jnp.issubdtype(values.dtype, jnp.floating) or values.dtype.kind in "iu"):
        raise TypeError(f"{_given(argument, times)} must be numbers.")
    for wrong, reason in (
        (~np.isfinite(values), "is not a finite number"),
        (values < 0, "is before the start of the process, t = 0"),
        (values > t1 * (1 + 1e-6), f"is after the end of the process, t1={t1}. Build the Process with a larger t1"),
    ):
        if wrong.any():
            raise ValueError(f"{argument}={values[wrong].flat[0]} {reason}.")


def check_shape(y, shape: tuple[int, ...], of: str) -> None:
    """Refuse a state of another shape."""
    if y.shape != shape:
        raise ValueError(f"the state has shape {y.shape}; that of {of} is {shape}.")


def check_interval(s, t, t1: float) -> None:
    """Refuse times that are not scalars, and concrete ones outside 0 ≤ s < t ≤ t1."""
    for name, value in (("s", s), ("t", t)):
        if np.ndim(value) != 0:
            raise ValueError(f"{name} has shape {np.shape(value)}; give one time, and use jax.vmap for several.")
        if is_concrete(value) and not _is_number(value):
            raise TypeError(f"{_given(name, value)} must be a number.")
    # Values, also while something else is traced: comparisons of JAX arrays would be traced too.
    s, t = (np.asarray(v)[()] if is_concrete(v) else v for v in (s, t))
    if is_concrete(s) and not s >= 0:
        raise ValueError(f"s={s} is before the start of the process: times lie in [0, t1] = [0, {t1}].")
    if is_concrete(s, t) and not t > s:
        raise ValueError(f"t={t} must be later than s={s}: a transition needs an interval of positive length.")
    if is_concrete(t) and t > t1 * (1 + 1e-6):
        raise ValueError(f"t={t} is after the end of the process, t1={t1}. Build the Process with a larger t1.")


def _is_number(value) -> bool:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return False
    return array.ndim == 0 and (jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "iu")


def _given(argument: str, value) -> str:
    """An argument as it was given, shortened."""
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return f"{argument}={text if len(text) <= 60 else text[:57] + '...'}"
