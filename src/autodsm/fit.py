"""`fit`: from a process and samples of y_0 to a trained score, in one call.

What is not given is chosen from the process:

| the process                             | objective                                             |
|-----------------------------------------|-------------------------------------------------------|
| linear drift                            | DSM from s = 0, exact                                 |
| elementwise drift                       | TabulatedDSM, exact                                   |
| coupled drift, invertible noise         | PathwiseDSM, no linearization                         |
| coupled drift, noise in some coordinates | LocalDSM with antithetic pairs                       |
"""

import dataclasses
import hashlib
import json
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
from .clock import Clock
from .errors import check_count
from .marginals import Marginals
from .network import MLP, Frozen, Score, trainable
from .objective import DSM, AbstractObjective, LocalDSM, PathwiseDSM, TabulatedDSM
from .process import Process, check_invertible
from .run import RunFolder, check_free
from .schedule import FromZero
from .simulate import initial_states
from .structure import Dense, Elementwise
from .targets import AbstractForward, Paths
from .train import Plan, optimizer_for, train

MAX_LINEAR = 16
"""Largest number of densely coupled coordinates for which a linear process gets the exact kernel from s = 0."""


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


class Framed(eqx.Module):
    """A network that sees the state in the frame of the marginals: `net((y − m_t)/s_t, t) / s_t`, times γ(t)."""

    net: Callable
    marginals: Frozen

    def __call__(self, y, t):
        return self.net(self.marginals.value.standardize(y, t), t)


def is_linear(process: Process, x: np.ndarray) -> bool:
    """True when the drift is affine in the state, as far as midpoints of probe states show, at several times."""
    scale = float(np.std(x)) + 1.0
    rng = np.random.default_rng(0)
    a, b = (x[:1] + 3.0 * scale * rng.normal(size=(16, *x.shape[1:])) for _ in range(2))
    times = process.t1 * np.linspace(0.05, 1.0, 5)
    with jax.enable_x64(True):
        f = jax.jit(jax.vmap(jax.vmap(process.f, in_axes=(None, 0)), in_axes=(0, None)))
        ends = (np.asarray(f(jnp.asarray(v, float), times)) for v in (a, b, 0.5 * (a + b)))
        left, right, middle = ends
    bend = np.abs(left + right - 2 * middle)
    return bool(np.all(bend <= 1e-5 * np.max(np.abs(left) + np.abs(right) + 1e-30)))


def choose_objective(process: Process, x: np.ndarray, **options) -> tuple[DSM, str]:
    """The default objective for examples like `x` (n, *shape), and why."""
    shape = x.shape[1:]
    structure = process.structure_for(shape)
    small = not isinstance(structure, Dense) or math.prod(shape) <= MAX_LINEAR
    if is_linear(process, x) and small:
        return LocalDSM(process, schedule=FromZero(), **options), "DSM from s = 0: the drift is linear, so it is exact"
    if isinstance(structure, Elementwise):
        return TabulatedDSM(process, **options), "TabulatedDSM: the drift acts on each coordinate alone"
    try:
        check_invertible(process, shape, what="", remedy="")
    except ValueError:
        return LocalDSM(process, **options), "LocalDSM, antithetic pairs: noise enters only some coordinates"
    return PathwiseDSM(process, **options), "PathwiseDSM: the drift couples coordinates, and the noise is invertible"


def default_network(process: Process, shape: tuple[int, ...], marginals: Marginals, prior, *, key: PRNGKey) -> Score:
    """An MLP of three layers of 256, as a residual on the score of the prior, or of the Gaussian of the marginals."""
    clock = Clock(process)
    small = math.prod(shape) <= 4
    spread = float(jnp.sqrt(jnp.mean(marginals.std[-1] ** 2)))
    if prior is not None:
        base = jax.grad(lambda y: jnp.sum(prior.log_prob(y)))
        net = MLP(shape, clock, key=key, fourier=(0.25, 0.5, 1.0, 2.0) if small else ())
        return Score(net, clock, parameterization="residual", base=lambda y, t: base(y), spread=spread)
    net = Framed(MLP(shape, clock, key=key, fourier=(0.25, 0.5) if small else ()), Frozen(marginals))
    return Score(net, clock, parameterization="residual", base=marginals.score, spread=spread)


