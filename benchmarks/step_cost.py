"""Cost of a training step of a nonlinear process, against one of VP diffusion in closed form, in the same run.

    python benchmarks/step_cost.py [--rounds 20]

The yardstick draws `y = a x + σ ε` and its target `−ε/σ` for a whole round in a few lines of jnp, with nothing of the
library, and takes the same optimizer steps with the same network. All step counts, batches and networks are those of
`fit`: 1,024 evaluations of an MLP of three layers of 256, residual. A round makes the draws for many steps at once, in
a thread beside the steps of the round before; its time over its steps is what counts. ISM with one Hutchinson probe is
timed beside.

Methods take turns, round by round; ratios are of neighbours in time, and their medians are reported, so that a busy
machine slows all alike. "draws" is the part of a step that makes states and targets, timed alone.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import tyro
from jaxtyping import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table

import autodsm as ad
from autodsm.learn.choose import default_network
from autodsm.learn.objective import AbstractObjective
from autodsm.learn.train import Rounds, TrainState, initial_state, make_draws, make_round, make_step, optimizer_for
from autodsm.targets.pilot import Pilot

BATCH, STEPS = 1024, 64 * 100
BETA0, BETA1 = 0.1, 10.0


class Case(NamedTuple):
    process: ad.Process
    y0: Callable[..., Array]
    shape: tuple[int, ...]
    objective: AbstractObjective
    wanted: float
    prior: Any = None


def cases() -> dict[str, Case]:
    logistic = dist.Logistic(0.0, 1.0)
    langevin = ad.langevin(logistic)
    swimmer, particles = ad.systems.swimmer(), ad.systems.particles()
    board = Case(langevin, ad.data.checkerboard, (2,), ad.TabulatedDSM(langevin), 1.05, logistic)
    return {
        "checkerboard, tabulated": board,
        "swimmer, local antithetic": Case(*swimmer, ad.LocalDSM(swimmer.process, 1e-2), 1.25),
        "five particles, pathwise": Case(*particles, ad.PathwiseDSM(particles.process), 1.25),
    }


class VPDraw(NamedTuple):
    t: Array
    y: Array
    target: Array
    sigma: Array


class VP:
    """The loss of the yardstick: `½ mean (σ (s_θ + ε/σ))²`."""

    evaluations, pairs_per_path = 1, 1

    def at(self, score, draw: VPDraw) -> Array:
        return 0.5 * jnp.mean((draw.sigma * (score(draw.y, draw.t) - draw.target)) ** 2)


def vp_draws(y0, shape: tuple[int, ...], t1: float, key, step, rounds: Rounds) -> VPDraw:
    """All draws of a round, at once."""
    n = rounds.round_steps * rounds.paths
    x_key, t_key, noise_key = jax.random.split(jax.random.fold_in(key, step), 3)
    u = (jnp.arange(rounds.paths) + jax.random.uniform(t_key, (rounds.round_steps, 1))) / rounds.paths
    t = 1e-3 + (1 - 1e-3) * u.ravel()
    integral = BETA0 * t + 0.5 * (BETA1 - BETA0) * t**2
    per_state = (n, *(1 for _ in shape))
    a, sigma = jnp.exp(-0.5 * integral).reshape(per_state), jnp.sqrt(-jnp.expm1(-integral)).reshape(per_state)
    eps = jax.random.normal(noise_key, (n, *shape))
    draw = VPDraw(t1 * t, a * y0(x_key, n) + sigma * eps, -eps / sigma, sigma)
    return jax.tree.map(lambda leaf: leaf.reshape(rounds.round_steps, rounds.paths, *leaf.shape[1:]), draw)


class Method(NamedTuple):
    """One way to train: a round, `(state, key) -> state`, and its draws alone."""

    round: Callable
    draws: Callable
    steps: int


def vp_method(case: Case, network, optimizer) -> Method:
    loss: Any = VP()
    rounds = Rounds.make(loss, math.prod(case.shape), steps=STEPS, batch_size=BATCH, ema=0.999)
    step = make_step(loss, network, optimizer, rounds)

    def draws(state: TrainState, key):
        return vp_draws(case.y0, case.shape, case.process.t1, key, state.step, rounds)

    def run(state: TrainState, key):
        return jax.lax.scan(step, state, draws(state, key))[0]

    return Method(jax.jit(run), jax.jit(draws), rounds.round_steps)


def library_method(objective: AbstractObjective, case: Case, network, optimizer) -> Method:
    """As `train` does it: the draws of the next round are made in another thread meanwhile, and waited for."""
    rounds = Rounds.make(objective, math.prod(case.shape), steps=STEPS, batch_size=BATCH, ema=0.999)
    make = make_draws(objective, rounds, rounds.round_steps)
    steps = make_round(objective, network, optimizer, rounds)
    thread = ThreadPoolExecutor(1)
    waiting: list = []

    def draws(state: TrainState, key):
        return jax.block_until_ready(make(case.y0, key, state.step))

    def run(state: TrainState, key):
        now = waiting.pop() if waiting else draws(state, key)
        following = thread.submit(draws, state._replace(step=state.step + rounds.round_steps), key)
        state = jax.block_until_ready(steps(state, now)[0])
        waiting.append(following.result())
        return state

    return Method(run, draws, rounds.round_steps)


def timed(function: Callable, state: TrainState, key) -> tuple[Any, float]:
    began = time.perf_counter()
    out = jax.block_until_ready(function(state, key))
    return out, time.perf_counter() - began


def measure(case: Case, rounds: int, label: str, console: Console) -> dict[str, dict[str, np.ndarray]]:
    """Seconds of a step, and of its draws, in each round and for each method."""
    keys = jax.random.split(jax.random.key(0), 4)
    objective = case.objective.prepare(case.y0, key=keys[0])
    ism = ad.ISM(case.process, divergence="hutchinson", probes=1).prepare(case.y0, key=keys[0])
    pilot = Pilot(case.process, case.y0, key=keys[1])
    marginals = pilot.marginals(pilot.paths())
    network = default_network(case.process, case.shape, marginals, case.prior, key=keys[2])
    optimizer = optimizer_for(STEPS)
    methods = {
        "VP": vp_method(case, network, optimizer),
        "nonlinear": library_method(objective, case, network, optimizer),
        "ISM": library_method(ism, case, network, optimizer),
    }
    states = {name: initial_state(network, optimizer) for name in methods}
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "draws": []} for name in methods}
    for i in track(range(rounds + 1), description=label, console=console):
        for name, method in methods.items():
            state, whole = timed(method.round, states[name], keys[3])
            _, part = timed(method.draws, states[name], keys[3])
            states[name] = state
            if i > 0:  # the first round compiles
                found[name]["step"].append(whole / method.steps)
                found[name]["draws"].append(part / method.steps)
    return {name: {k: np.array(v) for k, v in each.items()} for name, each in found.items()}


def main(rounds: int = 20) -> None:
    """Compare training steps.

    Args:
        rounds: how often each method is timed, a round of up to 64 steps each time.
    """
    console = Console(width=110)
    table = Table(title=f"Time of a training step over that of closed-form VP, medians of {rounds} alternating rounds")
    for column in ("case", "VP, ms", "its draws", "nonlinear / VP", "quartiles", "wanted", "its draws", "ISM / VP"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, case in cases().items():
        found = measure(case, rounds, name, console)
        vp = found["VP"]["step"]
        low, ratio, high = np.quantile(found["nonlinear"]["step"] / vp, [0.25, 0.5, 0.75])
        share = {k: f"{np.median(v['draws'] / v['step']):.0%}" for k, v in found.items()}
        ism = float(np.median(found["ISM"]["step"] / vp))
        table.add_row(
            name, f"{1e3 * np.median(vp):.2f}", share["VP"], f"{ratio:.3f}", f"{low:.2f}–{high:.2f}",
            f"≤ {case.wanted:g}", share["nonlinear"], f"{ism:.2f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
