"""Training: many steps in one compiled call, checkpoints, resumption to the same result.

A *round* of M steps draws examples, makes all of its states and targets at once, and takes M optimizer steps. The K
draws of one path go to K consecutive steps (cyclically), so that no batch holds two of them while M ≥ K. Everything
random in a round follows from the key of the run and the step at which the round starts: a resumed run repeats an
uninterrupted one bit for bit.

Draws do not depend on the weights, so those of the next round are made by another thread while this one trains: paths
are loops, which keep one core busy, and data may come from a disk.
"""

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from ..base.errors import as_floating, check_count, check_number, check_positive
from ..base.types import PRNGKey
from ..network import trainable
from ..paths.initial import initial_states
from ..run.checkpoint import Checkpoints
from ..run.watch import Metrics, interruption, progress_bar
from .objective import AbstractObjective

MAX_ROUND = 64
"""Steps of a round: twice the most draws of a path (`targets.paths.PER_PATH`), so that no batch holds two of one path
even where a round is halved to divide the steps."""
_FLOATS = 1 << 22  # numbers drawn at once, at most
_TOGETHER = 1 << 14
"""Pairs of a state and a start, times coordinates, for which draws that are averaged over starts are made at once."""


class TrainState(NamedTuple):
    params: Any
    ema: Any
    opt_state: Any
    step: Array


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How a run is cut up: `steps` in all, rounds of `round_steps`, each step `paths` examples of `pairs` draws."""

    steps: int
    round_steps: int
    paths: int
    pairs: int
    ema: float

    @classmethod
    def make(cls, objective: AbstractObjective, size: int, *, steps: int, batch_size: int, ema: float) -> "Rounds":
        """For states of `size` coordinates; `batch_size` counts evaluations of the network in a step."""
        check_batch(objective, steps=steps, batch_size=batch_size, ema=ema)
        per_draw, pairs = objective.evaluations, objective.pairs_per_path
        if pairs is None:
            raise ValueError("the objective does not know its pairs_per_path yet: call objective.prepare(y0, key=key).")
        paths = batch_size // (per_draw * pairs)
        most = _FLOATS // (4 * paths * pairs * per_draw * max(size, 1))
        most = int(np.clip(most, 1, min(MAX_ROUND, steps)))
        # Rounds of one length need one compilation, if a length nearly as long divides the steps.
        even = next((m for m in range(most, most // 2, -1) if steps % m == 0), most)
        return cls(steps, even, paths, pairs, ema)


def check_batch(objective: AbstractObjective | None, *, steps: int, batch_size: int, ema: float) -> None:
    """Refuse what no rounds can be made of, as far as the objective is known."""
    check_count("steps", steps)
    check_count("batch_size", batch_size)
    check_number("ema", ema)
    if not 0 <= ema < 1:
        raise ValueError(f"ema={ema} must be at least 0 and below 1.")
    if objective is None:
        return
    per_draw, pairs = objective.evaluations, objective.pairs_per_path or 1
    if batch_size < per_draw * pairs:
        raise ValueError(
            f"batch_size={batch_size} is too small: one path has {pairs} draws of {per_draw} evaluations. Make it at "
            f"least {per_draw * pairs}, or the objective's pairs_per_path smaller."
        )


class TrainingError(FloatingPointError):
    """The loss, or a weight of the network, is not finite any more."""


def optimizer_for(
    steps: int, *, learning_rate: float = 3e-3, warmup: int | None = None, clip: float = 1.0, weight_decay: float = 1e-4
) -> optax.GradientTransformation:
    """AdamW with clipped gradients; the rate rises over `warmup` steps and falls to zero as a cosine."""
    check_positive("learning_rate", learning_rate)
    warmup = min(200, max(1, steps // 10)) if warmup is None else warmup
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup + 1))
    return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(rate, weight_decay=weight_decay))


def initial_state(network, optimizer: optax.GradientTransformation) -> TrainState:
    params, _ = eqx.partition(network, trainable(network))
    return TrainState(params, params, optimizer.init(params), jnp.zeros((), jnp.int32))


def is_traceable(y0) -> bool:
    """True when a sampler can be compiled. One that uses numpy is called between rounds instead; so is one in which
    nothing follows from the key, since it may draw by other means, and one draw would be compiled in for good."""
    if not callable(y0):
        return True
    try:
        jaxpr = jax.make_jaxpr(lambda k: y0(k, 2))(jax.random.key(0)).jaxpr
    except Exception:  # whatever a sampler does with a tracer; called with a key, it works
        return False
    return any(jaxpr.invars[0] is used for equation in jaxpr.eqns for used in equation.invars)


def make_step(objective: AbstractObjective, network, optimizer, rounds: Rounds) -> Callable:
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
        decay = jnp.minimum(rounds.ema, (1.0 + n) / (10.0 + n))  # young averages forget faster
        ema = optax.incremental_update(params, state.ema, 1.0 - decay)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return TrainState(params, ema, opt_state, state.step + 1), (value, norm)

    return step


def make_draws(objective: AbstractObjective, rounds: Rounds, steps: int) -> Callable:
    """The compiled `(data, key, step) -> draws` of a round of `steps` that begins at `step`."""
    # The objective is closed over: checks in it look at values.
    return eqx.filter_jit(lambda data, key, step: round_draws(objective, data, key, step, rounds, steps))


def make_round(objective: AbstractObjective, network, optimizer, rounds: Rounds) -> Callable:
    """`(state, draws) -> (state, losses, gradient norms, weights finite)` of one round."""
    step = make_step(objective, network, optimizer, rounds)

    @eqx.filter_jit
    def run(state: TrainState, draws):
        state, (losses, norms) = jax.lax.scan(step, state, draws)
        return state, losses, norms, _finite(state)

    @eqx.filter_jit
    def one(state: TrainState, draws, i: Array):
        state, told = step(state, jax.tree.map(lambda leaf: leaf[i], draws))
        return state, *told, _finite(state)

    def run_apart(state: TrainState, draws):
        told = []
        for i in jnp.arange(len(jax.tree.leaves(draws)[0])):
            state, *values = one(state, draws, i)
            told.append(values)
        losses, norms, finite = map(np.array, zip(*told, strict=True))
        return state, losses, norms, finite.all()

    return run_apart if jax.default_backend() == "cpu" and _convolves(network) else run


def _convolves(network) -> bool:
    """Whether it has weights with the four axes of a convolution's kernel: gradients of those are eight times as slow
    inside a compiled loop as outside, on CPUs (XLA of jaxlib 0.10; an 8×8 U-Net: 340 against 44 ms a step)."""
    return any(np.ndim(leaf) >= 4 for leaf in jax.tree.leaves(eqx.filter(network, trainable(network))))


def _finite(state: TrainState) -> Array:
    """A weight that is lost stays lost: to look at the end of a round is enough, and finds what the last step did."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((state.params, state.ema))]))


