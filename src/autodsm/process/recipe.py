"""How a process was made, where a constructor of the library made it: its name and its arguments.

    vp(LinearBeta(0.1, 10.0)).recipe  # vp(beta=LinearBeta(...), t1=None, structure=None)

A drift is a function, which no file can hold; the recipe of it is data. A process of a drift of the user's has none.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx

from ..base.modules import replace
from .process import Process

P = ParamSpec("P")
T = TypeVar("T")

CONSTRUCTORS: dict[str, Callable] = {}
"""By name, all whose processes have recipes."""


@dataclasses.dataclass(frozen=True, eq=False)  # arguments may be arrays, which have no one truth value
class Recipe:
    name: str
    arguments: dict[str, Any]
    """All of them, defaults too, which may change from one release to the next."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={_short(value)}' for name, value in self.arguments.items())})"


def _short(value) -> str:
    if isinstance(value, eqx.Module):
        held = (f"{name}={_short(getattr(value, name))}" for name in value.__dataclass_fields__)
        return f"{type(value).__name__}({', '.join(held)})"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text or len(text) > 60 else text


def recorded(constructor: Callable[P, T]) -> Callable[P, T]:
    """The constructor of a process, or of a system that holds one, which leaves its recipe on it."""

    @functools.wraps(constructor)
    def build(*args: P.args, **options: P.kwargs) -> T:
        made: Any = constructor(*args, **options)
        given = inspect.signature(constructor).bind(*args, **options)
        given.apply_defaults()
        recipe = Recipe(constructor.__name__, dict(given.arguments))
        if isinstance(made, Process):
            return replace(made, recipe=recipe)
        return made._replace(process=replace(made.process, recipe=recipe))

    CONSTRUCTORS[constructor.__name__] = build
    return build
