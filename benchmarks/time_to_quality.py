"""Seconds of training until the score is right: the checkerboard under logistic Langevin dynamics, exact score known.

    python benchmarks/time_to_quality.py [--target 0.1] [--cap 6000] [--quick]

The error is `√(E|s_θ − s|² / E|s|²)` at t = 0.1, 0.2 and 0.5, averaged; s is the Fokker–Planck equation's on a grid,
taken at 4,096 states for each t, and s_θ the network with averaged weights. All methods have 1,024 evaluations of an
MLP of three layers of 256 in a step, and a constant learning rate: whoever stops early has lost nothing by a schedule.
They train in turns of a few steps, so that a busy machine slows all alike; compilation and evaluation do not count.

"paper's recipe" is local-DSM with λ = 0.01 without variance reduction, a ReLU network that sees the raw time and
predicts the noise, uniform times. All others have the network of `fit`; ISM is with one Hutchinson probe.
"""

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import autodsm as ad
from autodsm.learn.choose import default_network
from autodsm.learn.objective import AbstractObjective
from autodsm.learn.train import Rounds, initial_state, make_draws, make_round
from autodsm.network import MLP, Score, trainable
from autodsm.targets.pilot import Pilot

BATCH, LEARNING_RATE, TURN = 1024, 1e-3, 128
TIMES = (0.1, 0.2, 0.5)
ISM, PAPER = "ISM, SiLU, Hutchinson", "paper's recipe"
MARKS = (0.2, 0.15, 0.1, 0.05)  # errors on the way


def methods(process: ad.Process, prior, key) -> dict[str, tuple[AbstractObjective, Any]]:
    """Objectives and networks."""
    data = ad.data.checkerboard
    pilot_key, net_key, key = jax.random.split(key, 3)
    pilot = Pilot(process, data, key=pilot_key)
    marginals = pilot.marginals(pilot.paths())
    network = default_network(process, (2,), marginals, prior, key=net_key)
    clock = ad.Clock(process)
    paper = Score(MLP((2,), clock, key=net_key, activation="relu", time="raw"), clock, parameterization="noise")
    found: dict[str, tuple[AbstractObjective, Any]] = {
        "tabulated (default)": (ad.TabulatedDSM(process), network),
        "pathwise": (ad.PathwiseDSM(process), network),
        "local, antithetic, λ = 0.01": (ad.LocalDSM(process, 1e-2), network),
        PAPER: (ad.LocalDSM(process, 1e-2, variance_reduction="none", times="uniform"), paper),
        ISM: (ad.ISM(process, divergence="hutchinson", probes=1), network),
    }
    return {name: (objective.prepare(data, key=key), network) for name, (objective, network) in found.items()}


def make_errors(process: ad.Process, *, n: int, cells: int, key) -> Callable[..., np.ndarray]:
    """The relative errors of a score network at TIMES, at fixed states."""
    exact = ad.products.checkerboard(process, TIMES, cells=cells)
    start_key, path_key = jax.random.split(key)
    paths = jax.vmap(lambda x, k: ad.simulate(process, x, jnp.asarray(TIMES), key=k))
    y = jax.jit(paths)(ad.data.checkerboard(start_key, n), jax.random.split(path_key, n))  # (n, times, 2)
    score = jnp.stack([jax.vmap(lambda y, i=i: exact.score(y, i))(y[:, i]) for i in range(len(TIMES))], axis=1)
    if not bool(jnp.all(jnp.isfinite(score))):
        raise ValueError("the exact score is not resolved at some of the states.")

    @eqx.filter_jit
    def errors(network):
        found = jax.vmap(lambda y: jax.vmap(network)(y, jnp.asarray(TIMES)))(y)
        return jnp.sqrt(jnp.sum((found - score) ** 2, axis=(0, 2)) / jnp.sum(score**2, axis=(0, 2)))

    return lambda network: np.asarray(errors(network))


