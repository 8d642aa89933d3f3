"""Experiments on images: what they are made of, at each scale, and processes with velocities on images."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm import cli, data
from autodsm.experiments.images import LAM, PRIORS, SCALES, Setting, over_images, scale_of, told
from autodsm.network import Score, UNet


def parameters(setting: Setting, **changes) -> int:
    """Counted, not made."""
    network = eqx.filter_eval_shape(lambda key: setting.network(key=key, **changes), jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(network.net) if hasattr(leaf, "shape"))


def test_sizes_of_the_networks(monkeypatch):
    monkeypatch.setitem(SCALES, "paper", SCALES["paper"]._replace(images=lambda split: FakeCifar()))
    monkeypatch.setitem(SCALES, "small", SCALES["small"]._replace(images=lambda split: FakeCifar()))
    found = {name: parameters(Setting.make(scale_of(name, quick=False), "mixture")) for name in SCALES}
    assert found == {"digits": 176_849, "longer": 176_849, "small": 1_541_547, "paper": 35_746_307}
    large = parameters(Setting.make(SCALES["paper"], "mixture"), **SCALES["paper"].for_samples)
    assert large == 180_496_163


class FakeCifar:
    shape = (3, 32, 32)


@pytest.mark.parametrize("prior", PRIORS)
def test_priors_are_those_of_the_paper(prior, x64):
    y = jnp.linspace(-3.0, 3.0, 7)
    exact = {
        "logistic": jnp.exp(-y) / (1 + jnp.exp(-y)) ** 2,
        "mixture": sum(0.5 * jnp.exp(-((y - m) ** 2)) / np.sqrt(np.pi) for m in (-0.5, 0.5)),
    }[prior]
    np.testing.assert_allclose(jnp.exp(PRIORS[prior].log_prob(y)), exact, rtol=1e-6)
    spread = float(np.sqrt(PRIORS[prior].variance))
    assert spread**2 == pytest.approx({"logistic": np.pi**2 / 3, "mixture": 0.75}[prior], rel=1e-5)


def test_objectives_differ_in_what_their_names_say():
    setting = Setting.make(scale_of("digits", quick=True), "mixture")
    local = setting.objective("local-DSM, perceptual")
    assert (local.weighting, local.evaluations, local.target.expand) == ("perceptual", 1, "t")
    pairs = setting.objective("antithetic local-DSM, ELBO")
    assert (pairs.weighting, pairs.evaluations, pairs.target.expand) == ("likelihood", 2, "t")
    assert isinstance(setting.objective("ISM, ELBO"), ad.ISM)
    assert setting.objective("tabulated, ELBO").weighting == "likelihood"


def test_a_network_that_predicts_noise():
    """`−net/γ`, γ² = 1 − exp(−λ) once as much noise as λ was received, whatever the time; others start at the prior."""
    setting = Setting.make(scale_of("digits", quick=True), "mixture")
    y = jax.random.normal(jax.random.key(0), setting.shape)
    network = setting.network("local-DSM, ELBO, predicting noise", key=jax.random.key(1))
    network = eqx.tree_at(lambda network: network.net, network, lambda y, t: y)
    np.testing.assert_allclose(network(y, 0.5), -y / np.sqrt(-np.expm1(-LAM)), rtol=1e-5)
    received = float(ad.Clock(setting.process)(1e-3))
    assert received < LAM
    np.testing.assert_allclose(network(y, 1e-3), -y / np.sqrt(-np.expm1(-received)), rtol=1e-5)
    other = setting.network("local-DSM, ELBO", key=jax.random.key(1))
    np.testing.assert_allclose(other(y, 0.5), setting.base(y, 0.5), rtol=1e-6)


def test_bits_of_a_known_density(x64):
    """With the score of the prior, the model is the prior, and the bound is tight from any image: its mean is log π."""
    setting = Setting.make(scale_of("digits", quick=True)._replace(examples=200, draws=256), "mixture")
    slope = jax.grad(lambda y: jnp.sum(setting.prior.log_prob(y)))
    found = setting.bits(lambda y, t: slope(y), "ism", key=jax.random.key(3), decoder=False)
    _, xs = setting.held_out(key=jax.random.split(jax.random.key(3))[0])
    assert found.shape == (200,)
    exact = np.log2(17 / 2) - np.asarray(jax.vmap(lambda x: jnp.sum(setting.prior.log_prob(x)))(xs)) / (64 * np.log(2))
    gap = ad.likelihood.estimate(found - exact)
    assert gap.stderr < 0.03
    assert abs(gap.value) < 4.5 * gap.stderr + 1e-3


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["autodsm", "reproduce", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2


def test_missing_images_are_named_before_anything_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AUTODSM_DATA", str(tmp_path / "none"))
    run(monkeypatch, "cifar10-bpd", "--scale", "small", "--out", str(tmp_path / "run"))
    assert "autodsm data cifar10" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cifar10-bpd", "--scale", "large"], "Choose one of: digits, longer, paper, small"),
        (["demo", "--scale", "small"], "one scale"),
    ],
)
def test_scales_that_are_not_there(monkeypatch, tmp_path, capsys, words, message):
    run(monkeypatch, *words, "--out", str(tmp_path / "run"))
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["cld", "underdamped"])
def test_processes_with_velocities_learn_on_images(name):
    """A few steps of training, a bound and samples, all finite, with a U-Net that sees positions and velocities."""
    prior = dist.Normal(0.0, 1.0) if name == "cld" else dist.Logistic(0.0, 1.0)
    process = ad.cld() if name == "cld" else ad.underdamped(prior)
    law, images = ad.WithVelocity(prior), data.digits()

    def y0(key, n):
        x_key, v_key = jax.random.split(key)
        x = images(x_key, n)
        return jnp.stack([x, 0.5 * jax.random.normal(v_key, x.shape)], axis=1)

    clock = ad.Clock(process)
    shape = (2, 1, 8, 8)
    net = UNet(shape, clock, key=jax.random.key(0), channels=8, levels=(1,), blocks=1, attention=(), dropout=0.0)
    slope = jax.grad(law.log_prob)
    network = Score(net, clock, parameterization="residual", base=lambda y, t: slope(y))
    model = ad.fit(process, y0, network=network, steps=4, batch_size=8, key=jax.random.key(1), progress=False)
    assert np.isfinite([row["loss"] for row in model.history]).all()
    bound = ad.ELBO(process, law, kind="local-dsm", draws=4, steps=16)
    assert np.isfinite(bound.values(model.score, y0(jax.random.key(2), 2), key=jax.random.key(3))).all()
    ys = ad.sample(process, model.score, law, 2, key=jax.random.key(4), steps=10)
    assert ys.shape == (2, *shape)


def test_errors_over_images_and_seeds():
    one = over_images([[1.0, 3.0]])
    assert one == {"value": 2.0, "stderr": 1.0}
    two = over_images([[1.0, 3.0], [5.0, 7.0]])  # means of the seeds are 2 and 6
    assert two == {"value": 4.0, "stderr": pytest.approx(np.sqrt(1.0 + 4.0))}


@pytest.mark.parametrize(
    ("count", "size"), [(176849, "176,849"), (1.53e6, "1.5 million"), (35.7e6, "36 million"), (180.6e6, "181 million")]
)
def test_the_size_of_a_network_in_words(count, size):
    assert told({"parameters": count, "batch": 4.0}) == f"U-Nets of {size} parameters, 4 images in a batch"
