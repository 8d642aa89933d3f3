"""Many at once, but not all."""

from collections.abc import Callable

import jax


def in_batches(one: Callable, *arguments, size: int = 2000):
    """`jax.vmap(one)(*arguments)`, compiled, for `size` at a time: these fit into caches, and of paths with adaptive
    steps they wait for the slowest among them only."""
    size = min(size, len(arguments[0]))
    return jax.jit(lambda each: jax.lax.map(lambda x: one(*x), each, batch_size=size))(arguments)
