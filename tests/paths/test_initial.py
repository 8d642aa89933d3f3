"""Laws of y_0 that have a density: samples as their own, scores that are checked against them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.paths.initial import Law, as_start, initial_states

KEY = jax.random.key(0)


class Rescaled:
    """Samples of one normal law with the log_prob of another."""

    def __init__(self, law, factor=1.0, shift=0.0):
        self.law, self.factor, self.shift = law, factor, shift

    def sample(self, key, sample_shape=()):
        return self.shift + self.factor * self.law.sample(key, sample_shape)

    def log_prob(self, y):
        return self.law.log_prob(y)


NORMAL = dist.Normal(jnp.array([1.0, -2.0]), jnp.array([0.3, 2.0]))
LAWS = {
    "normal": NORMAL,
    "correlated": dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.9], [0.9, 1.0]])),
    "heavy tails": dist.StudentT(2.0, jnp.zeros(3), 1.0).to_event(1),
    "tiny": dist.Normal(jnp.full(2, 1e-6), 1e-9),
    "two modes": dist.MixtureSameFamily(
        dist.Categorical(jnp.ones(2) / 2), dist.Normal(jnp.array([[-3.0, 3.0]] * 2), 0.5)
    ),
    "of a system": ad.systems.particles().y0,
}


@pytest.mark.parametrize("name", LAWS)
def test_laws_are_accepted_and_sampled_as_they_are(name):
    law = as_start(LAWS[name])
    law.check(key=KEY)
    np.testing.assert_array_equal(law(KEY, 5), LAWS[name].sample(KEY, (5,)))
    np.testing.assert_array_equal(initial_states(LAWS[name], 5, key=KEY), law(KEY, 5))


@pytest.mark.parametrize("wrong", [Rescaled(NORMAL, 1.1), Rescaled(NORMAL, 1.0, 0.05), dist.Uniform(-jnp.ones(2), 1.0)])
def test_samples_that_disagree_with_the_density_are_refused(wrong):
    with pytest.raises(ValueError, match=r"samples and its log_prob disagree.*give its sampler alone"):
        Law(wrong).check(key=KEY)


def test_the_score_of_a_law():
    y = jnp.array([0.5, 1.0])
    np.testing.assert_allclose(Law(NORMAL).score(y), [0.5 / 0.09, -3.0 / 4.0], rtol=1e-5)


def test_fit_takes_a_law_and_its_sums_begin_with_the_score():
    process = ad.Process(lambda y, t: jnp.tanh(y[::-1]) - y, 0.7, 1.0)
    for y0, known in ((NORMAL, True), (lambda key, n: NORMAL.sample(key, (n,)), False)):
        model = ad.fit(process, y0, key=KEY, steps=2, batch_size=64, width=16, depth=1, progress=False)
        assert model.objective.target.profile.known is known
    with pytest.raises(ValueError, match="disagree"):
        ad.fit(process, Rescaled(NORMAL, 1.2), key=KEY, steps=2, batch_size=64, progress=False)


def test_bounds_for_each_example_do_not_know_the_start():
    process = ad.Process(lambda y, t: jnp.tanh(y[::-1]) - y, 0.7, 1.0)
    ready = ad.PathwiseDSM(process, weighting="likelihood").prepare(NORMAL, key=KEY)
    assert not ready.target.profile.known
    assert not ad.ELBO(process, dist.Normal(0.0, 1.0), kind="pathwise").prepare(jnp.ones((8, 2)), key=KEY).target.score
