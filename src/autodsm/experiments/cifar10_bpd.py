"""Bits per dimension of images, for non-Gaussian priors and objectives, at equal compute.

The paper's first table of images. "local-DSM" has the paper's target, λ = 0.01, expanded around (y_s, t), without
variance reduction, weighted as in the bound or perceptually; "antithetic" has pairs of opposite noise; "tabulated" has
them too, and the exact kernel; "no training" is the score of the prior. β rises from 0.1 to 10. Bits are by ISM's bound
with one Hutchinson probe, and by local-DSM's with λ = 0.001; both reach down to the data, from δ = 0.001 on by the
score, before by a Gaussian decoder. Errors are over held-out images, and with one seed say nothing of what another
would give; differences are between models on the same images and paths. To code all levels alike takes log₂ 17 = 4.09
bits for digits, and 8 for CIFAR-10.

This is not quite the paper's recipe: networks are residuals on the score of the prior, where the paper's predict noise
(as here where it is said), and states come from the tabulated kernel, where the paper simulates them. All objectives
have the same network, rate and number of evaluations in a step, and ISM takes fewer steps, for about equal time.
"""

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from .shared.experiment import Experiment, Grid, Trials, written
from .shared.images import OF_NOISE, PRIORS, SCALES, Setting, about, check_data, over_images, scale_of, told
from .shared.verdict import AGREES, CANNOT_TELL, DIFFERS, POSITIVE, VERDICTS, opening, verdict

UNTRAINED, PLAIN, PAIRS = "no training", "local-DSM, ELBO", "antithetic local-DSM, ELBO"
METHODS = (
    UNTRAINED,
    PLAIN,
    f"{PLAIN}, {OF_NOISE}",
    "local-DSM, perceptual",
    PAIRS,
    "ISM, ELBO",
    "tabulated, ELBO",
    "tabulated, perceptual",
)
PARTS = tuple(f"{prior}: {method}" for prior in PRIORS for method in METHODS)
FEWER = tuple(p for p in PARTS if p.endswith((UNTRAINED, "ELBO", " local-DSM, perceptual")))
"""Those of the small scale, which is for two cores."""
TRAINED_LONGER = tuple(f"mixture: {method}" for method in (UNTRAINED, PLAIN, "ISM, ELBO"))
"""The two that the paper compares, with the prior that parts them most."""
BOUNDS = {"ISM": dict(kind="ism"), "local-DSM": dict(kind="local-dsm")}
PAPER = {
    PLAIN: ("3.568 ± 0.07", "3.496 ± 0.11"),
    "local-DSM, perceptual": ("3.561 ± 0.09", "3.503 ± 0.15"),
    "ISM, ELBO": ("3.741 ± 0.09", "3.637 ± 0.14"),
}
"""The paper's values for logistic and mixture, on CIFAR-10, with 36 million parameters."""


def trial(part: str, *, quick: bool, seed: int, scale: str, folder: Path) -> dict:
    prior, method = part.split(": ")
    setting = Setting.make(scale_of(scale, quick=quick), prior)
    train_key, bits_key = jax.random.split(jax.random.key(seed))
    if method == UNTRAINED:
        score = eqx.nn.inference_mode(setting.network(key=train_key))
        training = about(score, [], setting.scale)
    else:
        model = setting.train(method, key=train_key, out=folder)
        score = model.score
        training = about(score, model.history, setting.scale, objective=model.objective)
    bits = {name: setting.bits(score, key=bits_key, **bound) for name, bound in BOUNDS.items()}
    return {**training, "bits": bits}


