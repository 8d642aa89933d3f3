"""Cases of `fuzz.py`: what a score is good for, with the exact score of a linear process."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from fuzz_cases import GAUSSIAN, SMALL, Case, case, key_of, moments_off, off, pick, typed
from fuzz_processes import Made, random_process
from scipy.stats import wasserstein_distance

import autodsm as ad
from autodsm.base.estimate import Estimate


def _gaussian(rng, **options) -> tuple[Made, Any]:
    made = random_process(rng, kinds=GAUSSIAN, shapes=SMALL, noise=("number", "function", "diagonal"), **options)
    return made, made.marginals()


def log_normal(mean, cov, u) -> np.ndarray:
    """log N(u; mean, cov) at each row."""
    off_mean = np.atleast_2d(u) - mean
    squares = np.einsum("ni,ij,nj->n", off_mean, np.linalg.inv(cov), off_mean)
    return -0.5 * (squares + np.linalg.slogdet(2 * math.pi * np.asarray(cov))[1])


def _prior(made: Made) -> dist.Distribution:
    mean, cov = made.exact(1.0)
    return dist.MultivariateNormal(jnp.asarray(made.L * mean, float), jnp.asarray(made.L**2 * cov, float))


@case
def reference(rng) -> Case:
    made = random_process(rng, kinds=("linear", "linear in time", "kinetic", "stiff", "coupled"), shapes=SMALL)
    tau = float(rng.uniform(0.05, 1.0))

    def call(process, mean, cov, t, key):
        exact = ad.reference.gaussian_marginals(process, mean, cov)
        m, P = exact.moments(t)
        return m, P, exact.score(jnp.asarray(m).reshape(np.shape(mean)), t), exact.sample(key, 8, t)

    def check(found):
        m, P = made.exact(tau)
        std = np.sqrt(np.diag(P))
        scale = np.outer(std, std)
        apart = off(made.natural(found[0]).ravel() / std, m / std, tol=1e-3 * (1 + np.abs(m / std).max()))
        return apart or off(np.asarray(found[1], float) / made.L**2 / scale, P / scale, tol=2e-3)

    mean, cov = made.L * made.mean.reshape(made.shape), (made.L * made.std) ** 2 * np.eye(made.size)
    given = dict(process=made.process, mean=mean, cov=cov, t=tau * made.T, key=key_of(rng))
    return Case("", call, given, check if made.linear else None)


@case
def flow(rng) -> Case:
    made, exact = _gaussian(rng)
    starts = made.states(rng, 256)

    def call(process, score, y0, times, tol):
        if np.ndim(y0) == 0:
            return ad.flow(process, score, y0, times, tol=tol)
        return jax.vmap(lambda y: ad.flow(process, score, y, times, tol=tol))(jnp.asarray(y0))[:, -1]

    def check(ys):
        return moments_off(made, ys, 1.0, tol=0.02)

    times = np.array([0.0, 0.5, 1.0]) * made.T
    return Case("", call, dict(process=made.process, score=exact.score, y0=starts, times=times, tol=1e-5), check)


@case
def sample(rng) -> Case:
    made, exact = _gaussian(rng)
    method = pick(rng, "sde", "ode")
    steps, tol = pick(rng, (None, None), (100, None)) if method == "sde" else (None, pick(rng, None, 1e-4))
    t0 = 0.02 * made.T
    given = dict(
        process=made.process, score=exact.score, prior=_prior(made), n=256, key=key_of(rng), shape=made.shape,
        method=method, steps=steps, tol=tol, corrector=pick(rng, 0, 0, 1) if method == "sde" else 0, t0=t0,
    )  # fmt: skip

    def check(ys):
        # Heun's steps near a sharp start are off by some percent, and the score of single precision with them.
        return moments_off(made, ys, 0.02, tol=0.1)

    return Case("", lambda key, **a: ad.sample(**a, key=key), given, check if made.kind != "kinetic" else None)


@case
def log_likelihood(rng) -> Case:
    made, exact = _gaussian(rng)
    x, t0 = made.states(rng, 1)[0], 0.01 * made.T

    def check(value):
        mean, cov = made.exact(0.01)
        log_q = log_normal(mean, cov, made.natural(x).ravel())[0] - made.size * math.log(made.L)
        return off(value, log_q, tol=0.02 + 1e-3 * abs(log_q))

    given = dict(process=made.process, score=exact.score, prior=_prior(made), x=typed(rng, x), t0=t0, tol=1e-5)
    return Case("", ad.log_likelihood, given, check)


@case
def ELBO(rng) -> Case:
    made, exact = _gaussian(rng, units=0.1)
    xs = made.states(rng, 48)
    kind = pick(rng, "ism", "local-dsm", "pathwise", "tabulated")
    options: dict[str, Any] = {} if kind == "tabulated" else {"steps": 32}
    if kind == "tabulated":
        reach = float(4 * made.L * (np.abs(made.mean).max() + made.std))
        options = dict(y_range=(-reach, reach), shape=made.shape)

    def call(process, score, prior, xs, key, kind, draws, t0, **options):
        bound = ad.ELBO(process, prior, kind=kind, draws=draws, t0=t0, **options)
        return bound.values(score, xs, key=key)

    def check(values):
        log_q = log_normal(made.mean, made.std**2 * np.eye(made.size), made.natural(xs)) - made.size * math.log(made.L)
        gaps = np.asarray(values) - log_q  # of mean zero, but for the error of 32 steps
        return off(gaps.mean(), 0.0, stderr=gaps.std() / math.sqrt(len(gaps)), tol=0.15 * made.size)

    given = dict(
        process=made.process, score=exact.score, prior=_prior(made), xs=xs, key=key_of(rng), kind=kind, draws=8,
        t0=0.001 * made.T, **options,
    )  # fmt: skip
    return Case("", call, given, check if made.kind != "kinetic" else None)


@case
def bits_per_dim(rng) -> Case:
    value, levels, width = float(rng.normal()), int(rng.integers(2, 257)), float(rng.uniform(0.5, 3.0))
    shape = pick(rng, (2,), (1, 8, 8))
    given = dict(log_density=Estimate(value, 0.1), shape=shape, levels=levels, width=width)

    def check(found):
        d = math.prod(shape)
        return off(found.value, math.log2(levels / width) - value / (d * math.log(2)), tol=1e-9)

    return Case("", lambda log_density, **a: ad.bits_per_dim(log_density, **a), given, check)


@case
def observables(rng) -> Case:
    made, exact = _gaussian(rng)
    rates = "entropy_rate", "entropy_production"
    name = pick(rng, "log_density", "entropy", *rates, "average", "free_energy", "current")
    t, n = 0.5 * made.T, 128
    mean, cov = made.exact(0.5)
    roots = np.linalg.cholesky(cov)
    ys = (made.L * (mean + rng.normal(size=(n, made.size)) @ roots.T)).reshape(n, *made.shape).astype(np.float32)
    log_q = log_normal(mean, cov, made.natural(ys)) - made.size * math.log(made.L)

    def call(process, score, ys, log_densities, t, key):
        of = ad.observables
        if name == "log_density":
            return of.log_density(process, score, ys, log_densities, [t, process.t1], key=key).log_density
        if name == "current":
            return of.current(process, score, jnp.asarray(ys)[0], t, log_densities[0])
        if name == "entropy":
            return of.entropy(log_densities)
        if name == "average":
            return of.average(lambda y: jnp.sum(y), ys)
        if name == "free_energy":
            return of.free_energy(lambda y: 0.0 * jnp.sum(y), 1.0, ys, log_densities)
        return getattr(of, name)(process, score, ys, t)

    def check(found):
        if name == "entropy_rate":
            h = 1e-4
            ends = [np.linalg.slogdet(made.exact(0.5 + s * h)[1])[1] for s in (-1, 1)]
            rate = 0.5 * (ends[1] - ends[0]) / (2 * h)
            return off(found.value * made.T, rate, stderr=found.stderr * made.T, tol=0.01 * (1 + abs(rate)))
        if name == "entropy_production":
            return None if found.total.value >= -1e-6 / made.T else "the production of entropy is negative"
        return None

    given = dict(process=made.process, score=exact.score, ys=ys, log_densities=log_q, t=t, key=key_of(rng))
    return Case("", call, given, check)


@case
def metrics(rng) -> Case:
    d, n, m = int(rng.integers(1, 4)), int(rng.integers(2, 60)), int(rng.integers(2, 60))
    unit = 2.0 ** float(rng.choice([0, 0, 10, -10, 30, -30]))
    x, y = unit * rng.normal(size=(n, d)), unit * (1 + rng.normal(size=(m, d)))
    name = pick(rng, "mmd2", "sliced_wasserstein", "moments")

    def call(x, y, key, permutations):
        if name == "moments":
            return ad.metrics.moments(x)
        if name == "mmd2":
            return ad.metrics.mmd2(x, y, key=key, permutations=permutations)
        return ad.metrics.sliced_wasserstein(x, y, key=key, order=1, permutations=permutations)

    def check(found):
        if name == "moments":
            of_mean = off(found.mean / unit, x.mean(0) / unit, tol=1e-9)
            return of_mean or off(found.variance / unit**2, x.var(0, ddof=1) / unit**2, tol=1e-9)
        if name == "sliced_wasserstein" and d == 1:
            return off(found.value / unit, wasserstein_distance(x[:, 0], y[:, 0]) / unit, tol=1e-6)
        return None

    return Case("", call, dict(x=x, y=y, key=key_of(rng), permutations=20), check)


@case
def score_errors(rng) -> Case:
    made, exact = _gaussian(rng)
    ys, t, factor = made.states(rng, 32), 0.4 * made.T, float(rng.uniform(0.5, 1.5))
    name = pick(rng, "relative_score_error", "fisher_divergence")

    def call(process, score, exact, y, t):
        if name == "fisher_divergence":
            return ad.metrics.fisher_divergence(process, score, exact, y, t)
        return ad.metrics.relative_score_error(score, exact, y, t)

    def check(found):
        return None if name == "fisher_divergence" else off(found.value, (factor - 1) ** 2, tol=1e-4)

    wrong = lambda y, t: factor * exact.score(y, t)  # noqa: E731
    return Case("", call, dict(process=made.process, score=wrong, exact=exact.score, y=ys, t=t), check)
