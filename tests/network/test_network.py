"""Networks: shapes, symmetries, scales, and what is trained."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autodsm as ad
from autodsm.network import (
    ACTIVATIONS,
    MLP,
    NON_SMOOTH,
    Equivariant,
    Frozen,
    Odd,
    Relaxation,
    Score,
    TimeFeatures,
    non_smooth_activation,
    trainable,
)
from autodsm.process.clock import Clock

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def clock():
    return Clock(ad.vp())


def shaken(net, scale=0.3):
    """The network with noise on every trained array: the last layer is zero otherwise, and so is all that is seen."""
    params, rest = eqx.partition(net, trainable(net))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(7)
    leaves = [jnp.asarray(np.asarray(x) + scale * rng.normal(size=x.shape), x.dtype) for x in leaves]
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


def small(clock, shape=(2,), **options):
    return MLP(shape, clock, key=KEY, **{"width": 16, "depth": 2, **options})


@pytest.mark.parametrize("shape", [(), (2,), (3, 4, 4)])
def test_output_has_the_shape_of_the_state(clock, shape):
    net = small(clock, shape, fourier=(1, 2))
    y = jax.random.normal(KEY, shape)
    np.testing.assert_array_equal(net(y, 0.3), np.zeros(shape))  # before training
    for each in (net, Odd(net), Score(net, clock), Score(net, clock, parameterization="residual", base=lambda y, t: y)):
        out = shaken(each)(y, 0.3)
        assert out.shape == shape
        assert out.dtype == y.dtype
        assert np.all(np.abs(out) > 1e-6)
    batch = jax.random.normal(KEY, (5, *shape))
    found = jax.vmap(shaken(net))(batch, jnp.linspace(0.1, 0.9, 5))
    np.testing.assert_allclose(found[3], shaken(net)(batch[3], 0.7), rtol=1e-4, atol=1e-5)


def test_a_batch_is_refused(clock):
    with pytest.raises(ValueError, match=r"shape \(5, 2\).*jax.vmap"):
        small(clock)(jnp.zeros((5, 2)), 0.3)


def test_precision_follows_the_state(x64):
    net = shaken(Score(small(Clock(ad.vp())), Clock(ad.vp())))
    for dtype in (jnp.float32, jnp.float64):
        assert net(jnp.ones(2, dtype), 0.3).dtype == dtype


@pytest.mark.parametrize("fourier", [(), (1, 2, 4)])
@pytest.mark.parametrize(("time", "times"), [("raw", 1), ("log", 9), ("both", 10)])
def test_parameter_count(clock, fourier, time, times):
    net = MLP((3, 2), clock, key=KEY, width=16, depth=3, fourier=fourier, time=time)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(net, trainable(net))))
    inputs = 6 * (1 + 2 * len(fourier)) + times
    assert count == (inputs + 1) * 16 + 2 * (16 + 1) * 16 + (16 + 1) * 6


def test_hidden_layers_keep_the_size_of_signals(clock):
    net = MLP((64,), clock, key=KEY, width=512, depth=4, activation="relu")
    x = jax.random.normal(KEY, (net.layers[0].weight.shape[0],))
    for layer in net.layers[:-1]:
        x = layer(x)
        assert 0.5 < jnp.std(x) < 2.0
        x = jax.nn.relu(x)


def test_a_batch_copies_no_weights(clock):
    """Activations of 256 states of 64 numbers need 64 kB a layer; copies of the weights would need 4 MB a layer."""
    net = MLP((2,), clock, key=KEY, width=64, depth=3)
    compiled = jax.jit(jax.vmap(net)).lower(jnp.zeros((256, 2)), jnp.zeros(256)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


def test_state_is_standardized(clock):
    mean, std = jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])
    y = jnp.array([0.3, 0.8])
    found = shaken(small(clock, mean=mean, std=std))(y, 0.3)
    np.testing.assert_allclose(found, shaken(small(clock))((y - mean) / std, 0.3), rtol=1e-5)
    with pytest.raises(ValueError, match=r"mean \(3,\) .* broadcast to the shape \(2,\)"):
        small(clock, mean=jnp.zeros(3))
    with pytest.raises(ValueError, match="must be above zero"):
        small(clock, std=jnp.array([1.0, 0.0]))


def test_fourier_features_are_waves_of_the_standardized_state(clock):
    """With weights on one wave alone, the output repeats after 2/k standard deviations, and not after half of it."""
    net = small(clock, (1,), fourier=(2,), std=3.0)
    first = net.layers[0]
    assert first.weight.shape == (1 + 2 + 10, 16)
    net = eqx.tree_at(lambda n: n.layers[0].weight, shaken(net), first.weight.at[np.array([0, *range(3, 13)])].set(0.0))
    y = jnp.array([0.4])
    np.testing.assert_allclose(net(y + 3.0, 0.3), net(y, 0.3), rtol=1e-4)
    assert abs((net(y + 1.5, 0.3) - net(y, 0.3)).item()) > 1e-2
    only_sine = eqx.tree_at(lambda n: n.layers[0].weight, net, net.layers[0].weight.at[2].set(0.0))
    np.testing.assert_allclose(only_sine(jnp.array([0.9]), 0.3), only_sine(jnp.array([0.6]), 0.3), rtol=1e-4)


@pytest.mark.parametrize("t", [0.01, 0.1, 1.0])
def test_waves_fade_as_noise_smooths_them(x64, t):
    """Of noise ε of the deviation γ(t), E[features(y + ε)] by quadrature; γ is that of `Score`."""
    clock = Clock(ad.vp())
    options = dict(fourier=(0.25, 1), mean=0.5, std=jnp.array([1.0, 1.7]))
    plain, fading = small(clock, **options), small(clock, spread=1.3, **options)
    y, gamma = jnp.array([0.4, -0.3]), Score(plain, clock, spread=1.3).gamma(t)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    mean = weights @ jax.vmap(lambda e: plain.features(y + gamma * e, t))(jnp.asarray(nodes)) / weights.sum()
    np.testing.assert_allclose(fading.features(y, t), mean, atol=1e-9)
    if t == 1.0:
        assert np.max(np.abs(fading.features(y, t) - plain.features(y, t))) > 0.3
    with pytest.raises(ValueError, match="spread"):
        small(clock, fourier=(1,), spread=0.0)


def test_time_features_resolve_early_times(clock):
    early = jnp.array([1e-3, 2e-3])
    raw, log, both = (jax.vmap(TimeFeatures(clock, kind))(early) for kind in ("raw", "log", "both"))
    assert jnp.max(jnp.abs(raw[1] - raw[0])) < 0.01
    assert jnp.max(jnp.abs(log[1] - log[0])) > 0.5
    np.testing.assert_array_equal(both, jnp.concatenate([raw, log], axis=1))


def test_time_features_are_scaled(clock):
    times = jnp.geomspace(1e-3, 1.0, 50)
    raw, log = (jax.vmap(TimeFeatures(clock, kind))(times) for kind in ("raw", "log"))
    np.testing.assert_allclose(raw[:, 0], 2 * times - 1, atol=1e-6)
    x = log[:, 0]
    np.testing.assert_allclose([x[0], x[-1]], [-1.0, 1.0], atol=1e-5)
    assert np.all(np.diff(x) > 0)
    angles = 0.5 * np.pi * np.outer(x, [1, 2, 4, 8])
    np.testing.assert_allclose(log[:, 1:], np.concatenate([np.sin(angles), np.cos(angles)], axis=1), atol=1e-5)
    assert np.all(np.isfinite(TimeFeatures(clock)(0.0)))


@pytest.mark.parametrize("time", ["raw", "log", "both"])
@pytest.mark.parametrize("make", [MLP, Equivariant])
def test_networks_depend_on_time(clock, make, time):
    net = shaken(make((3, 2), clock, key=KEY, width=16, depth=2, time=time))
    y = jax.random.normal(KEY, (3, 2))
    assert jnp.min(jnp.abs(net(y, 0.9) - net(y, 0.2))) > 1e-3


def test_odd_is_exactly_odd(clock):
    inner = shaken(small(clock, mean=0.7))
    net, y = Odd(inner), jnp.array([0.3, -1.2])
    np.testing.assert_array_equal(net(-y, 0.3), -net(y, 0.3))
    assert np.all(np.abs(net(y, 0.3)) > 1e-3)
    assert np.all(np.abs(inner(-y, 0.3) + inner(y, 0.3)) > 1e-3)
    np.testing.assert_allclose(net(y, 0.3) - net(-y, 0.3), inner(y, 0.3) - inner(-y, 0.3), rtol=1e-4)


@pytest.mark.parametrize("depth", [1, 3])
def test_equivariant(clock, depth):
    mean, std = jnp.array([0.3, -1.0]), jnp.array([2.0, 0.5])
    net = Equivariant((5, 2), clock, key=KEY, width=16, depth=depth, mean=mean, std=std)
    y = jax.random.normal(KEY, (5, 2))
    np.testing.assert_array_equal(net(y, 0.3), np.zeros((5, 2)))
    net = shaken(net)
    out = net(y, 0.3)
    assert np.std(out, axis=0).min() > 1e-3  # particles are told apart
    for seed in range(3):
        order = jax.random.permutation(jax.random.key(seed), 5)
        np.testing.assert_allclose(net(y[order], 0.3), out[order], rtol=1e-4, atol=1e-5)


def test_equivariant_particles_see_each_other(clock):
    net = shaken(Equivariant((4, 2), clock, key=KEY, width=16))
    y = jax.random.normal(KEY, (4, 2))
    jacobian = jax.jacobian(net)(y, 0.3)  # (i, ·, j, ·)
    assert jnp.min(jnp.max(jnp.abs(jacobian), axis=(1, 3))) > 1e-4


def test_equivariant_messages_pair_by_pair(clock):
    net = shaken(Equivariant((3, 2), clock, key=KEY, width=16, depth=3, mean=0.5, std=2.0))
    y, act = jax.random.normal(KEY, (3, 2)), jax.nn.silu
    times, z = TimeFeatures(clock)(0.3), (y - 0.5) / 2.0
    for i in range(3):
        node = jnp.concatenate([z[i], times])
        pairs = [net.receive(node) + (z[j] - z[i]) @ net.difference for j in range(3)]
        x = jnp.concatenate([node, sum(act(net.messages[0](act(p))) for p in pairs) / 3])
        for layer in net.update[:-1]:
            x = act(layer(x))
        np.testing.assert_allclose(net(y, 0.3)[i], net.update[-1](x), rtol=1e-4, atol=1e-5)


def test_equivariant_refuses_other_states(clock):
    with pytest.raises(ValueError, match=r"shape=\(3, 4, 4\) must be \(n, k\)"):
        Equivariant((3, 4, 4), clock, key=KEY)
    with pytest.raises(ValueError, match=r"broadcast to the shape \(2,\)"):  # one for each particle breaks the symmetry
        Equivariant((3, 2), clock, key=KEY, mean=jnp.zeros((3, 2)))


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_gamma_is_that_of_the_variance_preserving_process(clock, spread):
    times = jnp.array([1e-7, 1e-5, 1e-3, 0.1, 0.5, 1.0])
    score = Score(small(clock), clock, spread=spread)
    noise = np.asarray(ad.LinearBeta(0.1, 20.0).integral(np.asarray(times, float)), np.float64)
    expected = -(spread**2) * np.expm1(-noise / spread**2)
    gamma = np.asarray(jax.vmap(score.gamma)(times))
    np.testing.assert_allclose(gamma**2, expected, rtol=3e-4)
    np.testing.assert_allclose(gamma[0] ** 2, noise[0], rtol=3e-4)  # γ² ≈ G when that is small
    if spread == 1.0:
        np.testing.assert_allclose(gamma[-1], spread, rtol=1e-4)


def test_gamma_of_langevin_dynamics(x64):
    """`1 − exp(−2∫β)`; with a constant β the clock is exact."""
    gaussian = type("Gaussian", (), {"log_prob": staticmethod(lambda y: -0.5 * y**2)})()
    clock = Clock(ad.langevin(gaussian, ad.ConstantBeta(3.0), t1=10.0))
    times = jnp.array([1e-7, 1e-4, 0.01, 0.2, 1.0, 10.0])
    gamma = jax.vmap(Score(small(clock), clock).gamma)(times)
    np.testing.assert_allclose(gamma**2, -np.expm1(-6.0 * np.asarray(times)), rtol=1e-9)
    wide = jax.vmap(Score(small(clock), clock, spread=1e6).gamma)(times)
    np.testing.assert_allclose(wide**2, 6.0 * times, rtol=1e-9)


def test_parameterizations(clock):
    net, y, t = shaken(small(clock)), jnp.array([0.3, -1.2]), 0.01
    gamma = np.sqrt(-np.expm1(-ad.LinearBeta(0.1, 20.0).integral(t)))
    out = net(y, t)
    np.testing.assert_array_equal(Score(net, clock, parameterization="plain")(y, t), out)
    np.testing.assert_allclose(Score(net, clock)(y, t), -out / gamma, rtol=1e-3)
    residual = Score(net, clock, parameterization="residual", base=lambda y, t: -y * t)
    np.testing.assert_allclose(residual(y, t), -y * t + out / gamma, rtol=1e-3)


@pytest.mark.parametrize("t", [0.0, 1e-3, 1.0])
def test_residual_starts_at_its_base(clock, t):
    score = Score(small(clock), clock, parameterization="residual", base=lambda y, t: -2.0 * y)
    y = jnp.array([0.3, -1.2])
    np.testing.assert_array_equal(score(y, t), -2.0 * y)


def test_gamma_of_each_coordinate():
    """`γ_i² = v_i (1 − exp(−∫Q_ii/v_i))`; a coordinate without noise follows the others, in its own unit."""
    clock = Clock(ad.Process(lambda y, t: -y, np.array([0.5, 0.0, 2.0]), 1.0))
    spread = np.array([1.0, 2.0**20, 3.0])
    found = Score(small(clock), clock, spread=spread).gamma(0.4)
    ratios = 0.4 * np.array([0.25, 0.5 * (0.25 + 4.0 / 9.0), 4.0 / 9.0])
    np.testing.assert_allclose(found, spread * np.sqrt(-np.expm1(-ratios)), rtol=1e-5)


def test_residual_needs_a_base_and_others_take_none(clock):
    with pytest.raises(ValueError, match="'residual' needs a base"):
        Score(small(clock), clock, parameterization="residual")
    with pytest.raises(ValueError, match="no other takes one"):
        Score(small(clock), clock, parameterization="noise", base=lambda y, t: y)


def held_by_frozen(net):
    nodes = jax.tree.leaves(net, is_leaf=lambda x: isinstance(x, Frozen))
    return [x for node in nodes if isinstance(node, Frozen) for x in jax.tree.leaves(node) if eqx.is_inexact_array(x)]


@pytest.mark.parametrize("make", [MLP, Equivariant])
def test_frozen_arrays_are_neither_trained_nor_decayed(clock, make):
    base = shaken(make((3, 2), clock, key=jax.random.key(1), width=8))
    net = shaken(make((3, 2), clock, key=KEY, width=8, mean=jnp.array([0.1, 0.2]), std=2.0))
    score = Score(net, clock, parameterization="residual", base=base)
    # Two clocks of two arrays, mean, std, spread, and all of the base.
    assert len(held_by_frozen(score)) == 7 + len(jax.tree.leaves(base))
    spec = trainable(score)
    assert jax.tree.structure(spec) == jax.tree.structure(score)
    assert not any(jax.tree.leaves((spec.clock, spec.base, spec.spread, spec.net.inputs)))
    y = jax.random.normal(KEY, (3, 2))

    def loss(score):
        return jnp.sum(score(y, 0.3) ** 2)

    grads = eqx.filter_grad(loss)(score)
    assert all(not np.any(x) for x in held_by_frozen(grads))
    trained = jax.tree.leaves(eqx.filter(grads, spec))
    assert len(trained) == sum(jax.tree.leaves(spec)) > 0
    assert all(np.any(x) for x in trained)

    params, rest = eqx.partition(score, spec)
    optimizer = optax.adamw(0.1, weight_decay=1.0)
    updates, _ = optimizer.update(eqx.filter(grads, spec), optimizer.init(params), params)
    after = eqx.combine(eqx.apply_updates(params, updates), rest)
    for old, new in zip(held_by_frozen(score), held_by_frozen(after), strict=True):
        np.testing.assert_array_equal(old, new)
    assert loss(after) != loss(score)


def test_a_frozen_base_still_has_a_divergence(clock):
    base = shaken(small(clock))
    score = Score(small(clock), clock, parameterization="residual", base=base)
    y = jnp.array([0.3, -1.2])
    np.testing.assert_allclose(jax.jacfwd(score)(y, 0.3), jax.jacfwd(base)(y, 0.3), rtol=1e-5)
    assert np.any(jax.jacfwd(base)(y, 0.3))


def test_every_array_of_another_network_is_trained():
    net = eqx.nn.MLP(3, 2, 8, 2, key=KEY)
    assert jax.tree.leaves(trainable(net)) == jax.tree.leaves(jax.tree.map(eqx.is_inexact_array, net))
    assert any(jax.tree.leaves(trainable(net)))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_non_smooth_activations_are_those_whose_derivative_jumps(clock, name):
    points = jnp.linspace(-8.0, 8.0, 16001)
    slopes = jax.vmap(jax.grad(ACTIVATIONS[name]))(points)
    jumps = jnp.max(jnp.abs(jnp.diff(slopes))) > 0.1
    assert jumps == (name in NON_SMOOTH)
    assert non_smooth_activation(small(clock, activation=name)) == (name if jumps else None)


def test_non_smooth_activations_are_found_anywhere(clock):
    bent, smooth = small(clock, activation="relu"), small(clock)
    residual = Score(smooth, clock, parameterization="residual", base=bent)
    for net in (Odd(bent), Score(Odd(bent), clock), {"a": [smooth, bent]}, eqx.nn.MLP(2, 2, 8, 1, key=KEY)):
        assert non_smooth_activation(net) == "relu"
    leaky = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.Lambda(jax.nn.leaky_relu)])
    assert non_smooth_activation(leaky) == "leaky_relu"
    particles = Equivariant((3, 2), clock, key=KEY, activation="relu6")
    assert non_smooth_activation(particles) == "relu6"
    tanh = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=KEY)
    for net in (smooth, Odd(smooth), Score(smooth, clock), tanh, residual, lambda y, t: y):
        assert non_smooth_activation(net) is None


def test_non_smooth_activations_in_static_fields():
    class Net(eqx.Module):
        function: object = eqx.field(static=True)

    assert non_smooth_activation(Net(jax.nn.relu)) == "relu"
    assert non_smooth_activation(Net(jax.nn.silu)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "sillu"}, "activation='sillu' is not known. Did you mean 'silu'"),
        ({"time": "lag"}, "time='lag' is not known. Did you mean 'log'"),
        ({"width": 0}, "width=0 must be a whole number"),
        ({"depth": 0}, "depth=0 must be a whole number"),
    ],
)
@pytest.mark.parametrize("make", [MLP, Equivariant])
def test_wrong_options_are_refused(clock, make, options, message):
    with pytest.raises(ValueError, match=message):
        make((3, 2), clock, key=KEY, **options)


def test_wrong_parameterizations_are_refused(clock):
    with pytest.raises(ValueError, match=r"'noisy' is not known\. Did you mean 'noise'"):
        Score(small(clock), clock, parameterization="noisy")
    with pytest.raises(ValueError, match=r"spread=0\.0 must be"):
        Score(small(clock), clock, spread=0.0)


# Before t0


@pytest.mark.parametrize("t0", [None, 0.02])
@pytest.mark.parametrize("parameterization", ["noise", "plain", "residual"])
def test_a_score_is_held_before_it_was_trained(clock, parameterization, t0):
    """At 0 it is what it is at t0, and not 1/γ(0) times the network."""
    base = (lambda y, t: -y / (t + 0.1)) if parameterization == "residual" else None
    score = shaken(Score(small(clock), clock, parameterization=parameterization, base=base, t0=t0))
    first = 1e-3 if t0 is None else t0
    y = jnp.array([0.3, -1.2])
    for t in (0.0, 1e-9, 0.5 * first):
        np.testing.assert_array_equal(score(y, t), score(y, first))
    assert np.all(np.isfinite(score(y, 0.0)))
    assert jnp.min(jnp.abs(score(y, 1.5 * first) - score(y, first))) > 1e-4


def test_a_known_start_is_exact_at_zero(clock):
    """From there a line in t to the trained score; what the start has where it is not used does not matter."""
    net, y = shaken(small(clock)), jnp.array([0.3, -1.2])
    held = Score(net, clock, t0=0.01)
    known = Score(net, clock, t0=0.01, start=lambda y: -3.0 * y)
    np.testing.assert_allclose(known(y, 0.0), -3.0 * y, rtol=1e-6)
    for part in (0.25, 0.8):
        expected = (1.0 - part) * -3.0 * y + part * held(y, 0.01)
        np.testing.assert_allclose(known(y, 0.01 * part), expected, rtol=1e-5)
    singular = Score(net, clock, t0=0.01, start=lambda y: jnp.log(-jnp.ones_like(y)))
    for score in (known, singular):
        for t in (0.01, 0.5):
            np.testing.assert_array_equal(score(y, t), held(y, t))
            np.testing.assert_array_equal(jax.jacfwd(score)(y, t), jax.jacfwd(held)(y, t))
    assert not any(jax.tree.leaves(trainable(Score(net, clock, start=small(clock))).start))


def test_a_flow_from_zero_takes_as_long_as_from_where_training_starts():
    """Counted in evaluations of the drift; both ends are right. Without a hold the first is hundreds of times more."""
    count = []

    def drift(y, t):
        jax.debug.callback(lambda: count.append(1))
        return -y

    process = ad.Process(drift, 1.0, 1.0)
    clock = ad.Clock(process)
    variance = lambda t: 0.5 - 0.25 * jnp.exp(-2.0 * t)  # noqa: E731
    net = shaken(small(clock, width=8, depth=1), scale=0.05)
    residual = dict(parameterization="residual", base=lambda y, t: -y / variance(t))
    y = jnp.array([0.4, -0.2])
    evaluations = []
    for start in (None, lambda y: -4.0 * y):
        for first in (0.0, 1e-3):
            count.clear()
            end = ad.flow(process, Score(net, clock, start=start, **residual), y, [first, 1.0])[-1]
            jax.effects_barrier()
            evaluations.append(len(count))
            assert np.all(np.isfinite(end))
    for from_zero, from_t0 in (evaluations[:2], evaluations[2:]):
        assert from_t0 > 20
        assert from_zero < 2 * from_t0


@pytest.mark.parametrize("t0", [0.0, 1.0, -1.0])
def test_wrong_times_of_a_hold_are_refused(clock, t0):
    with pytest.raises(ValueError, match="t0="):
        Score(small(clock), clock, t0=t0)


# The base that goes over to the stationary score


def test_relaxation(clock):
    """`b + c (s* − b) + net/γ`, c from the features of time; nothing before training."""
    relaxation = Relaxation(lambda y: -(y**3), clock)
    options = dict(parameterization="residual", base=lambda y, t: -2.0 * y)
    net, y, t = shaken(small(clock)), jnp.array([0.3, -1.2]), 0.4
    plain, score = Score(net, clock, **options), Score(net, clock, relaxation=relaxation, **options)
    np.testing.assert_array_equal(score(y, t), plain(y, t))
    weights = 0.1 * (1.0 + jnp.arange(11.0))
    moved = eqx.tree_at(lambda score: score.relaxation.weights, score, weights)
    gain = weights[0] + weights[1:] @ TimeFeatures(clock)(t)
    assert abs(gain) > 0.1
    np.testing.assert_allclose(moved(y, t) - plain(y, t), gain * (-(y**3) + 2.0 * y), rtol=1e-4, atol=1e-5)
    assert trainable(score).relaxation.weights
    assert not any(jax.tree.leaves(trainable(score).relaxation.features))
    with pytest.raises(ValueError, match="relaxation is that of a base"):
        Score(net, clock, relaxation=relaxation)
