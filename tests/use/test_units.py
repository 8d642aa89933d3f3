"""What a score is used for does not depend on the units of coordinates and time.

`y' = L y`, `t' = τ t` makes of a process `f' = L f/τ`, `g' = L g/√τ`, and of a score `s' = s/L`. L and τ are powers of
two here, which do not round, so that results are the same up to the order of sums. Scores are exact ones of linear
processes from a Gaussian: with noise in one coordinate only, coupled with noise in both, and without coupling.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.use import metrics, observables

KEY = jax.random.key(0)
SYSTEMS = {  # A and g of dy = A y dt + g dw
    "kinetic": ([[0.0, 1.0], [-1.0, -0.5]], [0.0, 0.7]),
    "coupled": ([[-1.0, 0.8], [-0.5, -1.5]], [0.7, 1.0]),
    "elementwise": ([[-1.0, 0.0], [0.0, -0.5]], [0.7, 1.0]),
}
ONE = (1.0, 1.0, 1.0)
UNITS = [(2.0**30, 2.0**-30, 2.0**-30), (2.0**-30, 2.0**30, 2.0**30)]
"""L of both coordinates, and τ."""
MEAN, COV = [0.5, -0.3], [[0.6, 0.1], [0.1, 0.4]]


class Case:
    """A system in units: its process, score and prior."""

    def __init__(self, name: str, units):
        matrix, noise = (np.array(x) for x in SYSTEMS[name])
        self.L, self.tau = np.array(units[:2]), units[2]
        exact = marginals(name)
        structure = "elementwise" if name == "elementwise" else "dense"

        def along(y):
            return jnp.diag(matrix) * y if structure == "elementwise" else jnp.asarray(matrix, y.dtype) @ y

        self.process = ad.Process(
            lambda y, t: self.L / self.tau * along(y / self.L),
            self.L / np.sqrt(self.tau) * noise,
            self.tau * 1.0,
            structure=structure,
        )
        self.score = lambda y, t: exact.score(y / self.L, t / self.tau) / self.L
        self.prior = dist.Normal(jnp.zeros(2), jnp.asarray(0.8 * self.L, jnp.float32))
        self.y = jnp.asarray(self.L * np.asarray(exact.sample(jax.random.key(1), 64, 0.5)), jnp.float32)
        self.logs = -np.sum(np.log(self.L))  # what a log-density gains


@functools.cache
def marginals(name: str):
    matrix, noise = (np.array(x) for x in SYSTEMS[name])
    process = ad.Process(lambda y, t: jnp.asarray(matrix) @ y, noise, 1.0)
    return ad.reference.gaussian_marginals(process, MEAN, COV, degree=24)


@functools.cache
def value(use, name: str, units, *options):
    return jax.tree.map(np.asarray, use(Case(name, units), *options))


def same(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, wanted)


def samples(case, *options):
    y = ad.sample(case.process, case.score, case.prior, 8, key=KEY, **dict(options))
    return y / case.L


def densities(case):
    y, times = case.y[:8], case.tau * np.array([0.5, 1.0])
    found = observables.log_density(case.process, case.score, y, np.zeros(8), times)
    likelihood = jax.vmap(lambda y: ad.log_likelihood(case.process, case.score, case.prior, y))(y)
    return found.y / case.L, found.log_density, likelihood - case.logs


def bounds(case, kind):
    bound = ad.ELBO(case.process, case.prior, kind=kind, draws=4, steps=8)
    return jax.jit(lambda y: bound(case.score, y, key=KEY))(case.y[0]) - case.logs


def rates(case):
    t = 0.5 * case.tau
    found = [observables.entropy_rate(case.process, case.score, case.y, t)]
    if np.all(case.process.diffusion > 0):
        found += observables.entropy_production(case.process, case.score, case.y, t)
    found.append(metrics.fisher_divergence(case.process, lambda y, t: 0.8 * case.score(y, t), case.score, case.y, t))
    return [case.tau * np.array(rate) for rate in found]


def distances(case):
    """Lengths of coordinates with one unit."""
    x, y = case.y[:32, :1], 1.3 * case.y[32:, :1]
    mmd, wasserstein = metrics.mmd2(x, y, key=KEY), metrics.sliced_wasserstein(x, y, key=KEY)
    moments = metrics.moments(case.y)
    return [mmd.value, mmd.p_value, *(np.array(wasserstein) / case.L[0])], [
        moments.mean / case.L, moments.mean_stderr / case.L, moments.variance / case.L**2,
        moments.variance_stderr / case.L**2,
    ]  # fmt: skip


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", SYSTEMS)
def test_rates(name, units):
    same(value(rates, name, units), value(rates, name, ONE))


@pytest.mark.parametrize(("name", "units"), [("kinetic", UNITS[0]), ("coupled", UNITS[1])])
def test_densities(name, units):
    same(value(densities, name, units), value(densities, name, ONE))


@pytest.mark.parametrize("units", UNITS)
def test_distances(units):
    same(value(distances, "coupled", units), value(distances, "coupled", ONE))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kinetic", (("method", "ode"),)),
        ("elementwise", (("steps", 20), ("corrector", 1))),
        ("coupled", (("tol", 0.03),)),
    ],
)
def test_samples(name, options):
    same(value(samples, name, UNITS[0], *options), value(samples, name, ONE, *options))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kinetic", "ism"), ("kinetic", "local-dsm"), ("coupled", "pathwise"), ("elementwise", "local-dsm")],
)
def test_bounds(name, kind):
    same(value(bounds, name, UNITS[0], kind), value(bounds, name, ONE, kind))
