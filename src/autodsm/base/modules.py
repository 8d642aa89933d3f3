"""Equinox modules with other values in some of their fields."""

from typing import Any


def replace(module, **changes) -> Any:
    """A copy of an Equinox module with other values in some fields, static ones included."""
    new = object.__new__(type(module))
    for name in module.__dataclass_fields__:
        object.__setattr__(new, name, changes.get(name, getattr(module, name)))
    return new