def fit(
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
    learning_rate: float = 2e-3,
    ema: float = 0.999,
    out: Path | str | None = None,
    checkpoint_every: int = 1000,
    progress: bool = True,
) -> Model:
    """Learn the score of a process.

        model = fit(process, y0, key=jax.random.key(0))
        model.score(y, t)

    **Arguments:**

    - `y0`: a sampler `y0(key, n)`, or an array of samples stacked along its first axis.
    - `prior`: the stationary law, when there is one: the network then learns the difference to its score.
    - `objective`, `network`, `optimizer`: chosen when not given. Any callable pytree `(y, t) -> y` is a network.
    - `batch_size`: evaluations of the network in a step.
    - `learning_rate`: peak of the default optimizer's.
    - `out`: a folder for config.json, metrics.jsonl and checkpoints. If it holds an unfinished run of the same
      configuration, that run is resumed, to the same result as if it had not been interrupted.
    """
    check_count("steps", steps)
    check_count("checkpoint_every", checkpoint_every)
    x = _examples(process, y0, key)
    shape = x.shape[1:]
    objective_key, network_key, pilot_key, train_key = jax.random.split(key, 4)
    reason = "given"
    if objective is None:
        objective, reason = choose_objective(process, x)
    if progress:
        print(f"objective: {reason}" if reason != "given" else f"objective: {type(objective).__name__}, as given")
    objective = objective.prepare(y0, key=objective_key)
    if not callable(y0) and (problem := objective.covers(np.asarray(y0))) is not None:
        raise ValueError(problem)
    if network is None:
        marginals = Marginals.estimate(process, y0, _forward(objective, process, y0, pilot_key), key=pilot_key)
        network = default_network(process, shape, marginals, prior, key=network_key)
    _check_network(network, x[0], process)
    plan = Plan.make(objective, math.prod(shape), steps=steps, batch_size=batch_size, ema=ema)
    given = optimizer is not None
    config = {
        "process": _fingerprint(process, x[:4]),
        "data": _digest(x),
        "objective": describe(objective),
        "network": describe(network),
        "optimizer": "given" if given else {"name": "adamw", "learning_rate": learning_rate},
        "steps": steps,
        "batch_size": batch_size,
        "ema": ema,
        "key": np.asarray(jax.random.key_data(key)).tolist(),
    }
    folder = None if out is None else _open(Path(out), config)
    state, history = train(
        objective,
        network,
        y0,
        optimizer=optimizer if optimizer is not None else optimizer_for(steps, learning_rate=learning_rate),
        plan=plan,
        key=train_key,
        folder=folder,
        checkpoint_every=checkpoint_every,
        progress=progress,
    )
    _, static = eqx.partition(network, trainable(network))
    score, last = eqx.combine(state.ema, static), eqx.combine(state.params, static)
    return Model(score, last, objective, history, config)


def _examples(process: Process, y0, key: PRNGKey) -> np.ndarray:
    """A few initial states, checked."""
    if not callable(y0) and np.ndim(y0) < 1:
        raise ValueError(f"y0={y0!r} must be a sampler y0(key, n), or an array of samples along its first axis.")
    x = np.asarray(initial_states(y0, 256, key=key))
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


def _open(path: Path, config: dict) -> Path:
    """The run folder: new, or that of the same run, begun before."""
    recorded = path / "config.json"
    if not recorded.exists():
        check_free(path)
        RunFolder.create(path, config)
        return path
    before = json.loads(recorded.read_text())
    now = json.loads(json.dumps(config))
    if differences := list(_differences(before.get("fit", before), now)):
        raise ValueError(
            f"{path} holds a run of another configuration:\n  "
            + "\n  ".join(differences)
            + "\nName another folder, or "
            "use the configuration of that run."
        )
    return path


def _differences(before, now, where: str = ""):
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{where}.{name}" if where else name)
    elif before != now:
        yield f"{where}: {before!r} there, {now!r} here"


def describe(tree) -> Any:
    """A module as plain data: names, numbers, and a digest for each array."""
    if isinstance(tree, eqx.Module):
        values = {name: describe(getattr(tree, name)) for name in tree.__dataclass_fields__ if name != "process"}
        return {"type": type(tree).__name__, **values}
    if isinstance(tree, jax.Array | np.ndarray):
        return float(tree) if tree.ndim == 0 else f"{tree.dtype}{list(tree.shape)} {_digest(tree)}"
    if isinstance(tree, list | tuple):
        return [describe(v) for v in tree]
    if isinstance(tree, dict):
        return {str(k): describe(v) for k, v in tree.items()}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    return getattr(tree, "__qualname__", type(tree).__name__)


def _digest(values) -> str:
    return hashlib.sha256(np.ascontiguousarray(np.asarray(values)).tobytes()).hexdigest()[:12]


def _fingerprint(process: Process, x: np.ndarray) -> dict:
    """What tells one process from another: its span, and drift and noise at some states and times."""
    times = [0.25 * process.t1, 0.75 * process.t1]
    drift = [np.asarray(process.f(jnp.asarray(y), t), float) for y in x for t in times]
    noise = [np.asarray(process.g(t), float) for t in times]
    return {"t1": process.t1, "drift": _digest(np.round(drift, 5)), "noise": _digest(np.round(noise, 5))}
