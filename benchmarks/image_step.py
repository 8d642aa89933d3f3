"""Cost of a training step on images under a nonlinear elementwise process, against one of VP diffusion in closed form.

    python benchmarks/image_step.py [--rounds 10] [--scale small] [--batch 32]

The yardstick draws `y = a x + σ ε` and its target for a whole round in a few lines of jnp. All train the same U-Net, of
that scale of the experiments on images, with as many evaluations in a step. Methods take turns, round by round; ratios
are of neighbours in time, and medians are reported. Memory is what the compiled round needs for itself, by XLA's
account: the same on every machine of a kind.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autodsm.experiments.images import Setting, scale_of
from autodsm.train import Plan, TrainState, initial_state, make_round, make_step, optimizer_for

BETA0, BETA1 = 0.1, 20.0
ROUND = 4
METHODS = {
    "tabulated": "tabulated, perceptual",
    "local-DSM": "local-DSM, perceptual",
    "local-DSM, antithetic": "antithetic local-DSM, perceptual",
    "ISM": "ISM",
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


def vp_round(network, optimizer, plan: Plan) -> Callable:
    loss: Any = VP()
    step = make_step(loss, network, optimizer, plan)

    @jax.jit
    def run(state: TrainState, x, key):
        t_key, noise_key = jax.random.split(jax.random.fold_in(key, state.step))
        u = (jnp.arange(plan.paths) + jax.random.uniform(t_key, (plan.round_steps, 1))) / plan.paths
        t = 1e-3 + (1 - 1e-3) * u.ravel()
        integral = (BETA0 * t + 0.5 * (BETA1 - BETA0) * t**2)[:, None, None, None]
        sigma = jnp.sqrt(-jnp.expm1(-integral))
        eps = jax.random.normal(noise_key, x.shape)
        draw = VPDraw(t, jnp.exp(-0.5 * integral) * x + sigma * eps, -eps / sigma, sigma)
        draw = jax.tree.map(lambda leaf: leaf.reshape(plan.round_steps, plan.paths, *leaf.shape[1:]), draw)
        return jax.lax.scan(step, state, draw)

    return run


class Method(NamedTuple):
    run: Callable
    x: Array
    steps: int
    temporary: int
    """Bytes."""


def method_of(name: str, setting: Setting, network, optimizer, key) -> Method:
    images, size = setting.scale.images("train"), math.prod(setting.shape)
    options: dict = dict(steps=ROUND, batch_size=setting.scale.batch, ema=0.999)
    state = initial_state(network, optimizer)
    if name == "VP":
        loss: Any = VP()
        plan = Plan.make(loss, size, **options)
        run = vp_round(network, optimizer, plan)
    else:
        objective = setting.objective(METHODS[name]).prepare(images, key=key)
        plan = Plan.make(objective, size, **options)
        run = make_round(objective, network, optimizer, plan, plan.round_steps)
    x = images(key, plan.round_steps * plan.paths)
    compiled: Any = run.lower(state, x, key).compile()
    analysis = getattr(compiled, "compiled", compiled).memory_analysis()
    return Method(lambda *given: compiled(*given)[0], x, plan.round_steps, analysis.temp_size_in_bytes)


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
            states[name] = jax.block_until_ready(method.run(states[name], method.x, keys[2]))
            if i > 0:
                seconds[name].append((time.perf_counter() - began) / method.steps)
    table = Table(title=f"A training step, {scale}, batch {batch}: medians of {rounds} alternating rounds")
    for column in ("method", "ms", "over VP", "quartiles", "memory, MB", "over VP"):
        table.add_column(column, justify="left" if column == "method" else "right")
    yardstick = np.array(seconds["VP"])
    for name, method in methods.items():
        low, ratio, high = np.quantile(np.array(seconds[name]) / yardstick, [0.25, 0.5, 0.75])
        memory = method.temporary / methods["VP"].temporary
        table.add_row(
            name, f"{1e3 * np.median(seconds[name]):.0f}", f"{ratio:.3f}", f"{low:.2f}–{high:.2f}",
            f"{method.temporary / 1e6:.0f}", f"{memory:.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
