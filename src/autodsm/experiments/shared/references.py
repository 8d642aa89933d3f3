"""Reference systems whose exact score is known at all times of training, of every kind that `fit` tells apart."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.stats import ortho_group

from ...data import checkerboard as draw_checkerboard
from ...exact.gaussian import gaussian_marginals
from ...exact.grid2d import solve_2d
from ...exact.products import checkerboard as checkerboard_density
from ...exact.products import solve_products
from ...learn.builders import PathwiseDSM
from ...process.priors import linear
from ...process.process import Process
from ...process.systems import System, swimmer
from ...process.systems import mueller_brown as make_mueller_brown
from .learning import logistic_langevin


class Reference(NamedTuple):
    """A process with its exact score."""

    process: Process
    y0: Any
    """Samples, or a sampler, without the density."""
    law: Any
    """The law of y0, with its density; None where a training with it is not compared."""
    score: Callable
    """`score(y, t)`; NaN in coordinates, and at states, where it is not known."""
    times: tuple[float, ...]
    """At which errors are looked at."""
    options: dict
    """Of `fit`."""
    noiseless: tuple[int, ...] = ()
    """Coordinates without noise, whose score is neither learned nor needed."""


class Equilibrium(eqx.Module):
    """Samples of `exp(−V)`, with that density."""

    samples: jax.Array
    energy: Callable = eqx.field(static=True)

    def sample(self, key, sample_shape=()):
        return self.samples[jax.random.randint(key, sample_shape, 0, len(self.samples))]

    def log_prob(self, y):
        return -self.energy(y)


def equilibrium(energy: Callable, d: int, *, n: int, sweeps: int, h: float = 0.02) -> Equilibrium:
    """By Metropolis-adjusted Langevin steps."""

    def move(key, y):
        noise_key, accept_key = jax.random.split(key)
        value, slope = jax.vmap(jax.value_and_grad(energy))(y)
        new = y - h * slope + jnp.sqrt(2.0 * h) * jax.random.normal(noise_key, y.shape)
        new_value, new_slope = jax.vmap(jax.value_and_grad(energy))(new)
        there, back = new - y + h * slope, y - new + h * new_slope
        log_ratio = value - new_value + (jnp.sum(there**2, 1) - jnp.sum(back**2, 1)) / (4.0 * h)
        accepted = jnp.log(jax.random.uniform(accept_key, (len(y),))) < log_ratio
        return jnp.where(accepted[:, None], new, y)

    first, steps = jax.random.split(jax.random.key(7))
    y = jax.random.normal(first, (n, d))
    y = jax.jit(lambda y: jax.lax.scan(lambda y, k: (move(k, y), None), y, jax.random.split(steps, sweeps))[0])(y)
    return Equilibrium(y, energy)


def ring(quick: bool) -> Reference:
    """The φ⁴ ring of sixteen coordinates, in equilibrium: its score is −∇V at all times. Without the drift as a base,
    which here is the score."""

    def energy(y):
        return jnp.sum(0.25 * y**4 - 0.5 * y**2 + 0.25 * (y - jnp.roll(y, 1)) ** 2)

    law = equilibrium(energy, 16, n=1 << (10 if quick else 16), sweeps=400)
    process = Process(lambda y, t: -jax.grad(energy)(y), np.sqrt(2.0), 1.0)
    options = {"drift_basis": False}
    return Reference(process, law.samples, law, lambda y, t: -jax.grad(energy)(y), (0.03, 0.1, 0.5, 1.0), options)


def rotated(quick: bool) -> Reference:
    """Two double wells, out of equilibrium, seen in turned and sheared coordinates: g is a matrix."""
    matrix = jnp.asarray(np.array([[1.0, 0.6], [-0.3, 0.8]]))
    inverse, times = jnp.linalg.inv(matrix), np.geomspace(1e-3, 2.0, 40 if quick else 160)
    wells = Process(lambda z, t: z - z**3, 0.7, 2.0)
    parts = [lambda x, m=m: np.exp(-((x - m) ** 2) / 0.18) for m in (-0.5, 0.8)]
    cells = 1000 if quick else 4000
    exact = solve_products(wells, [1.0], [parts], times, x_range=(-5.0, 5.0), cells=cells)
    process = Process(lambda y, t: matrix @ wells.f(inverse @ y, t), 0.7 * matrix, 2.0)
    law = dist.MultivariateNormal(matrix @ jnp.array([-0.5, 0.8]), 0.09 * matrix @ matrix.T)
    score = lambda y, t: inverse.T @ exact.score_at(inverse @ y, t)  # noqa: E731
    return Reference(process, _without_density(law), law, score, (0.02, 0.1, 0.5, 1.0, 2.0), {})


def spiral(quick: bool) -> Reference:
    """Three coordinates that turn and relax, each at its own rate: linear, so that the score is known. Learned as if it
    were not."""
    turn = ortho_group.rvs(3, random_state=0)
    matrix = turn @ np.array([[-0.5, 3.0, 0.0], [-3.0, -0.5, 0.0], [0.0, 0.0, -2.0]]) @ turn.T
    process = linear(jnp.asarray(matrix), jnp.array([1.0, 0.5, 0.8]), t1=2.0)
    mean, cov = np.array([1.0, -1.0, 0.5]), np.diag([0.1, 0.5, 0.2])
    exact = gaussian_marginals(process, mean, cov)
    law = dist.MultivariateNormal(jnp.asarray(mean), jnp.asarray(cov))
    options = {"objective": PathwiseDSM(process)}
    return Reference(process, _without_density(law), law, exact.score, (0.02, 0.1, 0.5, 1.0, 2.0), options)


def checkerboard(quick: bool) -> Reference:
    """Langevin dynamics towards the logistic law: each coordinate moves by itself."""
    process, prior = logistic_langevin()
    exact = checkerboard_density(process, np.geomspace(1e-3, 1.0, 160), cells=4000)
    return Reference(process, draw_checkerboard, None, exact.score_at, (0.01, 0.03, 0.1, 0.2, 0.5), {"prior": prior})


class OnGrid(eqx.Module):
    """A score on a grid, at many times, and linear in log t between them."""

    grid: Any
    log_times: jax.Array

    def __call__(self, y, t):
        place = jnp.interp(jnp.log(t), self.log_times, jnp.arange(len(self.log_times)))
        left = jnp.clip(jnp.floor(place).astype(int), 0, len(self.log_times) - 2)
        part = (place - left).astype(y.dtype)
        low, high = self.grid.score_at(y, left), self.grid.score_at(y, left + 1)
        return ((1.0 - part) * low + part * high).astype(y.dtype)


GRID_STEPS = 20
"""Of the grid between one time and the next: halved, scores of the swimmer change by less than 10⁻³ of themselves."""


def _on_grid(system: System, times, *, ranges, cells, looks, law=None, noiseless: tuple[int, ...] = ()) -> Reference:
    start, times = system.y0, np.asarray(times)
    mean, std = np.asarray(start.mean, float), start.std
    density = lambda x, y: np.exp(-((x - mean[0]) ** 2 + (y - mean[1]) ** 2) / (2 * std**2))  # noqa: E731
    grid = solve_2d(system.process, density, times, ranges=ranges, cells=cells, steps=GRID_STEPS)
    score = OnGrid(grid, jnp.log(jnp.asarray(times)))
    plain = _without_density(start) if law is not None else start
    return Reference(system.process, plain, law, score, looks, {}, noiseless)


def mueller_brown(quick: bool) -> Reference:
    """Müller and Brown's potential, a twentieth of it, at unit temperature, from one of its wells."""
    system = make_mueller_brown()
    cells, ranges = (320, 300), ((-2.6, 2.0), (-1.4, 2.8))
    looks = (0.03, 0.1, 0.3, 1.0)
    times = np.geomspace(1e-3, 1.0, 60)
    return _on_grid(system, times, ranges=ranges, cells=cells, looks=looks, law=system.y0)


