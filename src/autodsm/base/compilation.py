"""Compilation of functions that run once or a few times, where it takes longer than what is compiled."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax

SMALL = 16
"""Coordinates of a state up to which pilots are compiled without optimization. With 10 they then take three times as
long to run and a third to compile, which is less in sum; with 100 it is more."""


def jit_once(function: Callable, *, optimize: bool) -> Callable:
    """`equinox.filter_jit` for a function that runs a few times. On CPU it is compiled in a fifth of the time, unless
    it is to `optimize`. Results agree up to rounding.

    With optimization, XLA's former fusion code would compile in two thirds of the time, but for reversed arrays,
    `y[::-1]`, in more than twenty times of it; so its defaults are left alone.
    """
    return eqx.filter_jit(function, compiler_options=None if optimize else _options())  # pyright: ignore[reportCallIssue]: of jax.jit


@functools.cache
def _options() -> dict | None:
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0.0).lower().compile(compiler_options=options)
    except (ValueError, RuntimeError):  # a compiler that does not know them
        return None
    return options
