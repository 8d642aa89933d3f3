"""`fit`: from a process and samples of y_0 to a trained score, in one call."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..base.calls import check_returned, shape_of
from ..base.errors import as_floating, check_count, check_flag, check_key, suggest_options
from ..base.types import PRNGKey
from ..network import Score, network_name, trainable
from ..paths.initial import LOOK, as_start, initial_states
from ..process.process import Process, check_process
from ..run.config import Config, Fingerprint, outline, sketch
from ..run.folder import locked
from ..run.watch import announce
from ..use.diagnose import poor
from .axes import check_axes, path_like
from .choose import Plan, is_image, make_plan
from .model import Model
from .objective import AbstractObjective
from .saved import begin, finish, update
from .train import Rounds, check_batch, optimizer_for, train

_LOOKED = 4
"""Examples at which a process is told from another, and as many states beside them: a changed term that vanishes at
one state does not at eight."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that training needs, checked."""

    plan: Plan
    rounds: Rounds
    optimizer: optax.GradientTransformation
    key: PRNGKey
    process: Process
    examples: np.ndarray
    record: Callable[["Setup"], Config]

    @functools.cached_property
    def config(self) -> Config:
        """The above as plain data, made when it is asked for: a dry run has no use for it."""
        return self.record(self)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """Of the process, at a few examples."""
        return Fingerprint.of(self.process, self.examples[:_LOOKED])

    @property
    def objective(self) -> AbstractObjective:
        return self.plan.objective

    @property
    def network(self):
        return self.plan.network

    @property
    def reason(self) -> str:
        return self.plan.reason

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(x.size for x in jax.tree.leaves(eqx.filter(self.network, trainable(self.network))))


def set_up(
    process: Process,
    y0,
    *,
    key: PRNGKey,
    prior=None,
    objective: AbstractObjective | None = None,
    network=None,
    steps: int = 5000,
    batch_size: int = 1024,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: float | None = None,
    ema: float = 0.999,
    width: int | None = None,
    depth: int | None = None,
    activation: str | None = None,
    drift_basis: bool | None = None,
    command: dict | None = None,
    progress: bool = False,
) -> Setup:
    """Check the arguments of `fit`, and choose what was not given; with `progress`, say what takes long."""
    check_process(process)
    check_key(key)
    check_count("steps", steps)
    y0 = as_start(y0)
    if objective is not None and not isinstance(objective, AbstractObjective):
        raise TypeError(f"objective={objective!r} must be an objective of autodsm, e.g. LocalDSM(process).")
    size = dict(width=width, depth=depth, activation=activation, drift_basis=drift_basis)
    size = {k: v for k, v in size.items() if v is not None}
    if network is not None and size:
        raise ValueError(f"{', '.join(f'{k}={v}' for k, v in size.items())} is for the default network; one was given.")
    if optimizer is not None and learning_rate is not None:
        raise ValueError(f"learning_rate={learning_rate} is for the default optimizer; one was given.")
    example_key, plan_key, train_key = jax.random.split(key, 3)
    x = _examples(process, y0, example_key)
    if prior is None and not is_image(x.shape[1:]) and (problem := path_like(process, x)) is not None:
        warnings.warn(problem, stacklevel=3)
    if is_image(x.shape[1:]) and (vain := [f"{k}={v}" for k, v in size.items() if k != "width"]):
        raise ValueError(f"{', '.join(vain)} is not for the U-Net that images get. Give a network, or width alone.")
    # What can be refused is refused before the pilot: a batch that is too small, a network that does not fit.
    check_batch(objective, steps=steps, batch_size=batch_size, ema=ema)
    if network is not None:
        _check_network(network, x[0], process)
    if optimizer is None:
        rate = 3e-3 if learning_rate is None else learning_rate
        named = {"name": "adamw", "learning_rate": rate}
        optimizer = optimizer_for(steps, learning_rate=rate)
    else:
        named = {"name": "given", "functions": outline(optimizer)}
    plan = make_plan(
        process,
        y0,
        key=plan_key,
        prior=prior,
        objective=objective,
        network=network,
        batch_size=batch_size,
        report=lambda text: announce(text, shown=progress),
        **size,
    )
    if network is not None:
        _check_hold(network, plan.objective.times.t0)
    rounds = Rounds.make(plan.objective, x[0].size, steps=steps, batch_size=batch_size, ema=ema)
    if network is None:
        _check_network(plan.network, x[0], process)

    def record(setup: Setup):
        return Config(
            shape=x.shape[1:],
            t1=process.t1,
            steps=steps,
            batch_size=batch_size,
            ema=ema,
            key=np.asarray(jax.random.key_data(key)).tolist(),
            data=sketch(x if callable(y0) else as_floating(y0)),
            objective={
                "name": type(plan.objective).__name__,
                "reason": plan.reason,
                "given": None if objective is None else outline(objective),
            },
            network={
                "name": network_name(plan.network),
                "parameters": setup.parameters,
                "outline": {"default": size} if network is None else outline(network),
            },
            optimizer=named,
            prior=None if prior is None else type(prior).__name__,
            command=command,
        )

    return Setup(plan, rounds, optimizer, train_key, process, x, record)


