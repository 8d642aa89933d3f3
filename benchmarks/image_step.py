"""Cost of a training step on images under a nonlinear elementwise process, against one of VP diffusion in closed form.

    python benchmarks/image_step.py [--rounds 10] [--scale small] [--batch 16]

The yardstick draws `y = a x + σ ε` and its target for a whole round in a few lines of jnp. All train the same U-Net, of
that scale of the experiments on images, with as many evaluations in a step: of a batch at once, or, where there are
pairs of opposite noise, of half a batch and then of the other half; there is a yardstick of each. Methods take turns,
round by round; ratios are of neighbours in time, and medians are reported. Memory is that of weights, their averages
and the optimizer, of draws, and of what the compiled functions need by XLA's account: the same on every machine of a
kind.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import numpy as np
import tyro
from jaxtyping import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table
from step_cost import VP, VPDraw, vp_draws

from autodsm.experiments.shared.images import Setting, scale_of
from autodsm.learn.train import (
    Batch,
    Rounds,
    TrainState,
    groups_of,
    initial_state,
    make_draws,
    make_round,
    make_step,
    optimizer_for,
)

ROUND = 4
METHODS = {
    "tabulated": "tabulated, perceptual",
    "local-DSM": "local-DSM, perceptual",
    "local-DSM, antithetic": "antithetic local-DSM, perceptual",
    "ISM": "ISM",
}


class VPPairs:
    """The loss of the yardstick for pairs of opposite noise."""

    evaluations, pairs_per_path = 2, 1

    def at(self, score, draw: VPDraw) -> Array:
        opposite = draw._replace(y=draw.y + 2.0 * draw.sigma**2 * draw.target, target=-draw.target)
        return 0.5 * (VP().at(score, draw) + VP().at(score, opposite))


YARDSTICKS = {"VP": VP(), "VP, pairs": VPPairs()}


class Method(NamedTuple):
    run: Callable
    steps: int
    memory: int
    """Bytes."""


def method_of(name: str, setting: Setting, network, optimizer, key) -> Method:
    """Draws and steps one after the other: a network of this size keeps all cores busy."""
    images, size = setting.scale.images("train"), math.prod(setting.shape)
    yardstick: Any = YARDSTICKS.get(name)
    objective = yardstick or setting.objective(METHODS[name]).prepare(images, key=key)
    rounds = Rounds.make(objective, size, steps=ROUND, batch_size=setting.scale.batch, ema=0.999)
    starts = rounds.round_steps * rounds.paths if yardstick else groups_of(objective, rounds, rounds.round_steps)[2]
    data = Batch(images(key, starts))
    make: Any = make_draws(objective, rounds, rounds.round_steps)
    if yardstick:
        make = jax.jit(lambda data, key, step: vp_draws(lambda *_: data.x, setting.shape, 1.0, key, step, rounds))
    state = initial_state(network, optimizer)
    draws: Any = make.lower(data, key, state.step).compile()
    made = draws(data, key, state.step)
    steps = make_round(objective, network, optimizer, rounds)
    first = jax.tree.map(lambda leaf: leaf[0], made)
    one: Any = jax.jit(make_step(objective, network, optimizer, rounds)).lower(state, first).compile()
    temporary = [getattr(c, "compiled", c).memory_analysis().temp_size_in_bytes for c in (draws, one)]
    held = jax.tree.leaves((eqx.filter(state, eqx.is_array), made))
    memory = sum(leaf.nbytes for leaf in held) + max(temporary)

    def run(state: TrainState, key) -> TrainState:
        return steps(state, draws(data, key, state.step))[0]

    return Method(run, rounds.round_steps, memory)


def main(rounds: int = 10, scale: Literal["digits", "small", "paper"] = "small", batch: int | None = None) -> None:
    """Compare training steps.

    Args:
        rounds: how often each method is timed, up to four steps each time.
        scale: of the experiments on images: which images and network.
        batch: evaluations of the network in a step, by default those of the scale.
    """
    console = Console(width=110)
    size = scale_of(scale, quick=False)
    batch = size.batch if batch is None else batch
    setting = Setting.make(size._replace(batch=batch), "logistic")
    keys = jax.random.split(jax.random.key(0), 3)
    network, optimizer = setting.network(key=keys[0]), optimizer_for(1000)
    names = [*YARDSTICKS, *METHODS]
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
    over = [f"over {name}" for name in YARDSTICKS]
    for column in ("method", "ms", *over, "memory, MB", *over):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, method in methods.items():
        times, sizes = [], []
        for yardstick in YARDSTICKS:
            ratios = np.array(seconds[name]) / np.array(seconds[yardstick])
            low, ratio, high = np.quantile(ratios, [0.25, 0.5, 0.75])
            times.append(f"{ratio:.3f} ({low:.2f}–{high:.2f})")
            sizes.append(f"{method.memory / methods[yardstick].memory:.3f}")
        table.add_row(name, f"{1e3 * np.median(seconds[name]):.0f}", *times, f"{method.memory / 1e6:.0f}", *sizes)
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
