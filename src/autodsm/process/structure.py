"""How the coordinates of a drift are coupled, and the linear algebra that each kind of coupling needs.

| structure   | the drift at a coordinate depends on   | Jacobian kept as          | cost         |
|-------------|----------------------------------------|---------------------------|--------------|
| elementwise | that coordinate alone                  | its diagonal, shape of y  | O(d)         |
| blocks      | the K channels of its pixel            | K×K at each pixel         | O(d K²)      |
| dense       | anything                               | d×d                       | O(d³)        |

A state of shape (K, *pixels) has K channels. Everything that follows (linearization, moments, kernels) is
written once against this interface; vectors and matrices are in the *layout* of the structure:

| structure   | vector         | matrix            |
|-------------|----------------|-------------------|
| elementwise | shape of y     | shape of y        |
| blocks      | (*pixels, K)   | (*pixels, K, K)   |
| dense       | (d,)           | (d, d)            |
"""

import abc
import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.types import StructureName
from .coupling import marked_outputs

MAX_DENSE = 1024
"""Largest number of coordinates for which a dense Jacobian is formed without being asked for by name."""


@dataclasses.dataclass(frozen=True)
class AbstractStructure(abc.ABC):
    """Linear algebra for states of one shape. Hashable, so that it may be a static field."""

    shape: tuple[int, ...]

    @abc.abstractmethod
    def split(self, y: Array) -> Array:
        """State to vector layout."""

    @abc.abstractmethod
    def join(self, x: Array) -> Array:
        """Vector layout to state."""

    @abc.abstractmethod
    def jacobian(self, fun: Callable[[Array], Array], y: Array) -> tuple[Array, Array]:
        """Value and Jacobian of `fun` at `y`, both in layout."""

    @abc.abstractmethod
    def noise_cov(self, g: Array) -> Array:
        """`Q = g gᵀ` as a matrix in layout."""

    @abc.abstractmethod
    def noise_columns(self, g: Array) -> Array:
        """Tangents v_k, stacked, with `Σ_k D²f[v_k, v_k] = Σ_ij Q_ij ∂²f/∂y_i∂y_j`."""

    @abc.abstractmethod
    def identity(self, dtype) -> Array: ...

    @abc.abstractmethod
    def matmul(self, a: Array, b: Array) -> Array: ...

    @abc.abstractmethod
    def matvec(self, a: Array, x: Array) -> Array: ...

    @abc.abstractmethod
    def transpose(self, a: Array) -> Array: ...

    @abc.abstractmethod
    def norm(self, a: Array) -> Array:
        """An operator norm, the largest over sites."""

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """Of each matrix: how many coordinates are coupled to each other."""


class Elementwise(AbstractStructure):
    """Every coordinate for itself: matrices are their diagonals and all products are pointwise."""

    def split(self, y):
        return y

    def join(self, x):
        return x

    def jacobian(self, fun, y):
        return jax.jvp(fun, (y,), (jnp.ones_like(y),))

    def noise_cov(self, g):
        return jnp.broadcast_to(expand_noise(g, self.shape) ** 2, self.shape)

    def noise_columns(self, g):
        return jnp.broadcast_to(expand_noise(g, self.shape), self.shape)[None]

    def identity(self, dtype):
        return jnp.ones(self.shape, dtype)

    def matmul(self, a, b):
        return a * b

    def matvec(self, a, x):
        return a * x

    def transpose(self, a):
        return a

    def norm(self, a):
        return jnp.max(jnp.abs(a))

    @property
    def rows(self):
        return 1


class _Matrices(AbstractStructure):
    """Shared algebra of square matrices with leading site axes (none for a dense Jacobian)."""

    @abc.abstractmethod
    def basis(self, dtype) -> Array:
        """Unit tangents, shape (n, *shape): one for each column of the Jacobian at every site."""

    def jacobian(self, fun, y):
        value, pushforward = jax.linearize(fun, y)
        columns = jax.vmap(lambda v: self.split(pushforward(v)))(self.basis(y.dtype))
        return self.split(value), jnp.moveaxis(columns, 0, -1)

    def noise_columns(self, g):
        if noise_kind(g.shape, self.shape) == "matrix":
            return jnp.moveaxis(self._matrix_columns(g), -1, 0)
        diagonal = jnp.broadcast_to(expand_noise(g, self.shape), self.shape)
        return self.basis(g.dtype) * diagonal

    @abc.abstractmethod
    def _matrix_columns(self, g: Array) -> Array: ...

    def identity(self, dtype):
        leading, n = self._sites()
        return jnp.broadcast_to(jnp.eye(n, dtype=dtype), (*leading, n, n))

    @abc.abstractmethod
    def _sites(self) -> tuple[tuple[int, ...], int]:
        """Leading site axes, and the size of each matrix."""

    @property
    def rows(self):
        return self._sites()[1]

    def noise_cov(self, g):
        columns = jax.vmap(self.split, out_axes=-1)(self.noise_columns(g))
        return columns @ self.transpose(columns)

    def matmul(self, a, b):
        return a @ b

    def matvec(self, a, x):
        return jnp.einsum("...ij,...j->...i", a, x)

    def transpose(self, a):
        return jnp.swapaxes(a, -1, -2)

    def norm(self, a):
        return jnp.max(jnp.sum(jnp.abs(a), axis=-1))


