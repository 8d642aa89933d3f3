"""What `fit` returns: a trained score, how it came about, and what it is good for; to be saved, and opened again.

    model.save("swimmer.autodsm")
    model = load("swimmer.autodsm")    # or load("runs/swimmer")

A process of the library is saved by its name and arguments, a numpyro law by its name and parameters, a network of the
library whole. What is the user's own, a drift, a prior, a network, is given again: `load(path, process=process)`. The
drift is compared with that of the training, at states and times that the file holds.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..base.errors import as_floating, check_count, check_key, check_number
from ..base.estimate import Estimate, over_samples
from ..base.types import PRNGKey, State, StateLike
from ..paths.initial import Law, as_start, initial_states
from ..process.process import Process
from ..run.config import Config, Fingerprint
from ..targets.marginals import Marginals

if TYPE_CHECKING:
    from ..use.findings import Report
    from ..use.observables import EntropyProduction
    from .objective import AbstractObjective


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A trained score, with how it came about."""

    score: Any
    """`score(y, t)`, the network with averaged weights."""
    last: Any
    """The same with the weights of the last step."""
    history: list[dict]
    """Metrics of every round: step, loss, grad_norm, steps_per_s."""
    config: Config
    """What was asked for."""
    step: int
    """How many steps it has been trained; fewer than `config.steps` where the run was interrupted."""
    fingerprint: Fingerprint
    """Drift and noise at some states."""
    process: Process | None
    """None where a file holds none: it was made of a drift of the user's own."""
    prior: Any = None
    """The law that the process tends to, where one was given."""
    y0: Any = None
    """The law, the sampler or the samples of the initial state; None where a file holds none."""
    scales: Marginals | None = None
    """Mean and deviation of every coordinate over time, where the training asked for them."""
    objective: "AbstractObjective | None" = None
    """What was minimized; None in a model from a file, whose `config.objective` says it in words."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a state."""
        return self.config.shape

    @property
    def t1(self) -> float:
        return self.config.t1

    def save(self, path: Path | str) -> None:
        """Write the model into one file, whole or not at all; an older file of that name is replaced."""
        from .saved import save

        save(self, Path(path))

    def export(self, path: Path | str, *, sampler: bool = False, steps: int | None = None) -> None:
        """Write the score as StableHLO, for any program that has JAX, without this library:

            exported = jax.export.deserialize(bytearray(open(path, "rb").read()))
            scores = exported.call(y, t)    # y: (n, *shape), t: (n,), float32, any n

        With `sampler`, states at t1 are carried back to data by the reversed process in `steps` (250):
        `exported.call(y, key)`, y drawn from the prior, key of two uint32.
        """
        from .export import export

        export(self, Path(path), sampler=sampler, steps=steps)

    def sample(self, n: int, *, key: PRNGKey, **options) -> Any:
        """n samples of y_0, from the prior by the reversed process; `options` are those of `autodsm.sample`."""
        from ..use.sample import sample

        prior = self._prior(options.pop("prior", None), "sample")
        return sample(self._process("sample"), self.score, prior, n, key=key, **{"shape": self.shape, **options})

    def flow(self, y0: StateLike, times: StateLike, **options) -> Array:
        """The probability flow through y0 at `times[0]`, (len(times), *shape), as `autodsm.flow`; of n states
        (n, *shape) stacked, (n, len(times), *shape)."""
        from ..use.flow import flow

        process = self._process("flow")
        return self._each(lambda y: flow(process, self.score, y, times, **options), y0, "y0")

    def velocity(self, y: StateLike, t) -> State:
        """`v = f − ½ Q s`, of one state or of n of them stacked."""
        from ..use.flow import velocity

        process = self._process("velocity")
        return self._each(lambda y: velocity(process, self.score, y, t), y, "y")

    def log_prob(self, y: StateLike, *, key: PRNGKey | None = None, **options) -> Array:
        """The model's log-density at one state, or at n of them stacked, as `autodsm.log_likelihood`."""
        from ..use.likelihood import log_likelihood

        process, prior = self._process("log_prob"), self._prior(options.pop("prior", None), "log_prob")
        return self._each(
            lambda y, k=None: log_likelihood(process, self.score, prior, y, key=k, **options), y, "y", key=key
        )

    def entropy(self, t: float, *, key: PRNGKey, n: int = 4096, y0=None, **options) -> Estimate:
        """`S = −E log q_t`, over n states that the probability flow carries to t: from y_0, where its law has a
        log_prob, or else from the prior. `options` are those of `observables.log_density`, or of `autodsm.sample`."""
        from ..use import observables
        from ..use.sample import Samples, sample

        process = self._process("entropy")
        check_number("t", t)
        check_count("n", n)
        law = as_start(self.y0 if y0 is None else y0)
        if isinstance(law, Law):
            start_key, key = jax.random.split(key)
            ys = initial_states(law, n, key=start_key)
            start = over_samples(lambda y: jnp.sum(law.law.log_prob(y)), ys)
            options = {"key": key, **options} if options.get("divergence") == "hutchinson" else options
            if t == 0:
                return observables.entropy(start)
            found = observables.log_density(process, self.score, ys, start, [0.0, t], **options)
            return observables.entropy(found.log_density[-1])
        if self.prior is None:
            raise ValueError(
                "entropy needs a law with a density to start from: the model has no prior, and its y0 has no log_prob. "
                "Give y0=law, with sample and log_prob. Rates need none: observables.entropy_rate."
            )
        options = {"shape": self.shape, "method": "ode", "log_density": True, "t0": t, **options}
        drawn = sample(process, self.score, self.prior, n, key=key, **options)
        assert isinstance(drawn, Samples)
        return observables.entropy(drawn.log_density)

    def entropy_production(self, t: float, *, key: PRNGKey, n: int = 4096, y0=None) -> "EntropyProduction":
        """Rates of entropy at t, over n simulated states, as `observables.entropy_production`."""
        from ..paths.simulate import simulate
        from ..use import observables

        process, start = self._process("entropy_production"), self.y0 if y0 is None else y0
        check_number("t", t)
        check_key(key)
        if start is None:
            raise ValueError(
                "entropy_production is over states of the process, and its file holds no y0: give y0=... ."
            )
        start_key, path_key = jax.random.split(key)
        states = initial_states(start, n, key=start_key)
        if t > 0:
            times = jnp.asarray([t], states.dtype)
            states = over_samples(lambda y, k: simulate(process, y, times, key=k)[0], states, key=path_key)
        return observables.entropy_production(process, self.score, states, t)

    def diagnose(self, y0=None, *, key: PRNGKey, **options) -> "Report":
        """Whether the score is any good, on fresh states: see `autodsm.diagnose`.

            print(model.diagnose(key=key))

        `y0`: another start than that of the training.
        """
        from ..use.diagnose import diagnose

        y0 = self.y0 if y0 is None else y0
        if y0 is None:
            raise ValueError("the model does not know the start that it was trained from: give y0=... .")
        return diagnose(self._process("diagnose"), self.score, y0, key=key, **options)

    def _process(self, what: str) -> Process:
        if self.process is None:
            raise ValueError(
                f"{what} needs the drift, which is your own and not in the file. Give it: "
                "ad.load(path, process=process)."
            )
        return self.process

    def _prior(self, given, what: str):
        if given is None and self.prior is None:
            if self.config.prior is not None:
                raise ValueError(
                    f"{what} needs the prior, {self.config.prior}, which is your own and not in the file. Give "
                    "prior=..., or ad.load(path, prior=prior)."
                )
            remedy = "a physical system is carried forwards, model.flow(y0, times)" if what == "sample" else "give one"
            raise ValueError(f"{what} needs a prior, prior=..., and this model has none: {remedy}.")
        return self.prior if given is None else given

    def _each(self, function: Callable, y: StateLike, name: str, key: PRNGKey | None = None) -> Any:
        """A function of one state, at one or at each of several."""
        y = as_floating(y, name)
        if y.shape == self.shape:
            return function(y) if key is None else function(y, key)
        if y.shape[1:] != self.shape:
            shape = ", ".join(map(str, self.shape))
            raise ValueError(
                f"{name} has shape {y.shape}; a state has shape {self.shape}, and n of them ({shape and 'n, '}{shape})."
            )
        return jax.vmap(function)(y) if key is None else jax.vmap(function)(y, jax.random.split(key, len(y)))

    def __repr__(self) -> str:
        config = self.config
        made = "a drift of its own" if self.process is None or self.process.recipe is None else self.process.recipe
        tenth = [row["loss"] for row in self.history[-max(1, len(self.history) // 10) :]]
        loss = f"loss {np.mean(tenth):.4g} (mean of the last tenth)" if tenth else "no loss yet"
        lines = [
            f"Model of {made}: states of shape {self.shape}, t from 0 to {self.t1:g}",
            f"  network    {config.network.get('name')}, {config.network.get('parameters')} trained numbers",
            f"  objective  {config.objective.get('reason')}",
            f"  training   {self.step} of {config.steps} steps of {config.batch_size} evaluations; {loss}",
            f"  prior      {type(self.prior).__name__ if self.prior is not None else 'none'}",
        ]
        return "\n".join(lines)
