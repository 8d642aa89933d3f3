"""Whatever is given in place of an argument is refused by its name; and no answer that is not a number is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config

import autodsm as ad
from autodsm.network import MLP, Equivariant, UNet

KEY = jax.random.key(0)
OU = ad.Process(lambda y, t: -y, 1.0, 1.0)
YS = np.random.default_rng(0).normal(size=(8, 2))


@pytest.fixture(autouse=True)
def untyped():
    """Without the types that are checked in tests alone: users have the library's own errors."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def score(y, t):
    return -y


class Normal:
    def log_prob(self, y):
        return -0.5 * y**2


def exact(**given):
    return ad.reference.gaussian_marginals(**{"process": OU, "mean": np.zeros(2), "cov": np.eye(2), **given})


def density(*y):
    return np.exp(-0.5 * sum(x**2 for x in y))


def grid(**given):
    ranges = ((-6, 6), (-6, 6))
    given = {"process": OU, "density": density, "times": [0.1], "ranges": ranges, "cells": 20, "steps": 2, **given}
    return ad.fokker_planck_2d.solve_2d(**given)


def products(**given):
    given = {"process": OU, "weights": [1.0], "densities": [[density]], "times": [0.1], "x_range": (-6, 6), **given}
    return ad.products.solve_products(**given)