def round_draws(objective: AbstractObjective, data, key: PRNGKey, step, rounds: Rounds, steps: int):
    """Draws of one round, (steps, paths · pairs, …). `data` is a sampler, an array of samples, or the batch itself.

    The times of every step are stratified: with u uniform in (0, 1), of times `(k + u)/pairs`, k = 0, 1, …, each of
    its paths · pairs strata holds one.

    An objective that averages targets over starts draws from members of a group of them at one time. Those go to as
    many consecutive steps, one to each, so that every step has all strata still.
    """
    _, order_key, u_key, draw_key = _keys(key, step)
    blocks, members, count = groups_of(objective, rounds, steps)
    pool, averaging = _starts(data, key, step, count), objective.averaging
    pool = pool if averaging is None else averaging.arrange(pool)
    strata = jnp.broadcast_to(jnp.arange(rounds.paths)[:, None], (rounds.paths, blocks))
    strata = jax.random.permutation(order_key, strata, axis=0, independent=True)
    u = (strata + jax.random.uniform(u_key, strata.shape)) / rounds.paths
    u = jnp.minimum(u, 1.0 - 1e-7).astype(pool.dtype).reshape(-1)

    def draw(index, key, u):
        return objective.draws_together(pool, index, rounds.paths * blocks, members, key=key, u=u)

    given = (jnp.arange(u.size), jax.random.split(draw_key, u.size), u)
    if averaging is None:
        draws = jax.vmap(draw)(*given)
    else:  # what a group needs, so often, should fit into caches
        some = max(1, _TOGETHER // (members * averaging.references * max(pool[0].size, 1)))
        draws = jax.lax.map(lambda each: draw(*each), given, batch_size=some)

    def deal(leaf):  # (paths · blocks, members, pairs, …) -> (steps, paths · pairs, …)
        step, path, pair = np.ogrid[:steps, : rounds.paths, : rounds.pairs]
        leaf = leaf.reshape(rounds.paths, blocks * members, rounds.pairs, *leaf.shape[3:])
        leaf = leaf[:, :steps]
        return leaf[path, (step - pair) % steps, pair].reshape(steps, rounds.paths * rounds.pairs, *leaf.shape[3:])

    return jax.tree.map(deal, draws)


def groups_of(objective: AbstractObjective, rounds: Rounds, steps: int) -> tuple[int, int, int]:
    """How many blocks of steps a round has, how many steps a block, and how many starts there are in all."""
    if objective.averaging is None:
        return steps, 1, steps * rounds.paths
    blocks = -(-steps // objective.averaging.references)
    return blocks, -(-steps // blocks), blocks * objective.averaging.references * rounds.paths


def _keys(key: PRNGKey, step) -> Array:
    """The keys of the round that begins at `step`: of examples, their order, u, and draws."""
    return jax.random.split(jax.random.fold_in(key, step), 4)


def _starts(data, key: PRNGKey, step, n: int) -> Array:
    return data.x if isinstance(data, Batch) else initial_states(data, n, key=_keys(key, step)[0])


class Batch(NamedTuple):
    """Examples that were drawn outside."""

    x: Array


def train(
    objective: AbstractObjective,
    network,
    y0,
    *,
    optimizer: optax.GradientTransformation,
    rounds: Rounds,
    key: PRNGKey,
    folder: Path | None = None,
    checkpoint_every: int = 1000,
    progress: bool = True,
    each_round: Callable[[int, TrainState], object] | None = None,
) -> tuple[TrainState, list[dict]]:
    """Train, from the newest checkpoint of the folder if it has one. Returns the last state and the metrics.

    Checkpoints are at ends of rounds, the first such `checkpoint_every` steps or more after the one before.
    `each_round(step, state)` is called at each end of a round.
    """
    state = initial_state(network, optimizer)
    store = None if folder is None else Checkpoints(folder / "checkpoints")
    if store is not None and store.steps():
        restored = store.restore(state)
        state = restored.state
        for skipped, reason in restored.skipped:
            told = f"checkpoint {skipped} in {folder} is damaged ({reason}); going on from step {restored.step}."
            warnings.warn(told, stacklevel=2)
    y0 = y0 if callable(y0) else as_floating(y0)
    traceable = is_traceable(y0)
    drawing = functools.lru_cache(lambda steps: make_draws(objective, rounds, steps))

    def draws_at(step: int):
        steps = min(rounds.round_steps, rounds.steps - step)
        data = y0 if traceable else Batch(_starts(y0, key, step, groups_of(objective, rounds, steps)[2]))
        return drawing(steps)(data, key, jnp.asarray(step, jnp.int32))

    run = make_round(objective, network, optimizer, rounds)
    saved = done = int(state.step)
    metrics = Metrics(None if folder is None else folder / "metrics.jsonl", done)
    with (
        interruption(enabled=store is not None) as interrupted,
        progress_bar(rounds.steps, progress, done) as report,
        contextlib.closing(ahead(draws_at, range(done, rounds.steps, rounds.round_steps))) as every_draws,
    ):
        began = time.monotonic()
        for draws in every_draws:
            new, losses, norms, finite = run(state, draws)
            losses, norms = np.asarray(losses), np.asarray(norms)
            good, steps = np.isfinite(losses) & np.isfinite(norms), len(losses)
            if not (good.all() and finite):
                first = steps - 1 if good.all() else int(np.argmin(good))
                raise TrainingError(_diagnose(objective, network, optimizer, state, y0, draws, key, rounds, first))
            state, done = new, done + steps
            rate = steps / max(time.monotonic() - began, 1e-9)
            row = {"step": done, "loss": float(losses.mean()), "grad_norm": float(norms.mean()), "steps_per_s": rate}
            metrics.add(row)
            report(done, row["loss"])
            if each_round is not None:
                each_round(done, state)
            stop = interrupted.is_set()  # looked at once: a signal from here on is for the next round
            if store is not None and (done == rounds.steps or done - saved >= checkpoint_every or stop):
                store.save(done, state)
                saved = done
            if stop:
                raise KeyboardInterrupt(
                    f"stopped at step {done} of {rounds.steps}; saved. Resume: autodsm resume {folder}"
                )
            began = time.monotonic()
    return state, metrics.rows


def ahead(make: Callable[[int], Any], items: Iterable[int]) -> Generator[Any]:
    """`make(item)` for each of the items, in order; the next one is made by another thread while this one is used."""
    config: Any = jax.config
    x64, device = config.jax_enable_x64, config.jax_default_device  # they belong to a thread

    def there(item: int):
        with jax.enable_x64(x64), jax.default_device(device):
            return jax.block_until_ready(make(item))

    maker = ThreadPoolExecutor(1)
    try:
        pending = None
        for item in items:
            following = maker.submit(there, item)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()
    finally:
        maker.shutdown(cancel_futures=True)


def _diagnose(objective, network, optimizer, state: TrainState, y0, draws, key, rounds: Rounds, first: int) -> str:
    """What went wrong at step `first` of a round, with the example that shows it best."""
    step, steps = int(state.step) + first + 1, jax.tree.leaves(draws)[0].shape[0]
    x = np.asarray(_starts(y0, key, state.step, groups_of(objective, rounds, steps)[2]))
    if (reason := objective.covers(x)) is not None:
        return f"the loss is not finite at step {step}: {reason}"
    batch = jax.tree.map(lambda leaf: leaf[first], draws)
    before = jax.tree.map(lambda leaf: leaf[:first], draws)
    state, _ = eqx.filter_jit(jax.lax.scan)(make_step(objective, network, optimizer, rounds), state, before)
    _, static = eqx.partition(network, trainable(network))
    score = eqx.combine(state.params, static)
    losses = np.asarray(eqx.filter_jit(jax.vmap(lambda draw: objective.at(score, draw)))(batch))
    worst = int(np.argmax(np.where(np.isfinite(losses), np.abs(losses), np.inf)))
    path, pair = divmod(worst, rounds.pairs)
    start = (
        x[path * steps + (first - pair) % steps] if objective.averaging is None else "one of a group"
    )  # as they were dealt
    leaves = jax.tree.leaves(jax.tree.map(lambda leaf: np.asarray(leaf[worst]), batch))
    broken = not all(np.isfinite(leaf).all() for leaf in leaves)
    shown = [v if isinstance(v, str) else np.array2string(v, threshold=8, precision=4) for v in (start, *leaves[:3])]
    example = f"y_0 = {shown[0]}; t, y and what follows = {', '.join(shown[1:])}; its loss is {losses[worst]}"
    advice = (
        "The simulated state or its target is not finite there: the drift may blow up, or the path needs more steps "
        "(steps=... of the objective)."
        if broken
        else "States and targets are finite: the optimizer diverged. Lower the learning rate, or clip gradients harder."
    )
    what = "loss is" if not np.isfinite(losses).all() else "gradient or the update of the weights is"
    return f"the {what} not finite at step {step} (worst example: {example}). {advice}"
