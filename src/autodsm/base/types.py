"""Shape aliases. A state has any shape; batches are made by `jax.vmap`, outside."""

from typing import Literal

from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key, UInt32

State = Float[Array, "..."]
"""One state `y`: a vector, an image, channels by pixels."""

StateLike = ArrayLike | list | tuple
"""What a user may give for a state: anything that `jnp.asarray` takes."""

PRNGKey = Key[Array, ""] | UInt32[Array, "2"]

StructureName = Literal["elementwise", "blocks", "dense"]
