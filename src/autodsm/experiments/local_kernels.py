"""Local kernels of a nonlinear diffusion against its exact marginals, in one dimension.

Langevin dynamics towards the mixture ½N(−1,½) + ½N(1,½), β from 0.1 to 10, from a start on two intervals. Paths are
simulated to s(t); the density at t is then the mean of the Gaussian kernels from s to t, and is compared with a
Fokker–Planck solution on a grid. With a small λ the two agree; with a large one the linearization shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from matplotlib.figure import Figure
from rich.progress import track

from ..base import plot
from ..exact.grid1d import solve_1d
from ..kernels.gaussian import transition
from ..kernels.schedule import ScheduledPairs
from ..paths.simulate import simulate
from ..process.priors import langevin
from .shared.experiment import Experiment, Grid, Trials, over_seeds, row_of

LAMBDAS = (0.05, 0.5, 2.0)


def prior():
    """½N(−1,½) + ½N(1,½), the second argument a variance."""
    modes = dist.Normal(jnp.array([-1.0, 1.0]), np.sqrt(0.5))
    return dist.MixtureSameFamily(dist.Categorical(jnp.array([0.5, 0.5])), modes)


def initial_density(x):
    """Uniform on [−2, −1] ∪ [0, 1]."""
    return 0.5 * (((x > -2) & (x < -1)) | ((x > 0) & (x < 1)))


def draw_initial(key, n):
    where, which = jax.random.split(key)
    return jax.random.uniform(where, (n, 1)) - 2.0 * jax.random.bernoulli(which, shape=(n, 1))


def trial(part: str, *, quick: bool, seed: int) -> dict:
    n, cells = (2_000, 400) if quick else (40_000, 2_000)
    times = np.array([0.1, 0.2, 0.4, 1.0])
    process = langevin(prior())
    grid = solve_1d(process, initial_density, times, x_range=(-6.0, 6.0), cells=cells)
    dx = grid.x[1] - grid.x[0]
    start_key, path_key, end_key = jax.random.split(jax.random.key(seed), 3)
    y0, keys = draw_initial(start_key, n), jax.random.split(path_key, n)
    x = jnp.asarray(grid.x)

    @jax.jit
    def local_density(y0, keys, s, t):
        y_s = jax.vmap(lambda y, k: simulate(process, y, s[None], key=k)[0])(y0, keys)
        kernels = jax.vmap(lambda y: transition(process, y, s, t))(y_s)

        def add(total, kernel):
            return total + jax.vmap(lambda x: jnp.exp(kernel.log_prob(x[None])))(x), None

        return jax.lax.scan(add, jnp.zeros_like(x), kernels)[0] / n

    curves, distance = {"Fokker–Planck (exact)": grid.q}, {}
    for lam in track(LAMBDAS, description="local kernels"):
        pairs = ScheduledPairs(process, lam)
        local = np.stack([np.asarray(local_density(y0, keys, pairs(t), jnp.asarray(t))) for t in times])
        curves[f"local kernels, λ = {lam:g}"] = local
        distance[lam] = 0.5 * np.abs(local - grid.q).sum(axis=1) * dx
    paths = jax.jit(jax.vmap(lambda y, k: simulate(process, y, jnp.asarray(times), key=k)))
    ends = np.asarray(paths(y0, jax.random.split(end_key, n)))[:, :, 0]

    return {
        "paths": n,
        "times": times,
        "total_variation": {f"{lam:g}": d for lam, d in distance.items()},
        "x": grid.x,
        "curves": curves,
        "samples": ends[:10_000].T,
    }


def combine(trials: Trials) -> dict:
    found = trials["all"]
    distance = {f"{lam:g}": over_seeds([each["total_variation"][f"{lam:g}"] for each in found]) for lam in LAMBDAS}
    return {"paths": found[0]["paths"], "times": found[0]["times"], "total_variation": distance}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    first = trials["all"][0]
    curves = {name: np.array(values) for name, values in first["curves"].items()}
    samples = [np.array(y) for y in first["samples"]]
    return {"local-kernels": plot.densities(np.array(first["x"]), first["times"], curves, samples)}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    columns = [row_of(numbers["total_variation"][f"{lam:g}"]) for lam in LAMBDAS]
    rows = [[f"{t:g}", *cells] for t, *cells in zip(numbers["times"], *columns, strict=True)]
    title = f"Total variation distance between local kernels ({numbers['paths']} paths) and the exact density"
    return [Grid(title, ("t", *(f"λ = {lam:g}" for lam in LAMBDAS)), rows)]


EXPERIMENT = Experiment(trial, combine, figures, report, seeds=3)
