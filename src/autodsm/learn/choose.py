"""What a training uses where nothing was given, chosen from the process and its data, once: the `Plan`.

`CHOICES` says which objective, and for what process; the first that applies is taken.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..base.types import PRNGKey
from ..kernels.schedule import FromZero
from ..network import MLP, Score, UNet
from ..network.framed import Framed
from ..network.relaxation import Relaxation
from ..process.clock import Clock
from ..process.equilibrium import equilibrium_score
from ..process.noise import is_invertible
from ..process.priors import score_of
from ..process.probes import is_linear
from ..process.process import Process
from ..process.structure import Elementwise
from ..targets import Adapted, Kinetic, Paths, Tabulated
from ..targets.kinetic import kinetic_problem
from ..targets.marginals import Marginals
from ..targets.pilot import Pilot
from ..use.prior_check import prior_mismatch
from .builders import KineticDSM, LocalDSM, PathwiseDSM
from .objective import DSM, AbstractObjective

MAX_LINEAR = 4
"""Largest number of coordinates coupled to each other for which a linear process gets the exact kernel from s = 0."""

MIN_SIDE = 4
"""Pixels of an image's shorter side: those of the last level of a U-Net, see `image_network`."""
MIN_IMAGE = 64
"""Coordinates of an image, at least: those of 8×8 pixels, the smallest images of `data`. Of fewer, an MLP can
learn from examples which pixels are neighbours."""


def is_image(shape: tuple[int, ...]) -> bool:
    """True for states (channels, height, width), or (…, height, width), that a U-Net is for.

    However they are given: an array of images and the same as `data.Images` have one answer. Neighbours along the last
    two axes are taken to be alike, so there must be as many pixels as channels, or more; the shape cannot tell a stack
    of matrices from an image, and such a process is given its network by name.
    """
    if len(shape) < 3 or min(shape[-2:]) < MIN_SIDE or math.prod(shape) < MIN_IMAGE:
        return False
    return math.prod(shape[:-2]) <= math.prod(shape[-2:])


MAX_STIFF = 300.0
"""Largest number of relaxation times in [0, t1] of a linear drift that depends on time for which kernels from s = 0 are
taken: they cost a step for each two of it. Tables and paths choose other steps."""


class Plan(NamedTuple):
    """What a training does, and why."""

    objective: AbstractObjective
    reason: str
    """Why this objective."""
    network: Any
    clock: Clock
    """Of the noise."""
    scales: Marginals | None
    """Mean and deviation of every coordinate over time; None where a given network made them unnecessary."""

    @property
    def target(self):
        """What the network regresses on; None for an objective without a target."""
        return getattr(self.objective, "target", None)

    @property
    def steps(self) -> int | None:
        """Of the simulated paths, where there are any."""
        if isinstance(getattr(self.target, "schedule", None), FromZero):
            return None
        found = (self.objective.forward, getattr(self.target, "forward", None))
        return next((forward.steps for forward in found if isinstance(forward, Paths)), None)


class Choice(NamedTuple):
    """An objective, for what process it is the default, and a function that makes it and says why, or returns None."""

    process: str
    objective: str
    make: Callable[[Pilot], tuple[DSM, str] | None]


def _is_steady(pilot: Pilot) -> bool:
    """True when kernels of the linear process take few steps: nothing depends on time, or the drift is not stiff."""
    process, shape = pilot.process, pilot.shape
    if process.autonomous(shape) and process.constant_noise:
        return True
    times = process.t1 * (jnp.arange(256.0) + 0.5) / 256.0
    y = jnp.asarray(pilot.x[0])
    slopes = np.asarray(jax.vmap(lambda t: pilot.structure.jacobian(lambda y: process.f(y, t), y)[1])(times))
    # Eigenvalues have the units of a rate, whatever those of the coordinates are.
    rates = slopes if isinstance(pilot.structure, Elementwise) else np.linalg.eigvals(slopes)
    fastest = np.abs(rates).reshape(len(times), -1).max(axis=1)
    return float(fastest.mean()) * process.t1 <= MAX_STIFF


