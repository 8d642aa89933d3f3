"""Drifts that jump are found, kinks are not taken for them, and the default objective derives no jump."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.learn.choose import choose_objective
from autodsm.process.jumps import find_jump, may_jump
from autodsm.targets import Adapted, Local
from autodsm.targets.pilot import Pilot

X1, X2 = (np.random.default_rng(0).normal(size=(64, d)) for d in (1, 2))


def of(drift, g=1.0):
    return ad.Process(drift, g, 1.0)


def friction(y, t):
    """Coulomb friction on the second coordinate, coupled to the first."""
    return jnp.stack([y[1] - y[0], -y[0] - 0.3 * jnp.sign(y[1])])


def in_a_loop(y, t):
    return jax.lax.scan(lambda c, _: (c - jnp.sign(c), None), y, None, length=3)[0]


JUMPS = {  # the size of the jump at 0, or of any
    "laplace": (ad.langevin(dist.Laplace(0.0, 1.0), ad.ConstantBeta(1.0)), X1, 2.0),
    "friction": (of(friction), X2, 0.6),
    "noise in the velocity only": (of(friction, jnp.array([0.0, 1.0])), X2, 0.6),
    "beside a steep force": (of(lambda y, t: y - y**3 - 0.1 * jnp.sign(y)), X1, 0.2),
    "where": (of(lambda y, t: jnp.where(y > 0.3, -y, -2.0 * y)), X2, 0.3),
    "floor": (of(lambda y, t: -jnp.floor(y)), X2, 1.0),
    "quotient": (of(lambda y, t: -y / jnp.abs(y)), X1, 2.0),
    "loop": (of(in_a_loop), X2, 2.0),
    "small units": (of(lambda y, t: -1e-9 * jnp.sign(y) - y, 1e-9), 1e-9 * X2, 2e-9),
    "far away": (of(lambda y, t: -jnp.sign(y - 1e4)), 1e4 + X2, 2.0),
    "one start": (of(lambda y, t: -jnp.sign(y - 0.5)), np.zeros((64, 1)), 2.0),
}
CONTINUOUS = {
    "logistic": (ad.langevin(dist.Logistic(0.0, 1.0)), X2),
    "student": (ad.langevin(dist.StudentT(3.0)), X2),
    "two slopes": (of(lambda y, t: jnp.where(y > 0, -y, -2.0 * y)), X2),
    "root": (of(lambda y, t: -jnp.sign(y) * jnp.sqrt(jnp.abs(y))), X2),
    "quotient": (of(lambda y, t: -y / (1.0 + jnp.abs(y))), X2),
    "steep": (of(lambda y, t: jnp.where(y > 0, -jnp.tanh(1e4 * y), -jnp.tanh(1e4 * y))), X2),
}
SMOOTH = {
    "relu": lambda y, t: -jax.nn.relu(y) - y,
    "abs": lambda y, t: -y * jnp.abs(y),
    "clip": lambda y, t: -jnp.clip(y, -1.0, 1.0),
    "in time": lambda y, t: -y * jnp.where(t < 0.3, 1.0, 2.0),
    "by a number": lambda y, t: -y / 3.0 + y**2,
}


@pytest.mark.parametrize("name", JUMPS)
def test_jumps_are_found(name):
    process, x, size = JUMPS[name]
    found = find_jump(process, x)
    assert found is not None
    np.testing.assert_allclose(np.max(np.abs(found.size)), size, rtol=1e-6)
    assert "jumps by" in str(found)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_kinks_and_steep_slopes_are_not_jumps(name):
    process, x = CONTINUOUS[name]
    assert may_jump(process.drift, x.shape[1:])  # by its operations
    assert find_jump(process, x) is None


@pytest.mark.parametrize("name", SMOOTH)
def test_operations_that_cannot_jump_are_known(name):
    assert not may_jump(SMOOTH[name], (2,))


@pytest.mark.parametrize("name", ["laplace", "friction", "noise in the velocity only"])
def test_the_default_takes_no_derivative_of_a_jump(name):
    process, x, _ = JUMPS[name]
    objective, reason = choose_objective(Pilot(process, x, key=jax.random.key(0)))
    assert isinstance(objective.target, Local)
    assert "jumps" in reason


def test_pathwise_targets_of_a_jump_are_refused():
    process, x, _ = JUMPS["friction"]
    objective = ad.PathwiseDSM(process)
    with pytest.raises(ValueError, match=r"jumps by.*LocalDSM"):
        ad.fit(process, x, key=jax.random.key(0), objective=objective, steps=1, batch_size=32, progress=False)


def test_kinks_keep_their_default():
    process = of(lambda y, t: jnp.stack([y[1] - jax.nn.relu(y[0]), -y[0] - jnp.where(y[1] > 0, 1.0, 2.0) * y[1]]))
    assert isinstance(choose_objective(Pilot(process, X2, key=jax.random.key(0)))[0].target, Adapted)
