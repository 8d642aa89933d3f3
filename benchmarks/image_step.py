"""Cost of a training step on images under a nonlinear elementwise process, against one of VP diffusion in closed form.

    python benchmarks/image_step.py [--rounds 10] [--scale small] [--batch 32]

The yardstick draws `y = a x + σ ε` and its target for a whole round in a few lines of jnp. All train the same U-Net, of
that scale of the experiments on images, with as many evaluations in a step. Methods take turns, round by round; ratios
are of neighbours in time, and medians are reported. Memory is what draws take, and the
compiled functions for themselves by XLA's account: the same on every machine of a kind.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step_cost import VP, VPDraw

from autodsm.experiments.images import Setting, scale_of
from autodsm.train import Batch, Plan, TrainState, initial_state, make_draws, make_round, make_step, optimizer_for

BETA0, BETA1 = 0.1, 20.0
ROUND = 4
METHODS = {
    "tabulated": "tabulated, perceptual",
    "local-DSM": "local-DSM, perceptual",
    "local-DSM, antithetic": "antithetic local-DSM, perceptual",
    "ISM": "ISM",
}


def vp_draws(plan: Plan) -> Callable:
    @jax.jit
    def draws(data: Batch, key, step):
        t_key, noise_key = jax.random.split(jax.random.fold_in(key, step))
        u = (jnp.arange(plan.paths) + jax.random.uniform(t_key, (plan.round_steps, 1))) / plan.paths
        t = 1e-3 + (1 - 1e-3) * u.ravel()
        integral = (BETA0 * t + 0.5 * (BETA1 - BETA0) * t**2)[:, None, None, None]
        sigma = jnp.sqrt(-jnp.expm1(-integral))
        eps = jax.random.normal(noise_key, data.x.shape)
        draw = VPDraw(t, jnp.exp(-0.5 * integral) * data.x + sigma * eps, -eps / sigma, sigma)
        return jax.tree.map(lambda leaf: leaf.reshape(plan.round_steps, plan.paths, *leaf.shape[1:]), draw)

    return draws


class Method(NamedTuple):
    run: Callable
    steps: int
    memory: int
    """Bytes."""


def method_of(name: str, setting: Setting, network, optimizer, key) -> Method:
    """Draws and steps one after the other: a network of this size keeps all cores busy."""
    images, size = setting.scale.images("train"), math.prod(setting.shape)
    objective: Any = VP() if name == "VP" else setting.objective(METHODS[name]).prepare(images, key=key)
    plan = Plan.make(objective, size, steps=ROUND, batch_size=setting.scale.batch, ema=0.999)
    data = Batch(images(key, plan.round_steps * plan.paths))
    make = vp_draws(plan) if name == "VP" else make_draws(objective, plan, plan.round_steps)
    state = initial_state(network, optimizer)
    draws: Any = make.lower(data, key, state.step).compile()
    made = draws(data, key, state.step)
    steps = make_round(objective, network, optimizer, plan)
    first = jax.tree.map(lambda leaf: leaf[0], made)
    one: Any = jax.jit(make_step(objective, network, optimizer, plan)).lower(state, first).compile()
    temporary = [getattr(c, "compiled", c).memory_analysis().temp_size_in_bytes for c in (draws, one)]
    memory = sum(leaf.nbytes for leaf in jax.tree.leaves(made)) + max(temporary)

    def run(state: TrainState, key) -> TrainState:
        return steps(state, draws(data, key, state.step))[0]

    return Method(run, plan.round_steps, memory)


def main(rounds: int = 10, scale: Literal["digits", "small", "paper"] = "small", batch: int = 32) -> None:
    """Compare training steps.

    Args:
        rounds: how often each method is timed, up to four steps each time.
        scale: of the experiments on images: which images and network.
        batch: evaluations of the network in a step.
    """
    console = Console(width=110)
    setting = Setting.make(scale_of(scale, quick=False)._replace(batch=batch), "logistic")
    keys = jax.random.split(jax.random.key(0), 3)
    network, optimizer = setting.network(key=keys[0]), optimizer_for(1000)
    names = ["VP", *METHODS]
    methods = {
        name: method_of(name, setting, network, optimizer, keys[1])
        for name in track(names, description="compiling", console=console)
    }
    states = {name: initial_state(network, optimizer) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in track(range(rounds + 1), description="timing", console=console):
        for name, method in methods.items():
            began = time.perf_counter()
            states[name] = jax.block_until_ready(method.run(states[name], keys[2]))
            if i > 0:
                seconds[name].append((time.perf_counter() - began) / method.steps)
    table = Table(title=f"A training step, {scale}, batch {batch}: medians of {rounds} alternating rounds")
    for column in ("method", "ms", "over VP", "quartiles", "memory, MB", "over VP"):
        table.add_column(column, justify="left" if column == "method" else "right")
    yardstick = np.array(seconds["VP"])
    for name, method in methods.items():
        low, ratio, high = np.quantile(np.array(seconds[name]) / yardstick, [0.25, 0.5, 0.75])
        memory = method.memory / methods["VP"].memory
        table.add_row(
            name, f"{1e3 * np.median(seconds[name]):.0f}", f"{ratio:.3f}", f"{low:.2f}–{high:.2f}",
            f"{method.memory / 1e6:.0f}", f"{memory:.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
