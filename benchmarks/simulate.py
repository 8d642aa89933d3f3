"""Paths per second: a double well in two dimensions, 1,024 paths, against diffrax and torchsde in the same run.

    python benchmarks/simulate.py

Every method is timed in turn, over and over, and medians are compared, so that a busy machine slows all alike. The
weak error of each is that of E[y²] at t = 5, against the grid solution of the Fokker–Planck equation; its standard
error is given behind it. "Equal weak error" is our second-order scheme with 48 steps, no less accurate than Euler's
with 100.
"""

import time
from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autodsm as ad
from autodsm.exact.grid1d import solve_1d

BATCH, STEPS, T = 1024, 100, 5.0
FEWER = 48
ROUNDS = 15
SYSTEM = ad.systems.double_well(2)
NOISE = 0.7


def ours(solver: str, steps: int) -> Callable:
    @jax.jit
    def run(y0, key):
        keys = jax.random.split(key, len(y0))
        one = lambda y, k: ad.simulate(SYSTEM.process, y, jnp.array([T]), key=k, solver=solver, steps=steps)[0]  # noqa: E731
        return jax.vmap(one)(y0, keys)

    return run


def diffrax_documented(y0, key):
    """As its documentation writes an SDE solve: one path, a virtual Brownian tree, vmapped."""

    def one(y, key):
        brownian = diffrax.VirtualBrownianTree(0.0, T, tol=T / STEPS / 2, shape=(2,), key=key)
        drift = diffrax.ODETerm(lambda t, y, args: SYSTEM.process.drift(y, t))
        noise = diffrax.ControlTerm(lambda t, y, args: lineax.DiagonalLinearOperator(jnp.full(2, NOISE)), brownian)
        ends = diffrax.diffeqsolve(diffrax.MultiTerm(drift, noise), diffrax.Euler(), 0.0, T, T / STEPS, y).ys
        return jnp.asarray(ends)[0]

    return jax.vmap(one)(y0, jax.random.split(key, len(y0)))


def diffrax_fastest(y0, key):
    """One solve over the whole batch, increments drawn as they are needed, no provision for reverse mode."""
    brownian = diffrax.UnsafeBrownianPath(shape=y0.shape, key=key)
    g = jnp.full(y0.shape, NOISE)
    drift = diffrax.ODETerm(lambda t, y, args: jax.vmap(SYSTEM.process.drift, in_axes=(0, None))(y, t))
    noise = diffrax.ControlTerm(lambda t, y, args: lineax.DiagonalLinearOperator(g), brownian)
    solution = diffrax.diffeqsolve(
        diffrax.MultiTerm(drift, noise), diffrax.Euler(), 0.0, T, T / STEPS, y0, adjoint=diffrax.ForwardMode()
    )
    return jnp.asarray(solution.ys)[0]


def torchsde_method() -> Callable | None:
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import torchsde  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    class DoubleWell:
        noise_type, sde_type = "diagonal", "ito"

        def f(self, t, y):
            return y - y**3

        def g(self, t, y):
            return torch.full_like(y, NOISE)

    times = torch.tensor([0.0, T])

    def run(y0, key):
        with torch.no_grad():
            return torchsde.sdeint(DoubleWell(), torch.tensor(np.asarray(y0)), times, dt=T / STEPS, method="euler")[-1]

    return run


def exact_second_moment() -> float:
    process = ad.systems.double_well(1).process
    grid = solve_1d(process, lambda x: np.exp(-2 * x**2), [T], x_range=(-4.0, 4.0), cells=2000, steps=1000)
    return float(np.sum(grid.x**2 * grid.q[0]) * (grid.x[1] - grid.x[0]))


def weak_error(run: Callable, exact: float, *, rounds: int = 8, n: int = 250_000) -> tuple[float, float]:
    """Error of E[y²] and its standard error, from `rounds` batches of n paths."""
    keys = [jax.random.split(jax.random.key(i)) for i in range(rounds)]
    means = [float(np.mean(np.asarray(run(SYSTEM.y0(start, n), path), float) ** 2)) for start, path in keys]
    return abs(float(np.mean(means)) - exact), float(np.std(means, ddof=1) / np.sqrt(rounds))


def main() -> None:
    console = Console(width=110)
    methods: dict[str, tuple[Callable, int]] = {
        "autodsm weak2": (ours("weak2", STEPS), STEPS),
        "autodsm weak2, equal weak error": (ours("weak2", FEWER), FEWER),
        "autodsm euler": (ours("euler", STEPS), STEPS),
        "diffrax Euler, fastest form": (jax.jit(diffrax_fastest), STEPS),
        "diffrax Euler, documented form": (jax.jit(diffrax_documented), STEPS),
    }
    torch_run = torchsde_method()
    if torch_run is None:
        console.print("torchsde: skipped, torch and torchsde are not installed.")
    else:
        methods["torchsde euler"] = (torch_run, STEPS)

    exact = exact_second_moment()
    errors = {}
    for name, (run, _) in track(methods.items(), description="weak errors", console=console):
        small = "documented" in name or "torchsde" in name  # slow: fewer paths tell enough
        errors[name] = weak_error(run, exact, n=20_000 if small else 250_000)

    y0 = SYSTEM.y0(jax.random.key(0), BATCH)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in track(range(ROUNDS + 1), description="timing", console=console):
        for name, (run, _) in methods.items():
            slow = name.startswith("torchsde")
            for repeat in range(1 if slow else 5):
                key = jax.random.key(10 * round_ + repeat)
                began = time.perf_counter()
                jax.block_until_ready(run(y0, key))
                if round_ > 0:  # the first round compiles
                    times[name].append(time.perf_counter() - began)

    median = {name: float(np.median(x)) for name, x in times.items()}
    fastest = median["diffrax Euler, fastest form"]
    table = Table(title=f"Double well to t = {T:g}, {BATCH} paths, {ROUNDS} alternating rounds")
    for column in ("method", "steps", "weak error", "ms", "paths/s", "× diffrax", "× torchsde"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, (_, steps) in methods.items():
        error, stderr = errors[name]
        over_torch = f"{median['torchsde euler'] / median[name]:.0f}" if torch_run else "–"
        rate = f"{BATCH / median[name]:.1e}"
        ratio = f"{fastest / median[name]:.2f}"
        table.add_row(
            name, str(steps), f"{error:.4f} ± {stderr:.4f}", f"{1e3 * median[name]:.2f}", rate, ratio, over_torch
        )
    console.print(table)


if __name__ == "__main__":
    main()