@suggest_options(set_up)
def fit(
    process: Process,
    y0,
    *,
    key: PRNGKey,
    out: Path | str | None = None,
    checkpoint_every: int = 1000,
    progress: bool = True,
    each_round: Callable[[int, Any], object] | None = None,
    check: bool | None = None,
    **options,
) -> Model:
    """Learn the score of a process.

        model = fit(process, y0, key=jax.random.key(0))
        model.score(y, t)

    **Arguments:**

    - `y0`: a sampler `y0(key, n)`, in JAX or numpy, an array of samples stacked along its first axis, or a law of a
      state with `sample` and `log_prob`, whose score takes noise out of the targets.
    - `out`: a folder for config.json, model.autodsm, metrics.jsonl and checkpoints, which `load` opens. If it holds an
      unfinished run of the same configuration, that run is resumed, to the same result as if it had not been
      interrupted.
    - `each_round`: called as `each_round(step, score)` every few dozen steps, with the score of the averaged weights.
    - `check`: look at the score at the end, on fresh states, and warn if it is surely poor; by default after trainings
      of 1,000 steps or more, of whose time it takes a few percent. `model.diagnose(key=key)` says more.

    and, as `options`:

    - `prior`: the stationary law, when there is one: the network then learns the difference to its score.
    - `objective`, `network`, `optimizer`: chosen when not given. Any callable pytree `(y, t) -> y` is a network.
    - `steps` (5000), `batch_size` (1024): evaluations of the network in a step.
    - `learning_rate` (3e-3): peak of the default optimizer's; `ema` (0.999): decay of the averaged weights.
    - `drift_basis`: whether the default network uses the stationary score `2 Q⁻¹ f`, by default where there is one;
      with True it is an error that there is none.
    - `width` (256), `depth` (3), `activation` ("gelu"): of the default network. For images, states (channels, height,
      width), that is a U-Net, whose `width` are its channels (128).
    """
    check_count("checkpoint_every", checkpoint_every)
    check_key(key)
    if check is not None:
        check_flag("check", check)
    y0 = as_start(y0)
    if out is not None:
        _check_repeats(y0, key)
    setup = set_up(process, y0, key=key, progress=progress, **options)
    if progress:
        print(f"states: of shape {setup.examples.shape[1:]}, one for each entry along the first axis of y0")
        print(f"objective: {setup.reason}")

    def used(network, weights):  # without dropout
        _, static = eqx.partition(network, trainable(network))
        return eqx.nn.inference_mode(eqx.combine(weights, static))

    def model_of(network, params, ema, step: int, history: list[dict]) -> Model:
        return Model(
            score=used(network, ema),
            last=used(network, params),
            history=history,
            config=setup.config,
            step=step,
            fingerprint=setup.fingerprint,
            process=process,
            prior=options.get("prior"),
            y0=y0,
            scales=setup.plan.scales,
            objective=setup.objective,
        )

    with contextlib.nullcontext() if out is None else locked(out):
        network, folder = setup.network, None if out is None else Path(out)
        first, _ = eqx.partition(network, trainable(network))
        start = model_of(network, first, first, 0, [])
        if folder is not None:
            network = begin(folder, start, network)
        try:
            state, history = train(
                setup.objective,
                network,
                y0,
                optimizer=setup.optimizer,
                rounds=setup.rounds,
                key=setup.key,
                folder=folder,
                checkpoint_every=checkpoint_every,
                progress=progress,
                each_round=each_round and (lambda step, state: each_round(step, used(network, state.ema))),
            )
        except KeyboardInterrupt:
            if folder is not None:
                update(folder, start)
            raise
        model = model_of(network, state.params, state.ema, int(state.step), history)
        if folder is not None:
            finish(folder, model)
    if setup.rounds.steps >= CHECKED if check is None else check:
        _warn_if_poor(setup, model.score, y0)
    return model


