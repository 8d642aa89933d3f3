"""Paths per second: the swimmer, d = 2, 1,024 paths, against diffrax and torchsde in the same run.

    python benchmarks/simulate.py

Every method is timed in turn, over and over, and medians are compared, so that a busy machine slows all alike. The
weak error of each is measured once with many paths: the largest error of E[x²], E[xv] and E[v²] at t = 5, against a
fine simulation (E[v²] = 1 exactly). "Equal weak error" is our second-order scheme with just as many steps as it needs
to be as accurate as Euler's with 100.
"""

import time
from collections.abc import Callable

import diffrax
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from rich.console import Console
from rich.table import Table

import autodsm as ad

BATCH, STEPS, T = 1024, 100, 5.0
ROUNDS = 15
SYSTEM = ad.systems.swimmer()


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
        noise = diffrax.ControlTerm(lambda t, y, args: lineax.DiagonalLinearOperator(SYSTEM.process.g(t)), brownian)
        return diffrax.diffeqsolve(diffrax.MultiTerm(drift, noise), diffrax.Euler(), 0.0, T, T / STEPS, y).ys[0]

    return jax.vmap(one)(y0, jax.random.split(key, len(y0)))


def diffrax_fastest(y0, key):
    """One solve over the whole batch, increments drawn as they are needed, no provision for reverse mode."""
    brownian = diffrax.UnsafeBrownianPath(shape=y0.shape, key=key)
    g = jnp.broadcast_to(SYSTEM.process.g(0.0), y0.shape)
    drift = diffrax.ODETerm(lambda t, y, args: jax.vmap(SYSTEM.process.drift, in_axes=(0, None))(y, t))
    noise = diffrax.ControlTerm(lambda t, y, args: lineax.DiagonalLinearOperator(g), brownian)
    solution = diffrax.diffeqsolve(
        diffrax.MultiTerm(drift, noise), diffrax.Euler(), 0.0, T, T / STEPS, y0, adjoint=diffrax.ForwardMode()
    )
    return solution.ys[0]


def torchsde_method() -> Callable | None:
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import torchsde  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    class Swimmer:
        noise_type, sde_type = "diagonal", "ito"

        def f(self, t, y):
            x, v = y[:, 0], y[:, 1]
            return torch.stack([-(x**3) + v, -0.1 * v], dim=1)

        def g(self, t, y):
            return torch.tensor([0.0, np.sqrt(0.2)], dtype=y.dtype).expand_as(y)

    times = torch.tensor([0.0, T])

    def run(y0, key):
        with torch.no_grad():
            return torchsde.sdeint(Swimmer(), torch.tensor(np.asarray(y0)), times, dt=T / STEPS, method="euler")[-1]

    return run


def second_moments(run: Callable, *, seed: int, rounds: int = 4, n: int = 250_000) -> np.ndarray:
    total = np.zeros(3)
    for i in range(rounds):
        start, path = jax.random.split(jax.random.key(1000 * seed + i))
        x, v = np.asarray(run(SYSTEM.y0(start, n), path), float).T
        total += [np.mean(x * x), np.mean(x * v), np.mean(v * v)]
    return total / rounds


def main() -> None:
    console = Console()
    console.print("Weak errors, 10⁶ paths each …")
    exact = second_moments(ours("weak2", 1000), seed=0)
    exact[2] = 1.0
    error = {("euler", STEPS): float(np.max(np.abs(second_moments(ours("euler", STEPS), seed=0) - exact)))}
    for steps in (*range(10, 50, 2), STEPS):
        found = float(np.max(np.abs(second_moments(ours("weak2", steps), seed=0) - exact)))
        error["weak2", steps] = found
        if found <= error["euler", STEPS]:
            break
    enough = max(steps for solver, steps in error if solver == "weak2")
    error["weak2", STEPS] = float(np.max(np.abs(second_moments(ours("weak2", STEPS), seed=0) - exact)))

    torch_run = torchsde_method()
    methods = {
        f"autodsm weak2, {STEPS} steps": (ours("weak2", STEPS), error["weak2", STEPS]),
        f"autodsm weak2, {enough} steps (equal weak error)": (ours("weak2", enough), error["weak2", enough]),
        f"autodsm euler, {STEPS} steps": (ours("euler", STEPS), error["euler", STEPS]),
        f"diffrax Euler, fastest form, {STEPS} steps": (jax.jit(diffrax_fastest), error["euler", STEPS]),
        f"diffrax Euler, documented form, {STEPS} steps": (jax.jit(diffrax_documented), error["euler", STEPS]),
    }
    if torch_run is None:
        console.print("torchsde: skipped, torch and torchsde are not installed.")
    else:
        methods[f"torchsde euler, {STEPS} steps"] = (torch_run, error["euler", STEPS])

    y0 = SYSTEM.y0(jax.random.key(0), BATCH)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in range(ROUNDS + 1):
        for name, (run, _) in methods.items():
            slow = name.startswith("torchsde")
            for repeat in range(1 if slow else 5):
                key = jax.random.key(10 * round_ + repeat)
                began = time.perf_counter()
                jax.block_until_ready(run(y0, key))
                if round_ > 0:  # the first round compiles
                    times[name].append(time.perf_counter() - began)

    median = {name: float(np.median(x)) for name, x in times.items()}
    fastest = median[f"diffrax Euler, fastest form, {STEPS} steps"]
    table = Table(title=f"Swimmer to t = {T:g}, {BATCH} paths, {ROUNDS} alternating rounds")
    for column in ("method", "ms", "paths/s", "speed / fastest diffrax", "weak error"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, (_, weak) in methods.items():
        table.add_row(
            name, f"{1e3 * median[name]:.2f}", f"{BATCH / median[name]:.2e}", f"{fastest / median[name]:.2f}", f"{weak:.4f}"
        )
    console.print(table)
    if torch_run is not None:
        torch_time = median[f"torchsde euler, {STEPS} steps"]
        ratios = [f"{torch_time / median[name]:.0f}× ({name})" for name in list(methods)[:2]]
        console.print(f"Over torchsde: {', '.join(ratios)}.", soft_wrap=True)


if __name__ == "__main__":
    main()
