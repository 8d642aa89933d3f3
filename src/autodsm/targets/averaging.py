"""Averaging a target over starts (Xu, Tong & Jaakkola, 2023): less noise, where a kernel's density can be evaluated.

Let x_1 … x_m be exchangeable starts, I one of them by chance, and `y ~ q(y|x_I)`. Given y and the starts, I is j with a
probability in proportion to `q(y|x_j)`. So

    ŝ = Σ_j w_j ∇ log q(y|x_j),        w_j = q(y|x_j) / Σ_k q(y|x_k),

is the mean of `∇ log q(y|x_I)` given y and the starts: of the same mean given y, the score, and never of more noise,
for every m. Without the own start among the m it would be wrong.

**Groups.** Starts far from each other share no y while the kernels are narrow. So the starts of a training's round, its
pool, are put in an order in which neighbours are alike, and split into blocks; a group is every w-th of a block of m w
starts: m starts that are evenly spread over it. Each, or some by chance, are drawn from. Which group I is in is
conditioned on as well, and the above holds for each group by itself, whatever the order and the blocks are: they decide
how much noise goes, never the mean. The share of the pool that is a block grows with t, as kernels do; a pilot chooses
it, for the least `E|ŝ|²`, the sum of `E|score|²` and the noise.

For an array of samples as y_0, starts are drawn from it with replacement, and targets tend to the score of its
empirical law, blurred by the kernel: what they mean without averaging, too.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..base.errors import check_count
from ..base.types import PRNGKey
from ..paths.initial import initial_states
from ..process.clock import EARLIEST, Clock
from .base import Draw
from .pilot import Pilot

MOST_REFERENCES, FEWEST_REFERENCES = 16, 8
"""Starts of a group, unless told otherwise: between these, and so that they have no more than `_LOOKED_UP` coordinates,
at each of which the kernel is evaluated for each draw. On the checkerboard noise falls 2.4, 4.4 and 45-fold at t = .01,
.1 and .5 with 16 starts, and 3.1, 6.1 and 280-fold with 32, which take twice the time."""
_LOOKED_UP = 1 << 8
_WORTH = 0.05
"""Share by which `E|ŝ|²` must fall, on the mean over log t, for averaging to be worth its time."""
_AT_ONCE = 1 << 10  # coordinates of starts that the pilot looks at together
_DIRECTIONS = 3
"""Principal directions of the starts by which they are put in order. More would leave the first of them too coarse: a
pool of 2¹⁵ starts is told apart by 15 bits."""
_BITS = 10  # of each direction
_QUANTILES = np.linspace(0.0, 1.0, 65)
_TIMES = 8
"""At which the pilot looks for the best blocks, evenly in log G; between them the share's logarithm is linear."""
_POOL = 1 << 15
"""Starts of the pilot, and of a round of 64 steps of 512; of many numbers fewer."""
_NUMBERS = 1 << 20  # in all starts of the pilot
_TRIED = 1 << 9  # draws for each time and block: E|ŝ|² to some percent