CHECKED = 1000
"""Steps from which a training is looked at when it ends: one of fewer is a trial, and compiling takes as long."""


def _warn_if_poor(setup: Setup, score, y0) -> None:
    key = jax.random.fold_in(setup.key, CHECKED)
    try:
        found = poor(setup.objective.process, score, y0, setup.objective.forward, key=key)
    except (FloatingPointError, ValueError) as error:  # a training that is done is not lost for this
        warnings.warn(f"the trained score could not be looked at: {error}", stacklevel=4)
        return
    if found is not None:
        warnings.warn(f"the trained score is poor. {found} model.diagnose(key=key) says more.", stacklevel=4)


def _check_repeats(y0, key: PRNGKey) -> None:
    """Refuse a sampler that draws by other means than its key: a run of it could not be resumed."""
    if not callable(y0):
        return
    first, second = (np.asarray(y0(key, 16)) for _ in range(2))
    if not np.array_equal(first, second, equal_nan=True):
        raise ValueError(
            "y0(key, n) returned two different draws for one key, so a run in out=... could not be resumed to the same "
            "result. Draw by the key, e.g. np.random.default_rng(np.asarray(jax.random.key_data(key)))."
        )


def _examples(process: Process, y0, key: PRNGKey) -> np.ndarray:
    """A few initial states, checked."""
    if isinstance(y0, str):
        raise TypeError(f"y0={y0!r} must be a sampler y0(key, n), or an array of samples such as np.load({y0!r}).")
    if not callable(y0) and (isinstance(y0, dict) or as_floating(y0, "y0").ndim < 1):
        raise ValueError(f"y0={y0!r} must be a sampler y0(key, n), or an array of samples along its first axis.")
    x = np.asarray(initial_states(y0, LOOK, key=key))
    if not np.isfinite(x).all() or (not callable(y0) and not np.isfinite(np.asarray(y0)).all()):
        raise ValueError("y0 holds values that are not finite.")
    if callable(y0) and (x != x[0]).any():
        other = np.asarray(initial_states(y0, LOOK, key=jax.random.fold_in(key, 1)))
        if np.array_equal(x, other):
            raise ValueError(
                "y0(key, n) returned the same states for two keys: it does not draw by its key. Write e.g. "
                "jax.random.normal(key, (n, d)), or give an array of samples instead of a function."
            )
    check_axes(process, x)
    return x


def _check_network(network, y: np.ndarray, process: Process) -> None:
    if not callable(network):
        raise TypeError(f"network={network!r} must be callable as network(y, t), for one state.")
    if isinstance(network, type):
        raise TypeError(f"network={network.__name__} is a class: give a network of it, {network.__name__}(shape, ...).")
    example = (jnp.asarray(y), jnp.asarray(process.t1, y.dtype))
    out = shape_of("network", network, *example)
    check_returned("network", out, y.shape)
    if not any(jax.tree.leaves(trainable(network))):
        raise ValueError("network has no floating arrays to train.")


def _check_hold(network, t0: float) -> None:
    """Refuse a network that is held at times where it is trained."""
    nodes = jax.tree.leaves(network, is_leaf=lambda node: isinstance(node, Score))
    held = max((node.t0 for node in nodes if isinstance(node, Score)), default=0.0)
    if held > t0 * (1 + 1e-6):
        raise ValueError(
            f"network is a Score that is held before t0={held:g}, and the objective trains it from t0={t0:g} on. Give "
            f"Score(..., t0={t0:g})."
        )
