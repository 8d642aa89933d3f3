"""The adapted target: a sum along the path whose mean given y_t is the score, with no linearization.

Let `E[ŝ | y] = ∇ log q(y)`. It stays so under `y⁺ = Φ(y) + G ξ`, ξ Gaussian, G invertible, for

    ŝ⁺ = Rᵀ (ŝ + DΦ(y)ᵀ η) − η,    η = G⁻ᵀ ξ,

whatever the matrix R is, as long as it is not random: `−η` alone has the score of y⁺ as its mean, and so does
`DΦ⁻ᵀ(…)`, of the score carried along; R weighs one against the other, and no Jacobian is inverted. (Moving ξ by
`ε G⁻¹(I − DΦ R) v`, and y by `ε R v`, moves y⁺ by ε v; the densities of both moves, the second being the score of y,
make up ŝ⁺·v.) `profiles` finds the R of least noise.

A path is a chain of such steps (see `paths.schemes.splitting`). A state at a time that is no point of its grid branches
off: it is reached from the point before by a shorter step with noise of its own. With Gaussian noise the target is
exact for the chain, however coarse its steps are; with four-point noise, which is cheaper and has the same first five
moments, up to the step's third order.

Where the score s_0 of the start is known, ŝ begins with it, and has no noise at first; else the first kick forgets the
start, R = 0.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..base.errors import check_flag, check_name
from ..base.modules import replace
from ..paths.initial import initial_states
from ..paths.schemes import four_point
from ..process.clock import Clock
from ..process.noise import check_invertible
from ..process.process import Process
from .base import AbstractTarget, Draw
from .chain import Piece
from .paths import PER_PATH, Paths
from .profiles import PATHS, PROFILES, STARTS, Profile, best_profile, plain_profile

TOL_WEIGHTED = 0.08
"""The tolerance of `choose_steps` for these paths: the drift changes by a quarter of itself in a step."""
_SHORTEST = 1e-6
"""Of a step of the grid: a branch is no shorter, as the noise of a kick has no inverse at a length of zero."""


class Adapted(AbstractTarget):
    """Targets from sums along simulated paths. Needs invertible noise.

        target = Adapted(process, Paths(process, 100))

    **Arguments:**

    - `forward`: the grid of steps.
    - `kind`: of the profile, "matrix" or "diagonal"; by default by the number of coupled coordinates.
    - `known_start`: whether the score of a start that has one is used; a bound per example must not.
    - `gaussian`: Gaussian noise, with which the identity is exact; else noise with the same five moments, cheaper.
    """

    process: Process
    forward: Paths
    profile: Profile | None
    """Chosen by `prepared`; before, that of a process without drift."""
    score: Callable | None
    """Of the start, where it is known."""
    clock: Clock
    kind: str | None = eqx.field(static=True)
    known_start: bool = eqx.field(static=True)
    gaussian: bool = eqx.field(static=True)

    def __init__(
        self,
        process: Process,
        forward: Paths,
        *,
        kind: str | None = None,
        known_start: bool = True,
        gaussian: bool = False,
        clock: Clock | None = None,
    ):
        if kind is not None:
            check_name("profile", kind, PROFILES)
        check_flag("known_start", known_start)
        check_flag("gaussian", gaussian)
        self.process, self.forward, self.profile, self.score = process, forward, None, None
        self.clock = Clock(process) if clock is None else clock
        self.kind, self.known_start, self.gaussian = kind, known_start, gaussian

    def prepared(self, pilot):
        ready = replace(self, forward=self.forward.prepared(pilot, tol=TOL_WEIGHTED))
        if self.profile is not None:
            return ready
        pilot.report("pilot: weights along the paths …")
        score = pilot.start_score if self.known_start else None
        return ready.fitted(pilot.y0, key=pilot.key, score=score)

    def fitted(self, y0, *, key, score: Callable | None = None) -> "Adapted":
        """The same, with the profile of least noise on paths from `y0`."""
        start_key, path_key = jax.random.split(key)
        x = initial_states(y0, PATHS if score is None else STARTS, key=start_key)
        check_invertible(self.process, x.shape[1:], what="the pathwise target", remedy="Use LocalDSM instead.")
        profile = best_profile(self.process, self.forward.grid, x, key=path_key, kind=self.kind, score=score)
        return replace(self, profile=profile, score=score)

    def draw(self, x, times, *, key):
        check_invertible(self.process, x.shape, what="the pathwise target", remedy="Use LocalDSM instead.")
        times, profile = jnp.asarray(times, x.dtype), self._profile(x.shape)
        trunk_key, branch_key = jax.random.split(key)
        grid, steps = self.forward.grid.astype(x.dtype), self.forward.steps
        pieces = Piece.along(grid)
        trunk = self._trunk(profile, x, pieces, trunk_key)
        index = jnp.clip(jnp.searchsorted(grid, times, side="left") - 1, 0, steps - 1)
        share = jnp.clip((times - pieces.a[index]) / pieces.h[index], _SHORTEST, 1.0)

        def branch(index, share, noise):
            state, piece = jax.tree.map(lambda leaf: leaf[index], (trunk, pieces))
            piece = piece._replace(h=share * piece.h)
            return self._carried(profile, state, piece, noise, profile.branch(index, share).astype(x.dtype))

        y, sums = jax.vmap(branch)(index, share, self._noise(branch_key, (len(times), 3), x))
        scale = jax.vmap(profile.scale)(index, share).astype(x.dtype)
        return Draw(times, y[:, None], sums[:, None], jnp.broadcast_to(scale, y.shape), None)

    def states(self, x, times, *, key):
        return self.draw(x, times, key=key).y[:, 0]  # those of the targets: what is made of them has the same errors

    def draws_per_path(self, shape):
        return PER_PATH

    def _profile(self, shape: tuple[int, ...]) -> Profile:
        if self.profile is None:
            return plain_profile(self.clock, self.forward.grid, shape)
        return self.profile

    def _noise(self, key, count: tuple[int, int], x) -> Array:
        """Noise of the kicks of many pieces, drawn together, which is much cheaper than one by one."""
        draw = jax.random.normal if self.gaussian else four_point
        return draw(key, (*count, *self.process.noise_shape(x.shape)), x.dtype)

    def _trunk(self, profile: Profile, x, pieces: Piece, key) -> tuple[Array, Array]:
        """States and sums at the start, and in the middles of all steps but the last."""
        first = jnp.zeros_like(x) if self.score is None else self.score(x)
        inner = jax.tree.map(lambda leaf: leaf[:-1], pieces)

        def step(state, inputs):
            state = self._carried(profile, state, *inputs)
            return state, state

        noise = self._noise(key, (len(inner.h), 2), x)
        _, path = jax.lax.scan(step, (x, first), (inner, noise, profile.turns[:-1, :2].astype(x.dtype)))
        return jnp.concatenate([x[None], path[0]]), jnp.concatenate([first[None], path[1]])

    def _carried(self, profile: Profile, state, piece: Piece, noise, turns) -> tuple[Array, Array]:
        """y and ŝ after as many drifts and kicks of a piece as there is noise for."""
        (y, total), algebra, count = state, profile.algebra, len(noise)
        drifts, kicks = piece.drifts(self.process)[:count], piece.kicks()[:count]
        for drift, kick, xi, turn in zip(drifts, kicks, noise, turns, strict=True):
            moved = kick.noise(self.process, xi, y.shape)
            eta = kick.divided(self.process, moved)
            y, pull = jax.vjp(drift, y)
            total = total + pull(eta)[0]
            total = total + algebra.join(algebra.matvec(turn, algebra.split(total))) - eta
            y = y + moved
        return y, total
