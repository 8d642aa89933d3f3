"""The words of the command line: its commands, and the options of each.

Nothing here loads JAX, so that `autodsm --help` answers at once.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

ObjectiveName = Literal["auto", "dsm", "local", "pathwise", "kinetic", "tabulated", "ism"]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of training."""

    objective: ObjectiveName = "auto"
    """"auto" follows the process; "dsm" is exact for linear drifts only."""
    lam: float | None = None
    """λ = ∫g² from s to t, for the objective "local" (default 0.01)."""
    profile: Literal["matrix", "diagonal"] | None = None
    """How "pathwise" weighs the noise along a path (default: by the number of coupled coordinates)."""
    weighting: Literal["likelihood", "perceptual", "score"] | None = None
    """Of the denoising objectives (default "perceptual")."""
    variance_reduction: Literal["antithetic", "control", "none"] | None = None
    """For "local", "tabulated" (not "control") and "dsm" (default "antithetic")."""
    divergence: Literal["exact", "hutchinson"] | None = None
    """For "ism" (default "exact")."""
    steps: int = 5000
    batch_size: int = 1024
    """Evaluations of the network in a step."""
    learning_rate: float = 3e-3
    ema: float = 0.999
    width: int | None = None
    """Of the default network (default 256)."""
    depth: int | None = None
    """Hidden layers of the default network (default 3)."""
    activation: str | None = None
    """Of the default network (default "gelu")."""
    checkpoint_every: int = 1000
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class List:
    """Show the experiments that can be reproduced, and the problems that can be trained on."""


@dataclasses.dataclass(frozen=True)
class Reproduce:
    """Run one experiment, or all, and write a run folder with figures and numbers."""

    name: tyro.conf.Positional[str]
    """An experiment (see `autodsm list`), or "all"."""
    quick: bool = False
    """A small version of the same computation, in seconds."""
    seeds: int | None = None
    """How many seeds to average over; by default as many as the results page shows, and one for a quick run."""
    seed: int = 0
    """The first of them."""
    scale: str | None = None
    """Of experiments on images: "digits" (default), "longer", "small" or "paper"."""
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/NAME, or the first free of runs/NAME-2, …"""


@dataclasses.dataclass(frozen=True)
class Report:
    """Take numbers and figures of finished experiments into a folder of documentation, and write its results.md."""

    docs: tyro.conf.Positional[Path]
    """The folder; it keeps results/*.json and figures/*.png, and what it had of the same experiments is replaced."""
    add: tuple[Path, ...] = ()
    """Run folders of `autodsm reproduce`. Without any, the page alone is written again."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a score on a named problem."""

    problem: tyro.conf.Positional[str]
    """One of the problems that `autodsm list` shows."""
    options: tyro.conf.OmitArgPrefixes[Options] = dataclasses.field(default_factory=Options)
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/PROBLEM, or the first free of runs/PROBLEM-2, …"""
    dry_run: bool = False
    """Say what would be done, and stop before training."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """Train a score for a process of your own: a Python file that defines `process` and `y0`.

    `process` is an autodsm.Process, `y0` a sampler y0(key, n) or an array of samples. The file may also define
    `prior`, `objective` and `network`.
    """

    file: tyro.conf.Positional[Path]
    options: tyro.conf.OmitArgPrefixes[Options] = dataclasses.field(default_factory=Options)
    out: Path | None = None
    """Folder to write; it must not exist. By default runs/NAME, or the first free of runs/NAME-2, …"""
    dry_run: bool = False
    """Say what would be done, and stop before training."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on with a run of `train`, `fit` or `reproduce` that was interrupted, to the same result."""

    run: tyro.conf.Positional[Path]
    """Its folder."""
    file: Path | None = None
    """The file that the run was made from, where it is elsewhere now."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draw samples from a run and write them into its folder, as samples.npz and a figure.

    A run with a prior is sampled backwards from it. One without is a physical system: its initial states are carried
    forwards by the probability flow.
    """

    run: tyro.conf.Positional[Path]
    """Its folder."""
    n: int = 10_000
    method: Literal["sde", "ode"] | None = None
    """The reversed process (default, with a prior), or the probability flow."""
    steps: int | None = None
    """Of the reversed process (default 250)."""
    seed: int = 0
    file: Path | None = None
    """A Python file that defines `process`, where the run's own is elsewhere now, or the run was made in Python."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure a run: distances with their noise floors, likelihoods, entropy rates, errors of the score.

    What applies is shown as a table and added to result.json.
    """

    run: tyro.conf.Positional[Path]
    """Its folder."""
    n: int = 4_000
    """Samples."""
    seed: int = 0
    file: Path | None = None
    """A Python file that defines `process`, where the run's own is elsewhere now, or the run was made in Python."""


@dataclasses.dataclass(frozen=True)
class Export:
    """Write the score of a run, or a sampler, as StableHLO: for programs that have JAX, and not this library."""

    run: tyro.conf.Positional[Path]
    """Its folder, or the file of a model."""
    what: Literal["score", "sampler"] = "score"
    steps: int | None = None
    """Of a sampler (default 250)."""
    out: Path | None = None
    """File to write; it must not exist. By default score.stablehlo or sampler.stablehlo in the folder of the run."""
    file: Path | None = None
    """A Python file that defines `process`, where the run's own is elsewhere now, or the run was made in Python."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Import a data set, verified, so that experiments find it.

    It is kept in the folder that the variable AUTODSM_DATA names, or else in the user's cache.
    """

    name: tyro.conf.Positional[Literal["cifar10"]]
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A folder, or an archive (.tar.gz, .tgz), with the binary version of CIFAR-10."""
    download: bool = False
    """Fetch the official archive instead."""


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Export, tyro.conf.subcommand("export")]
)
