"""Objectives by name: `DSM` with a target of each kind, and with what it takes."""

from ..base.errors import check_name, suggest_options
from ..exact.checks import check_range
from ..kernels.schedule import AbstractSchedule, FromZero, ScheduledPairs
from ..process.clock import Clock
from ..process.process import Process, check_process
from ..targets import AbstractForward, Adapted, Kinetic, Local, Paths, Tabulated
from ..targets.averaging import check_references
from .objective import DSM

DEFAULT_LAM = 1e-2
"""λ of local kernels, the paper's, in units of each coordinate's deviation."""
VARIANCE_REDUCTIONS = ("antithetic", "control", "none")
GONE = {
    name: 'Sums along the path are weighed for the least variance; profile="matrix" or "diagonal" says how.'
    for name in ("forgetting", "window", "exact")
}
"""Options that carried weights had, and what took their place."""


@suggest_options("prior", "times", "t0")
def LocalDSM(
    process: Process,
    lam: float | None = None,
    *,
    schedule: AbstractSchedule | None = None,
    expand: str = "t",
    ito: bool = False,
    weighting: str = "perceptual",
    variance_reduction: str = "antithetic",
    forward: AbstractForward | None = None,
    steps: int | None = None,
    pairs_per_path: int | None = None,
    references: int | None = None,
    **options,
) -> DSM:
    """Local denoising score matching: kernels over [s(t), t], by default with `∫g² = λ = 10⁻²`, in units of each
    coordinate's deviation once `prepare` (which `fit` calls) has seen the data.

        objective = LocalDSM(process, lam=1e-2)

    **Arguments:**

    - `lam` or `schedule`: s(t); a given `lam` is on `∫g²` as it is. `schedule=FromZero()` is DSM, exact for linear
      processes.
    - `expand`, `ito`: see `linearize`.
    - `variance_reduction`: "antithetic" (pairs ±ε), "control" (subtracts `s_θ(m)ᵀQŝ`) or "none".
    - `forward`: how y_s is drawn; `steps`: of the simulated path, when no other way is given.
    - `pairs_per_path`: how many times one path serves (32, or less if the batch is small).
    - `references`: of a linear process with `FromZero()`, over how many starts targets are averaged in a training; by
      default as `prepare` finds it. 1 is none but the own, as always for weighting="likelihood".
    - `options`: `prior`, `times`, `t0` of `DSM`.
    """
    check_name("variance_reduction", variance_reduction, VARIANCE_REDUCTIONS)
    if lam is not None and schedule is not None:
        raise ValueError(f"lam={lam} and schedule={schedule} exclude each other.")
    relative = lam is None and schedule is None
    if schedule is None:
        schedule = ScheduledPairs(process, DEFAULT_LAM if lam is None else lam)
    if forward is not None and steps is not None:
        raise ValueError(f"steps={steps} is for simulated paths; forward={type(forward).__name__} has its own.")
    from_zero = isinstance(schedule, FromZero)
    if from_zero and (forward is not None or steps is not None):
        raise ValueError("schedule=FromZero() starts from the data: it needs neither forward=... nor steps=... .")
    references = _references(references, weighting)
    if references not in (None, 1) and not from_zero:
        raise ValueError(f"references={references} needs kernels from the start: schedule=FromZero(), a linear drift.")
    clock = Clock(process)
    target = Local(
        process,
        schedule,
        Paths(process, steps, clock=clock) if forward is None else forward,
        expand=expand,
        ito=ito,
        antithetic=variance_reduction == "antithetic",
        relative=relative,
        references=references,
    )
    options |= dict(weighting=weighting, control=variance_reduction == "control", pairs_per_path=pairs_per_path)
    return DSM(process, target, clock=clock, **options)


@suggest_options("prior", "times", "t0", gone=GONE)
def PathwiseDSM(
    process: Process,
    *,
    profile: str | None = None,
    weighting: str = "perceptual",
    steps: int | None = None,
    gaussian: bool = False,
    pairs_per_path: int | None = None,
    **options,
) -> DSM:
    """Score matching with sums carried along the path: no linearization, small variance. Needs invertible noise.

        objective = PathwiseDSM(process)

    `prepare` (which `fit` calls) chooses how much of a sum each kick of noise keeps, for the least variance: by a
    "matrix" for coupled coordinates, or by a number for each, "diagonal"; `profile` names one. The mean of a target
    does not depend on it. Where y0 is a law with `sample` and `log_prob`, sums begin with its score, but not with
    weighting="likelihood", which is a bound for each example.

    One path serves `pairs_per_path` times. `steps`, `gaussian`: see `targets.Adapted`.
    """
    check_process(process)
    clock = Clock(process)
    target = Adapted(
        process,
        Paths(process, steps, clock=clock),
        kind=profile,
        known_start=weighting != "likelihood",
        gaussian=gaussian,
        clock=clock,
    )
    return DSM(process, target, weighting=weighting, pairs_per_path=pairs_per_path, clock=clock, **options)


@suggest_options("prior", "times", "t0", "pairs_per_path")
def KineticDSM(
    process: Process,
    window: float | None = None,
    *,
    weighting: str = "perceptual",
    steps: int | None = None,
    **options,
) -> DSM:
    """Score matching for noise in some coordinates only, which reaches the others through one derivative: positions and
    velocities, for example. No linearization, small variance.

        objective = KineticDSM(process)

    `window`, a share of the process' time (default: chosen by `prepare`, where noise is least), changes the target's
    variance, never its mean. `steps`: of the simulated path to the window's start. See `targets.Kinetic`.
    """
    check_process(process)
    clock = Clock(process)
    target = Kinetic(process, Paths(process, steps, clock=clock), window=window, clock=clock)
    return DSM(process, target, weighting=weighting, clock=clock, **options)


@suggest_options("prior", "times", "t0", "pairs_per_path")
def TabulatedDSM(
    process: Process,
    y_range: tuple[float, float] | None = None,
    *,
    weighting: str = "perceptual",
    variance_reduction: str = "antithetic",
    references: int | None = None,
    **options,
) -> DSM:
    """Denoising score matching with the exact kernel from y_0, for elementwise drifts.

        objective = TabulatedDSM(process, y_range=(-2.0, 2.0))

    Without `y_range`, `prepare` (which `fit` calls) takes it from the data. The table is built when the shape of a
    state is known: by `prepare`, or at the first draw.

    In a training, targets are averaged over `references` starts: as many as `prepare` finds worth their time, or as are
    given; 1 is none but the own. With weighting="likelihood", a bound for each example, there is no averaging.
    """
    check_name("variance_reduction", variance_reduction, ("antithetic", "none"))
    if y_range is not None:
        check_range("y_range", y_range)
    check_process(process)
    clock = Clock(process)
    references = _references(references, weighting)
    antithetic = variance_reduction == "antithetic"
    target = Tabulated(process, y_range=y_range, antithetic=antithetic, references=references, clock=clock)
    return DSM(process, target, weighting=weighting, clock=clock, **options)


def _references(references: int | None, weighting: str) -> int | None:
    """As given; 1 for bounds."""
    check_references(references)
    if weighting != "likelihood":
        return references
    if references not in (None, 1):
        raise ValueError(
            f'references={references} averages targets over starts, and weighting="likelihood" is a bound for each '
            "example, which needs the score given it. Leave references out, or take another weighting."
        )
    return 1
