"""The exact score as target."""

import jax
import jax.numpy as jnp
import numpy as np

import autodsm as ad
from autodsm.learn.objective import DSM
from autodsm.targets import Oracle

KEY = jax.random.key(0)


def oracle():
    process = ad.linear(jnp.array([[-1.0, 0.5], [0.0, -2.0]]), 0.8, t1=2.0)
    exact = ad.reference.gaussian_marginals(process, np.array([1.0, -0.5]), np.diag([0.3, 0.1]))
    start = lambda key, n: exact.sample(key, n, 0.0)  # noqa: E731
    return DSM(process, Oracle(process, exact.score)).prepare(start, key=KEY), exact, start


def test_the_loss_of_the_exact_score_is_zero_and_no_other_is():
    objective, exact, start = oracle()
    for factor, least, most in ((1.0, 0.0, 1e-9), (1.1, 1e-4, 1.0)):
        score = lambda y, t, factor=factor: factor * exact.score(y, t)  # noqa: E731
        losses = jax.jit(jax.vmap(lambda x, k, score=score: objective(score, x, key=k)))(
            start(KEY, 64), jax.random.split(KEY, 64)
        )
        assert least <= float(losses.mean()) <= most


def test_coordinates_are_weighed_by_the_size_of_their_score():
    objective, exact, start = oracle()
    t = jnp.array([0.01, 0.5, 2.0])
    draw = objective.target.draw(start(KEY, 1)[0], t, key=KEY)
    squares = [np.diagonal(np.linalg.inv(np.asarray(exact.moments(each)[1]))) for each in t]
    np.testing.assert_allclose(draw.scale, np.array(squares) ** -0.5, rtol=0.05)  # of 4,096 states: 1.1 %
