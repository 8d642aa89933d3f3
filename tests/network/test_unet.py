"""U-Nets: sizes as published, layers against plain formulas, dropout and precision as promised."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad
from autodsm.network import Score, UNet, state_shape
from autodsm.network.unet import _Affine, _Attention, _Norm, _Residual, _waves
from autodsm.process.clock import Clock

KEY = jax.random.key(0)
SHAPE = (2, 8, 8)
SMALL = dict(channels=8, levels=(1, 2), blocks=1, attention=(4,))


@pytest.fixture(scope="module")
def clock():
    return Clock(ad.vp())


def shaken(net, scale=0.3):
    """With random numbers added to all weights, also to those that start at zero."""
    leaves, tree = jax.tree.flatten(eqx.filter(net, eqx.is_inexact_array))
    rng = np.random.default_rng(7)
    moved = [
        jnp.asarray(np.asarray(x) + scale * rng.normal(size=x.shape) / np.sqrt(max(1, np.prod(x.shape[:-1]))), x.dtype)
        for x in leaves
    ]
    return eqx.combine(jax.tree.unflatten(tree, moved), net)


def call(net, y, t):
    return _call(net, y, jnp.asarray(t, y.dtype))


@eqx.filter_jit
def _call(net, y, t):
    return net(y, t)


@pytest.mark.parametrize(
    ("options", "millions"),
    [
        (dict(), 35.746307),  # Ho et al.: 35.7
        (dict(style="improved", blocks=3, attention=(16, 8)), 52.542979),  # Nichol & Dhariwal: 52.5
        (dict(style="improved", blocks=3, attention=(16, 8), channels=160, levels=(1, 2, 3, 4)), 180.496163),
    ],
)
def test_published_sizes(clock, options, millions):
    net = eqx.filter_eval_shape(lambda k: UNet((3, 32, 32), clock, key=k, **options), KEY)
    sizes = [leaf.size for leaf in jax.tree.leaves(net) if isinstance(leaf, jax.ShapeDtypeStruct)]
    assert sum(sizes) == round(1e6 * millions)


@pytest.mark.parametrize("style", ["ddpm", "improved"])
def test_starts_at_zero_and_uses_state_and_time(clock, style):
    net = UNet(SHAPE, clock, key=KEY, style=style, **SMALL)
    y = jax.random.normal(KEY, SHAPE)
    np.testing.assert_array_equal(call(net, y, 0.5), np.zeros(SHAPE))
    net = eqx.nn.inference_mode(shaken(net))
    found = call(net, y, 0.5)
    assert found.shape == SHAPE
    assert np.abs(found - call(net, y, 0.6)).max() > 1e-2 * np.abs(found).max()
    far = y.at[0, 0, 0].add(1.0)
    assert np.abs(call(net, far, 0.5) - found)[:, -1, -1].max() > 1e-6  # the whole image is seen
    assert state_shape(Score(net, clock)) == SHAPE


def channels_first(x):
    return jnp.moveaxis(x, -1, 0)


def channels_last(x):
    return jnp.moveaxis(x, 0, -1)


def test_layers_against_equinox():
    x = jax.random.normal(KEY, (6, 6, 8))
    for size, stride in ((3, 1), (1, 1)):
        ours = _Affine(8, 4, size, KEY, stride=stride)
        theirs = eqx.nn.Conv2d(8, 4, size, padding=size // 2, key=KEY)
        weights = jnp.transpose(ours.weight, (3, 2, 0, 1)), ours.bias[:, None, None]
        theirs = eqx.tree_at(lambda m: (m.weight, m.bias), theirs, weights)
        np.testing.assert_allclose(ours(x), channels_last(theirs(channels_first(x))), atol=1e-5)
    assert _Affine(8, 4, 3, KEY, stride=2)(x).shape == (3, 3, 4)
    for channels, groups in ((4, 1), (8, 2), (24, 6), (128, 32), (160, 32)):
        x = jax.random.normal(KEY, (6, 6, channels)) * jnp.arange(1.0, channels + 1)
        expected = eqx.nn.GroupNorm(groups, channels, eps=1e-6)(channels_first(x))
        np.testing.assert_allclose(_Norm(channels)(x), channels_last(expected), atol=1e-5)


def test_attention_against_its_formula():
    x = jax.random.normal(KEY, (3, 3, 4))
    layer = shaken(_Attention(4, 2, KEY))
    z = np.asarray(layer.norm(x)).reshape(9, 4)
    q, k, v = (z @ np.asarray(f.weight)[0, 0] + np.asarray(f.bias) for f in layer.inner)
    mixed = np.zeros((9, 4))
    for head in (slice(0, 2), slice(2, 4)):
        weights = np.exp(q[:, head] @ k[:, head].T / np.sqrt(2.0))
        weights /= weights.sum(axis=1, keepdims=True)
        mixed[:, head] = weights @ v[:, head]
    out = mixed @ np.asarray(layer.outer.weight)[0, 0] + np.asarray(layer.outer.bias)
    np.testing.assert_allclose(layer(x).reshape(9, 4), np.asarray(x).reshape(9, 4) + out, atol=1e-5)


@pytest.mark.parametrize("style", ["ddpm", "improved"])
def test_the_way_through_the_network(clock, style):
    """Down, through the middle, and up again, each with the features of its level from the way down."""
    net = eqx.nn.inference_mode(shaken(UNet(SHAPE, clock, key=KEY, style=style, **SMALL)))
    y, t = jax.random.normal(KEY, SHAPE), 0.3
    found = call(net, y, t)

    @eqx.filter_jit
    def expected(net):
        times = net.times[1](jax.nn.silu(net.times[0](_waves(jnp.asarray(300.0), 8))))

        def block(layer, *features):
            return layer(jnp.concatenate(features, axis=-1), times, KEY)

        entered = net.enter(channels_last(y))
        fine = block(net.down[0][0], entered)
        halved = net.shrink[0](fine)
        coarse = block(net.down[1][0], halved)
        middle = block(net.middle[2], net.middle[1](block(net.middle[0], coarse)))
        up = block(net.up[0][1], block(net.up[0][0], middle, coarse), halved)
        up = net.grow[0](jax.image.resize(up, (8, 8, up.shape[-1]), "nearest"))
        up = block(net.up[1][1], block(net.up[1][0], up, fine), entered)
        return channels_first(net.leave(jax.nn.silu(net.norm(up))))

    np.testing.assert_allclose(found, expected(net), atol=1e-5)


@pytest.mark.parametrize("improved", [False, True])
def test_residual_block_against_its_formula(improved):
    x, times = jax.random.normal(KEY, (4, 4, 8)), jax.random.normal(jax.random.key(1), (16,))
    layer = eqx.nn.inference_mode(shaken(_Residual(8, 12, 16, KEY, dropout=0.1, scales=improved)))
    assert layer.shortcut is not None
    first, second = layer.norms
    of_time = np.asarray(jax.nn.silu(times)) @ np.asarray(layer.time.weight).reshape(16, -1) + layer.time.bias
    z = layer.first(jax.nn.silu(first(x)))
    z = second(z) * (1 + of_time[:12]) + of_time[12:] if improved else second(z + of_time)
    expected = layer.second(jax.nn.silu(z)) + layer.shortcut(x)
    np.testing.assert_allclose(layer(x, times, KEY), expected, atol=1e-5)


def test_waves_of_the_time():
    found = np.asarray(_waves(jnp.asarray(3.0), 8))
    rates = 10_000.0 ** (-np.arange(4) / 3)
    np.testing.assert_allclose(found, np.concatenate([np.sin(3 * rates), np.cos(3 * rates)]), atol=1e-6)


def test_dropout_is_for_training_and_repeats_itself(clock):
    net = shaken(UNet(SHAPE, clock, key=KEY, dropout=0.5, **SMALL))
    y = jax.random.normal(KEY, SHAPE)
    dropped = call(net, y, 0.5)
    np.testing.assert_array_equal(dropped, call(net, y, 0.5))
    assert not np.allclose(dropped, call(eqx.nn.inference_mode(net), y, 0.5))
    # Other times get other masks, and the two states of an antithetic pair the same.
    drops = np.stack([call(net, y, t) for t in 0.5 + 1e-5 * np.arange(100)])
    assert drops.std(axis=0).mean() > 1e-3
    np.testing.assert_allclose(call(net, y + 1e-5, 0.5), dropped, atol=1e-2)


def test_computing_in_half_precision(clock):
    net = eqx.nn.inference_mode(shaken(UNet(SHAPE, clock, key=KEY, **SMALL)))
    half = _with(net, compute=jnp.bfloat16)
    y = jax.random.normal(KEY, SHAPE)
    full, found = call(net, y, 0.5), call(half, y, 0.5)
    assert found.dtype == jnp.float32
    size = float(jnp.std(full))
    assert 1e-5 * size < float(jnp.max(jnp.abs(found - full))) < 0.1 * size
    grads = eqx.filter_eval_shape(eqx.filter_grad(lambda n: jnp.sum(n(y, 0.5))), half)
    kinds = {g.dtype for g in jax.tree.leaves(grads) if isinstance(g, jax.ShapeDtypeStruct)}
    assert kinds == {np.dtype(np.float32)}


def _with(net, **changed):
    """The same network with other static fields."""
    new = object.__new__(type(net))
    for name in net.__dataclass_fields__:
        object.__setattr__(new, name, changed.get(name, getattr(net, name)))
    return new


def test_rematerialization_changes_no_gradient(clock):
    net = eqx.nn.inference_mode(shaken(UNet(SHAPE, clock, key=KEY, **SMALL)))
    y = jax.random.normal(KEY, SHAPE)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda n: jnp.sum(n(y, 0.5) ** 2)))
    grads = [gradient(_with(net, remat=r)) for r in (False, True)]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * (1 + np.abs(a).max()))


def test_rematerialization_keeps_fewer_numbers(clock):
    net = UNet((3, 32, 32), clock, key=KEY, channels=24, levels=(1, 2, 4), blocks=1, attention=(8,), dropout=0.1)

    def kept(net):
        params, static = eqx.partition(net, eqx.is_inexact_array)
        loss = lambda params: jnp.sum(eqx.combine(params, static)(jnp.ones((3, 32, 32)), 0.5))  # noqa: E731
        backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward)) - sum(leaf.size for leaf in jax.tree.leaves(params))

    assert 0 < kept(_with(net, remat=True)) < 0.2 * kept(net)


def test_training_returns_scores_without_dropout():
    process, images = ad.vp(), ad.data.digits()
    small = dict(channels=4, levels=(1,), blocks=1, attention=())
    network = Score(UNet(images.shape, Clock(process), key=KEY, **small), Clock(process))
    objective = ad.LocalDSM(process, schedule=ad.FromZero(), variance_reduction="none")
    options = dict(objective=objective, network=network, steps=2, batch_size=8, progress=False)
    model = ad.fit(process, images, key=KEY, **options)
    assert model.score.net.down[0][0].residual.dropout.inference
    assert not network.net.down[0][0].residual.dropout.inference
    assert all(np.isfinite(row["loss"]) for row in model.history)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(shape=(3, 8)), "must be \\(channels, height, width\\)"),
        (dict(shape=(3, 6, 8), levels=(1, 1, 1)), "cannot be halved 2 times"),
        (dict(channels=6), "multiple of four"),
        (dict(style="impoved"), "Did you mean 'improved'"),
        (dict(heads=3), "heads=3 must divide"),
        (dict(dropout=1.0), "dropout=1.0"),
        (dict(levels=()), "levels="),
        (dict(blocks=0), "blocks=0"),
        (dict(attention=(16,)), "not among the resolutions of this network, \\[8, 4\\]"),
    ],
)
def test_bad_arguments(clock, options, text):
    shape = options.pop("shape", SHAPE)
    with pytest.raises(ValueError, match=text):
        UNet(shape, clock, key=KEY, **{**SMALL, **options})


def test_wrong_images_are_named(clock):
    with pytest.raises(ValueError, match="Give ONE image"):
        UNet(SHAPE, clock, key=KEY, **SMALL)(jnp.zeros((5, *SHAPE)), 0.5)
