"""Sums along paths: exact for their chain, however coarse; exact scores for linear processes; of the least noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.base.modules import replace
from autodsm.targets import Adapted, Paths
from autodsm.targets.chain import Piece
from autodsm.targets.profiles import best_profile
from batches import in_batches
from stein import COUPLED, drawn, examples, start, z_scores

KEY = jax.random.key(0)
TIMES = [0.01, 0.33, 1.9]


def start_score(y):
    """That of `stein.start`."""
    return -(y - 0.3) / 0.49


def adapted(process, shape, *, steps=8, kind=None, known=False, gaussian=True):
    target = Adapted(process, Paths(process, steps), kind=kind, gaussian=gaussian)
    return target.fitted(start(shape), key=jax.random.key(3), score=start_score if known else None)


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("kind", ["matrix", "diagonal"])
@pytest.mark.parametrize("known", [False, True])
def test_sums_are_exact_for_coarse_chains(name, kind, known):
    """A matrix g, one that depends on time, drifts that do, pairs of coordinates; with eight steps."""
    process, shape = COUPLED[name]
    x, keys = examples(shape, 50_000)
    draw = drawn(adapted(process, shape, kind=kind, known=known), x, TIMES, keys)
    # Up to 48 residuals: the largest of so many normal ones is below 4.5 but once in 3,000 times.
    assert np.abs(z_scores(draw)).max() < 4.5


@pytest.mark.parametrize("known", [False, True])
def test_sums_are_exact_within_the_first_step(known):
    """A branch over a part of it: where the start's score is not known, no part of the sum of zero may be left."""
    process, shape = COUPLED["tanh"]
    x, keys = examples(shape, 50_000)
    target = adapted(process, shape, known=known)
    times = np.array([0.1, 0.6]) * float(target.forward.grid[1])
    assert np.abs(z_scores(drawn(target, x, times, keys))).max() < 4.5


def test_sums_without_a_pilot_are_exact():
    process, shape = COUPLED["pairs"]
    x, keys = examples(shape, 50_000)
    assert np.abs(z_scores(drawn(Adapted(process, Paths(process, 8), gaussian=True), x, TIMES, keys))).max() < 4.5


def carried_without_drift(self, profile, state, piece, noise, turns):
    """η in place of DΦᵀη."""
    (y, total), algebra, count = state, profile.algebra, len(noise)
    drifts, kicks = piece.drifts(self.process)[:count], piece.kicks()[:count]
    for drift, kick, xi, turn in zip(drifts, kicks, noise, turns, strict=True):
        moved = kick.noise(self.process, xi, y.shape)
        eta = kick.divided(self.process, moved)
        total = total + eta
        total = total + algebra.join(algebra.matvec(turn, algebra.split(total))) - eta
        y = drift(y) + moved
    return y, total


def carried_by_noise(self, profile, state, piece, noise, turns):
    """An R that looks at the noise of its own kick."""
    seen = jnp.tanh(noise.reshape(len(noise), -1)[:, 0]).reshape(-1, *(1 for _ in turns.shape[1:]))
    return CARRIED(self, profile, state, piece, noise, turns * (1.0 + 0.3 * seen))


CARRIED = Adapted._carried


@pytest.mark.parametrize("wrong", [carried_without_drift, carried_by_noise])
def test_wrong_sums_are_noticed(wrong, monkeypatch):
    process, shape = COUPLED["tanh"]
    x, keys = examples(shape, 50_000)
    target = adapted(process, shape)
    monkeypatch.setattr(Adapted, "_carried", wrong)
    assert np.abs(z_scores(drawn(target, x, [1.9], keys))).max() > 6


def test_a_wrong_score_of_the_start_is_noticed():
    process, shape = COUPLED["tanh"]
    x, keys = examples(shape, 50_000)
    target = replace(adapted(process, shape, known=True), score=lambda y: 0.9 * start_score(y))
    assert np.abs(z_scores(drawn(target, x, [0.01], keys))).max() > 6