def combine(trials: Trials) -> dict:
    values = {
        part: {name: np.array([t["bits"][name] for t in each], float) for name in BOUNDS}
        for part, each in trials.items()
    }
    found = {}
    for part, each in trials.items():
        prior, method = part.split(": ")
        rival = values.get(f"{prior}: ISM, ELBO")
        found[part] = {
            "prior": prior,
            "method": method,
            **{
                name: np.mean([t[name] for t in each])
                for name in ("parameters", "batch", "steps", "images", "ms_per_step", "seconds")
            },
            "bits": {name: over_images(v) for name, v in values[part].items()},
            "less_than_ism": None if rival is None else over_images(rival["ISM"] - values[part]["ISM"]),
        }
    seeds, images = next(iter(values.values()))["ISM"].shape
    return {"seeds": seeds, "images": images, "models": found}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    models = numbers["models"].values()
    rows = {
        prior: {
            m["method"]: (m["bits"]["ISM"]["value"], m["bits"]["ISM"]["stderr"]) for m in models if m["prior"] == prior
        }
        for prior in PRIORS
    }
    return {"cifar10-bpd": plot.dots({k: v for k, v in rows.items() if v}, label="bits per dimension")}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    rows = []
    for each in numbers["models"].values():
        bits, less = each["bits"], each["less_than_ism"]
        rows.append(
            [
                each["prior"],
                each["method"],
                f"{each['steps']:.0f}",
                f"{each['images']:,.0f}",
                f"{each['seconds'] / 60:.1f}",
                *(written(bits[name]["value"], bits[name]["stderr"]) for name in BOUNDS),
                "" if less is None or each["method"].startswith("ISM") else written(less["value"], less["stderr"]),
            ]
        )
    columns = [
        "prior",
        "objective",
        "steps",
        "images seen",
        "minutes",
        "ISM bpd",
        "local-DSM bpd",
        "below the model trained by ISM",
    ]
    first = next(iter(numbers["models"].values()))
    title = f"Bits per dimension of {numbers['images']} held-out images (bounds: less is better). {told(first)}"
    grid = Grid(title, columns, rows)
    said = []
    for prior in PRIORS:
        models = {m["method"]: m for m in numbers["models"].values() if m["prior"] == prior}
        if "ISM, ELBO" not in models:
            continue
        less = {m: found["less_than_ism"] for m, found in models.items() if m not in ("ISM, ELBO", UNTRAINED)}
        clear = [m for m, by in less.items() if by["value"] > 3 * by["stderr"]]
        worse = [m for m, by in less.items() if by["value"] < -3 * by["stderr"]]
        best = min(models, key=lambda m: models[m]["bits"]["ISM"]["value"])
        said.append(
            f"{prior}: best is {best}. By more than three standard errors below the model trained by ISM: "
            f"{'; '.join(clear) or 'none'}. Above: {'; '.join(worse) or 'none'}."
        )
        if PLAIN in models:
            took = models["ISM, ELBO"]["seconds"] / models[PLAIN]["seconds"]
            said.append(f"{prior}: ISM was trained for {took:.2f} of the time of {PLAIN}.")
        said += _untrained(prior, models)
        said += _verdicts(prior, models, seeds, comparisons=2 * len({m["prior"] for m in numbers["models"].values()}))
    theirs = "; ".join(f"{m} {PAPER[m][0]} and {PAPER[m][1]}" for m in PAPER)
    said.append(f"The paper, CIFAR-10, 36 million parameters, logistic and mixture: {theirs}.")
    return [grid, *said]


def _untrained(prior: str, models: dict) -> list[str]:
    """What training was worth."""
    bits = {m: found["bits"]["ISM"]["value"] for m, found in models.items()}
    if UNTRAINED not in bits:
        return []
    no_better = [m for m, value in bits.items() if m != UNTRAINED and value >= bits[UNTRAINED]]
    return [
        f"{prior}: the score of the prior alone is worth {bits[UNTRAINED]:.3g}; no better than it: "
        f"{'; '.join(no_better) or 'none'}."
    ]


def _verdicts(prior: str, models: dict, seeds: int, *, comparisons: int) -> list[str]:
    """The paper's claim, that local-DSM trains better models than ISM, for each weighting in its table."""
    of: dict[str, list[str]] = {found: [] for found in VERDICTS}
    for method in (m for m in PAPER if m.startswith("local-DSM") and m in models):
        less = models[method]["less_than_ism"]
        found = verdict(less["value"], less["stderr"], seeds, claim=POSITIVE, comparisons=comparisons)
        of[found].append(method)
    said = []
    for found, names in ((found, names) for found, names in of.items() if names):
        claim = {
            AGREES: "local-DSM is below ISM",
            DIFFERS: "whose local-DSM is below ISM: here it is above",
            CANNOT_TELL: "whether local-DSM is below ISM, as in the paper",
        }[found]
        by = {m: models[m]["less_than_ism"] for m in names}
        below = "; ".join(f"{m}, {_bits(less['value'], less['stderr'])}" for m, less in by.items())
        text = f"{opening(found, seeds, claim, about=prior)}, after {models[names[0]]['steps']:.0f} steps: {below}."
        if PLAIN in by and by[PLAIN]["value"] < 0:
            text += (
                f" The expected gradient of {PLAIN} is that of ISM, but that of a batch is mostly noise "
                "(`python benchmarks/image_noise.py`)."
            )
        said.append(text)
    return said


def _bits(less: float, stderr: float) -> str:
    return f"{written(abs(less), stderr)} bits {'below' if less > 0 else 'above'}"


EXPERIMENT = Experiment(
    trial, combine, figures, report,
    quick_parts=(f"mixture: {UNTRAINED}", "mixture: ISM, ELBO"),
    scales=dict.fromkeys(SCALES, PARTS) | {"small": FEWER, "longer": TRAINED_LONGER}, check=check_data,
)  # fmt: skip
