"""Bounds of the likelihood over λ: local-DSM parts from implicit score matching, the exact targets do not.

The checkerboard under logistic Langevin dynamics, where all is known: the score, and the log-likelihood of the law at
δ = 0.01, of which each method's value is a bound that the exact score makes tight but for the prior. What differs
between the rows is the target alone. The linearized kernel from s to t, `∫_s^t g² = λ`, has not quite the score as its
mean, so that its value is no bound any more as λ grows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import plot
from ..data import checkerboard
from ..estimate import Estimate, estimate, over_samples
from ..likelihood import ELBO
from ..priors import LinearBeta, langevin
from ..products import checkerboard as exact_checkerboard
from ..run import RunFolder
from ..simulate import simulate

DELTA = 0.01
LAMBDAS = (0.001, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0)


def run(folder: RunFolder, *, quick: bool = False, seed: int = 0) -> dict:
    console = Console()
    n, draws, lambdas = (2_000, 64, (0.001, 2.0)) if quick else (40_000, 128, LAMBDAS)
    prior = dist.Logistic(0.0, 1.0)
    process = langevin(prior, LinearBeta(0.1, 10.0))
    exact = exact_checkerboard(process, np.geomspace(DELTA, 1.0, 60 if quick else 200), cells=2000 if quick else 4000)

    def score(y, t):
        found = exact.score_at(y, t)
        return jnp.where(jnp.isfinite(found), found, -jnp.tanh(0.5 * y))  # beyond the grid, where about no state is

    start_key, path_key, *keys = jax.random.split(jax.random.key(seed), 5 + len(lambdas))
    paths = lambda x, k: simulate(process, x, jnp.array([DELTA]), key=k, tol=1e-4)[0]  # noqa: E731
    y = over_samples(paths, np.asarray(checkerboard(start_key, n)), key=path_key)
    truth = over_samples(lambda y: exact.log_density(y, 0), y)

    methods: dict[str, dict] = {"ISM": dict(kind="ism")}
    methods |= {f"local-DSM, λ = {lam:g}": dict(kind="local-dsm", lam=lam) for lam in lambdas}
    methods |= {
        "pathwise": dict(kind="pathwise", forgetting=1.0),
        "tabulated": dict(kind="tabulated", y_range=(-3.0, 3.0), shape=(2,)),
    }
    gaps: dict[str, Estimate] = {}
    for (name, options), key in zip(track(methods.items(), description="bounds"), keys, strict=True):
        bound = ELBO(process, prior, t0=DELTA, draws=draws, decoder=False, **options)
        values = over_samples(lambda x, k, bound=bound: bound(score, x, key=k), y, key=key, chunk=2048)
        gaps[name] = estimate(values - truth)

    table = Table("bound", "value − log q, nats", "standard error", title=f"Checkerboard, E log q = {truth.mean():.4f}")
    for name, gap in gaps.items():
        table.add_row(name, f"{gap.value:+.4f}", f"{gap.stderr:.4f}")
    console.print(table)
    local = [gaps[f"local-DSM, λ = {lam:g}"] for lam in lambdas]
    flat = {name: gaps[name] for name in ("ISM", "pathwise", "tabulated")}
    curves = {"local-DSM": (np.array([g.value for g in local]), np.array([g.stderr for g in local]))}
    ones = np.ones(len(lambdas))
    curves |= {name: (gap.value * ones, gap.stderr * ones) for name, gap in flat.items()}
    figure = plot.over_parameter(np.array(lambdas), curves, xlabel="λ", ylabel="value − exact log-likelihood, nats")
    console.print(f"Figure: {folder.save_figure('lambda-sweep', figure)}", soft_wrap=True)
    return {
        "delta": DELTA,
        "examples": n,
        "draws": draws,
        "log_likelihood": float(truth.mean()),
        "lambdas": list(lambdas),
        "gap": {name: gap._asdict() for name, gap in gaps.items()},
    }
