"""What the experiments on images share: data and networks at four scales, priors, objectives, and training.

| scale  | images                 | network                                   |
|--------|------------------------|-------------------------------------------|
| digits | 8×8 digits, 17 levels  | U-Net of 0.18 million parameters          |
| longer | the same               | the same, trained four times as long      |
| small  | CIFAR-10               | U-Net of 1.5 million                      |
| paper  | CIFAR-10               | Ho et al.'s of 36 million; 180 for samples |

Coordinates follow Langevin dynamics towards the prior, each by itself. States at s and t come from the tabulated
kernel, so that no objective waits for paths, and none has an error of them. All train one network, as a residual on the
score of the prior, with as many evaluations in a step: of as many images, or, by "antithetic" and "tabulated", of half
as many in pairs of opposite noise. A step of ISM costs more, and it takes fewer of them. (In the paper the network
stands for the noise received since s(t) instead, as here for methods that say so, and states come from simulated
paths.)
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import numpyro.distributions as dist

from ... import data
from ...base.estimate import estimate
from ...base.types import PRNGKey
from ...data import RANGE, Images
from ...learn.builders import LocalDSM, TabulatedDSM
from ...learn.fit import fit
from ...learn.ism import ISM
from ...learn.model import Model
from ...learn.objective import AbstractObjective
from ...network import Frozen, Score, UNet
from ...process.clock import Clock
from ...process.priors import AbstractBeta, InverseBeta, LinearBeta, langevin, score_of
from ...process.process import Process
from ...targets import Tabulated
from ...use.elbo import ELBO
from ...use.likelihood import bits
from .learning import LocalNoise

LAM = 0.01
OF_NOISE = "predicting noise"
ISM_COST = 2.0
"""Steps of the others for one of ISM: a step of it takes 1.95 times as long as one of local-DSM at the small scale, and
2.02 times on digits (benchmarks/image_step.py)."""
PRIORS: dict[str, dist.Distribution] = {
    "logistic": dist.Logistic(0.0, 1.0),
    "mixture": dist.MixtureSameFamily(
        dist.Categorical(np.array([0.5, 0.5], np.float32)),
        dist.Normal(np.array([-0.5, 0.5], np.float32), np.float32(np.sqrt(0.5))),
    ),
}
# One score of a prior for all networks, so that what uses them is compiled once.
SCORES = {name: score_of(prior) for name, prior in PRIORS.items()}
BETAS: dict[str, AbstractBeta] = {"linear": LinearBeta(0.1, 10.0), "inverse": InverseBeta()}


@lru_cache
def process_for(prior: str, beta: str) -> Process:
    """One for all trials, so that its tables are made once."""
    return langevin(PRIORS[prior], BETAS[beta])


class Scale(NamedTuple):
    """How much is done."""

    images: Callable[[str], Images]
    network: Mapping[str, Any]
    batch: int
    steps: int
    learning_rate: float
    ema: float
    examples: int
    """Held-out images."""
    draws: int
    """Times of a bound."""
    samples: int
    for_samples: Mapping[str, Any] = MappingProxyType({})
    """What is different in the network that images are drawn from."""


_DIGITS = Scale(
    images=data.digits,
    network=dict(channels=16, levels=(1, 2), blocks=1, attention=(4,), dropout=0.0),
    batch=64, steps=1_500, learning_rate=2e-3, ema=0.999, examples=360, draws=64, samples=64,
)  # fmt: skip
SCALES = {
    "digits": _DIGITS,
    "longer": _DIGITS._replace(steps=6_000),
    "small": Scale(
        images=data.cifar10,
        network=dict(channels=24, levels=(1, 2, 4), blocks=1, attention=(8,), dropout=0.0),
        batch=16, steps=400, learning_rate=1e-3, ema=0.99, examples=64, draws=32, samples=36,
    ),
    "paper": Scale(
        images=data.cifar10,
        network=dict(channels=128, levels=(1, 2, 2, 2), blocks=2, dropout=0.1),
        batch=256, steps=400_000, learning_rate=2e-4, ema=0.9999, examples=10_000, draws=128, samples=100,
        for_samples=dict(channels=160, levels=(1, 2, 3, 4), blocks=3, attention=(16, 8), style="improved"),
    ),
}  # fmt: skip
_FEW_DIGITS: dict[str, Any] = dict(
    network=dict(channels=8, levels=(1,), blocks=1, attention=(), dropout=0.0),
    batch=32, steps=48, examples=24, draws=16, samples=16,
)  # fmt: skip
_FIRST_STEPS = {
    "digits": _FEW_DIGITS,
    "longer": _FEW_DIGITS,
    "small": dict(steps=4, examples=2, draws=4, samples=1),
    "paper": dict(batch=4, steps=2, examples=2, draws=2, samples=1),
}  # fmt: skip
"""A quick run: on digits with a smaller network, else the first steps, at a reduced batch, of what a full run does."""


def scale_of(name: str, *, quick: bool) -> Scale:
    return SCALES[name]._replace(**_FIRST_STEPS[name]) if quick else SCALES[name]


def check_data(name: str) -> None:
    """Raise if the images of a scale are not there."""
    SCALES[name].images("test")


class Setting(NamedTuple):
    """A process towards a prior, for images at a scale."""

    scale: Scale
    process: Process
    prior: Any
    base: Callable
    """The score of the prior."""
    shape: tuple[int, ...]

    @classmethod
    def make(cls, scale: Scale, prior: str, beta: str = "linear") -> "Setting":
        return cls(scale, process_for(prior, beta), PRIORS[prior], SCORES[prior], scale.images("test").shape)

    def objective(self, method: str) -> AbstractObjective:
        """By name, such as "local-DSM, perceptual"; what is not perceptual is weighted as in the bound."""
        process = self.process
        weighting: dict = dict(weighting="perceptual" if "perceptual" in method else "likelihood")
        if method.startswith("tabulated"):
            return TabulatedDSM(process, RANGE, **weighting)
        options: dict = dict(forward=Tabulated(process, self.shape, y_range=RANGE), pairs_per_path=1)
        if method.startswith("ISM"):
            return ISM(process, divergence="hutchinson", times="mixed", **options)
        if method.startswith("antithetic"):
            return LocalDSM(process, LAM, **weighting, **options)
        return LocalDSM(process, LAM, variance_reduction="none", **weighting, **options)

    def network(self, method: str = "", *, key: PRNGKey, **changes) -> Score | LocalNoise:
        """A residual on the score of the prior, or the paper's network for methods that predict noise."""
        clock = Clock(self.process)
        net = UNet(self.shape, clock, key=key, **{**self.scale.network, **changes})
        if method.endswith(OF_NOISE):
            return LocalNoise(net, Frozen(clock), LAM)
        with jax.ensure_compile_time_eval():
            spread = float(np.sqrt(self.prior.variance))
        return Score(net, clock, parameterization="residual", base=self.base, spread=spread)

    def steps(self, method: str) -> int:
        """Of the training, in about equal time."""
        return max(1, round(self.scale.steps / (ISM_COST if method.startswith("ISM") else 1.0)))

    def train(self, method: str, *, key: PRNGKey, out: Path | None = None, **changes) -> Model:
        """Train, or go on with the training that is in the folder `out`."""
        net_key, fit_key = jax.random.split(key)
        scale, steps = self.scale, self.steps(method)
        return fit(
            self.process, scale.images("train"), objective=self.objective(method),
            network=self.network(method, key=net_key, **changes), steps=steps, batch_size=scale.batch,
            learning_rate=scale.learning_rate, ema=scale.ema, key=fit_key, out=out,
            checkpoint_every=max(1, min(1_000, steps // 8)),
        )  # fmt: skip

    def held_out(self, *, key: PRNGKey) -> tuple[Images, jax.Array]:
        """Images that no training saw, and as states; the first ones, since their order has no meaning."""
        images = self.scale.images("test")
        return images, images.states(np.arange(min(self.scale.examples, len(images))), key=key)

    def bits(self, score, kind: str, *, key: PRNGKey, **options) -> np.ndarray:
        """Bits per dimension of each held-out image, by one of the bounds."""
        state_key, bound_key = jax.random.split(key)
        images, xs = self.held_out(key=state_key)
        needed: dict[str, dict] = {
            "ism": dict(steps=1024, divergence="hutchinson"),
            "local-dsm": dict(steps=1024),
            "tabulated": dict(y_range=(1.5 * RANGE[0], 1.5 * RANGE[1]), shape=self.shape),
        }
        draws = self.scale.draws
        bound = ELBO(self.process, self.prior, kind=kind, draws=draws, **needed[kind], **options)
        # As many evaluations of the network at once as in a step of training.
        values = bound.values(score, xs, key=bound_key, chunk=max(1, self.scale.batch // draws))
        return bits(values, self.shape, levels=images.levels, width=RANGE[1] - RANGE[0])


def about(score, history: list[dict], scale: Scale, *, objective: AbstractObjective | None = None) -> dict:
    """What a training was, also when there was none."""
    evaluations = 1 if objective is None else objective.evaluations  # of the network for an image
    per_step = 1.0 / float(np.median([row["steps_per_s"] for row in history])) if history else 0.0
    steps = history[-1]["step"] if history else 0
    weights = jax.tree.leaves(eqx.filter(score.net, eqx.is_inexact_array))
    return {
        "parameters": sum(leaf.size for leaf in weights),
        "batch": scale.batch,
        "steps": steps,
        "images": steps * (scale.batch // evaluations),
        "ms_per_step": 1e3 * per_step,
        "seconds": per_step * steps,
    }


def over_images(values) -> dict:
    """Mean of (seeds, images); its error is that over images and, of several seeds, that over these."""
    values = np.asarray(values, float)
    found = estimate(values.mean(axis=0))
    seeds = estimate(values.mean(axis=1)).stderr if len(values) > 1 else 0.0
    return found._replace(stderr=float(np.hypot(found.stderr, seeds)))._asdict()


def told(model: Mapping) -> str:
    """The size of a network and of its training, as text."""
    count = model["parameters"]
    size = f"{count:,.0f}" if count < 1e6 else f"{count / 1e6:.{1 if count < 1e7 else 0}f} million"
    return f"U-Nets of {size} parameters, {model['batch']:.0f} evaluations in a step"
