"""Cases of `fuzz.py`: processes, paths, kernels, schedules, priors, systems, data and networks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from fuzz_cases import GAUSSIAN, SMALL, Case, case, is_key, key_of, moments_off, off, pick, typed
from fuzz_processes import random_process
from scipy.integrate import quad

import autodsm as ad

# Processes and kernels.


@case
def Process(rng) -> Case:
    shape = pick(rng, (), (2,), (2, 2), (1, 3, 3))
    drift = pick(rng, lambda y, t: -y, lambda y, t: jnp.sum(y) - y * t, lambda y, t: y[..., :1] * 0)
    noise = pick(rng, 0.5, [0.1, 0.2], lambda t: 1.0 + t, np.eye(2), np.float16(1.0), lambda t: jnp.array([t, 1.0]))

    def call(drift, diffusion, t1, structure, y):
        process = ad.Process(drift, diffusion, t1, structure=structure)
        process.check(y)
        found = process.structure_for(np.shape(y))
        kick = process.diffuse(0.5, jnp.ones(process.noise_shape(np.shape(y))), np.shape(y))
        return process.f(jnp.asarray(y, float), 0.5), kick, process.g(0.5), found.rows

    structure = pick(rng, None, None, "dense", "blocks", "elementwise")
    y = rng.normal(size=shape).astype(np.float32)
    return Case("", call, dict(drift=drift, diffusion=noise, t1=2.0, structure=structure, y=typed(rng, y)))


@case
def simulate(rng) -> Case:
    made = random_process(rng)
    solver = pick(rng, "weak2", "weak2", "heun", "euler", "lamba")
    n, steps = 256, 64 if rng.random() < 0.3 and solver != "lamba" else None
    tol = pick(rng, None, 1e-2) if steps is None else None
    times = np.sort(rng.uniform(0.1, 1.0, pick(rng, 1, 3))) * made.T
    starts = made.states(rng, n)

    def call(process, y0, times, key, solver, steps, tol):
        def one(y, k):
            return ad.simulate(process, y, times, key=k, solver=solver, steps=steps, tol=tol)

        if np.ndim(y0) == 0 or not is_key(key):  # which cannot be given in parts
            return one(y0, key)
        return jax.vmap(one)(jnp.asarray(y0), jax.random.split(key, len(y0)))[:, -1]

    known = made.linear is not None and (made.kind != "stiff" or steps is None)
    # Weak errors are of the order of tol; fixed steps of order one are off by their length times the rates.
    wide = 0.1 if steps is not None and solver == "euler" else 0.05 if tol else 0.02
    check = (lambda y: moments_off(made, y, times[-1] / made.T, tol=wide)) if known else None
    given = dict(process=made.process, y0=starts, times=times, key=key_of(rng), solver=solver, steps=steps, tol=tol)
    return Case("", call, given, check)


@case
def simulate_one(rng) -> Case:
    """One path, with its checks outside of any transformation."""
    made = random_process(rng)
    y = made.states(rng, 1)[0]
    times = np.sort(rng.uniform(0.0, 1.0, 3)) * made.T
    given = dict(process=made.process, y0=typed(rng, y), times=times, key=key_of(rng), steps=pick(rng, None, 8, 64))
    return Case("", lambda key, **a: ad.simulate(**a, key=key), given)


@case
def transition(rng) -> Case:
    made = random_process(rng)
    y = made.states(rng, 1)[0]
    s = float(rng.uniform(0.0, 0.5)) * made.T
    t = s + 10.0 ** rng.uniform(-4, -0.31) * made.T
    expand = pick(rng, "t", "t", "s")

    def call(process, y_s, s, t, expand, ito):
        kernel = ad.transition(process, y_s, s, t, expand=expand, ito=ito)
        eps = jnp.ones_like(kernel.mean)
        rest = kernel.score(eps), kernel.log_prob(kernel.sample(eps)), kernel.variance()
        return kernel.mean, kernel.cov(), rest

    def check(found):
        assert made.linear is not None
        u, cov = made.linear.moments(made.natural(y).ravel(), np.zeros((made.size,) * 2), t / made.T, s / made.T)
        deviations = np.sqrt(np.diag(cov)) + 1e-30
        single = 2e-5 * (1 + np.abs(made.natural(y)).max() / deviations.max())
        apart = off((made.natural(found[0]) - u).ravel() / deviations.max(), 0 * u, tol=1e-3 + single)
        scale = np.outer(deviations, deviations)
        return apart or off(np.asarray(found[1], float) / made.L**2 / scale, cov / scale, tol=2e-3)

    exact = made.linear is not None and (expand == "t" or made.linear.constant)
    given = dict(process=made.process, y_s=typed(rng, y), s=s, t=t, expand=expand, ito=pick(rng, False, True))
    return Case("", call, given, check if exact else None)


@case
def linearize(rng) -> Case:
    made = random_process(rng, shapes=SMALL)
    y = jnp.asarray(made.states(rng, 1)[0])
    s = 0.3 * made.T

    def call(process, y_s, s, expand, ito):
        affine = ad.linearize(process, y_s, s, expand=expand, ito=ito)
        A, b = affine.coefficients(s)
        return affine.structure.matvec(A, affine.structure.split(jnp.ones_like(y))), b

    def check(found):
        assert made.linear is not None
        A = made.linear.A(0.3)
        ones = np.asarray(found[0], float).ravel() * made.T
        return off(ones, A @ np.ones(made.size), tol=1e-4 * (1 + np.abs(A).max()))

    given = dict(process=made.process, y_s=y, s=s, expand=pick(rng, "s", "t"), ito=False)
    return Case("", call, given, check if made.linear else None)


@case
def ScheduledPairs(rng) -> Case:
    made = random_process(rng, noise=("number", "function", "diagonal"))
    rate = lambda t: float(np.max(np.asarray(made.process.g(t), float) ** 2))  # noqa: E731
    lam, t = float(rng.uniform(0.01, 0.5)) * made.L**2, float(rng.uniform(0.1, 1.0)) * made.T

    def check(s):
        if s == 0:
            return off(min(quad(rate, 0, t)[0] / lam, 1.0), quad(rate, 0, t)[0] / lam, tol=1e-3)
        return off(quad(rate, float(s), t)[0] / lam, 1.0, tol=1e-3 + 1e-6 * made.L**2 / lam)

    def call(process, lam, t):
        return ad.ScheduledPairs(process, lam)(t)

    return Case("", call, dict(process=made.process, lam=lam, t=t), check)


@case
def ConstantGap(rng) -> Case:
    def call(gap, t):
        return ad.ConstantGap(gap)(t), ad.FromZero()(t)

    gap, t = float(rng.uniform(0.01, 1.0)), float(rng.uniform(0.0, 1.0))
    return Case("", call, dict(gap=gap, t=t), lambda s: off(s, [max(t - gap, 0), 0.0], tol=1e-6), pointwise=True)


@case
def kl_bound(rng) -> Case:
    made = random_process(rng, shapes=SMALL, noise=("number", "function"))
    times = np.array([0.7]) * made.T
    schedule = pick(rng, ad.ScheduledPairs(made.process, 0.05 * made.L**2), ad.ConstantGap(0.1 * made.T), ad.FromZero())
    given = dict(process=made.process, schedule=schedule, y0=made.states(rng, 64), times=times, key=key_of(rng), n=16)

    def check(found):
        return off(found.bound, [0.0], tol=1e-2)  # exact for a linear drift, up to paths in single precision

    exact = made.kind in GAUSSIAN and made.L == made.T == 1
    return Case("", lambda key, **a: ad.kl_bound(**a, key=key), given, check if exact else None)


@case
def Clock(rng) -> Case:
    made = random_process(rng, noise=("number", "function", "diagonal"))
    t = float(rng.uniform(0.01, 1.0)) * made.T
    d = made.process.g(0.0).size

    def check(found):
        totals = [quad(lambda t, i=i: float(made.process.g(t).ravel()[i]) ** 2, 0, made.T)[0] for i in range(d)]
        return off(found[1] / max(totals), 1.0, tol=1e-3) or off(found[2] / made.T, t / made.T, tol=1e-3)

    def call(process, t):
        clock = ad.Clock(process)
        return clock(t), clock.total, clock.inverse(clock.log(t))

    return Case("", call, dict(process=made.process, t=t), check, pointwise=True)


# Priors, systems, data, networks.


@case
def priors(rng) -> Case:
    law = pick(rng, dist.Logistic(0.0, 1.0), dist.Normal(0.0, 1.0), dist.Laplace(0.0, 1.0), dist.StudentT(3.0))
    beta = pick(rng, None, ad.LinearBeta(0.1, 2.0), ad.ConstantBeta(2.0), ad.CosineBeta(), lambda t: 1 + t)
    name = pick(rng, "langevin", "vp", "sub_vp", "cld", "underdamped")
    shape = (2, 1) if name in ("cld", "underdamped") else (2,)

    def call(beta, t1, prior, mass, y, t):
        first = (prior,) if name in ("langevin", "underdamped") else ()
        more = {"mass": mass} if name in ("cld", "underdamped") else {}
        process = getattr(ad, name)(*first, beta, t1=t1, **more)
        process.check(y, t)
        return process.f(jnp.asarray(y, float), t), process.g(t)

    y, t = rng.normal(size=shape).astype(np.float32), float(rng.uniform(0, 0.9))
    given = dict(beta=beta, t1=pick(rng, None, 0.9), prior=law, mass=0.3, y=y, t=t)
    return Case("", call, given, pointwise=True)


@case
def vp_transition(rng) -> Case:
    """Kernels of `vp`, `sub_vp` and `ve` in closed form, and integrals of the schedules."""
    beta0, beta1 = float(rng.uniform(0.05, 1.0)), float(rng.uniform(1.0, 20.0))
    name, t = pick(rng, "vp", "sub_vp", "ve"), float(rng.uniform(0.01, 1.0))

    def call(beta0, beta1, t, x):
        process = ad.ve(beta0, beta1) if name == "ve" else getattr(ad, name)(ad.LinearBeta(beta0, beta1))
        kernel = ad.transition(process, x, 0.0, t)
        return kernel.mean, kernel.variance(), ad.LinearBeta(beta0, beta1).integral(t)

    def check(found):
        B = quad(lambda u: beta0 + (beta1 - beta0) * u, 0, t)[0]
        mean, variance = math.exp(-0.5 * B), -math.expm1(-B)
        variance = variance**2 if name == "sub_vp" else variance
        if name == "ve":
            mean, variance = 1.0, beta0**2 * ((beta1 / beta0) ** (2 * t) - 1)
        of_moments = off(found[0], [0.7 * mean], tol=1e-4) or off(found[1] / variance, [1.0], tol=2e-3)
        return of_moments or off(found[2], B, tol=1e-4)

    return Case("", call, dict(beta0=beta0, beta1=beta1, t=t, x=np.array([0.7], np.float32)), check)


@case
def linear(rng) -> Case:
    d = int(rng.integers(1, 4))
    A, c = rng.normal(size=(d, d)).astype(np.float32), rng.normal(size=d).astype(np.float32)
    y = rng.normal(size=d).astype(np.float32)

    def call(matrix, diffusion, t1, offset, y):
        process = ad.linear(matrix, diffusion, t1=t1, offset=offset)
        process.check(y)
        return process.f(jnp.asarray(y, float), 0.5)

    given = dict(matrix=A, diffusion=pick(rng, 1.0, np.eye(d), np.ones(d)), t1=1.0, offset=c, y=y)
    return Case("", call, given, lambda f: off(f, A @ y + c, tol=1e-4))


@case
def systems(rng) -> Case:
    name = pick(rng, "ornstein_uhlenbeck", "double_well", "swimmer", "particles", "harmonic_particles")
    options: dict[str, Any] = {
        "ornstein_uhlenbeck": dict(dim=2, rate=0.5, noise=1.0, std0=0.3, t1=2.0),
        "double_well": dict(dim=1, noise=0.7, std0=0.5, t1=2.0),
        "swimmer": dict(gamma=0.2, D=0.5, std0=1.0, t1=1.0),
        "particles": dict(n=3, A=5.0, r=0.5, D=0.25, std0=0.5, t1=1.0),
        "harmonic_particles": dict(n=3, a=1.0, omega=2.0, D=0.25, std0=0.25, t1=1.0),
    }[name]

    def call(key, **options):
        system = getattr(ad.systems, name)(**options)
        y = system.y0(key, 4)
        return y, jax.vmap(lambda y: system.process.f(y, 0.5))(y), system.process.g(0.5)

    return Case("", call, dict(key=key_of(rng), **options))


@case
def data(rng) -> Case:
    name = pick(rng, "checkerboard", "digits", "states", "shard", "cifar10")

    def call(key, n, split):
        if name == "checkerboard":
            return ad.data.checkerboard(key, n)
        images = ad.data.cifar10(split, folder="missing") if name == "cifar10" else ad.data.digits(split)
        if name == "states":
            return images.states([0, n], key=key)
        return (images.shard(0, n) if name == "shard" else images)(key, n)

    def check(y):
        return None if np.min(y) >= -2 and np.max(y) <= 2 else "values out of range"

    return Case("", call, dict(key=key_of(rng), n=int(rng.integers(1, 30)), split=pick(rng, "train", "test")), check)


@case
def network(rng) -> Case:
    process = ad.Process(lambda y, t: -y, 1.0, 1.0)
    name, shape = pick(rng, ("MLP", (2,)), ("MLP", (2, 2)), ("Equivariant", (3, 2)), ("UNet", (1, 4, 4)))
    options: dict[str, Any] = {
        "MLP": dict(width=8, depth=2, activation="silu", time="both", mean=0.0, std=1.0, fourier=(1.0,), spread=1.0),
        "Equivariant": dict(width=8, depth=2, activation="gelu", time="log", mean=0.0, std=1.0),
        "UNet": dict(channels=4, levels=(1,), blocks=1, attention=(4,), style="ddpm", heads=2, dropout=0.1),
    }[name]
    wrapped = pick(rng, None, "Odd", "Score", "residual")
    y = rng.normal(size=shape).astype(np.float32)

    def call(y, t, key, shape, **options):
        net = getattr(ad.network, name)(shape, ad.Clock(process), key=key, **options)
        if wrapped == "Odd":
            net = ad.network.Odd(net)
        elif wrapped is not None:
            base = (lambda y, t: -y) if wrapped == "residual" else None
            net = ad.network.Score(net, ad.Clock(process), parameterization=wrapped if base else "noise", base=base)
        return net(y, t), ad.network.state_shape(net)

    def check(found):
        return None if found[0].shape == shape and found[1] == shape else f"shapes {found[0].shape}, {found[1]}"

    given = dict(y=typed(rng, y), t=float(rng.uniform(0, 1)), key=key_of(rng), shape=shape, **options)
    return Case("", call, given, check, pointwise=True)
