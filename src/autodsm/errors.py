"""Checks of arguments, and how their errors are worded: the argument, its value, the remedy."""

import difflib
import math
from collections.abc import Iterable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def as_floating(value) -> jax.Array:
    """An array of the value, in single precision at least."""
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(float)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


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
    if name not in options:
        raise unknown_name(argument, name, options)


def check_positive(argument: str, value, *, why: str = "") -> None:
    """Refuse a concrete value that is not a finite positive number."""
    if not is_concrete(value):
        return
    if not (np.ndim(value) == 0 and math.isfinite(value) and value > 0):
        raise ValueError(f"{argument}={value} must be a finite number above zero.{' ' + why if why else ''}")


def check_count(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{argument}={value!r} must be a whole number of at least 1.")


def check_interval(s, t, t1: float) -> None:
    """Refuse times that are not scalars, and concrete ones outside 0 ≤ s < t ≤ t1."""
    for name, value in (("s", s), ("t", t)):
        if np.ndim(value) != 0:
            raise ValueError(f"{name} has shape {np.shape(value)}; give one time, and use jax.vmap for several.")
    if is_concrete(s) and not s >= 0:
        raise ValueError(f"s={s} is before the start of the process: times lie in [0, t1] = [0, {t1}].")
    if is_concrete(s, t) and not t > s:
        raise ValueError(f"t={t} must be later than s={s}: a transition needs an interval of positive length.")
    if is_concrete(t) and t > t1 * (1 + 1e-6):
        raise ValueError(f"t={t} is after the end of the process, t1={t1}. Build the Process with a larger t1.")
