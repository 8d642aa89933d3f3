"""What is read off a network: the shape of a state, and what it is called."""

from collections.abc import Callable

import jax
from jax import Array

from .base import Shape
from .mlp import MLP, Inputs
from .particles import Equivariant
from .unet import UNet


def state_shape(score) -> Shape | None:
    """The shape of a state, if a network of this library says it."""
    known = (Inputs, UNet)
    nodes = jax.tree.leaves(score, is_leaf=lambda node: isinstance(node, known))
    return next((node.shape for node in nodes if isinstance(node, known)), None)


def check_one(score: Callable, x: Array, remedy: str) -> None:
    """Refuse a batch of states where one is taken, if the network says so."""
    if x.ndim == 0 or state_shape(score) != x.shape[1:]:
        return
    try:  # a score of several networks may well take states that look like a batch
        jax.eval_shape(score, x, jax.ShapeDtypeStruct((), x.dtype))
    except ValueError as error:
        raise ValueError(f"x has shape {x.shape}, and one example has shape {x.shape[1:]}. {remedy}") from error


def network_name(network) -> str:
    """What a network is, in words."""
    if (net := _first(network, MLP)) is not None:
        depth = len(net.layers) - 1
        return f"MLP, {depth} hidden layer{'s' * (depth > 1)} of {net.layers[0].bias.size}"
    return type(_first(network, UNet | Equivariant) or network).__name__


def _first(tree, kind):
    """The first module of a kind in a tree, or None."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return next((leaf for leaf in leaves if isinstance(leaf, kind)), None)