def _linear(pilot: Pilot):
    few = pilot.structure.rows <= MAX_LINEAR
    if few and is_linear(pilot.process, pilot.x, clock=pilot.clock) and _is_steady(pilot):
        objective = LocalDSM(pilot.process, schedule=FromZero())
        return objective, "DSM from s = 0: the drift is linear, so it is exact"
    return None


def _jumping(pilot: Pilot):
    if pilot.jump is not None:
        return LocalDSM(pilot.process), f"LocalDSM: it takes no derivative of the drift's jump ({pilot.jump})"
    return None


def _degenerate(pilot: Pilot):
    if not all(is_invertible(pilot.process, pilot.shape, share * pilot.process.t1) for share in (0.5, 1.0)):
        if (problem := kinetic_problem(pilot)) is not None:
            return LocalDSM(pilot.process), f"LocalDSM, antithetic pairs: {problem}"
        reason = "KineticDSM: noise enters some coordinates, and reaches the others through one derivative"
        return KineticDSM(pilot.process), reason
    return None


def _elementwise(pilot: Pilot):
    if not isinstance(pilot.structure, Elementwise):
        return None
    if isinstance(target := Tabulated.find(pilot, antithetic=True, references=None), str):
        return PathwiseDSM(pilot.process), f"PathwiseDSM, since there is no table: {target}"
    objective = DSM(pilot.process, target, clock=pilot.clock)
    return objective, "TabulatedDSM: the drift acts on each coordinate alone"


def _coupled(pilot: Pilot):
    return PathwiseDSM(pilot.process), "PathwiseDSM: the drift couples coordinates, and the noise is invertible"


CHOICES = (
    Choice("a linear drift that couples few coordinates", "DSM from s = 0, exact", _linear),
    Choice("a drift that jumps, such as sign(y)", "LocalDSM: no derivative of the jump", _jumping),
    Choice("noise in some coordinates only", "KineticDSM; LocalDSM where it reaches others indirectly", _degenerate),
    Choice("a drift of each coordinate alone", "TabulatedDSM, exact; PathwiseDSM where no table fits", _elementwise),
    Choice("a coupled drift, invertible noise", "PathwiseDSM, no linearization", _coupled),
)


def choose_objective(pilot: Pilot) -> tuple[DSM, str]:
    """The default objective for the process of a pilot, and why."""
    return next(found for choice in CHOICES if (found := choice.make(pilot)) is not None)


def make_plan(
    process: Process,
    y0,
    *,
    key: PRNGKey,
    prior=None,
    objective: AbstractObjective | None = None,
    network=None,
    batch_size: int,
    report: Callable[[str], object] = lambda text: None,
    **size,
) -> Plan:
    """The plan of a training: what was given, and the choice of the rest; `size`: of the default network.

    `report` is told what takes long.
    """
    pilot_key, network_key, prior_key = jax.random.split(key, 3)
    clock = None if objective is None else objective.times.clock
    pilot = Pilot(process, y0, key=pilot_key, clock=clock, report=report)
    if objective is None:
        objective, reason = choose_objective(pilot)
    else:
        reason = f"{type(objective).__name__}, as given"
        target = getattr(objective, "target", None)
        if isinstance(target, Adapted | Kinetic) and pilot.jump is not None:
            name = "KineticDSM" if isinstance(target, Kinetic) else "PathwiseDSM"
            raise ValueError(f"{name} derives the drift along a path, and {pilot.jump}. Use LocalDSM(process).")
    objective = objective.prepare_by(pilot, batch_size)
    if objective.averaging is not None:
        reason += f"; targets are averaged over {objective.averaging.references} starts"
    if (problem := objective.covers(pilot.x if callable(y0) else y0)) is not None:
        raise ValueError(problem)
    if callable(getattr(prior, "sample", None)):
        found = prior_mismatch(prior, pilot.ends(objective.forward), key=prior_key)
        if found is not None:
            warnings.warn(found, stacklevel=4)
    if network is not None:
        return Plan(objective, reason, network, pilot.clock, None)
    scales = pilot.marginals(objective.forward)
    make = image_network if is_image(pilot.shape) else default_network
    options = dict(key=network_key, clock=pilot.clock, t0=objective.times.t0, start=pilot.start_score, **size)
    network = make(process, pilot.shape, scales, prior, **options)
    return Plan(objective, reason, network, pilot.clock, scales)


