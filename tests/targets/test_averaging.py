"""Targets averaged over starts: the score in the mean, less noise, and never for bounds of single examples."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.exact.grid1d import evolve_1d
from autodsm.learn.objective import DSM
from autodsm.learn.train import Batch, Rounds, round_draws
from autodsm.targets import Tabulated
from autodsm.targets.averaging import place_members
from autodsm.targets.tabulated import look_up

KEY = jax.random.key(0)
# Two coordinates, of different units, that turn and relax; a start of two bumps.
UNITS = np.array([3.0, 0.2])
MATRIX = np.array([[-1.0, 2.0], [-1.0, -0.5]]) * UNITS[:, None] / UNITS
LINEAR = ad.linear(jnp.asarray(MATRIX), jnp.asarray(np.array([0.8, 0.5]) * UNITS), t1=1.0)
MEANS, SPREAD, SHARES = np.array([[1.0, -0.5], [-0.8, 0.7]]) * UNITS, 0.3 * UNITS, np.array([0.7, 0.3])
WELL = ad.Process(lambda y, t: y - y**3, 0.7, 1.0)


def bumps(key, n):
    which, noise = jax.random.split(key)
    second = jax.random.bernoulli(which, SHARES[1], (n,)).astype(int)
    return jnp.asarray(MEANS)[second] + SPREAD * jax.random.normal(noise, (n, 2))


EXACT = [ad.reference.gaussian_marginals(LINEAR, mean, np.diag(SPREAD**2)) for mean in MEANS]
TARGET = ad.LocalDSM(LINEAR, schedule=ad.FromZero(), references=4).target


@jax.jit
def exact_score(y, moments):
    """Of the bumps, moved by the process: each stays Gaussian, with these moments."""

    def log_density(y):
        logs = [dist.MultivariateNormal(mean, cov).log_prob(y) for mean, cov in moments]
        return jax.nn.logsumexp(jnp.stack(logs) + jnp.log(jnp.asarray(SHARES)))

    return jax.vmap(jax.grad(log_density))(y)


@jax.jit
def averaged(x, t, keys):
    """y, ŝ and `1/Σ_j w_j²`, of how many starts it is an average, of one draw from each of the groups x."""

    def one(x, key):
        draw = TARGET.together(x, t, 1, key=key)
        kernels = jax.vmap(lambda x: ad.transition(LINEAR, x, 0.0, t))(x)
        y = draw.y[0, 0]
        weights = jax.nn.softmax(jax.vmap(lambda kernel: kernel.log_prob(y))(kernels))
        return y, draw.score[0, 0], 1.0 / jnp.sum(weights**2)

    return jax.vmap(one)(x, keys)


@jax.jit
def of_others(x, t, keys):
    """y, from the first of each group, and a target averaged over all but that."""

    def one(x, key):
        y = TARGET.together(x[:1], t, 1, key=key).y[0, 0]
        kernels = jax.vmap(lambda x: ad.transition(LINEAR, x, 0.0, t))(x[1:])
        return y, jax.grad(lambda y: jax.nn.logsumexp(jax.vmap(lambda kernel: kernel.log_prob(y))(kernels)))(y)

    return jax.vmap(one)(x, keys)


def drawn(draw, m, t, n):
    """From n groups of m starts: y, `ŝ − s` and ŝ in units of the coordinates, and what else there is."""
    y, score, *rest = draw(bumps(KEY, n * m).reshape(n, m, 2), t, jax.random.split(jax.random.key(1), n))
    return y, (score - exact_score(y, [exact.moments(t) for exact in EXACT])) * UNITS, score * UNITS, *rest


def residuals(y, apart):
    """`E[(ŝ − s) φ(y)]` in standard errors, for smooth φ."""
    y = y / UNITS
    tests = jnp.stack([jnp.ones(len(y)), y[:, 0], y[:, 1], jnp.tanh(2 * y[:, 0] - y[:, 1]), jnp.cos(2 * y[:, 0])])
    found = np.asarray(tests[:, :, None] * apart, np.float64)
    return found.mean(1) / (found.std(1) / np.sqrt(len(y)))


@pytest.mark.parametrize("m", [2, 5, 33])
def test_the_mean_is_the_score_and_the_noise_falls(m):
    """By the effective number of starts, about."""
    for t in (0.05, 0.3, 1.0):
        y, apart, s, number = drawn(averaged, m, t, 30_000 // m)
        assert np.abs(residuals(y, apart)).max() < 4.5
        _, apart_alone, alone, _ = drawn(averaged, 1, t, 10_000)
        fallen, number = float(jnp.mean(apart_alone**2) / jnp.mean(apart**2)), float(jnp.mean(number))
        assert 0.6 * number < fallen < 1.7 * number, (t, fallen, number)
        assert jnp.mean(s**2) < 1.02 * jnp.mean(alone**2)


def test_without_the_own_start_it_is_wrong():
    """As the test before would see."""
    y, apart, _ = drawn(of_others, 3, 0.3, 8000)
    assert np.abs(residuals(y, apart)).max() > 20.0


@pytest.mark.usefixtures("x64")
def test_it_is_the_score_of_the_mixture_of_the_kernels():
    """`∇ log Σ_j q(y|x_j)`, by the density of each kernel and automatic differentiation."""
    target = ad.LocalDSM(LINEAR, schedule=ad.FromZero()).target
    x = bumps(KEY, 7)
    for t in (0.03, 0.4, 1.0):
        draw = jax.jit(lambda x, t=t: target.together(x, t, 3, key=KEY))(x)
        kernels = jax.vmap(lambda x, t=t: ad.transition(LINEAR, x, 0.0, t))(x)
        score = jax.grad(lambda y, k=kernels: jax.nn.logsumexp(jax.vmap(lambda k: k.log_prob(y))(k)))
        np.testing.assert_allclose(draw.score, jax.vmap(jax.vmap(score))(draw.y), rtol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("power", [30, -30])
def test_units_make_no_difference(power):
    """To linear kernels, nor to tables; nor to the blocks that a pilot finds."""

    def averaged(a):
        process = ad.Process(lambda y, t: y - y**3 / a**2, 0.7 * a, 1.0)
        start = lambda k, n: a * jax.random.uniform(k, (n, 2), minval=-1.0)  # noqa: E731
        objective = ad.TabulatedDSM(process, y_range=(-a, a), references=8).prepare(start, key=KEY)
        x = start(KEY, 8)
        draw = objective.target.together(x, 0.3, 4, key=KEY)
        averaging = objective.target.averaging
        return draw.y / a, draw.score * a, averaging.shares, averaging.arrange(x) / a

    for one, other in zip(averaged(1.0), averaged(2.0**power), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# Tables


@pytest.mark.usefixtures("x64")
def test_weights_of_the_loss_do_not_depend_on_the_start():
    """Or its minimum would be `E[σ²ŝ|y]/E[σ²|y]`: kernels of a double well are of deviations that differ."""
    target = Tabulated(WELL, (1,), y_range=(-1.4, 1.4), references=4)
    x, times = jnp.linspace(-1.4, 1.4, 4)[:, None], jnp.array([0.1, 1.0])
    own = jax.vmap(lambda x: target._draw(target.tables, x, times[1], jnp.zeros(1)).scale)(x)
    assert np.ptp(np.asarray(own)) > 0.2 * np.mean(np.asarray(own))
    found = jax.vmap(lambda x: target.draw(x, times, key=KEY).scale)(x)
    np.testing.assert_allclose(found, jnp.broadcast_to(found[:1], found.shape), rtol=1e-6)
    np.testing.assert_allclose(target.together(x, times[1], 2, key=KEY).scale, found[:2, 1], rtol=1e-6)
    assert np.min(np.asarray(own)) < float(found[0, 1, 0]) < np.max(np.asarray(own))


def density(target, x, t, y):
    """`log q(y|x)` and its score by the second table, for arrays x and y: (x, y)."""
    draw = jax.vmap(lambda x: target._draw(target.tables, x[None], t, jnp.zeros(1)))(x)
    rows = jax.vmap(lambda x: target._rows(target.tables, x[None], t))(x)

    def one(rows, mean, scale):
        log_q, score = jax.vmap(lambda y: look_up(rows, (y - mean) / scale))(y[:, None])
        return (log_q - jnp.log(scale))[:, 0], (score / scale)[:, 0]

    return jax.vmap(one)(rows, draw.anchor, draw.scale)


@pytest.mark.usefixtures("x64")
def test_densities_of_an_ornstein_uhlenbeck_process_far_out():
    """Twelve deviations: beyond the ends of the table, too."""
    process = ad.Process(lambda y, t: -1.5 * y + 0.4, 0.7, 2.0)
    target = Tabulated(process, (1,), y_range=(-2.0, 2.0), references=None)
    assert target.tables.density_error < 5e-3
    u, x = np.linspace(-12.0, 12.0, 97), jnp.array([-1.3, 0.2, 1.9])
    for t in (0.004, 0.1, 2.0):
        mean = x * np.exp(-1.5 * t) + 0.4 * -np.expm1(-1.5 * t) / 1.5
        std = 0.7 * np.sqrt(-np.expm1(-3.0 * t) / 3.0)
        for i in range(3):
            log_q, score = density(target, x[i : i + 1], jnp.asarray(t), jnp.asarray(mean[i] + std * u))
            off = np.abs(log_q[0] + 0.5 * u**2 + np.log(std) + 0.5 * np.log(2 * np.pi))
            assert np.all(off < 3e-3 * (1.0 + u**2))
            assert np.all(np.abs(score[0] * std + u) < 6e-3 * (1.0 + np.abs(u)))


@pytest.mark.usefixtures("x64")
def test_densities_in_a_double_well_against_a_grid():
    """Averaged over a narrow start on both sides, where the density is above 10⁻⁹ of its maximum."""
    target = Tabulated(WELL, (1,), y_range=(-1.4, 1.4), references=None)
    faces = np.linspace(-4.0, 4.0, 8001)
    y = 0.5 * (faces[1:] + faces[:-1])
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    for start in (0.05, 0.9):
        times = [0.05, 0.3, 1.0]
        q = evolve_1d(WELL, np.exp(-0.5 * ((y - start) / 0.05) ** 2)[None], times, faces=faces, steps=150)[:, 0]
        for t, exact in zip(times, q, strict=True):
            seen = exact > 1e-9 * exact.max()
            at = y[seen][::20]
            log_q, score = density(target, jnp.asarray(start + 0.05 * nodes), jnp.asarray(t), jnp.asarray(at))
            logs = log_q + np.log(weights / weights.sum())[:, None]
            found = jax.nn.logsumexp(logs, axis=0)
            mean = np.sum(jax.nn.softmax(logs, axis=0) * score, axis=0)
            slope = np.gradient(np.log(np.maximum(exact, 1e-300)), y)[seen][::20]
            mass = exact[seen][::20] / np.sum(exact[seen][::20])
            std = np.sqrt(mass @ at**2 - (mass @ at) ** 2)
            stated = 1.5 * target.tables.density_error
            assert np.sqrt(mass @ (found - np.log(exact[seen][::20])) ** 2) < stated
            assert np.sqrt(mass @ (std * (mean - slope)) ** 2) < stated
            assert np.abs(found - np.log(exact[seen][::20])).max() < 0.3


def test_tabulated_targets_are_the_score_in_the_mean():
    """Against a grid, from a start of two boxes, m = 6, in groups that the pilot's blocks make."""
    box = ad.products.uniform_on((-1.4, -0.6), (0.2, 1.0))
    times = [0.02, 0.2, 1.0]
    exact = ad.products.solve_products(WELL, [1.0], [[box]], times, x_range=(-4.0, 4.0), cells=4000)

    def y0(key, n):
        side, place = jax.random.split(key)
        return jnp.where(jax.random.bernoulli(side, 0.5, (n, 1)), 0.2, -1.4) + 0.8 * jax.random.uniform(place, (n, 1))

    target = ad.TabulatedDSM(WELL, y_range=(-1.4, 1.4), references=6).prepare(y0, key=KEY).target
    averaging, groups = target.averaging, 2000
    pool = averaging.arrange(y0(KEY, 6 * groups))
    for i, t in enumerate(times):

        def one(index, key, t=t):
            place, key = jax.random.split(key)
            return target.together(pool[averaging.group(index, groups, t, key=place)], t, 6, key=key)

        draw = jax.jit(jax.vmap(one))(jnp.arange(groups), jax.random.split(KEY, groups))
        s = jax.jit(jax.vmap(lambda y, i=i: exact.score(y, i)))
        y = draw.y.reshape(-1, 1)
        apart = (draw.score.reshape(-1, 1) - s(y)) * draw.scale[0, 0]
        good = np.isfinite(np.asarray(apart))[:, 0]
        found = np.stack([np.asarray(v)[good] for v in (apart, apart * y, apart * jnp.tanh(3 * y), apart * jnp.cos(y))])
        # All members of a group, and both of a pair, are no more than as many independent draws are.
        off = 4.5 * found.std(1) / np.sqrt(groups) + 0.5 * target.tables.density_error
        assert np.all(np.abs(found.mean(1)) < off)
        alone = jax.jit(jax.vmap(lambda x, k, t=t: target.draw(x, jnp.asarray([t]), key=k)))
        plain = alone(pool, jax.random.split(KEY, len(pool)))
        assert np.mean(np.asarray(draw.score) ** 2) < 1.02 * np.mean(np.asarray(plain.score) ** 2)


