"""Training: many steps in one compiled call, checkpoints, resumption to the same result.

A *round* of M steps draws examples, makes all of its states and targets at once, and takes M optimizer steps. The K
draws of one path go to K consecutive steps (cyclically), so that no batch holds two of them while M ≥ K. Everything
random in a round follows from the key of the run and the step at which the round starts: a resumed run repeats an
uninterrupted one bit for bit.
"""

import contextlib
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ._types import PRNGKey
from .checkpoint import Checkpoints
from .errors import check_count, check_positive
from .network import trainable
from .objective import AbstractObjective
from .simulate import initial_states

MAX_ROUND = 64
_FLOATS = 1 << 22  # numbers drawn at once, at most


class TrainState(NamedTuple):
    params: Any
    ema: Any
    opt_state: Any
    step: Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run is cut up: `steps` in all, rounds of `round_steps`, each step `paths` examples of `pairs` draws."""

    steps: int
    round_steps: int
    paths: int
    pairs: int
    ema: float

    @classmethod
    def make(cls, objective: AbstractObjective, size: int, *, steps: int, batch_size: int, ema: float) -> "Plan":
        """For states of `size` coordinates; `batch_size` counts evaluations of the network in a step."""
        check_count("steps", steps)
        check_count("batch_size", batch_size)
        if not 0 <= ema < 1:
            raise ValueError(f"ema={ema} must be at least 0 and below 1.")
        per_draw, pairs = objective.evaluations, objective.pairs_per_path
        if batch_size < per_draw * pairs:
            raise ValueError(
                f"batch_size={batch_size} is too small: one path has {pairs} draws of {per_draw} evaluations. Make it "
                f"at least {per_draw * pairs}, or the objective's pairs_per_path smaller."
            )
        paths = batch_size // (per_draw * pairs)
        most = _FLOATS // (4 * paths * pairs * per_draw * max(size, 1))
        most = int(np.clip(most, 1, min(MAX_ROUND, steps)))
        # Rounds of one length need one compilation, if a length nearly as long divides the steps.
        even = next((m for m in range(most, most // 2, -1) if steps % m == 0), most)
        return cls(steps, even, paths, pairs, ema)


class TrainingError(FloatingPointError):
    """The loss is not finite any more."""


def optimizer_for(
    steps: int, *, learning_rate: float = 2e-3, warmup: int | None = None, clip: float = 1.0, weight_decay: float = 1e-4
) -> optax.GradientTransformation:
    """AdamW with clipped gradients; the rate rises over `warmup` steps and falls to zero as a cosine."""
    check_positive("learning_rate", learning_rate)
    warmup = min(200, max(1, steps // 10)) if warmup is None else warmup
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1))
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, b2=0.99, weight_decay=weight_decay))


def initial_state(network, optimizer: optax.GradientTransformation) -> TrainState:
    params, _ = eqx.partition(network, trainable(network))
    return TrainState(params, params, optimizer.init(params), jnp.zeros((), jnp.int32))


def is_traceable(y0) -> bool:
    """True when a sampler can be compiled; one that uses numpy is called between rounds instead."""
    if not callable(y0):
        return True
    try:
        jax.eval_shape(lambda k: y0(k, 2), jax.random.key(0))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, TypeError):
        return False
    return True


def make_step(objective: AbstractObjective, network, optimizer, plan: Plan) -> Callable:
    """`(state, draws) -> (state, (loss, gradient norm))`, one optimizer step."""
    _, static = eqx.partition(network, trainable(network))

    def loss(params, draws):
        score = eqx.combine(params, static)
        return jnp.mean(jax.vmap(lambda draw: objective.at(score, draw))(draws))

    def step(state: TrainState, draws):
        value, grads = jax.value_and_grad(loss)(state.params, draws)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        n = state.step.astype(jnp.float32)
        decay = jnp.minimum(plan.ema, (1.0 + n) / (10.0 + n))  # young averages forget faster
        ema = optax.incremental_update(params, state.ema, 1.0 - decay)
        return TrainState(params, ema, opt_state, state.step + 1), (value, optax.global_norm(grads))

    return step


def make_round(objective: AbstractObjective, network, optimizer, plan: Plan, steps: int) -> Callable:
    """The compiled function `(state, data, key) -> (state, losses, gradient norms)` of one round of `steps`."""
    step = make_step(objective, network, optimizer, plan)

    @eqx.filter_jit
    def run(state: TrainState, data, key):
        draws = round_draws(objective, data, key, state.step, plan, steps)
        state, (losses, norms) = jax.lax.scan(step, state, draws)
        return state, losses, norms

    return run


def round_draws(objective: AbstractObjective, data, key: PRNGKey, step, plan: Plan, steps: int):
    """Draws of one round, (steps, paths · pairs, …). `data` is a sampler, an array of samples, or the batch itself."""
    data_key, order_key, u_key, draw_key = jax.random.split(jax.random.fold_in(key, step), 4)
    n = steps * plan.paths
    x = data.x if isinstance(data, Batch) else initial_states(data, n, key=data_key)
    u = (jax.random.permutation(order_key, n) + jax.random.uniform(u_key, (n,))) / n
    u = jnp.minimum(u, 1.0 - 1e-7).astype(x.dtype)
    draws = jax.vmap(lambda x, k, u: objective.draws(x, key=k, u=u))(x, jax.random.split(draw_key, n), u)

    def deal(leaf):  # (paths · steps, pairs, …) -> (steps, paths · pairs, …)
        leaf = leaf.reshape(plan.paths, steps, plan.pairs, *leaf.shape[2:])
        moved = [jnp.roll(leaf[:, :, k], k, axis=1) for k in range(plan.pairs)]
        return jnp.moveaxis(jnp.stack(moved, axis=2), 1, 0).reshape(steps, plan.paths * plan.pairs, *leaf.shape[3:])

    return jax.tree.map(deal, draws)


class Batch(NamedTuple):
    """Examples that were drawn outside."""

    x: Array


def train(
    objective: AbstractObjective,
    network,
    y0,
    *,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    key: PRNGKey,
    folder: Path | None = None,
    checkpoint_every: int = 1000,
    progress: bool = True,
) -> tuple[TrainState, list[dict]]:
    """Train, from the newest checkpoint of the folder if it has one. Returns the last state and the metrics."""
    state, history = initial_state(network, optimizer), []
    store = None if folder is None else Checkpoints(folder / "checkpoints")
    log = None if folder is None else folder / "metrics.jsonl"
    if store is not None and store.steps():
        restored = store.restore(state)
        state = restored.state
        for skipped, reason in restored.skipped:
            print(f"checkpoint {skipped} is damaged ({reason}); going on from step {restored.step}.")
        history = _read_metrics(log, restored.step)
    traceable = is_traceable(y0)
    rounds: dict[int, Callable] = {}
    saved = done = int(state.step)
    with _interruption(enabled=store is not None) as interrupted, _progress(plan.steps, progress, done) as report:
        while done < plan.steps:
            steps = min(plan.round_steps, plan.steps - done)
            if steps not in rounds:
                rounds[steps] = make_round(objective, network, optimizer, plan, steps)
            data = y0 if traceable else _draw_outside(y0, key, done, steps * plan.paths)
            began = time.monotonic()
            new, losses, norms = rounds[steps](state, data, key)
            losses, norms = np.asarray(losses), np.asarray(norms)
            if not (np.isfinite(losses).all() and np.isfinite(norms).all()):
                first = int(np.argmin(np.isfinite(losses) & np.isfinite(norms)))
                raise TrainingError(_diagnose(objective, network, optimizer, state, data, key, plan, steps, first))
            state, done = new, done + steps
            rate = steps / max(time.monotonic() - began, 1e-9)
            row = {"step": done, "loss": float(losses.mean()), "grad_norm": float(norms.mean()), "steps_per_s": rate}
            history.append(row)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            report(done, row["loss"])
            if store is not None and (done == plan.steps or done - saved >= checkpoint_every or interrupted.is_set()):
                store.save(done, state)
                saved = done
            if interrupted.is_set() and done < plan.steps:
                raise KeyboardInterrupt(
                    f"stopped at step {done} of {plan.steps}; saved. Resume: autodsm resume {folder}"
                )
    return state, history


def _draw_outside(y0, key, step: int, n: int) -> Batch:
    data_key = jax.random.split(jax.random.fold_in(key, step), 4)[0]
    return Batch(initial_states(y0, n, key=data_key))


def _diagnose(objective, network, optimizer, state: TrainState, data, key, plan: Plan, steps: int, first: int) -> str:
    """What went wrong at step `first` of a round, with the example that shows it best."""
    step = int(state.step) + first
    n = steps * plan.paths
    x = (
        data.x
        if isinstance(data, Batch)
        else initial_states(data, n, key=jax.random.split(jax.random.fold_in(key, state.step), 4)[0])
    )
    if (reason := objective.covers(np.asarray(x))) is not None:
        return f"step {step}: {reason}"
    draws = eqx.filter_jit(round_draws)(objective, data, key, state.step, plan, steps)
    batch = jax.tree.map(lambda leaf: leaf[first], draws)
    before = jax.tree.map(lambda leaf: leaf[:first], draws)
    state, _ = eqx.filter_jit(jax.lax.scan)(make_step(objective, network, optimizer, plan), state, before)
    _, static = eqx.partition(network, trainable(network))
    score = eqx.combine(state.params, static)
    losses = np.asarray(eqx.filter_jit(jax.vmap(lambda draw: objective.at(score, draw)))(batch))
    worst = int(np.argmax(np.where(np.isfinite(losses), np.abs(losses), np.inf)))
    leaves = jax.tree.leaves(jax.tree.map(lambda leaf: np.asarray(leaf[worst]), batch))
    broken = not all(np.isfinite(leaf).all() for leaf in leaves)
    example = "; ".join(np.array2string(leaf, threshold=8, precision=4) for leaf in leaves[:3])
    advice = (
        "The simulated state or its target is not finite there: the drift may blow up, or the path needs more steps "
        "(steps=... of the objective)."
        if broken
        else "States and targets are finite: the optimizer diverged. Lower the learning rate, or clip gradients harder."
    )
    shown = f"worst example: t; y; target = {example}; its loss is {losses[worst]}"
    return f"the loss is not finite at step {step} ({shown}). {advice}"


def _read_metrics(log: Path | None, step: int) -> list[dict]:
    """Rows up to `step`; later ones, of steps that will be taken again, are dropped from the file too."""
    if log is None or not log.exists():
        return []
    rows = []
    for line in log.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line cut short by a kill
            rows.append(json.loads(line))
    rows = [row for row in rows if row["step"] <= step]
    partial = log.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(log)
    return rows


@contextlib.contextmanager
def _interruption(*, enabled: bool) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set while the block runs; a second one acts at once."""
    event = threading.Event()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield event
        return

    def on_signal(number, frame):
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(steps: int, shown: bool, done: int) -> Iterator[Callable[[int, float], None]]:
    if not shown:
        yield lambda done, loss: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} steps/s"),
        TimeRemainingColumn(),
    )
    began, first = time.monotonic(), done
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=steps, completed=done, loss="…", rate="…")

        def report(done: int, loss: float) -> None:
            rate = (done - first) / max(time.monotonic() - began, 1e-9)
            bar.update(task, completed=done, loss=f"{loss:.4g}", rate=f"{rate:.0f}")

        yield report
