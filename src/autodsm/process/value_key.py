"""A key of what a JAX function computes: equal for functions of equal operations and constants.

An `id()` names an object only while it lives, and tells equal functions built twice apart. The key here is made of the
traced operations and the bytes of every constant in them, so it can be kept longer than the function.
"""

import hashlib
import re
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import numpy as np

from ..base.errors import is_concrete
from .process import Process

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of Python functions beside their traced bodies, e.g. a custom derivative


def value_key(fun: Callable, example: Sequence) -> str | None:
    """The key of `fun` for arguments of these shapes (`jax.ShapeDtypeStruct`); None where operations do not tell what
    it computes: it calls back into Python, or holds values that are being traced."""
    closed = jax.make_jaxpr(fun)(*example)
    text, constants = str(closed), list(_constants(closed.jaxpr, closed.consts))
    if "callback" in text or not is_concrete(constants):
        return None
    digest = hashlib.sha256(_ADDRESS.sub("", text).encode())
    for value in constants:
        digest.update(array_key(value).encode())
    return digest.hexdigest()


def array_key(value) -> str:
    """The key of an array."""
    value = np.asarray(value)
    return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"


def process_key(process: Process, shape: tuple[int, ...]) -> tuple | None:
    """The key of a process for states of this shape; None where that of its drift or noise is None."""
    state, time = jax.ShapeDtypeStruct(shape, float), jax.ShapeDtypeStruct((), float)
    drift = value_key(process.f, (state, time))
    noise = array_key(process.diffusion) if process.constant_noise else value_key(process.g, (time,))
    return None if drift is None or noise is None else (drift, noise, process.t1)


def _constants(jaxpr, consts):
    """All constants of a jaxpr and of those inside it: text shows scalars rounded, and of arrays the shape alone."""
    yield from consts
    for eqn in jaxpr.eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, jex.Literal))
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: isinstance(v, jex.ClosedJaxpr)):
            if isinstance(value, jex.ClosedJaxpr):
                yield from _constants(value.jaxpr, value.consts)
            elif isinstance(value, jex.Jaxpr):
                yield from _constants(value, [])
            elif isinstance(value, np.ndarray | jax.Array):
                yield value
