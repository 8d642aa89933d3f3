"""Shape aliases. A state has any shape; batches are made by `jax.vmap`, outside."""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Array, Float, Key, UInt32

State = Float[Array, "..."]
"""One state `y`: a vector, an image, channels by pixels."""

Times = Float[Array, " times"]
PRNGKey = Key[Array, ""] | UInt32[Array, "2"]
Score = Callable[..., State]

StructureName = Literal["elementwise", "blocks", "dense"]
Expand = Literal["s", "t"]