class Averaging(eqx.Module):
    """Which starts of a pool a draw is averaged over."""

    directions: Float[Array, "p d"]
    """Of the order: principal ones of the starts, each coordinate in units of its deviation."""
    quantiles: Float[Array, "p nodes"]
    """Of the starts, along each direction."""
    shares: Float[Array, " times"]
    """Logarithm of the share of the pool that is a block, at even places of log G."""
    clock: Clock
    references: int = eqx.field(static=True)
    """Starts of a group."""

    def arrange(self, pool: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
        """The pool in an order in which neighbours are alike: along a Z-curve (Morton's) through the directions."""
        if len(self.directions) == 0:
            return pool
        along = self.directions.astype(pool.dtype) @ pool.reshape(len(pool), -1).T
        levels = jnp.asarray(_QUANTILES, pool.dtype)
        place = jax.vmap(lambda v, q: jnp.interp(v, q, levels))(along, self.quantiles.astype(pool.dtype))
        cells = jnp.minimum((place * (1 << _BITS)).astype(jnp.uint32), (1 << _BITS) - 1)
        code = jnp.zeros(len(pool), jnp.uint32)
        for bit in range(_BITS):
            for i, cell in enumerate(cells):
                code = code | (((cell >> bit) & 1) << (bit * len(cells) + i))
        return pool[jnp.argsort(code)]

    def group(self, index, groups: int, t, *, key: PRNGKey) -> Int[Array, " references"]:
        """Places in a pool of that many groups: those of one of the groups that it is split into at t, in a cyclic
        order whose first is left to chance."""
        width = jnp.clip(jnp.round(jnp.exp(self._share(t)) * groups), 1, groups).astype(jnp.int32)
        return place_members(index, groups, self.references, width, key=key)

    def _share(self, t) -> Array:
        """The logarithm of the share of the pool that is a block."""
        first, last = self.clock.log(EARLIEST * self.clock.t1), self.clock.log(self.clock.t1)
        place = (self.clock.log(t) - first) / (last - first) * (len(self.shares) - 1)
        return jnp.interp(place, jnp.arange(len(self.shares), dtype=place.dtype), self.shares.astype(place.dtype))


def place_members(index, groups: int, members: int, width, *, key: PRNGKey) -> Int[Array, " members"]:
    """The group `index` of those that blocks of `width` groups hold: each starts in its block where it may, and takes
    every width-th place. The last block is of as many groups as are left."""
    before = index - index % width
    width = jnp.minimum(width, groups - before)
    turn = jax.random.randint(key, (), 0, members)
    return before * members + (index - before) + width * ((jnp.arange(members) + turn) % members)


def average(log_q: Float[Array, " m"], scores: Float[Array, "m ..."]) -> Float[Array, "..."]:
    """`Σ_j w_j ∇ log q(y|x_j)`."""
    return jnp.tensordot(jax.nn.softmax(log_q), scores, axes=1)


def check_references(references: int | None) -> None:
    if references is not None:
        check_count("references", references)


def find_averaging(pilot: Pilot, together: Callable[..., Draw], references: int | None) -> Averaging | None:
    """The order of the starts of a `Pilot`, and the blocks of least noise for `together(xs, t, members, key=key)`.

    None where the number of references was not given, and averaging over as many as are affordable is not worth it.
    """
    size, given = int(np.prod(pilot.shape)), references is not None
    if not given and (references := min(MOST_REFERENCES, _LOOKED_UP // max(1, size))) < FEWEST_REFERENCES:
        return None
    assert references is not None
    pilot.report("pilot: starts to average over …")
    pool_key, draw_key = jax.random.split(pilot.key)
    groups = max(1, min(_POOL, _NUMBERS // max(1, size)) // references)
    pool = initial_states(pilot.y0, groups * references, key=pool_key)
    directions, quantiles = _directions(np.asarray(pool, np.float64).reshape(len(pool), -1))
    plain = Averaging(directions, quantiles, jnp.zeros(2), pilot.clock, references)
    pool = eqx.filter_jit(plain.arrange)(pool)
    widths = np.unique(np.geomspace(1, groups, 1 + int(np.ceil(0.5 * np.log2(groups)))).round().astype(int))
    first, last = (float(pilot.clock.log(t)) for t in (EARLIEST * pilot.clock.t1, pilot.clock.t1))
    times = pilot.clock.inverse(jnp.linspace(first, last, _TIMES))
    tried = min(_TRIED, groups)
    index = jnp.arange(tried) * groups // tried  # the same draws for all widths
    keys = jax.random.split(draw_key, tried)

    def noise(starts: int, width, t):
        """`E|ŝ|²`, averaged over so many starts of each group, in units of the kernel's deviation."""

        def one(given):
            index, key = given
            place_key, key = jax.random.split(key)
            places = place_members(index, groups, references, width, key=place_key)[:starts]
            draw = together(pool[places], t, 1, key=key)
            return jnp.mean((draw.score * draw.scale[:, None]) ** 2)

        return jnp.mean(jax.lax.map(one, (index, keys), batch_size=max(1, _AT_ONCE // (references * size))))

    @jax.jit
    def found(t):
        every = jax.lax.map(lambda width: noise(references, width, t), jnp.asarray(widths, jnp.int32))
        return every, noise(1, groups, t)

    averaged, alone = (np.array(v) for v in zip(*map(found, times), strict=True))
    averaged = np.where(np.isfinite(averaged), averaged, np.inf)
    if not given and not np.mean(averaged.min(axis=1) / alone) <= 1.0 - _WORTH:
        return None
    shares = jnp.log(jnp.asarray(widths[np.argmin(averaged, axis=1)] / groups, float))
    return Averaging(directions, quantiles, shares, pilot.clock, references)


def _directions(x: np.ndarray) -> tuple[Array, Array]:
    """Principal directions of states (n, d), each coordinate in units of its deviation, and quantiles along them."""
    x = x[: 1 << 12]
    spread = x.std(axis=0)
    scaled = np.where(spread > 0, (x - x.mean(axis=0)) / np.where(spread > 0, spread, 1.0), 0.0)
    _, size, axes = np.linalg.svd(scaled, full_matrices=False)
    axes = axes[: min(_DIRECTIONS, int(np.sum(size > 1e-6 * max(size[0], 1e-30))))]
    directions = axes / np.where(spread > 0, spread, np.inf)
    return jnp.asarray(directions, float), jnp.asarray(np.quantile(x @ directions.T, _QUANTILES, axis=0).T, float)