def swimming(quick: bool) -> Reference:
    """The active swimmer: noise in the velocity alone."""
    ranges, looks = ((-4.8, 4.8), (-6.0, 6.0)), (0.3, 1.0, 3.0, 5.0)
    times = np.geomspace(0.02, 5.0, 48)
    return _on_grid(swimmer(), times, ranges=ranges, cells=(384, 300), looks=looks, noiseless=(0,))


def underdamped_well(quick: bool) -> Reference:
    """A position in a double well and its velocity, from a narrow start at the barrier."""

    def drift(y, t):
        x, v = y
        return jnp.stack([v, x - x**3 - 0.5 * v])

    start = swimmer(mean0=0.0, std0=0.4).y0
    system = System(Process(drift, np.array([0.0, np.sqrt(0.5)]), 5.0), start, (2,))
    ranges, looks = ((-3.4, 3.4), (-4.4, 4.4)), (0.3, 1.0, 3.0, 5.0)
    times = np.geomspace(0.02, 5.0, 48)
    return _on_grid(system, times, ranges=ranges, cells=(384, 300), looks=looks, noiseless=(0,))


def _without_density(law) -> Callable:
    return lambda key, n: law.sample(key, (n,))


REFERENCES: dict[str, Callable[[bool], Reference]] = {
    "φ⁴ ring": ring,
    "rotated wells": rotated,
    "spiral": spiral,
    "checkerboard": checkerboard,
    "Müller–Brown": mueller_brown,
    "swimmer": swimming,
    "underdamped well": underdamped_well,
}


@lru_cache
def reference(name: str, quick: bool) -> Reference:
    return REFERENCES[name](quick)
