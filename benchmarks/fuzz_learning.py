"""Cases of `fuzz.py`: solutions on grids, losses and trainings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz_cases import SMALL, Case, case, key_of, off, pick
from fuzz_processes import KINDS, random_process

import autodsm as ad


def _blur(ends, cells: int, least: float) -> float:
    """What cells of a grid may do to moments: their squared width, in the least deviation that the law has."""
    return ((ends[1] - ends[0]) / cells / least) ** 2


@case
def fokker_planck(rng) -> Case:
    made = random_process(rng, kinds=("linear", "linear in time", "elementwise", "time", "jumping"), shapes=((1,),))
    ends, least = made.range(0)

    def call(process, density, times, x_range, cells, steps):
        grid = ad.fokker_planck.solve_1d(process, density, times, x_range=x_range, cells=cells, steps=steps)
        dx = grid.x[1] - grid.x[0]
        mean = np.sum(grid.x * grid.q, axis=1) * dx
        return mean, np.sum((grid.x - mean[:, None]) ** 2 * grid.q, axis=1) * dx, grid.entropy()

    def check(found):
        m, P = made.exact(1.0)
        std, tol = math.sqrt(P[0, 0]), 0.01 + _blur(ends, 400, least)
        of_mean = off(found[0][-1] / made.L / std, m[0] / std, tol=tol)
        return of_mean or off(found[1][-1] / made.L**2 / P[0, 0], 1.0, tol=tol)

    density = lambda x: np.exp(-0.5 * ((x / made.L - made.mean[0]) / made.std) ** 2)  # noqa: E731
    given = dict(process=made.process, density=density, times=[0.5 * made.T, made.T], x_range=ends)
    return Case("", call, {**given, "cells": 400, "steps": 50}, check if made.linear else None)


@case
def fokker_planck_2d(rng) -> Case:
    made = random_process(rng, kinds=("linear", "kinetic"), shapes=((2,),), noise=("number", "diagonal", "function"))
    (first, small), (second, least) = made.range(0), made.range(1)

    def call(process, density, times, ranges, cells, steps):
        grid = ad.fokker_planck_2d.solve_2d(process, density, times, ranges=ranges, cells=cells, steps=steps)
        return grid.mean()[-1], grid.cov()[-1], grid.mass()

    def check(found):
        m, P = made.exact(1.0)
        std = np.sqrt(np.diag(P))
        # Twenty steps at rates of up to five, in two directions by turns: (h times the rate)².
        tol = 0.06 + _blur(first, 80, small) + _blur(second, 80, least)
        of_mean = off(found[0] / made.L / std, m / std, tol=tol)
        scale = np.outer(std, std)
        return of_mean or off(found[1] / made.L**2 / scale, P / scale, tol=tol)

    def density(x, v):
        squares = (x / made.L - made.mean[0]) ** 2 + (v / made.L - made.mean[1]) ** 2
        return np.exp(-0.5 * squares / made.std**2)

    given = dict(process=made.process, density=density, times=[made.T], ranges=(first, second))
    return Case("", call, {**given, "cells": 80, "steps": 20}, check)


@case
def products(rng) -> Case:
    made = random_process(rng, kinds=("linear",), shapes=((1,),), noise=("number", "function"))
    ends, _ = made.range(0)
    y = made.L * (made.exact(1.0)[0] + 0.5)

    def call(process, weights, densities, times, x_range, cells, steps, y):
        mixture = ad.products.solve_products(
            process, weights, densities, times, x_range=x_range, cells=cells, steps=steps
        )
        return mixture.score(y, len(times) - 1), mixture.log_density(y, 0)

    def check(found):
        m, P = made.exact(1.0)
        exact = -(y / made.L - m) / P[0, 0]
        return off(np.asarray(found[0]) * made.L, exact, tol=0.01 * (1 + np.abs(exact).max()))

    density = lambda x: np.exp(-0.5 * ((x / made.L - made.mean[0]) / made.std) ** 2)  # noqa: E731
    given = dict(process=made.process, weights=[1.0], densities=[[density]], times=[0.5 * made.T, made.T])
    more = dict(x_range=ends, cells=1000, steps=20, y=y.astype(np.float32))
    return Case("", call, {**given, **more}, check, pointwise=True)


# Losses and training.


@case
def loss(rng) -> Case:
    # Not "runaway": a loss that is not finite is an answer, which training looks into.
    kinds = tuple(kind for kind in KINDS if kind != "runaway")
    made = random_process(rng, kinds=kinds, shapes=((1,), (2,), (3,), (2, 2)))
    name = pick(rng, "LocalDSM", "PathwiseDSM", "TabulatedDSM", "ISM")
    options: dict[str, Any] = {} if name == "ISM" else {"weighting": pick(rng, "perceptual", "likelihood", "score")}
    if name == "LocalDSM":
        options |= dict(
            lam=0.02 * made.L**2, variance_reduction=pick(rng, "antithetic", "control", "none"), steps=32, ito=False
        )
    elif name == "TabulatedDSM":
        reach = float(made.L * (np.abs(made.mean).max() + 4 * made.std))
        options |= dict(y_range=(-reach, reach))
    else:
        options |= dict(steps=32)

    def call(process, x, key, times, t0, **options):
        objective = getattr(ad, name)(process, times=times, t0=t0, **options)
        score = lambda y, t: -y / made.L**2  # noqa: E731
        return jax.jit(lambda x: objective(score, x, key=key))(x)

    given = dict(process=made.process, x=jnp.asarray(made.states(rng, 1)[0]), key=key_of(rng))
    return Case("", call, given | dict(times=pick(rng, "mixed", "uniform"), t0=0.01 * made.T) | options, pointwise=True)


@case
def fit(rng) -> Case:
    made = random_process(rng, shapes=SMALL, kinds=("linear", "elementwise", "coupled", "kinetic", "time", "jumping"))

    def call(process, y0, key, prior, **options):
        model = ad.fit(process, y0, key=key, prior=prior, progress=False, **options)
        y = jnp.asarray(made.states(np.random.default_rng(0), 1)[0])
        return model.score(y, 0.5 * process.t1), model.score(y, process.t1)

    starts = made.states(rng, 512)
    given = dict(process=made.process, y0=starts, key=key_of(rng), prior=None, steps=8, batch_size=64, width=8, depth=1)
    return Case("", call, given | dict(learning_rate=pick(rng, None, 1e-3), ema=0.9))