A, G = np.array([[-1.0, 2.0], [0.3, -0.5]]), np.array([[1.0, 0.4], [0.0, 0.7]])
LINEAR = {
    "matrix g": ad.linear(A, G, t1=2.0),
    "of time": ad.Process(lambda y, t: (1 + t) * jnp.asarray(A) @ y + jnp.sin(3 * t), lambda t: (1 + 0.5 * t) * G, 2.0),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("known", [False, True])
def test_sums_of_a_linear_process_are_the_score_of_the_chain(name, known, x64, monkeypatch):
    """A chain that is linear in its noise is Gaussian: its mean and covariance follow from derivatives by the noise. At
    the points of the grid, for which the profile is made."""
    process, steps = LINEAR[name], 6
    width = 0.6 if known else 0.0  # of the start
    target = Adapted(process, Paths(process, steps), gaussian=True)
    score = (lambda y: -y / width**2) if known else None
    x = width * jnp.array(
        [[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]
    )  # whose scores have the right mean square
    profile = best_profile(process, target.forward.grid, x, key=KEY, score=score)
    target = replace(target, profile=profile, score=score)
    count, t = target.forward.steps - 1, target.forward.grid[-3]

    def ends(noise):
        first, trunk, branch = jnp.split(noise, [2, 2 + 4 * count])
        given = {(count, 2): trunk.reshape(count, 2, 2), (1, 3): branch.reshape(1, 3, 2)}
        monkeypatch.setattr(Adapted, "_noise", lambda self, key, n, like: given[n])
        draw = target.draw(width * first, jnp.array([t]), key=KEY)
        return draw.y[0, 0], draw.score[0, 0]

    size = 2 + 4 * count + 6
    slopes, _ = jax.jacobian(ends)(jnp.zeros(size))
    cov = np.asarray(slopes @ slopes.T)
    for key in jax.random.split(KEY, 3):
        y, found = ends(jax.random.normal(key, (size,)).at[:2].multiply(known))
        mean, _ = ends(jnp.zeros(size))
        np.testing.assert_allclose(found, -np.linalg.solve(cov, np.asarray(y - mean)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["matrix", "diagonal"])
@pytest.mark.parametrize("known", [False, True])
def test_the_mean_square_is_what_the_profile_says(kind, known):
    process, shape = COUPLED["pairs"]
    x, keys = examples(shape, 50_000)
    draw = drawn(adapted(process, shape, kind=kind, known=known), x, TIMES[1:], keys)
    found, scale = np.asarray(draw.score[:, :, 0], np.float64) ** 2, np.asarray(draw.scale[0], np.float64)
    # The pilot has 512 paths, whose averages are a percent or two off.
    np.testing.assert_allclose(found.mean(axis=0) * scale**2, 1.0, atol=0.06)


def test_the_best_matrix_has_less_noise_than_the_best_diagonal_and_both_less_than_none():
    process, shape = COUPLED["tanh"]
    x, keys = examples(shape, 20_000)
    squares = [
        np.asarray(drawn(target, x, [1.9], keys).score, np.float64).var()
        for target in (
            adapted(process, shape, kind="matrix"),
            adapted(process, shape, kind="diagonal"),
            Adapted(process, Paths(process, 8), gaussian=True),
        )
    ]
    assert squares[0] < 0.95 * squares[1]
    assert squares[1] < 0.95 * squares[2]


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("kind", ["matrix", "diagonal"])
def test_noise_does_not_grow_with_steps(name, kind):
    process, shape = COUPLED[name]
    x, keys = examples(shape, 20_000)
    few, many = (
        np.asarray(drawn(adapted(process, shape, steps=steps, kind=kind), x, [0.33, 1.9], keys).score, np.float64)
        for steps in (12, 48)
    )
    squares = [np.mean(np.sum(v**2, axis=tuple(range(2, v.ndim))), axis=0) for v in (few, many)]
    assert np.all(squares[1] < 1.1 * squares[0])


@pytest.mark.parametrize("kind", ["matrix", "diagonal"])
def test_units_of_coordinates_and_of_time_make_no_difference(kind):
    process, _ = COUPLED["tanh"]
    units, long = jnp.array([2.0**20, 2.0**-20]), 2.0**15
    other = ad.Process(
        lambda y, t: units / long * process.f(y / units, t / long),
        units[:, None] * process.g(0.0) / np.sqrt(long),
        2.0 * long,
    )
    x, keys = examples((2,), 256)
    draws = []
    for each, unit, second in ((process, jnp.ones(2), 1.0), (other, units, long)):
        target = Adapted(each, Paths(each, 8), kind=kind).fitted(x * unit, key=KEY)
        draw = drawn(target, x * unit, jnp.asarray(TIMES) * second, keys)
        draws.append((draw.y / unit, draw.score * unit, draw.scale / unit))
    for a, b in zip(*draws, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * np.abs(a).max())


def test_four_point_noise_changes_the_target_little():
    process, shape = COUPLED["tanh"]
    x, keys = examples(shape)
    draw = drawn(adapted(process, shape, steps=48, gaussian=False), x, [0.5, 2.0], keys)
    assert np.abs(z_scores(draw)).max() < 4.5


@pytest.mark.parametrize("n", [2, 50])
def test_states_follow_a_moving_trap(n, x64, monkeypatch):
    """Particles in a rotating harmonic trap. All is linear: without noise a path is its mean, and derivatives by the
    noise give variances. Both are exact, up to the scheme, at times all over the steps that are chosen. A shift of all
    particles by a hundredth of their deviation would be a tenth of that of the mean of fifty, and of every current."""
    system = ad.systems.harmonic_particles(n)
    forward = ad.PathwiseDSM(system.process).prepare(system.y0, key=KEY).target.forward
    target, count = Adapted(system.process, forward), forward.steps - 1
    first = jnp.broadcast_to(jnp.array([2.0, 0.0]), (n, 2))

    def state(x, noise, t):
        given = {(count, 2): noise[:-1, :2], (1, 3): noise[-1:]}
        monkeypatch.setattr(Adapted, "_noise", lambda self, key, n, like: given[n])
        return target.draw(x, t[None], key=KEY).y[0, 0]

    none = jnp.zeros((count + 1, 3, n, 2))

    def relative(x, noise, t):  # one of the modes in which particles move against each other
        y = state(x, noise, t)
        return (y[0, 0] - y[1, 0]) / np.sqrt(2.0)

    times = jnp.linspace(0.35, 2.13, 24)
    means = jax.jit(jax.vmap(lambda t: state(first, none, t)))(times)
    slopes = jax.jit(jax.vmap(lambda t: jax.grad(relative, argnums=(0, 1))(first, none, t)))(times)
    from_start, from_noise = (np.sum(np.asarray(s) ** 2, axis=tuple(range(1, s.ndim))) for s in slopes)
    variance = 0.25**2 * from_start + from_noise
    exact = [ad.reference.harmonic_particles(float(t)) for t in times]
    np.testing.assert_allclose(means, np.stack([[e.mean] * n for e in exact]), atol=1.5e-3)
    np.testing.assert_allclose(variance, [e.fluctuation for e in exact], rtol=6e-3)


@pytest.fixture(scope="module")
def five_particles():
    """The system, and the target that it gets."""
    system = ad.systems.particles()
    return system, ad.PathwiseDSM(system.process).prepare(system.y0, key=jax.random.key(2)).target


def test_steps_that_are_chosen_leave_no_error_to_be_seen(five_particles):
    """Five repelling particles, ten coordinates: `E[ŝ·(y − m)]/d = −1`, averaged over the steps of a path."""
    (system, target), n = five_particles, 8192
    times = jnp.linspace(0.3, 10.0, 128)
    x, keys = system.y0(jax.random.key(1), n), jax.random.split(jax.random.key(2), n)
    found = drawn(target, x, times, keys)
    y, score = np.asarray(found.y[:, :, 0], np.float64), np.asarray(found.score[:, :, 0], np.float64)
    values = np.mean(np.sum(score * (y - y.mean(axis=0)), axis=(2, 3)) / 10, axis=1)
    assert abs(values.mean() + 1.0) < 4.5 * values.std() / np.sqrt(n)


def test_flows_of_the_scores_of_paths_keep_variances(five_particles):
    """The flow of a score carries states by the true drift, where those it learned from took steps of a scheme: if the
    two disagree by little in a unit of time, they do by ten times as much after ten. In states and scores of paths,
    `d log Var/dt = (2 E[f·(y − m)] − g² E[ŝ·(y − m)])/Var` for a component, and E[ŝ·(y − m)] = −1 for an exact score;
    averaged here from t = 2 to 10, four turns of the trap.
    """
    ((process, y0, _), target), n = five_particles, 40_000
    times = np.linspace(2.0, 10.0, 33)
    x, keys = y0(jax.random.key(0), n), jax.random.split(jax.random.key(1), n)
    local = ad.LocalDSM(process).prepare(y0, key=jax.random.key(2)).target

    def deviation(draw):
        """In standard errors; and these, in percent of the variance in a unit of time."""

        def one(x, k):
            y, pull = draw(x, jnp.asarray(times), k)
            return y, jax.vmap(process.f)(y, jnp.asarray(times)), pull

        y, f, pull = (np.asarray(v, float) for v in in_batches(one, x, keys, size=500))
        y = y - y.mean(axis=0)
        variance = y.var(axis=0)
        rates = (2 * f * y - float(process.g(0.0)) ** 2 * (-1.0 if pull.ndim == 1 else pull * y)) / variance
        weights = np.array([0.5, *np.ones(31), 0.5]) / 32
        turned = np.log(variance[-1] / variance[0]) / 8
        grown = turned + (y[:, -1] ** 2 / variance[-1] - y[:, 0] ** 2 / variance[0]) / 8
        gone = (np.tensordot(rates, weights, (1, 0)) - grown).mean(axis=(1, 2))
        error = gone.std() / np.sqrt(n)
        return gone.mean() / error, 100 * error

    def weighted(x, times, key):
        found = target.draw(x, times, key=key)
        return found.y[:, 0], found.score[:, 0]

    def states_of(forward):  # with the exact score of their law
        return lambda x, times, key: (forward.states(x, times, key=key), jnp.zeros(()))

    for draw in (states_of(local), weighted):
        found, error = deviation(draw)
        assert abs(found) < 4.5
        assert error < 0.15
    assert deviation(states_of(Paths(process, 176)))[0] < -9  # that change means and variances by less than .5 %


def test_branches_end_where_they_are_asked_to(x64):
    """Kicks of the pieces to a time t add up to t, however the last step is cut."""
    process = ad.Process(lambda y, t: jnp.zeros_like(y), lambda t: jnp.sqrt(1.0 + t), 2.0)
    grid = Paths(process, 8).grid
    pieces = Piece.along(grid)
    for index, share in ((0, 0.4), (1, 0.2), (7, 1.0), (len(grid) - 2, 0.6)):
        along = [jax.tree.map(lambda leaf, k=k: leaf[k], pieces) for k in range(index + 1)]
        kicks = [kick for piece in along[:-1] for kick in piece.kicks()[:2]]
        kicks += along[-1]._replace(h=share * along[-1].h).kicks()
        t = float(grid[index] + share * (grid[index + 1] - grid[index]))
        received = sum(float(kick.h) for kick in kicks)
        assert received == pytest.approx(t, rel=1e-12)


def test_singular_noise_is_refused():
    system = ad.systems.swimmer()
    with pytest.raises(ValueError, match=r"pathwise target divides by the noise.*Use LocalDSM"):
        Adapted(system.process, Paths(system.process, 8)).draw(jnp.zeros(2), jnp.ones(1), key=KEY)


def test_profiles_follow_the_number_of_coupled_coordinates():
    def profile(n):
        drift = lambda y, t: jnp.tanh(jnp.roll(y, 1)) - y  # noqa: E731
        process = ad.Process(drift, 1.0, 1.0)
        return Adapted(process, Paths(process, 8)).fitted(jnp.zeros((4, n)), key=KEY).profile

    assert profile(8).kind == "matrix"
    assert profile(100).kind == "diagonal"
    assert profile(100).turns.shape[2:] == (100,)