class Runner:
    """A training that goes on for a turn at a time, and notes when the error first falls below each mark."""

    def __init__(self, objective: AbstractObjective, network, marks: tuple[float, ...], cap: int):
        self.marks, self.cap = marks, cap
        self.seconds, self.steps, self.errors = 0.0, 0, np.full(len(TIMES), np.inf)
        self.reached: dict[float, tuple[float, int]] = {}
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, b2=0.99, weight_decay=1e-4))
        rounds = Rounds.make(objective, 2, steps=TURN, batch_size=BATCH, ema=0.999)
        self.round_steps = rounds.round_steps
        self.draws = make_draws(objective, rounds, rounds.round_steps)
        self.steps_of = make_round(objective, network, optimizer, rounds)
        self.state = initial_state(network, optimizer)
        self.static = eqx.partition(network, trainable(network))[1]
        self.key = jax.random.key(1)
        self.round()  # compiles; its result is dropped

    def round(self):
        draws = self.draws(ad.data.checkerboard, self.key, self.state.step)
        return jax.block_until_ready(self.steps_of(self.state, draws))[0]

    @property
    def done(self) -> bool:
        return self.marks[-1] in self.reached or self.steps >= self.cap

    def turn(self, errors_of: Callable[..., np.ndarray]) -> None:
        for _ in range(TURN // self.round_steps):
            began = time.perf_counter()
            self.state = self.round()
            self.seconds += time.perf_counter() - began
            self.steps += self.round_steps
        self.errors = errors_of(eqx.combine(self.state.ema, self.static))
        for mark in self.marks:
            if self.errors.mean() <= mark and mark not in self.reached:
                self.reached[mark] = self.seconds, self.steps

    def speed_up(self, other: "Runner") -> str:
        """How many times sooner than the other it reached the last mark; "> x" if the other has not."""
        if (mine := self.reached.get(self.marks[-1])) is None:
            return "–"
        theirs = other.reached.get(self.marks[-1])
        return f"{theirs[0] / mine[0]:.1f}" if theirs else f"> {other.seconds / mine[0]:.1f}"


def main(target: float = 0.1, cap: int = 6000, quick: bool = False) -> None:
    """Time to a relative score error.

    Args:
        target: the error to reach.
        cap: steps after which a method is given up.
        quick: a few steps only, to see that it runs.
    """
    if quick:
        target, cap = 0.3, TURN
    console = Console(width=130)
    prior = dist.Logistic(0.0, 1.0)
    process = ad.langevin(prior)
    net_key, error_key = jax.random.split(jax.random.key(0))
    errors_of = make_errors(process, n=512 if quick else 4096, cells=1000 if quick else 4000, key=error_key)
    marks = (*(m for m in MARKS if m > target), target)
    with console.status("compiling"):
        trials = methods(process, prior, net_key)
        runners = {name: Runner(*trial, marks, cap) for name, trial in trials.items()}
    with Progress(console=console) as bar:
        tasks = {name: bar.add_task(name, total=cap) for name in runners}
        while any(not runner.done for runner in runners.values()):
            for name, runner in runners.items():
                if not runner.done:
                    runner.turn(errors_of)
                    bar.update(tasks[name], completed=runner.steps, description=f"{name}: {runner.errors.mean():.3f}")

    table = Table(title=f"Training seconds (steps) to a relative score error; {BATCH} evaluations a step")
    columns = [f"{mark:g}" for mark in marks]
    for column in ("objective", *columns, "at t = 0.1, 0.2, 0.5", "ms/step", "× ISM", "× paper"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    for name, runner in runners.items():
        cells = [f"{r[0]:.1f} ({r[1]})" if (r := runner.reached.get(m)) else "" for m in marks]
        if not cells[-1]:
            cells[-1] = f"not reached ({runner.errors.mean():.3f})"
        speed_ups = [runner.speed_up(runners[other]) for other in (ISM, PAPER)]
        last = " ".join(f"{e:.2f}" for e in runner.errors)
        table.add_row(name, *cells, last, f"{1e3 * runner.seconds / runner.steps:.1f}", *speed_ups)
    console.print(table)
    console.print(
        f"Given up after {cap} steps. × ISM, × paper: how many times sooner an error of {target:g} is reached."
    )


if __name__ == "__main__":
    tyro.cli(main)