def default_network(
    process: Process,
    shape: tuple[int, ...],
    marginals: Marginals,
    prior,
    *,
    key: PRNGKey,
    clock: Clock | None = None,
    t0: float | None = None,
    start: Callable | None = None,
    drift_basis: bool | None = None,
    **size,
) -> Score:
    """An MLP, as a residual on the score of the prior or of the Gaussian of the marginals; `size`: width, depth, ….

    With few coordinates it also sees waves of the state, and so learns sharp edges sooner. Towards a prior they fade,
    if noise enters all coordinates and so smooths all edges. `t0` and `start`: see `Score`. Where the drift tells the
    stationary score, the Gaussian goes over to it with a learned gain, unless `drift_basis` is False.
    """
    clock, few = Clock(process) if clock is None else clock, math.prod(shape) <= 4
    size = {"activation": "gelu", **size}
    mean, spread = marginals.mean[-1], marginals.std[-1]
    options: dict = dict(parameterization="residual", spread=spread, t0=t0, start=start)
    if prior is None:
        net = Framed(MLP(shape, clock, key=key, fourier=(0.25, 0.5) if few else (), **size), clock, marginals)
        relaxation = None if drift_basis is False else _relaxation(process, marginals, clock, needed=bool(drift_basis))
        return Score(net, clock, base=marginals.score, relaxation=relaxation, **options)
    if drift_basis:
        raise ValueError("drift_basis=True adds the stationary score, which is that of the given prior.")
    fading = spread if is_invertible(process, shape, 0.5 * process.t1) else None
    waves = (0.25, 0.5, 1.0, 2.0) if few else ()
    net = MLP(shape, clock, key=key, fourier=waves, spread=fading, mean=mean, std=spread, **size)
    return Score(net, clock, base=score_of(prior), **options)


def _relaxation(process: Process, marginals: Marginals, clock: Clock, *, needed: bool) -> Relaxation | None:
    """Towards the stationary score, if the drift tells it at states of the marginals."""
    found = equilibrium_score(process, marginals.typical_states())
    if not isinstance(found, str):
        return Relaxation(found, clock)
    if needed:
        raise ValueError(f"drift_basis=True needs a drift that tells the stationary score: {found}.")
    return None


def image_network(
    process: Process,
    shape: tuple[int, ...],
    marginals: Marginals,
    prior,
    *,
    key: PRNGKey,
    clock: Clock | None = None,
    t0: float | None = None,
    start: Callable | None = None,
    width: int = 128,
) -> Score:
    """A U-Net of `width` channels, halved down to four pixels (Ho et al.'s, for 32×32), as a residual on the score of
    the prior, or predicting noise."""
    # One spread for the pixels of a channel: the pilot has few images.
    pixels = tuple(range(1, len(shape)))
    spread = jnp.sqrt(jnp.mean(marginals.std[-1] ** 2, axis=pixels, keepdims=True))
    clock, spread = Clock(process) if clock is None else clock, jnp.broadcast_to(spread, shape)
    halvings = [n for n in (1, 2, 3) if all(side % 2**n == 0 and side >> n >= 4 for side in shape[-2:])]
    net = UNet(shape, clock, key=key, channels=width, levels=(1, *(2 for _ in halvings)))
    options: dict = dict(spread=spread, t0=t0, start=start)
    if prior is None:
        return Score(net, clock, **options)
    return Score(net, clock, parameterization="residual", base=score_of(prior), **options)
