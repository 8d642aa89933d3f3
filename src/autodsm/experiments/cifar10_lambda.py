"""Bounds of images over λ: how far local-DSM's parts from ISM's, and from that of the exact kernel.

The paper's second table of images: one model for each prior, trained with the local-DSM bound at λ = 0.01 (antithetic
pairs), and its bits per dimension by several bounds, on the same held-out images. "ISM" and "tabulated" have no λ, and
are bounds up to the error of simulated paths; the linearized kernel's is not quite one, and the more λ, the less.
λ is `∫g²`, as in the paper's text; the λ of its appendix, `∫β`, is half of it. Errors are over images.
"""

from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from .shared.experiment import Experiment, Grid, Trials, written
from .shared.images import PRIORS, SCALES, Setting, about, check_data, over_images, scale_of, told
from .shared.verdict import AGREES, CANNOT_TELL, DIFFERS, POSITIVE, opening, verdict

LAMBDAS = (0.01, 0.02, 0.05, 0.2)
BOUNDS: dict[str, dict] = {f"{lam:g}": dict(kind="local-dsm", lam=lam) for lam in LAMBDAS}
BOUNDS |= {"tabulated": dict(kind="tabulated"), "ISM": dict(kind="ism")}
PAPER = {"logistic": (3.568, (3.566, 3.530, 3.422)), "mixture": (3.496, (3.465, 3.434, 3.354))}
"""ISM's, and local-DSM's for the first three λ."""
PAPER_ERRORS = {"logistic": (0.07, 0.096), "mixture": (0.11, 0.1879)}
"""Of ISM's, and of the last."""


def trial(part: str, *, quick: bool, seed: int, scale: str, folder: Path) -> dict:
    setting = Setting.make(scale_of(scale, quick=quick), part)
    train_key, bits_key = jax.random.split(jax.random.key(seed))
    model = setting.train("antithetic local-DSM, ELBO", key=train_key, out=folder)
    bits = {name: setting.bits(model.score, key=bits_key, **bound) for name, bound in BOUNDS.items()}
    training = about(model.score, model.history, setting.scale, objective=model.objective)
    return {**training, "bits": bits}


def combine(trials: Trials) -> dict:
    found = {}
    for prior, each in trials.items():
        values = {name: np.array([t["bits"][name] for t in each], float) for name in BOUNDS}
        found[prior] = {
            **{name: each[0][name] for name in ("parameters", "batch", "steps")},
            "images": values["ISM"].shape[1],
            "bits": {name: over_images(v) for name, v in values.items()},
            "less_than_ism": {name: over_images(values["ISM"] - v) for name, v in values.items()},
        }
    return {"priors": found}


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    curves = {}
    for prior, each in numbers["priors"].items():
        less = [each["less_than_ism"][f"{lam:g}"] for lam in LAMBDAS]
        curves[prior] = (np.array([v["value"] for v in less]), np.array([v["stderr"] for v in less]))
    label = "bits per dimension below ISM's"
    return {"cifar10-lambda": plot.over_parameter(np.array(LAMBDAS), curves, xlabel="λ", ylabel=label)}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    rows = []
    for prior, each in numbers["priors"].items():
        for name in BOUNDS:
            label = name if name in ("ISM", "tabulated") else f"local-DSM, λ = {name}"
            pair = (each["bits"][name], each["less_than_ism"][name])
            rows.append([prior, label, *(written(v["value"], v["stderr"]) for v in pair)])
            rows[-1][-1] = "" if name == "ISM" else rows[-1][-1]
    first = next(iter(numbers["priors"].values()))
    title = f"Bits per dimension of {first['images']} held-out images, after {first['steps']} steps. {told(first)}"
    theirs = "; ".join(
        f"{prior} {ism}, and {', '.join(f'{v:.3f}' for v in local)} for λ = {', '.join(f'{x:g}' for x in LAMBDAS[:3])}"
        for prior, (ism, local) in PAPER.items()
    )
    grid = Grid(title, ["prior", "bound", "bits per dimension", "below ISM's"], rows)
    off = [
        f"{prior}, λ = {lam:g}"
        for prior, each in numbers["priors"].items()
        for lam, less in ((lam, each["less_than_ism"][f"{lam:g}"]) for lam in LAMBDAS)
        if abs(less["value"]) > 3 * less["stderr"]
    ]
    said = [f"Local-DSM's value is more than three standard errors from ISM's for: {'; '.join(off) or 'none'}."]
    lam = LAMBDAS[2]
    for prior, each in numbers["priors"].items():
        gap, less = PAPER[prior][0] - PAPER[prior][1][2], each["less_than_ism"][f"{lam:g}"]
        found = verdict(less["value"], less["stderr"], seeds, claim=POSITIVE, comparisons=len(numbers["priors"]))
        claim = {
            AGREES: "local-DSM's value is below ISM's",
            DIFFERS: "where local-DSM's value is below ISM's",
            CANNOT_TELL: "whether local-DSM's value is below ISM's, as in the paper",
        }[found]
        here = f"at λ = {lam:g} by {written(less['value'], less['stderr'])} bits here, by "
        here += f"{written(gap, float(np.hypot(*PAPER_ERRORS[prior])))} there, which may be zero too"
        said.append(f"{opening(found, seeds, claim, about=prior)}: {here}.")
    return [grid, *said, f"The paper, CIFAR-10, 36 million parameters, errors of 0.07 to 0.19: {theirs}."]


EXPERIMENT = Experiment(
    trial, combine, figures, report,
    quick_parts=("mixture",), scales=dict.fromkeys(SCALES, tuple(PRIORS)), check=check_data,
)  # fmt: skip
