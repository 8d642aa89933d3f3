"""How much of a training step on images is signal: gradients of one batch against their mean, before training and
after some.

    python benchmarks/image_noise.py [--scale digits] [--batches 64] [--steps 300]

All objectives are weighted as in the bound, and so have the same expected gradient g of the same network: their |g|²
agree within errors. They differ in the noise of a batch around it, tr Cov. While the ratio |g|²/tr Cov is far below one
a step is mostly noise, and it takes one over that ratio many of them to see where to go. Before training only the last
layer has a gradient, as it is zero; so it is measured also after some steps of the tabulated objective.
"""

import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.flatten_util import ravel_pytree
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autodsm.base.estimate import Estimate
from autodsm.experiments.shared.images import PRIORS, Setting, scale_of
from autodsm.learn.train import Batch, Rounds, make_draws
from autodsm.network import trainable

METHODS = ("local-DSM, ELBO", "antithetic local-DSM, ELBO", "ISM, ELBO", "tabulated, ELBO")
ROUND = 4
"""Batches whose draws are made at once."""


def gradients(setting: Setting, method: str, network, *, batches: int, key) -> np.ndarray:
    """(batches, parameters)."""
    images = setting.scale.images("train")
    objective = setting.objective(method).prepare(images, key=key)
    rounds = Rounds.make(objective, math.prod(setting.shape), steps=ROUND, batch_size=setting.scale.batch, ema=0.0)
    params, static = eqx.partition(network, trainable(network))
    draws = make_draws(objective, rounds, rounds.round_steps)

    @jax.jit
    def gradient(batch):
        def loss(params):
            score = eqx.combine(params, static)
            return jnp.mean(jax.vmap(lambda draw: objective.at(score, draw))(batch))

        return ravel_pytree(jax.grad(loss)(params))[0]

    found = []
    while len(found) < batches:
        data_key, draw_key = jax.random.split(jax.random.fold_in(key, len(found)))
        made = draws(Batch(images(data_key, rounds.round_steps * rounds.paths)), draw_key, jnp.asarray(0))
        found += [gradient(jax.tree.map(lambda leaf, i=i: leaf[i], made)) for i in range(rounds.round_steps)]
    return np.asarray(found[:batches], float)


def signal_and_noise(g: np.ndarray) -> tuple[Estimate, float]:
    """|E g|², without the bias of a mean over few, and tr Cov g; the error is by leaving out one batch at a time."""
    n = len(g)
    products = g @ g.T
    total, own = products.sum(), np.diag(products)
    signal = (total - own.sum()) / (n * (n - 1))  # over pairs of different batches
    without = (total - 2 * products.sum(axis=1) + own - (own.sum() - own)) / ((n - 1) * (n - 2))
    error = np.sqrt((n - 1) / n * np.sum((without - without.mean()) ** 2))
    return Estimate(float(signal), float(error)), float(own.mean() - signal)


def main(scale: Literal["digits", "small", "paper"] = "digits", batches: int = 64, steps: int = 300) -> None:
    """Compare the gradients of objectives.

    Args:
        scale: of the experiments on images: which images, network and batch.
        batches: how many gradients each objective is judged by.
        steps: of the training, after which they are taken again.
    """
    console = Console(width=110)
    size = scale_of(scale, quick=False)._replace(steps=steps)
    table = Table("prior", "steps", "objective", "|E g|²", "tr Cov of a batch", "ratio")
    table.title = f"Gradients, {scale}: {batches} batches of {size.batch} evaluations"
    for prior in PRIORS:
        setting = Setting.make(size, prior)
        trained = setting.train("tabulated, ELBO", key=jax.random.key(0)).last
        networks = {0: setting.network(key=jax.random.key(0)), steps: trained}
        cases = [(count, method) for count in networks for method in METHODS]
        for count, method in track(cases, description=f"gradients, {prior}", console=console):
            found = gradients(setting, method, networks[count], batches=batches, key=jax.random.key(1))
            signal, noise = signal_and_noise(found)
            table.add_row(prior, str(count), method, str(signal), f"{noise:.3g}", f"{signal.value / noise:.2g}")
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
