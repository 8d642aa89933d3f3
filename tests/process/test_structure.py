"""Structure: inferred right on everything shipped and on odd drifts; the algebra agrees with dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm.process.coupling import marked_outputs
from autodsm.process.structure import Blocks, Dense, Elementwise

MIXTURE = dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(jnp.array([-1.0, 1.0]), 0.7))

SHIPPED = {
    "logistic": (ad.langevin(dist.Logistic(0.0, 1.0)), (3, 8, 8), Elementwise),
    "mixture": (ad.langevin(MIXTURE), (5,), Elementwise),
    "joint normal": (
        ad.langevin(dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1, 0.5], [0.5, 1]]))),
        (2,),
        Dense,
    ),
    "vp": (ad.vp(), (7,), Elementwise),
    "sub_vp": (ad.sub_vp(), (7,), Elementwise),
    "ve": (ad.ve(), (7,), Elementwise),
    "cld": (ad.cld(), (2, 3, 4), Blocks),
    "underdamped": (ad.underdamped(dist.Logistic(0.0, 1.0)), (2, 3, 32, 32), Blocks),
    "linear": (ad.linear(np.array([[0.0, 1.0], [-1.0, 0.0]]), 1.0, t1=1.0), (2,), Dense),
    "diagonal linear": (ad.linear(np.diag([1.0, 2.0]), 1.0, t1=1.0), (2,), Elementwise),
}
SYSTEMS = {
    "ornstein-uhlenbeck": Elementwise,
    "double-well": Elementwise,
    "swimmer": Dense,
    "particles": Dense,
    "harmonic-particles": Blocks,  # its two components do not mix
}
WEIGHTS = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def cutoff_force(y, radius):
    """Soft spheres: a force only between particles closer than `radius`, which random states hardly ever are."""
    apart = y[:, None] - y[None]
    distance = jnp.sqrt(jnp.sum(apart**2, axis=-1) + 1e-12)
    return jnp.sum(jnp.where(distance < radius, radius - distance, 0.0)[..., None] * apart, axis=1)


PERMUTATION = np.array([2, 0, 3, 1])
ODD = {
    "zero": (lambda y, t: jnp.zeros_like(y), 1.0, (4,), Elementwise),
    "constant": (lambda y, t: jnp.arange(4.0), 1.0, (4,), Elementwise),
    "time only": (lambda y, t: jnp.full_like(y, jnp.sin(t)), 1.0, (4,), Elementwise),
    "sum over coordinates": (lambda y, t: -y + jnp.sum(y), 1.0, (4,), Dense),
    "permuted coordinates": (lambda y, t: y[PERMUTATION], 1.0, (4,), Dense),
    "permuted there and back": (
        lambda y, t: jnp.tanh(y[PERMUTATION])[np.argsort(PERMUTATION)],
        1.0,
        (4,),
        Elementwise,
    ),
    "very weak coupling": (lambda y, t: -y + 1e-12 * jnp.roll(y, 1), 1.0, (64,), Dense),
    "one coupled pair of many": (lambda y, t: (-y).at[17].add(y[1000]), 1.0, (1024,), Dense),
    "first drives last": (lambda y, t: (-y).at[3].add(y[0]), 1.0, (4,), Dense),
    "last drives first": (lambda y, t: (-y).at[0].add(y[3]), 1.0, (4,), Dense),
    "difference of neighbours": (lambda y, t: y - jnp.roll(y, 1), 1.0, (4,), Dense),
    "rows": (lambda y, t: -jnp.sum(y, axis=0, keepdims=True) * y, 1.0, (3, 5), Blocks),
    "columns": (lambda y, t: -jnp.sum(y, axis=1, keepdims=True) * y, 1.0, (3, 5), Dense),
    "matrix noise couples": (lambda y, t: -y, np.ones((4, 2)), (4,), Dense),
    "channel noise couples": (lambda y, t: -y, np.ones((3, 2)), (3, 4), Blocks),
    "short range": (lambda y, t: cutoff_force(y, 0.2), 1.0, (3, 2), Dense),
    "coupled late": (lambda y, t: -y + jnp.where(t > 0.99, 1.0, 0.0) * jnp.roll(y, 1), 1.0, (4,), Dense),
    "coupled far away": (lambda y, t: -y + jnp.maximum(jnp.sum(y) - 1e6, 0.0), 1.0, (4,), Dense),
    "by a loop": (lambda y, t: jax.lax.fori_loop(0, 3, lambda i, z: z + jnp.roll(z, 1), y), 1.0, (4,), Dense),
    "through a condition": (lambda y, t: jnp.where(y[0] > 0, -y, y), 1.0, (4,), Dense),
    "halves put together": (
        lambda y, t: jnp.concatenate([jnp.sin(a) for a in jnp.split(y, 2)]),
        1.0,
        (4,),
        Elementwise,
    ),
    "diagonal matrix product": (lambda y, t: jnp.diag(jnp.arange(4.0)) @ y, 1.0, (4,), Elementwise),
    "a neural network": (lambda y, t: WEIGHTS @ jnp.tanh(WEIGHTS @ y), 1.0, (4,), Dense),
    "its gradient": (jax.grad(lambda y, t: -jnp.sum(jax.nn.softplus(y) ** 2)), 1.0, (4,), Elementwise),
    "sorted": (lambda y, t: jnp.sort(y), 1.0, (4,), Dense),
    "undefined for negative y": (lambda y, t: jnp.sqrt(y) * jnp.sum(y), 1.0, (2,), Dense),
    "scalar state": (lambda y, t: -(y**3), 1.0, (), Elementwise),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_inferred_for_shipped_processes(name):
    process, shape, expected = SHIPPED[name]
    inferred = ad.Process(process.drift, process.diffusion, process.t1)  # forget what was declared
    assert isinstance(inferred.structure_for(shape), expected)
    assert isinstance(process.structure_for(shape), expected)


@pytest.mark.parametrize("name", SYSTEMS)
def test_inferred_for_systems(name):
    system = ad.systems.SYSTEMS[name]()
    assert isinstance(system.process.structure_for(system.shape), SYSTEMS[name])
    assert system.y0(jax.random.key(0), 3).shape == (3, *system.shape)


@pytest.mark.parametrize("name", ODD)
def test_inferred_for_odd_drifts(name):
    drift, g, shape, expected = ODD[name]
    assert isinstance(ad.Process(drift, g, 1.0).structure_for(shape), expected)


def test_inference_works_inside_jit_and_vmap():
    process = ad.Process(lambda y, t: -(y**3), 1.0, 1.0)
    kernel = jax.jit(jax.vmap(lambda y: ad.transition(process, y, 0.1, 0.2)))(jnp.ones((3, 4)))
    assert isinstance(kernel.structure, Elementwise)


def test_traced_parameters_do_not_hinder_inference():
    def mean(a):
        process = ad.Process(lambda y, t: -a * y, 1.0, 1.0)
        kernel = ad.transition(process, jnp.ones(2), 0.1, 0.2)
        assert isinstance(kernel.structure, Elementwise)
        return jnp.sum(kernel.mean)

    np.testing.assert_allclose(jax.jit(mean)(1.0), 2 * np.exp(-0.1), rtol=1e-5)
    np.testing.assert_allclose(jax.jacfwd(mean)(1.0), -0.2 * np.exp(-0.1), rtol=1e-4)


def test_marks_agree_with_the_jacobian():
    # On a drift of many operations, every nonzero of the Jacobian must be marked.
    def fun(y, t):
        a = y.reshape(2, 3).T
        b = jnp.concatenate([a[:1], jnp.cumsum(a[1:], axis=0)]) * t
        return (b @ jnp.array([[1.0, 0.0], [2.0, 1.0]])).ravel().at[2].add(y[jnp.array([5, 0])].prod())[::-1]

    example = (jax.ShapeDtypeStruct((6,), float), jax.ShapeDtypeStruct((), float))
    found = marked_outputs(fun, example, list(np.eye(6, dtype=bool)))
    jacobian = jax.jacfwd(fun)(jax.random.normal(jax.random.key(0), (6,)), 0.7)
    assert np.all(np.stack(found, axis=1)[np.asarray(jacobian) != 0])
    assert not np.all(found)


def test_refusals():
    coupled = ad.Process(lambda y, t: -y + jnp.mean(y), 1.0, 1.0)
    with pytest.raises(ValueError, match=r'3072×3072 Jacobian is too large.*structure="elementwise".*"blocks"'):
        coupled.structure_for((3, 32, 32))
    with pytest.raises(ValueError, match="needs a scalar or diagonal diffusion"):
        ad.Process(lambda y, t: -y, np.ones((2, 2)), 1.0, structure="elementwise").structure_for((2,))
    with pytest.raises(ValueError, match=r"needs a state of shape \(K, \*pixels\)"):
        ad.Process(lambda y, t: -y, 1.0, 1.0, structure="blocks").structure_for((2,))
    assert isinstance(ad.Process(coupled.drift, 1.0, 1.0, structure="dense").structure_for((3, 32, 32)), Dense)


@pytest.mark.parametrize("structure", [Blocks((3, 2)), Dense((3, 2))])
def test_jacobian_agrees_with_autodiff(structure, x64):
    def fun(y):  # couples the rows of each column only
        return jnp.sin(y) * jnp.sum(y**2, axis=0)

    y = jax.random.normal(jax.random.key(1), (3, 2))
    value, jacobian = structure.jacobian(fun, y)
    np.testing.assert_allclose(structure.join(value), fun(y))
    full = jax.jacfwd(fun)(y).reshape(6, 6)
    v = jax.random.normal(jax.random.key(2), (3, 2))
    found = structure.join(structure.matvec(jacobian, structure.split(v)))
    np.testing.assert_allclose(np.ravel(found), full @ np.ravel(v), rtol=1e-12)


def test_elementwise_kernel_needs_memory_linear_in_d():
    process = ad.langevin(dist.Logistic(0.0, 1.0))

    def sample(y, eps):
        kernel = ad.transition(process, y, 0.5, 0.501)
        return kernel.sample(eps), kernel.score(eps)

    for width in (32, 64):
        y = jax.ShapeDtypeStruct((3, width, width), jnp.float32)
        used = jax.jit(sample).lower(y, y).compile().memory_analysis().temp_size_in_bytes
        d = 3 * width * width
        assert used < 100 * 4 * d  # a hundred numbers for each coordinate; a d×d matrix would be d of them
