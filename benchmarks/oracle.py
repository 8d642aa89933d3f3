"""How far is a trained score from what its network could learn? The experiment `oracle`, for some of its systems.

    python benchmarks/oracle.py --systems "φ⁴ ring" "swimmer" --seeds 1
    python benchmarks/oracle.py --quick                # a few steps only, to see that it runs

All systems, with three seeds, resumable, for the page of results: `autodsm reproduce oracle`.
"""

import json
from pathlib import Path

import tyro
from rich.console import Console

from autodsm.app.report import show
from autodsm.base.errors import check_count, check_name
from autodsm.experiments.oracle import EXPERIMENT
from autodsm.experiments.shared.references import REFERENCES


def main(systems: tuple[str, ...] = tuple(REFERENCES), seeds: int = 3, quick: bool = False, out: str = "") -> None:
    """Trained errors as multiples of those of training on the exact score.

    Args:
        systems: which of the systems.
        seeds: trainings of each method.
        quick: a few steps only.
        out: a JSON file for the numbers.
    """
    check_count("seeds", seeds)
    for name in systems:
        check_name("system", name, REFERENCES)
    console = Console(width=150)
    numbers: dict = {"systems": {}}
    for name in systems:
        trials = [EXPERIMENT.trial(name, quick=quick, seed=seed) for seed in range(seeds)]
        found = EXPERIMENT.combine({name: trials})
        show(EXPERIMENT.report(found, seeds), console)
        numbers["systems"] |= found["systems"]
        if out:
            Path(out).write_text(json.dumps(numbers, indent=1, default=lambda value: value.tolist()) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