# Groups


@pytest.mark.parametrize(("groups", "members", "width"), [(12, 4, 1), (12, 4, 5), (7, 3, 7), (9, 2, 4), (1, 5, 1)])
def test_groups_split_the_pool(groups, members, width):
    keys = jax.random.split(KEY, groups)
    found = [place_members(i, groups, members, jnp.asarray(width), key=k) for i, k in enumerate(keys)]
    assert sorted(np.concatenate(found)) == list(range(groups * members))
    for each in found:
        assert np.ptp(each) < width * members  # in one block
    firsts = [int(place_members(0, groups, members, jnp.asarray(width), key=k)[0]) for k in jax.random.split(KEY, 60)]
    assert len(set(firsts)) == members  # whichever comes first is left to chance


@pytest.mark.parametrize("steps", [16, 12, 7, 1])
def test_rounds_of_groups_have_all_strata_in_every_step(steps):
    process = ad.Process(lambda y, t: -y, 1.0, 1.0)
    objective = ad.LocalDSM(process, schedule=ad.FromZero(), references=5, times="uniform", t0=0.2)
    objective = objective.prepare(lambda k, n: jax.random.normal(k, (n, 2)), key=KEY)
    assert objective.averaging.references == 5
    rounds = Rounds(steps, steps, 6, 1, 0.9)
    draw, _ = round_draws(objective, lambda k, n: jax.random.normal(k, (n, 2)), KEY, 0, rounds, steps)
    assert draw.y.shape == draw.score.shape == (steps, 6, 2, 2)
    for row in np.asarray(draw.t):
        assert np.all(np.histogram(row, np.linspace(0.2, 1.0, 7))[0] == 1)
    # At least as many starts as draws: none is given twice
    assert len(np.unique(np.asarray(draw.anchor).reshape(-1, 2), axis=0)) == 6 * steps


