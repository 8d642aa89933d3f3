"""`fit`: from a process and samples of y_0 to a trained score, in one call."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._types import PRNGKey
from .data import Images
from .defaults import choose_objective, default_network, image_network
from .errors import check_count
from .marginals import Marginals
from .network import trainable
from .objective import AbstractObjective, PathwiseDSM
from .process import Process
from .record import describe, digest, fingerprint, open_run
from .simulate import LOOK, initial_states
from .structure import Elementwise
from .targets import AbstractForward, Paths
from .train import Plan, optimizer_for, train


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained score, with how it came about."""

    score: Any
    """`score(y, t)`, the network with averaged weights."""
    last: Any
    """The same with the weights of the last step."""
    objective: AbstractObjective
    history: list[dict]
    """Metrics of every round: step, loss, grad_norm, steps_per_s."""
    config: dict


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that training needs, checked."""

    objective: AbstractObjective
    reason: str
    """Why this objective."""
    network: Any
    optimizer: optax.GradientTransformation
    plan: Plan
    config: dict
    """The above as plain data."""
    key: PRNGKey

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
    command: dict | None = None,
) -> Setup:
    """Check the arguments of `fit`, and choose what was not given."""
    check_count("steps", steps)
    size = {k: v for k, v in dict(width=width, depth=depth, activation=activation).items() if v is not None}
    if network is not None and size:
        raise ValueError(f"{', '.join(f'{k}={v}' for k, v in size.items())} is for the default network; one was given.")
    if isinstance(y0, Images) and (vain := [f"{k}={v}" for k, v in size.items() if k != "width"]):
        raise ValueError(f"{', '.join(vain)} is not for the U-Net that images get. Give a network, or width alone.")
    if optimizer is not None and learning_rate is not None:
        raise ValueError(f"learning_rate={learning_rate} is for the default optimizer; one was given.")
    example_key, objective_key, network_key, pilot_key, train_key = jax.random.split(key, 5)
    x = _examples(process, y0, example_key)
    shape = x.shape[1:]
    given = objective is not None
    if objective is None:
        objective, reason = choose_objective(process, x)
    else:
        reason = f"{type(objective).__name__}, as given"
    objective = objective.for_batch(batch_size)
    # What can be refused is refused before the pilot runs: a batch that is too small, a network that does not fit.
    Plan.make(objective, math.prod(shape), steps=steps, batch_size=batch_size, ema=ema)
    if network is not None:
        _check_network(network, x[0], process)
    if optimizer is None:
        rate = 3e-3 if learning_rate is None else learning_rate
        named = {"name": "adamw", "learning_rate": rate}
        optimizer = optimizer_for(steps, learning_rate=rate)
    else:
        named = {"name": "given", "functions": describe(optimizer)}
    try:
        objective = objective.prepare(y0, key=objective_key)
    except ValueError as problem:  # a table that was not asked for may be too sharp, or of too many laws
        if given or not isinstance(process.structure_for(shape), Elementwise):
            raise
        reason = f"PathwiseDSM, since there is no table: {problem}"
        objective = PathwiseDSM(process).prepare(y0, key=objective_key)
    # Prepared, it may take another number of draws from a path.
    objective = objective.for_batch(batch_size)
    plan = Plan.make(objective, math.prod(shape), steps=steps, batch_size=batch_size, ema=ema)
    if (problem := objective.covers(x if callable(y0) else np.asarray(y0))) is not None:
        raise ValueError(problem)
    if network is None:
        forward_key, pilot_key = jax.random.split(pilot_key)
        forward, images = _forward(objective, process, y0, forward_key), isinstance(y0, Images)
        marginals = Marginals.estimate(process, y0, forward, key=pilot_key, n=64 if images else 4096)
        make: Callable = image_network if images else default_network
        network = make(process, shape, marginals, prior, key=network_key, **size)
        _check_network(network, x[0], process)
    config = {
        "process": fingerprint(process, x[:4]),
        "data": digest(x if callable(y0) else y0),
        "objective": describe(objective),
        "network": describe(network),
        "optimizer": named,
        "steps": steps,
        "batch_size": batch_size,
        "ema": ema,
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "command": command,
    }
    return Setup(objective, reason, network, optimizer, plan, config, train_key)


def fit(
    process: Process,
    y0,
    *,
    key: PRNGKey,
    out: Path | str | None = None,
    checkpoint_every: int = 1000,
    progress: bool = True,
    each_round: Callable[[int, Any], object] | None = None,
    **options,
) -> Model:
    """Learn the score of a process.

        model = fit(process, y0, key=jax.random.key(0))
        model.score(y, t)

    **Arguments:**

    - `y0`: a sampler `y0(key, n)`, in JAX or numpy, or an array of samples stacked along its first axis.
    - `out`: a folder for config.json, metrics.jsonl and checkpoints. If it holds an unfinished run of the same
      configuration, that run is resumed, to the same result as if it had not been interrupted.
    - `each_round`: called as `each_round(step, score)` every few dozen steps, with the score of the averaged weights.

    and, as `options`:

    - `prior`: the stationary law, when there is one: the network then learns the difference to its score.
    - `objective`, `network`, `optimizer`: chosen when not given. Any callable pytree `(y, t) -> y` is a network.
    - `steps` (5000), `batch_size` (1024): evaluations of the network in a step.
    - `learning_rate` (3e-3): peak of the default optimizer's; `ema` (0.999): decay of the averaged weights.
    - `width` (256), `depth` (3), `activation` ("gelu"): of the default network. For `data.Images` that is a U-Net,
      whose `width` are its channels (128).
    """
    check_count("checkpoint_every", checkpoint_every)
    if out is not None:
        _check_repeats(y0, key)
    setup = set_up(process, y0, key=key, **options)
    if progress:
        print(f"objective: {setup.reason}")
    _, static = eqx.partition(setup.network, trainable(setup.network))

    def used(weights):  # without dropout
        return eqx.nn.inference_mode(eqx.combine(weights, static))

    state, history = train(
        setup.objective,
        setup.network,
        y0,
        optimizer=setup.optimizer,
        plan=setup.plan,
        key=setup.key,
        folder=None if out is None else open_run(Path(out), setup.config),
        checkpoint_every=checkpoint_every,
        progress=progress,
        each_round=each_round and (lambda step, state: each_round(step, used(state.ema))),
    )
    score, last = used(state.ema), used(state.params)
    return Model(score, last, setup.objective, history, setup.config)


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
    if not callable(y0) and np.ndim(y0) < 1:
        raise ValueError(f"y0={y0!r} must be a sampler y0(key, n), or an array of samples along its first axis.")
    x = np.asarray(initial_states(y0, LOOK, key=key))
    if not np.isfinite(x).all() or (not callable(y0) and not np.isfinite(np.asarray(y0)).all()):
        raise ValueError("y0 holds values that are not finite.")
    process.check(jnp.asarray(x[0]))
    return x


def _forward(objective: AbstractObjective, process: Process, y0, key: PRNGKey) -> AbstractForward:
    """How the pilot draws states."""
    for name in ("target", "forward"):
        found = getattr(objective, name, None)
        if isinstance(found, AbstractForward):
            return found
    return Paths.for_process(process, y0, key=key)


def _check_network(network, y: np.ndarray, process: Process) -> None:
    if not callable(network):
        raise TypeError(f"network={network!r} must be callable as network(y, t), for one state.")
    out = eqx.filter_eval_shape(network, jnp.asarray(y), jnp.asarray(process.t1, y.dtype))
    if getattr(out, "shape", None) != y.shape:
        got = getattr(out, "shape", type(out).__name__)
        raise ValueError(
            f"network(y, t) returned shape {got} for a state of shape {y.shape}; it must return the state's."
        )
    if not any(jax.tree.leaves(trainable(network))):
        raise ValueError("network has no floating arrays to train.")