class Blocks(_Matrices):
    """State (K, *pixels) whose drift couples only the channels of each pixel."""

    def _sites(self):
        return self.shape[1:], self.shape[0]

    def split(self, y):
        return jnp.moveaxis(y, 0, -1)

    def join(self, x):
        return jnp.moveaxis(x, -1, 0)

    def basis(self, dtype):
        k = self.shape[0]
        units = jnp.eye(k, dtype=dtype).reshape(k, k, *(1 for _ in self.shape[1:]))
        return jnp.broadcast_to(units, (k, *self.shape))

    def _matrix_columns(self, g):
        columns = g.reshape(g.shape[0], *(1 for _ in self.shape[1:]), g.shape[1])
        return jnp.broadcast_to(columns, (*self.shape, g.shape[1]))


class Dense(_Matrices):
    """No structure: the state is raveled and the Jacobian is a full matrix."""

    def _sites(self):
        return (), math.prod(self.shape)

    def split(self, y):
        return y.reshape(-1)

    def join(self, x):
        return x.reshape(self.shape)

    def basis(self, dtype):
        d = math.prod(self.shape)
        return jnp.eye(d, dtype=dtype).reshape(d, *self.shape)

    def _matrix_columns(self, g):
        if g.shape[0] == math.prod(self.shape):
            return g.reshape(*self.shape, g.shape[1])
        pixels = math.prod(self.shape[1:])
        return jnp.kron(g, jnp.eye(pixels, dtype=g.dtype)).reshape(*self.shape, -1)


STRUCTURES: dict[str, type[AbstractStructure]] = {
    "elementwise": Elementwise,
    "blocks": Blocks,
    "dense": Dense,
}


def noise_kind(g_shape: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """What a `g` of shape `g_shape` means for a state of `shape`: "scalar", "diagonal" or "matrix"."""
    if g_shape == ():
        return "scalar"
    if len(shape) == 2 and g_shape == shape:
        raise ValueError(
            f"diffusion of shape {g_shape} for a state of the same shape could be a diagonal or a matrix over "
            f"the first axis. Give the state one more axis, e.g. {(1, *shape)}, or ravel it."
        )
    if g_shape == shape or (shape and g_shape == shape[:1]):
        return "diagonal"
    if len(g_shape) == 2 and shape and g_shape[0] in (shape[0], math.prod(shape)):
        return "matrix"
    fits = ["a number"]
    if shape:
        fits.append(f"one entry for each index of the first axis, {shape[:1]}")
        fits.append(f"a matrix ({shape[0]}, m)")
    if len(shape) > 1:
        fits.append(f"a matrix over the raveled state, ({math.prod(shape)}, m)")
    if len(shape) > 2:
        fits.append(f"a diagonal {shape}")
    raise ValueError(f"diffusion of shape {g_shape} does not fit a state of shape {shape}. Expected {'; '.join(fits)}.")


def expand_noise(g: Array, shape: tuple[int, ...]) -> Array:
    """A scalar or diagonal `g`, with axes appended until it broadcasts against the state."""
    return g.reshape(*g.shape, *(1 for _ in shape[1:])) if g.ndim == 1 else g


def noise_diagonal(g: Array) -> Array:
    """The diagonal of `Q = g gᵀ`, one entry for a scalar g."""
    return jnp.sum(g**2, axis=1) if g.ndim == 2 else jnp.ravel(g**2)


def infer(drift: Callable, g_shape: tuple[int, ...], shape: tuple[int, ...]) -> StructureName:
    """The least coupled structure that the drift and the noise allow, at every state and time.

    The coordinates are numbered, and each binary digit of the number splits them in two halves, so that any two
    coordinates are parted by some digit. If no half reaches the other through the drift, no two are coupled.
    """
    kind = noise_kind(g_shape, shape)
    if kind != "matrix" and _parted(drift, shape, sites=math.prod(shape)):
        return "elementwise"
    per_channel = kind != "matrix" or g_shape[0] == shape[0]
    if len(shape) > 1 and per_channel and _parted(drift, shape, sites=math.prod(shape[1:])):
        return "blocks"
    return "dense"


def depends_on_time(drift: Callable, shape: tuple[int, ...]) -> bool:
    """False only when the drift is the same at all times."""
    example = (jax.ShapeDtypeStruct((), float), jax.ShapeDtypeStruct(shape, float))
    return bool(np.any(marked_outputs(lambda t, y: drift(y, t), example, [np.ones((), bool)])[0]))


def is_affine(drift: Callable, shape: tuple[int, ...]) -> bool:
    """True only when the derivative of the drift depends on no coordinate, at any time, as its operations show.

    An operation may hide what it does from differentiation, as `sign` does: a caller looks at values too.
    """
    state, time = jax.ShapeDtypeStruct(shape, float), jax.ShapeDtypeStruct((), float)

    def slope(y, v, t):
        return jax.jvp(lambda y: drift(y, t), (y,), (v,))[1]

    return not np.any(marked_outputs(slope, (state, state, time), [np.ones(shape, bool)])[0])


def _parted(drift: Callable, shape: tuple[int, ...], *, sites: int) -> bool:
    """True when the drift couples no two sites (sites = d: coordinates; sites = pixels: pixels)."""
    if sites == 1:
        return True
    digits = (np.arange(sites)[None] >> np.arange((sites - 1).bit_length())[:, None]) & 1
    masks = np.concatenate([digits, 1 - digits]).astype(bool)  # (n, sites)
    masks = np.broadcast_to(masks[:, None], (len(masks), math.prod(shape) // sites, sites)).reshape(-1, *shape)
    example = (jax.ShapeDtypeStruct(shape, float), jax.ShapeDtypeStruct((), float))
    reached = marked_outputs(drift, example, list(masks))
    return all(not np.any(out & ~mask) for out, mask in zip(reached, masks, strict=True))
