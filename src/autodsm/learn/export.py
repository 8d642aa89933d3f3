"""A score, or a sampler, as StableHLO: for any program that has JAX, without this library.

    exported = jax.export.deserialize(bytearray(open("score.stablehlo", "rb").read()))
    scores = exported.call(y, t)        # (n, *shape) float32 and (n,) float32, for any n
    samples = exported.call(y, key)     # of a sampler: y from the prior, key of two uint32

The number of states is a symbol in it. One file serves CPUs, GPUs and TPUs.
"""

from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp

from ..base.errors import check_flag
from ..use.sample import sampler as make_sampler
from .model import Model

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(model: Model, path: Path, *, sampler: bool = False, steps: int | None = None) -> None:
    """See `Model.export`."""
    check_flag("sampler", sampler)
    if steps is not None and not sampler:
        raise ValueError(f"steps={steps} is for a sampler: give sampler=True.")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: name a file in a folder that exists.")
    (n,) = jax.export.symbolic_shape("n")
    y = jax.ShapeDtypeStruct((n, *model.shape), jnp.float32)
    if sampler:
        one = make_sampler(model._process("a sampler"), model.score, steps)

        def draw(y, key):
            key = jax.random.wrap_key_data(key, impl="threefry2x32")
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(y.shape[0]))
            return jax.vmap(one)(y, keys)

        function, given = draw, (y, jax.ShapeDtypeStruct((2,), jnp.uint32))
    else:
        function, given = jax.vmap(model.score), (y, jax.ShapeDtypeStruct((n,), jnp.float32))
    exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*given)
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_bytes(exported.serialize())
    partial.replace(path)
