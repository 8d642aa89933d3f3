"""What a dry run shows: a page that says what would be trained, on what, and what would be written."""

import math
from pathlib import Path

import jax
from rich.table import Table
from rich.text import Text

from ..kernels.schedule import FromZero, ScheduledPairs
from ..learn.fit import Setup
from ..network import network_name
from ..paths.initial import LOOK, initial_states
from ..process.noise import is_invertible
from ..process.process import Process
from ..process.structure import Blocks, Elementwise, noise_kind
from ..targets import Adapted, Kinetic, Local, Paths, Tabulated
from .arguments import Options
from .problems import Problem


def page(name: str, problem: Problem, setup: Setup, options: Options, out: Path) -> Table:
    shape = initial_states(problem.y0, LOOK, key=jax.random.key(0)).shape[1:]
    rounds, evaluations = setup.rounds, setup.objective.evaluations
    draws = f"{rounds.paths} paths × {rounds.pairs} draws" + f" × {evaluations} each" * (evaluations > 1)
    rows = {
        "problem": name,
        "process": f"state of {_size(shape)}, t from 0 to {problem.process.t1:g}",
        "drift": _drift(problem.process, shape),
        "noise": _noise(problem.process, shape),
        "prior": "none: sampled forwards from y0" if problem.prior is None else type(problem.prior).__name__,
        "objective": setup.reason,
        "states": _states(setup.objective),
        "network": f"{network_name(setup.network)}, {setup.parameters:,} trained numbers",
        "optimizer": f"AdamW, learning rate up to {options.learning_rate:g}, then to 0 as a cosine; "
        f"weights averaged over steps, {options.ema:g}",
        "batch": f"{rounds.paths * rounds.pairs * evaluations} evaluations of the network in a step: {draws}",
        "training": f"{rounds.steps} steps in rounds of {rounds.round_steps}, a checkpoint every "
        f"{options.checkpoint_every} steps, seed {options.seed}",
        "would write": f"{out}: config.json, model.autodsm, metrics.jsonl, checkpoints, figures/loss.png, result.json",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows.items():
        table.add_row(Text(label, "bold"), Text(text))
    return table


def _size(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"{shape[0]} numbers" if shape[0] > 1 else "1 number"
    return f"shape {shape}, {math.prod(shape)} numbers"


def _drift(process: Process, shape: tuple[int, ...]) -> str:
    structure = process.structure_for(shape)
    if isinstance(structure, Elementwise):
        coupling = "each coordinate on its own"
    else:
        coupling = "channels of a pixel are coupled" if isinstance(structure, Blocks) else "coordinates are coupled"
    return f"{coupling}; {'the same at all times' if process.autonomous(shape) else 'it depends on time'}"


def _noise(process: Process, shape: tuple[int, ...]) -> str:
    kinds = {"scalar": "the same in all coordinates", "diagonal": "one strength for each", "matrix": "a matrix"}
    kind = kinds[noise_kind(process.g(0.5 * process.t1).shape, shape)]
    reach = "" if is_invertible(process, shape, 0.5 * process.t1) else ", in some coordinates or directions only"
    return f"{kind}{reach}; {'constant' if process.constant_noise else 'a function of time'}"


def _states(objective) -> str:
    """How states and targets are drawn."""
    target = getattr(objective, "target", None)
    if isinstance(target, Tabulated):
        return "from a table of the exact kernel from y_0, without paths"
    if isinstance(target, Local) and isinstance(target.schedule, FromZero):
        return "from the Gaussian kernel from y_0, without paths"
    paths = _first(objective, Paths)
    text = f"from paths of {paths.steps} steps, the first of them short" if paths else "as the objective draws them"
    if isinstance(target, Adapted) and target.profile is not None:
        text += f"; {target.profile.kind} weights" + ", from the score of the start" * target.profile.known
    if isinstance(target, Kinetic) and target.window is not None:
        text += f"; windows of {float(target.window):.3g} of the process' time, in {target.window_steps} steps"
    if isinstance(target, Local) and isinstance(target.schedule, ScheduledPairs):
        text += f"; kernels over λ = {float(target.schedule.lam):.3g}"
    return text


def _first(tree, kind):
    """The first module of a kind in a tree, or None."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return next((leaf for leaf in leaves if isinstance(leaf, kind)), None)
