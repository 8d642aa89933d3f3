"""Data sets: points in the plane, and images.

Images of L levels are k = 0 … L−1 in every coordinate. A state is `2 (k + u)/L − 1`, u uniform in [0, 1): uniform
dequantization, scaled to [−1, 1]. Bits per dimension of the levels follow from its density with an offset of
`log2(L/2)`, 7 for bytes; see `likelihood.bits_per_dim`, with a width of 2.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..base.errors import as_double, check_count, check_key, check_name
from ..base.types import PRNGKey
from . import cifar10_files as _cifar10

SPLITS = ("train", "test")
RANGE = (-1.0, 1.0)
"""Where the values of images lie."""


@dataclasses.dataclass(frozen=True)
class Images:
    """Images as bytes, in memory or in files, and the sampler `images(key, n)` that training takes as y0.

        images = cifar10("train")
        y = images(jax.random.key(0), 128)  # (128, 3, 32, 32), dequantized, half of them flipped

    Draws are at random, with replacement, and follow from the key alone: a resumed run sees the same. In a run on many
    hosts, each takes `images.shard(jax.process_index(), jax.process_count())`, and draws for itself from one key.
    """

    parts: tuple[np.ndarray, ...]
    """Arrays (n_i, …) of bytes, one after the other; memory maps are read where they are drawn from."""
    shape: tuple[int, ...]
    """(channels, height, width) of an image, the last numbers of a row."""
    levels: int
    flip: bool
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    def __call__(self, key: PRNGKey, n: int) -> Float[Array, "n ..."]:
        check_count("n", n)
        rng = self._generator(key)
        pixels = self.pixels(rng.integers(0, len(self), n))
        if self.flip:
            mirrored = rng.random(n) < 0.5
            pixels[mirrored] = pixels[mirrored, ..., ::-1]
        return self._dequantized(pixels, rng)

    def states(self, indices, *, key: PRNGKey) -> Float[Array, "n ..."]:
        """Chosen images as states: dequantized, not flipped."""
        return self._dequantized(self.pixels(indices), self._generator(key))

    def pixels(self, indices) -> np.ndarray:
        """Chosen images as levels, (n, channels, height, width)."""
        numbers = as_double(indices, "indices")
        if np.any(numbers != np.round(numbers)):
            raise ValueError(f"indices={indices!r} must be whole numbers.")
        indices = np.atleast_1d(numbers.astype(int))
        if np.any((indices < 0) | (indices >= len(self))):
            raise IndexError(f"indices from {indices.min()} to {indices.max()} leave the {len(self)} images there are.")
        at = np.asarray(self.rows.start + self.rows.step * indices)
        ends = np.cumsum([len(part) for part in self.parts])
        which = np.searchsorted(ends, at, side="right")
        out = np.empty((len(at), *self.shape), np.uint8)
        size = int(np.prod(self.shape))
        for i in np.unique(which):
            part, mine = self.parts[i], which == i
            rows = part[at[mine] - (ends[i] - len(part))]
            out[mine] = rows.reshape(len(rows), -1)[:, -size:].reshape(-1, *self.shape)
        return out

    def shard(self, index: int, count: int) -> "Images":
        """Every count-th image from `index` on."""
        check_count("count", count)
        if not 0 <= index < count:
            raise ValueError(f"index={index} must lie in 0 … {count - 1}, for count={count}.")
        return dataclasses.replace(self, rows=self.rows[index::count])

    def _dequantized(self, pixels: np.ndarray, rng: np.random.Generator) -> Array:
        # Of 2¹⁴ places within a level, none near its edges: in single precision a state stays in its level.
        noise = (rng.integers(0, 1 << 14, pixels.shape, np.uint16) + np.float32(0.5)) / np.float32(1 << 14)
        return jnp.asarray(2.0 * (pixels + noise) / self.levels - 1.0, jnp.float32)

    def _generator(self, key: PRNGKey) -> np.random.Generator:
        """One for each key and shard."""
        check_key(key)
        rows = self.rows
        return np.random.default_rng([*np.asarray(jax.random.key_data(key)), rows.start, rows.step])


def digits(split: str = "train") -> Images:
    """Handwritten digits (Alpaydin & Kaynak, 1998; scikit-learn): 1,797 of 8×8 pixels and 17 levels, every fifth for
    testing."""
    check_name("split", split, SPLITS)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("digits come with scikit-learn: pip install 'autodsm[images]'") from None
    pixels = np.asarray(load_digits(return_X_y=True)[0], np.uint8).reshape(-1, 1, 8, 8)
    testing = np.arange(len(pixels)) % 5 == 4
    return _images([pixels[testing if split == "test" else ~testing]], (1, 8, 8), levels=17, flip=False)


def cifar10(split: str = "train", folder: Path | str | None = None) -> Images:
    """CIFAR-10: 50,000 images of 3×32×32 to train on, flipped at random, and 10,000 to test.

    From a folder with the official binary files; by default the one that `autodsm data cifar10` imports into.
    """
    check_name("split", split, SPLITS)
    folder = _cifar10.default_folder() if folder is None else Path(folder)
    _cifar10.check_folder(folder)
    names = [name for name in _cifar10.CHECKSUMS if name.startswith("test") == (split == "test")]
    shape = (_cifar10.RECORDS, _cifar10.RECORD)
    parts = [np.memmap(folder / name, np.uint8, "r", shape=shape) for name in names]
    return _images(parts, (3, 32, 32), levels=256, flip=split == "train")


def _images(parts: Sequence[np.ndarray], shape: tuple[int, ...], *, levels: int, flip: bool) -> Images:
    return Images(tuple(parts), shape, levels, flip, range(sum(len(part) for part in parts)))
