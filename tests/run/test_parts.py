"""Networks, laws and processes as data: described again after they were built, they are the same data."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.network import MLP, Equivariant, Framed, Odd, Relaxation, Score, UNet
from autodsm.paths.initial import Law
from autodsm.process.equilibrium import EquilibriumScore
from autodsm.process.priors import score_of
from autodsm.run.parts import Damaged, NoProcess, NoProcessError, Reader, Unknown, Writer
from autodsm.targets.correlations import Full, LowRank
from autodsm.targets.marginals import POINTS, Marginals

KEY = jax.random.key(0)
WELL = ad.systems.double_well(2)
CLOCK = ad.Clock(WELL.process)
SMALL = dict(key=KEY, width=4, depth=1)


def marginals(inverse):
    return Marginals(jnp.ones((POINTS, 2)), 2.0 * jnp.ones((POINTS, 2)), 5.0, inverse)


def framed():
    """What `fit` makes for a system whose drift tells its equilibrium."""
    moments = marginals(Full(jnp.broadcast_to(jnp.eye(2), (POINTS, 2, 2))))
    net = Framed(MLP((2,), CLOCK, fourier=(0.25, 0.5), **SMALL), CLOCK, moments)
    relaxation = Relaxation(EquilibriumScore(WELL.process, (2,)), CLOCK)
    base = moments.score
    options = dict(base=base, spread=moments.std[-1], start=Law(WELL.y0).score, relaxation=relaxation)
    return Score(net, CLOCK, parameterization="residual", **options)


def mixture():
    weights = dist.Categorical(probs=jnp.array([0.25, 0.75]))
    return dist.MixtureSameFamily(weights, dist.Normal(jnp.array([-1.0, 1.0]), 0.5))


def residual(base):
    return Score(MLP((2,), CLOCK, **SMALL), CLOCK, parameterization="residual", base=base)


LOW = LowRank(jnp.ones((POINTS, 2)), jnp.zeros((POINTS, 2, 1)))
KNOWN = {
    "framed": framed,
    "waves that fade": lambda: MLP((2,), CLOCK, spread=[1.0, 2.0], fourier=(0.5,), mean=[0.0, 1.0], **SMALL),
    "odd": lambda: Odd(MLP((2,), CLOCK, activation="tanh", **SMALL)),
    "particles": lambda: Equivariant((3, 2), CLOCK, **SMALL),
    "image": lambda: eqx.nn.inference_mode(
        UNet((1, 4, 4), CLOCK, key=KEY, channels=4, levels=(1,), blocks=1, compute=jnp.bfloat16)
    ),
    "directions": lambda: residual(marginals(LOW).score),
    "gaussian": lambda: residual(ad.reference.gaussian_marginals(ad.vp(), np.zeros(2), np.eye(2), degree=8).score),
    "prior": lambda: residual(score_of(mixture())),
    "velocity": lambda: ad.WithVelocity(dist.Logistic(0.0, 1.0)),
    "start": lambda: Law(ad.systems.swimmer().y0),
    "normal": lambda: dist.Normal(jnp.zeros(2), 1.0).to_event(1),
    "correlated": lambda: dist.MultivariateNormal(jnp.zeros(2), jnp.array([[2.0, 0.5], [0.5, 1.0]])),
    "heavy tails": lambda: dist.StudentT(3.0, 0.0, 2.0),
    "expanded": lambda: dist.Laplace(0.0, 1.0).expand((3,)),
    "numbers": lambda: {"a": (1, 2.5, float("inf")), "b": [None, True, "text"], "c": np.float64(2.0)}["a"],
    "vp": lambda: ad.vp(ad.LinearBeta(0.2, 8.0)),
    "langevin": lambda: ad.langevin(mixture(), ad.CosineBeta()),
    "underdamped": lambda: ad.underdamped(dist.Logistic(0.0, 1.0), mass=0.5),
    "linear": lambda: ad.linear(np.array([[0.0, 1.0], [-1.0, -0.5]]), np.array([0.0, 1.0]), t1=3.0),
    "particles in a trap": lambda: ad.systems.particles(3, gamma=2.0).process,
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_read_is_what_was_written(name):
    thing = KNOWN[name]()
    first = Writer(WELL.process)
    data = json.loads(json.dumps(first.describe(thing)))
    again = Reader(first.arrays, WELL.process).build(data)
    second = Writer(WELL.process)
    assert second.describe(again) == data
    for a, b in zip(first.arrays, second.arrays, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    assert type(again) is type(thing)


def test_a_network_computes_what_it_did():
    net, y = framed(), jnp.array([0.3, -0.4])
    writer = Writer(WELL.process)
    data = writer.describe(net)
    again = Reader(writer.arrays, WELL.process).build(data)
    for t in (0.0, 0.3):
        np.testing.assert_array_equal(net(y, t), again(y, t))
    without = Reader(writer.arrays, NoProcess()).build(data)
    with pytest.raises(NoProcessError, match=r"a drift of your own.*ad.load\(path, process=process\)"):
        without(y, 0.3)


class Mine(eqx.Module):
    def __call__(self, y, t):
        return -y


class Shifted(dist.Normal):
    """A law of the user's, which has parameters of the same names."""


@pytest.mark.parametrize(
    "thing",
    [
        Mine(),
        lambda y, t: -y,
        residual(lambda y, t: -y),
        Shifted(0.0, 1.0),
        dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.ExpTransform()),
        ad.Process(lambda y, t: -y, 1.0, 1.0),
        ad.vp(lambda t: 1.0 + t),
        KEY,
    ],
)
def test_what_is_the_users_is_told_apart(thing):
    with pytest.raises(Unknown):
        Writer().describe(thing)


@pytest.mark.parametrize(
    "data",
    [
        {"part": "os.system", "fields": {}},
        {"part": "Frozen", "fields": {}},
        {"part": "Frozen", "fields": {"held": 1, "more": 2}},
        {"part": "Frozen", "fields": [1]},
        {"part": "Frozen"},
        {"law": "Distribution", "parameters": {}},
        {"law": "Normal", "parameters": {"loc": 0.0, "scale": 1.0, "validate_args": True}},
        {"process": "eval", "arguments": {"x": "1"}},
        {"process": "vp", "arguments": {"no": 1}},
        {"process": "model"},
        {"method": "__class__", "of": {"part": "Marginals", "fields": {}}},
        {"method": "estimate", "of": {"part": "Marginals", "fields": {}}},
        {"array": 0},
        {"array": -1},
        {"array": "0"},
        {"dtype": "object"},
        {"number": "1"},
        {"tuple": "abc"},
        {"import": "os"},
        {},
    ],
)
def test_other_data_build_nothing(data):
    with pytest.raises((Damaged, KeyError, TypeError)):
        Reader([]).build(data)
