"""Error of the local mean and variance, with s_λ(t) and with a constant gap in time.

The paper's figure on scheduled pairs: Langevin dynamics towards ½N(−1,½) + ½N(1,½) with β = 0.1 + 9.9t, started on the
checkerboard. The kernel from y_s to y_t is compared with a fine simulation of y_t given y_s. With ∫g² = λ = 0.05 on
[s, t] the error is nearly the same at all t; with s = t − 0.05 it grows with β.

The simulated moments are estimated as differences to the linearized process driven by the same noise, whose own
moments follow from noiseless recursions: what is left to average is the linearization error itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

from ..base import plot
from ..data import checkerboard
from ..kernels.gaussian import transition
from ..kernels.linearize import linearize
from ..kernels.schedule import ConstantGap, ScheduledPairs
from ..paths.simulate import simulate
from ..process.priors import LinearBeta, langevin
from ..process.process import Process
from .local_kernels import prior
from .shared.experiment import Experiment, Grid, Trials, curve, over_seeds, written
from .shared.verdict import AGREES, CANNOT_TELL, DIFFERS, jointly, opening, verdict

STEPS = 64
SCHEDULES = ("scheduled, λ = 0.05", "constant gap, s = t − 0.05")
QUANTITIES = ("local mean", "local variance")


def true_moments(process: Process, y_s, s, t, *, n: int, key):
    """Mean and variance of y_t given y_s, from n fine paths of STEPS Heun steps."""
    affine = linearize(process, y_s, s)
    h = (t - s) / STEPS

    def heun(drift, u, tau, noise):
        f = drift(u, tau)
        return u + 0.5 * h * (f + drift(u + h * f + noise, tau + h)) + noise

    def exact(u, tau):
        return process.drift(y_s + u, tau)

    def linear(u, tau):
        A, b = affine.coefficients(tau)
        return A * u + b

    def step(carry, inputs):
        u, v, m, p = carry
        i, key = inputs
        tau = s + i * h
        # Antithetic pairs: half the paths mirror the noise of the other half.
        half = jax.random.normal(key, (n // 2, *y_s.shape))
        noise = process.g(tau + 0.5 * h) * jnp.sqrt(h) * jnp.concatenate([half, -half])
        (A0, _), (A1, _) = affine.coefficients(tau), affine.coefficients(tau + h)
        growth, inherited = 1 + 0.5 * h * (A0 + A1 + h * A1 * A0), 1 + 0.5 * h * A1
        u = jax.vmap(lambda u, w: heun(exact, u, tau, w))(u, noise)
        v = jax.vmap(lambda v, w: heun(linear, v, tau, w))(v, noise)
        p = growth**2 * p + inherited**2 * h * process.g(tau + 0.5 * h) ** 2
        return (u, v, heun(linear, m, tau, 0.0), p), None

    zeros = jnp.zeros((n, *y_s.shape))
    start = (zeros, zeros, jnp.zeros(y_s.shape), jnp.zeros(y_s.shape))
    inputs = (jnp.arange(STEPS), jax.random.split(key, STEPS))
    (u, v, m, p), _ = jax.lax.scan(step, start, inputs)
    mean = m + jnp.mean(u - v, axis=0)
    return y_s + mean, p + jnp.mean((u - mean) ** 2 - (v - m) ** 2, axis=0)


def kernel_errors(process: Process, schedule, times, *, outer: int, inner: int, key, label: str = ""):
    """Root mean square error of mean and variance over `outer` states y_s, (times,) each, with standard errors."""
    start_key, path_key, inner_key = jax.random.split(key, 3)
    x = checkerboard(start_key, outer)

    def one(x, path_key, inner_key, s, t):
        y_s = simulate(process, x, s[None], key=path_key)[0]
        kernel = transition(process, y_s, s, t)
        mean, variance = true_moments(process, y_s, s, t, n=inner, key=inner_key)
        return (kernel.mean - mean) ** 2, (kernel.variance() - variance) ** 2

    @jax.jit
    def at(t):
        keys = jax.random.split(path_key, outer), jax.random.split(inner_key, outer)
        squares = jax.lax.map(lambda z: one(z[0], z[1], z[2], schedule(t), t), (x, *keys), batch_size=32)
        means = jnp.stack([jnp.mean(e) for e in squares])
        stderrs = jnp.stack([jnp.std(e) for e in squares]) / np.sqrt(2 * outer)
        return jnp.sqrt(means), 0.5 * stderrs / jnp.sqrt(means)

    found = [jax.device_get(at(jnp.asarray(t))) for t in track(times, description=label)]
    values, stderrs = (np.stack(x) for x in zip(*found, strict=True))
    return values, stderrs


def trial(part: str, *, quick: bool, seed: int) -> dict:
    times = np.linspace(0.1, 1.0, 4 if quick else 10)
    outer, inner = (64, 256) if quick else (512, 512)
    process = langevin(prior(), LinearBeta(0.1, 10.0))
    schedules = dict(zip(SCHEDULES, (ScheduledPairs(process, 0.05), ConstantGap(0.05)), strict=True))
    key = jax.random.key(seed)
    found = {
        name: kernel_errors(process, schedule, times, outer=outer, inner=inner, key=key, label=name)
        for name, schedule in schedules.items()
    }
    rms, errors = (
        {name: {q: pair[k][:, i] for i, q in enumerate(QUANTITIES)} for name, pair in found.items()} for k in (0, 1)
    )
    return {"times": times, "outer_states": outer, "inner_paths": inner, "rms_error": rms, "stderr": errors}


def combine(trials: Trials) -> dict:
    found = trials["all"]
    about = {name: found[0][name] for name in ("times", "outer_states", "inner_paths")}
    rms = {
        name: {q: over_seeds([each["rms_error"][name][q] for each in found]) for q in QUANTITIES} for name in SCHEDULES
    }

    if len(found) == 1:
        for name, of_name in rms.items():
            for q in QUANTITIES:
                of_name[q]["stderr"] = found[0]["stderr"][name][q]  # over states

    def ratios(of) -> dict:  # of(errors with s_λ, errors with the constant gap), of every seed
        def each(q, trial):
            return of(*(np.array(trial["rms_error"][name][q]) for name in SCHEDULES))

        return {q: over_seeds([each(q, trial) for trial in found]) for q in QUANTITIES}

    return {
        **about,
        "rms_error": rms,
        "ratio_at_t1": ratios(lambda scheduled, gap: gap[-1] / scheduled[-1]),
        "spread_scheduled": ratios(lambda scheduled, gap: scheduled.max() / scheduled.min()),
        "growth_constant_gap": ratios(lambda scheduled, gap: gap[-1] / gap[0]),
    }


def figures(trials: Trials, numbers: dict) -> dict[str, Figure]:
    rows = {q: {name: curve(numbers["rms_error"][name][q]) for name in SCHEDULES} for q in QUANTITIES}
    labels = {"local mean": "rms error of m", "local variance": "rms error of σ²"}
    return {"mean-error": plot.errors_over_time(np.array(numbers["times"]), rows, ylabels=labels)}


def report(numbers: dict, seeds: int) -> list[str | Grid]:
    rows = [
        [q, *(written(numbers[name][q]["value"], numbers[name][q]["stderr"], digits=3) for name in _COLUMNS)]
        for q in QUANTITIES
    ]
    grid = Grid("The error of the kernel's moments", ("quantity", *_COLUMNS.values()), rows)
    spread, growth = (
        max(numbers[name][q]["value"] for q in QUANTITIES) for name in ("spread_scheduled", "growth_constant_gap")
    )
    claims = {"spread_scheduled": (0.0, _MATTERS), "growth_constant_gap": (_MATTERS, np.inf)}
    found = jointly(
        verdict(numbers[name][q]["value"], numbers[name][q]["stderr"], seeds, claim=claim, comparisons=4)
        for name, claim in claims.items()
        for q in QUANTITIES
    )
    factors = f"it varies by a factor of {spread:.2g} over t, and grows by one of up to {growth:.2g}"
    claim = {
        AGREES: "the error is flat in t with s_λ, and grows with a constant gap in time",
        DIFFERS: f"where the error is flat in t with s_λ, and grows with a constant gap in time: {factors}",
        CANNOT_TELL: "whether the error is flat in t with s_λ, and grows with a constant gap in time, as the paper "
        f"says: {factors}",
    }[found]
    return [grid, f"{opening(found, seeds, claim)}."]


_MATTERS = 2.0
"""Errors within this factor of each other are flat in t, where a constant gap makes a hundredfold of them."""


_COLUMNS = {
    "spread_scheduled": "with s_λ: largest over smallest in t",
    "growth_constant_gap": "with s = t − 0.05: growth from t = 0.1 to 1",
    "ratio_at_t1": "the second over the first, t = 1",
}
EXPERIMENT = Experiment(trial, combine, figures, report, seeds=3)