def test_bounds_are_never_averaged():
    """By construction, whatever the target could do; and asking for it is an error."""
    with pytest.raises(ValueError, match="references=8 averages targets over starts"):
        ad.TabulatedDSM(WELL, references=8, weighting="likelihood")
    with pytest.raises(ValueError, match="references=8 averages"):
        ad.LocalDSM(LINEAR, schedule=ad.FromZero(), references=8, weighting="likelihood")
    target = ad.LocalDSM(LINEAR, schedule=ad.FromZero(), references=4).prepare(bumps, key=KEY).target
    assert DSM(LINEAR, target).averaging.references == 4
    bound = DSM(LINEAR, target, weighting="likelihood")
    assert bound.averaging is None
    x = bumps(KEY, 12)
    plain = ad.LocalDSM(LINEAR, schedule=ad.FromZero(), weighting="likelihood", references=1)
    found, same = (round_draws(each, Batch(x), KEY, 0, Rounds(4, 4, 3, 1, 0.9), 4) for each in (bound, plain))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_cannot_be_averaged():
    with pytest.raises(ValueError, match="references=0"):
        ad.TabulatedDSM(WELL, references=0)
    with pytest.raises(ValueError, match="references=4 needs kernels from the start"):
        ad.LocalDSM(LINEAR, references=4)
    normal = lambda k, n: jax.random.normal(k, (n, 2))  # noqa: E731
    with pytest.raises(ValueError, match="the drift is not linear"):
        ad.LocalDSM(WELL, schedule=ad.FromZero(), references=4).prepare(normal, key=KEY)
    still = ad.Process(lambda y, t: -y, jnp.array([1.0, 0.0]), 1.0)
    with pytest.raises(ValueError, match="noise does not reach all coordinates"):
        ad.LocalDSM(still, schedule=ad.FromZero(), references=4).prepare(normal, key=KEY)
    assert ad.LocalDSM(still, schedule=ad.FromZero()).prepare(normal, key=KEY).averaging is None
