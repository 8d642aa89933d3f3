"""Images drawn from models of two non-Gaussian priors and four objectives.

β = 1/(1 − t), as in the paper's figures of images, and perceptual weights where an objective has them. The reversed
process starts from the prior. The distance is MMD² between pixels of samples and of held-out images. Networks are
residuals on the score of the prior, where the paper's predict noise; ISM takes fewer steps than the others, for about
equal time.
"""

from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from ..use.metrics import mmd2
from ..use.sample import sample
from .shared.experiment import Experiment, Grid, Trials, difference, over_seeds, written
from .shared.images import SCALES, Setting, about, check_data, scale_of, told
from .shared.verdict import AGREES, CANNOT_TELL, DIFFERS, NEGATIVE, opening, verdict

PARTS = (
    "mixture: local-DSM, perceptual",
    "mixture: local-DSM, ELBO",
    "mixture: antithetic local-DSM, perceptual",
    "mixture: ISM",
    "mixture: tabulated, perceptual",
    "logistic: tabulated, perceptual",
)
_REFERENCES = 500


def trial(part: str, *, quick: bool, seed: int, scale: str, folder: Path) -> dict:
    prior, method = part.split(": ")
    setting = Setting.make(scale_of(scale, quick=quick), prior, "inverse")
    train_key, sample_key, data_key, mmd_key = jax.random.split(jax.random.key(seed), 4)
    model = setting.train(method, key=train_key, out=folder, **setting.scale.for_samples)
    steps = 25 if quick else 250
    ys = sample(
        setting.process, model.score, setting.prior, setting.scale.samples, key=sample_key, shape=setting.shape,
        steps=steps, progress=True,
    )  # fmt: skip
    assert isinstance(ys, np.ndarray)
    images = setting.scale.images("test")
    others = np.asarray(images.states(np.arange(min(_REFERENCES, len(images))), key=data_key))
    distance = None
    if len(ys) > 1:
        distance = mmd2(ys.reshape(len(ys), -1), others.reshape(len(others), -1), key=mmd_key)
    return {
        **about(model.score, model.history, setting.scale, objective=model.objective),
        "mmd2": np.nan if distance is None else distance.value,
        "floor": np.nan if distance is None else distance.floor,
        "samples": np.clip(np.floor((ys + 1.0) / 2.0 * images.levels), 0, images.levels - 1).astype(int),
        "levels": images.levels,
    }


def combine(trials: Trials) -> dict:
    names = ("parameters", "batch", "steps", "ms_per_step", "seconds", "mmd2", "floor")
    return {
        part: {n: over_seeds(np.array([t[n] for t in each], float)) for n in names} for part, each in trials.items()
    }


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    grids = {part: np.array(each[0]["samples"]) / (each[0]["levels"] - 1) for part, each in trials.items()}
    return {"cifar10-samples": plot.image_grids(grids)}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    rows = []
    for part, each in numbers.items():
        pair = (each["mmd2"], each["floor"])
        counted = [f"{each['steps']['value']:.0f}", f"{each['seconds']['value'] / 60:.1f}"]
        rows.append([part, *counted, *(written(v["value"], v["stderr"]) for v in pair)])
    first = {name: found["value"] for name, found in next(iter(numbers.values())).items()}
    columns = ["prior: objective", "steps", "minutes", "MMD² to held-out images", "noise floor"]
    grid = Grid(f"Samples. {told(first)}", columns, rows)
    names = [f"mixture: {m}" for m in ("local-DSM, perceptual", "ISM", "tabulated, perceptual")]
    if not set(names) <= set(numbers):
        return [grid]
    local, ism, exact = (numbers[name]["mmd2"] for name in names)
    at = [written(each["value"], each["stderr"]) for each in (local, ism, exact)]
    compared = f"samples of local-DSM are at {at[0]} from the images, ISM's at {at[1]}, the exact kernel's at {at[2]}"
    found = verdict(*difference(local, ism), seeds, claim=NEGATIVE)
    claim = {
        AGREES: "local-DSM's model draws better images than ISM's",
        DIFFERS: "whose local-DSM draws better images than ISM",
        CANNOT_TELL: "whether local-DSM's model draws better images than ISM's, as in the paper",
    }[found]
    return [grid, f"{opening(found, seeds, claim)}: {compared}."]


EXPERIMENT = Experiment(
    trial, combine, figures, report,
    quick_parts=("mixture: tabulated, perceptual",), scales=dict.fromkeys(SCALES, PARTS), check=check_data,
)  # fmt: skip