@pytest.mark.parametrize("process", [None, "process"])
@pytest.mark.parametrize(
    "call",
    [
        ad.Clock,
        lambda p: ad.ScheduledPairs(p, 0.1),
        lambda p: ad.linearize(p, jnp.zeros(2), 0.1),
        ad.LocalDSM,
        ad.PathwiseDSM,
        ad.KineticDSM,
        lambda p: ad.TabulatedDSM(p, (-1.0, 1.0)),
        ad.ISM,
        lambda p: exact(process=p),
        lambda p: ad.metrics.fisher_divergence(p, score, score, YS, 0.1),
        lambda p: ad.observables.entropy_rate(p, score, YS, 0.1),
        lambda p: ad.observables.current(p, score, YS[0], 0.1, 0.0),
        lambda p: ad.observables.log_density(p, score, YS, np.zeros(8), [0.0, 1.0]),
        lambda p: ad.fokker_planck.solve_1d(p, density, [0.1], x_range=(-6, 6)),
        lambda p: grid(process=p),
        lambda p: products(process=p),
    ],
)
def test_what_is_no_process(call, process):
    with pytest.raises(TypeError, match="process"):
        call(process)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("y_s", lambda: ad.linearize(OU, 1j, 0.1)),
        ("t=", lambda: ad.transition(OU, jnp.zeros(2), 0.0, 1j)),
        ("t=", lambda: ad.ScheduledPairs(OU, 0.1)(1j)),
        ("ys", lambda: ad.observables.log_density(OU, score, True, np.zeros(1), [0.1, 0.2])),
        ("y_s", lambda: ad.linearize(OU, "text", 0.1)),
        ("s has shape", lambda: ad.linearize(OU, jnp.zeros(2), [0.1, 0.2])),
        ("expand", lambda: ad.transition(OU, jnp.zeros(2), 0.0, 0.1, expand=np.zeros(0))),
        ("kind", lambda: ad.ELBO(OU, Normal(), kind=np.zeros(3))),
        ("score", lambda: ad.metrics.relative_score_error({}, score, YS, 0.1)),
        ("exact", lambda: ad.metrics.relative_score_error(score, True, YS, 0.1)),
        ("y=", lambda: ad.metrics.relative_score_error(score, score, 1j, 0.1)),
        ("x=", lambda: ad.metrics.moments("text")),
        ("x=", lambda: ad.metrics.moments([[1.0, 2.0], [1.0]])),
        ("mean", lambda: exact(mean={})),
        ("cov", lambda: exact(cov=None)),
        ("t has shape", lambda: exact().moments([0.1, 0.2])),
        ("y has shape", lambda: exact().score(jnp.zeros(3), 0.1)),
        ("key", lambda: exact().sample(0.5, 3, 0.1)),
        ("ranges", lambda: grid(ranges=1e30)),
        ("ranges", lambda: grid(ranges=(1.0, 2.0))),
        ("density", lambda: grid(density=np.zeros(3))),
        ("cells", lambda: grid(cells=None)),
        ("densities", lambda: products(densities=True)),
        ("densities", lambda: products(densities=[[None]])),
        ("weights", lambda: products(weights="text")),
        ("x_range", lambda: products(x_range=None)),
        ("times", lambda: products(times="text")),
        ("t0", lambda: ad.log_likelihood(OU, score, Normal(), jnp.zeros(2), t0={})),
        ("t0", lambda: ad.LocalDSM(OU, t0=np.array([1, 2, 3]))),
        ("t0", lambda: ad.sample(OU, score, Normal(), 8, key=KEY, shape=(2,), t0=(3,))),
        ("times", lambda: ad.sample(OU, score, Normal(), 8, key=KEY, shape=(2,), times="text")),
        ("xs", lambda: ad.ELBO(OU, Normal(), steps=8).values(score, [[1.0], [1.0, 2.0]], key=KEY)),
        ("shape", lambda: ad.ELBO(OU, Normal(), kind="tabulated", y_range=(-1.0, 1.0), shape=3)),
        ("shape", lambda: ad.ELBO(OU, Normal(), kind="tabulated", y_range=(-1.0, 1.0), shape=[1.0, 2.0])),
        ("y_range", lambda: ad.TabulatedDSM(OU, {})),
        ("y_range", lambda: ad.ELBO(OU, Normal(), kind="tabulated", y_range=3.0, shape=(2,))),
        ("log_density", lambda: ad.bits_per_dim(0.5, (2,), levels=2, width=1.0)),
        ("shape", lambda: ad.bits_per_dim(ad.observables.entropy([0.0, 1.0]), 0, levels=2, width=1.0)),
        ("width", lambda: ad.bits_per_dim(ad.observables.entropy([0.0, 1.0]), (2,), levels=2, width={})),
        ("log_densities", lambda: ad.observables.entropy("text")),
        ("log_densities", lambda: ad.observables.free_energy(jnp.sum, 1.0, YS, None)),
        ("temperature", lambda: ad.observables.free_energy(jnp.sum, "warm", YS, np.zeros(8))),
        ("function", lambda: ad.observables.average(3.0, YS)),
        ("t=", lambda: ad.observables.entropy_rate(OU, score, YS, "text")),
        ("indices", lambda: ad.data.digits().states([0, [1.0, 2.0]], key=KEY)),
        ("indices", lambda: ad.data.digits().pixels(["a"])),
        ("std0", lambda: ad.systems.double_well(std0=(0,))),
        ("rate", lambda: ad.systems.ornstein_uhlenbeck(rate=None)),
        ("omega", lambda: ad.systems.harmonic_particles(3, omega="fast")),
        ("A=", lambda: ad.systems.particles(3, A=[1.0, 2.0])),
        ("beta1", lambda: ad.LinearBeta(0.1, [1.0, 2.0])),
        ("value", lambda: ad.ConstantBeta({})),
        ("t1", lambda: ad.vp(ad.CosineBeta(), t1="late")),
        ("sigma1", lambda: ad.ve(0.1, (3.0,))),
        ("matrix", lambda: ad.linear("A", 1.0, t1=1.0)),
        ("offset", lambda: ad.linear(np.eye(2), 1.0, t1=1.0, offset={})),
        ("shape", lambda: MLP(1e-30, ad.Clock(OU), key=KEY)),
        ("shape", lambda: Equivariant((3, 0), ad.Clock(OU), key=KEY)),
        ("shape", lambda: UNet(None, ad.Clock(OU), key=KEY)),
        ("levels", lambda: UNet((1, 4, 4), ad.Clock(OU), key=KEY, channels=4, levels=-1.0)),
        ("levels", lambda: UNet((1, 4, 4), ad.Clock(OU), key=KEY, channels=4, levels=["a"])),
        ("attention", lambda: UNet((1, 4, 4), ad.Clock(OU), key=KEY, channels=4, levels=(1,), attention=3)),
        ("dropout", lambda: UNet((1, 4, 4), ad.Clock(OU), key=KEY, channels=4, levels=(1,), dropout="much")),
        ("fourier", lambda: MLP((2,), ad.Clock(OU), key=KEY, fourier=3)),
        ("time", lambda: MLP((2,), ad.Clock(OU), key=KEY, time=[])),
        ("clock", lambda: MLP((2,), OU, key=KEY)),
        ("learning_rate", lambda: ad.fit(OU, YS, key=KEY, learning_rate={})),
        ("ema", lambda: ad.fit(OU, YS, key=KEY, ema="slow")),
        ("diffusion", lambda: ad.Process(score, 1j, 1.0)),
        ("diffusion", lambda: ad.Process(score, "loud", 1.0)),
        ("g", lambda: ad.Process(score, lambda t: None, 1.0)),
        ("t=", lambda: ad.Clock(OU)("late")),
        ("t=", lambda: MLP((2,), ad.Clock(OU), key=KEY)(jnp.zeros(2), {})),
    ],
)
def test_what_is_no_argument(name, call):
    with pytest.raises((TypeError, ValueError), match=name):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: jax.vmap(lambda y: ad.flow(OU, score, y, [0.0, 1.0], tol=1e-30))(jnp.ones((2, 1))),
        lambda: jax.jit(lambda y: ad.log_likelihood(OU, score, Normal(), y, tol=1e-30))(jnp.ones(1)),
        lambda: ad.observables.average(jnp.sum, np.where(YS > 1, np.nan, YS)),
        lambda: ad.observables.entropy([0.0, np.inf, 1.0]),
        lambda: ad.observables.free_energy(jnp.sum, 1.0, YS, np.where(np.arange(8) == 2, np.nan, 0.0)),
        lambda: ad.observables.entropy_rate(OU, score, np.where(YS > 1, np.nan, YS), 0.1),
        lambda: ad.observables.log_density(OU, score, YS, np.full(8, np.nan), [0.0, 0.1]),
        lambda: ad.bits_per_dim(ad.observables.entropy([0.0, 1.0])._replace(value=np.nan), (2,), levels=2, width=1.0),
    ],
)
def test_no_answer_that_is_not_a_number(call):
    with pytest.raises((ValueError, RuntimeError, FloatingPointError), match="finite"):
        call()
