"""Training that is watched: what a score is worth after how many steps, and after how many seconds."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from ...base.types import PRNGKey
from ...exact.products import ProductMixture
from ...learn.fit import fit
from ...learn.model import Model
from ...learn.objective import AbstractObjective
from ...network import Frozen
from ...paths.initial import initial_states
from ...paths.simulate import simulate
from ...process.noise import apply_Q
from ...process.priors import LinearBeta, langevin
from ...process.process import Process
from ...use.flow import flow_with_density
from ...use.metrics import mmd2

BATCH = 1024
"""Evaluations of the network in a step."""


@lru_cache
def logistic_langevin() -> tuple[Process, dist.Distribution]:
    """Langevin dynamics to the logistic law, β from 0.1 to 10, and that law: one for all, so that tables are shared."""
    prior = dist.Logistic(0.0, 1.0)
    return langevin(prior, LinearBeta(0.1, 10.0)), prior


class ExactScore(eqx.Module):
    """The exact score at one of the times of a mixture, as a function of state and time; compiled once for all."""

    mixture: ProductMixture
    index: jax.Array

    def __call__(self, y, t=None):
        return self.mixture.score(y, self.index)


def _relative(off: jax.Array, exact: jax.Array) -> jax.Array:
    axes = tuple(range(1, exact.ndim))
    return jnp.sum(off**2, axis=axes) / jnp.sum(exact**2, axis=axes)


class Recipe(NamedTuple):
    """What is compared: an objective and a network, both chosen by `fit` where they are None."""

    objective: AbstractObjective | None = None
    network: Any = None


class LocalNoise(eqx.Module):
    """The paper's network: `s_θ = −ε_θ/γ`, `γ² = 1 − exp(−∫g²)` over [s(t), t]; the integral is λ once it can be."""

    net: Callable
    clock: Frozen
    lam: float = eqx.field(static=True)

    def __call__(self, y, t):
        received = jnp.minimum(self.clock.value(t), self.lam)
        return -self.net(y, t) / jnp.sqrt(-jnp.expm1(-received)).astype(y.dtype)


class ScoreError(eqx.Module):
    """`E|s_θ − s|² / E|s|²` at several times, over fixed states where the exact score is known; and of velocities."""

    y: jax.Array
    """(times, n, *shape)"""
    exact: jax.Array
    """The same; coordinates that are not compared are NaN, at all states."""
    times: jax.Array

    @classmethod
    def at(cls, states, exact, times) -> "ScoreError":
        """States (times, n, *shape) with exact scores; a path on which one of them is not known is left out."""
        exact = np.asarray(exact, float)
        compared = np.any(np.isfinite(exact), axis=(0, 1))
        known = np.all(np.isfinite(exact) | ~compared, axis=(0, *range(2, exact.ndim)))
        return cls(jnp.asarray(np.asarray(states)[:, known]), jnp.asarray(exact[:, known]), jnp.asarray(times, float))

    @eqx.filter_jit
    def __call__(self, score) -> jax.Array:
        """(times,)"""
        off, exact = self._off(score)
        return _relative(off, exact)

    @eqx.filter_jit
    def of_velocity(self, process: Process, score) -> jax.Array:
        """The same of `v = f − ½ Q s`, (times,); coordinates that are not compared have no noise."""
        off, exact = self._off(score)

        def at(each):
            y, t, off, exact = each
            pushed = jax.vmap(lambda s: 0.5 * apply_Q(process, t, s))
            return pushed(off), jax.vmap(lambda y: process.f(y, t))(y) - pushed(exact)

        return _relative(*jax.lax.map(at, (self.y, self.times.astype(self.y.dtype), off, exact)))

    def _off(self, score) -> tuple[jax.Array, jax.Array]:
        """`s_θ − s` and s, zero where it is not compared; a network that is lost stays NaN."""
        found = jax.lax.map(lambda z: jax.vmap(lambda y: score(y, z[1]))(z[0]), (self.y, self.times))
        compared = ~jnp.isnan(self.exact)
        return jnp.where(compared, found - self.exact, 0.0), jnp.where(compared, self.exact, 0.0)


def learn(
    process: Process,
    y0,
    recipe: Recipe,
    *,
    steps: int,
    marks: Sequence[int],
    evaluate: Callable[..., dict],
    key: PRNGKey,
    **options,
) -> tuple[Model, list[dict]]:
    """Train with `fit`, and take `evaluate(score)` at the first end of a round at or after each of the marks.

    Each row also has the step, and the seconds of training until then: by the median time of a step, so that neither
    compilation, nor evaluation, nor what else the machine did for a while counts.
    """
    rows: list[dict] = []
    left = sorted({*(mark for mark in marks if mark < steps), steps})

    def look(step, score):
        if left and step >= left[0]:
            rows.append({"step": step, **evaluate(score)})
            left[:] = [mark for mark in left if mark > step]

    given = {name: value for name, value in recipe._asdict().items() if value is not None}
    model = fit(process, y0, key=key, steps=steps, each_round=look, **{"batch_size": BATCH, **given, **options})
    per_step = 1.0 / np.median([row["steps_per_s"] for row in model.history])
    for row in rows:
        row["seconds"] = float(per_step * row["step"])
    return model, rows


def simulated(process: Process, y0, times, n: int, *, key: PRNGKey, **options) -> np.ndarray:
    """n simulated paths at `times`, (times, n, *shape)."""
    start_key, path_key = jax.random.split(key)
    starts = initial_states(y0, n, key=start_key)
    at = jnp.asarray(times, starts.dtype)
    paths = jax.jit(jax.vmap(lambda y, k: simulate(process, y, at, key=k, **options)))
    return np.moveaxis(np.asarray(paths(starts, jax.random.split(path_key, n))), 1, 0)


def carried(process: Process, score, starts, times) -> np.ndarray:
    """States at the first of the times, (n, *shape), carried through all by the probability flow: (times, n, *shape).

    Those that a wrong score leads out of the finite numbers are not finite.
    """
    starts = jnp.asarray(starts)
    return np.moveaxis(np.asarray(_carry(process, score, starts, jnp.asarray(times, starts.dtype))), 1, 0)


@eqx.filter_jit
def _carry(process: Process, score, starts, times):
    return jax.vmap(lambda y: flow_with_density(process, score, y, times, tol=1e-4, divergence=None).y)(starts)


def kept(ys: np.ndarray) -> list[np.ndarray]:
    """Samples at each time, (times, n, *shape), without those that are lost: not finite, or beyond a million."""
    flat = np.abs(ys.reshape(*ys.shape[:2], -1))
    return [y[here] for y, here in zip(ys, np.all(flat < 1e6, axis=2), strict=True)]


def distances(ys: np.ndarray, references: np.ndarray, *, key: PRNGKey) -> dict:
    """MMD² between samples at each time, (times, n, *shape), and its noise floors; and the largest share of samples
    that is lost. With half of them lost there is no distance, and it is NaN."""
    values, floors, n = [], [], ys.shape[1]
    left = kept(ys)
    for y, reference in zip(left, references, strict=True):
        found = mmd2(y, reference, key=key, permutations=40) if len(y) > n / 2 else None
        values.append(np.nan if found is None else found.value)
        floors.append(np.nan if found is None else found.floor)
    return {"mmd2": values, "floor": floors, "lost": 1.0 - min(map(len, left)) / n}
