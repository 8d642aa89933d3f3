"""Experiments on images: what they are made of, at each scale, and processes with velocities on images."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import autodsm as ad
from autodsm import data
from autodsm.app import cli
from autodsm.base.estimate import estimate
from autodsm.experiments import cifar10_bpd, cifar10_lambda, cifar10_samples
from autodsm.experiments.shared.images import LAM, PRIORS, SCALES, Setting, about, over_images, scale_of, told
from autodsm.experiments.shared.verdict import AGREES, CANNOT_TELL, DIFFERS, VERDICTS
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
    setting = Setting.make(scale_of("digits", quick=True)._replace(examples=200, draws=256, batch=8192), "mixture")
    slope = jax.grad(lambda y: jnp.sum(setting.prior.log_prob(y)))
    found = setting.bits(lambda y, t: slope(y), "ism", key=jax.random.key(3), decoder=False)
    _, xs = setting.held_out(key=jax.random.split(jax.random.key(3))[0])
    assert found.shape == (200,)
    exact = np.log2(17 / 2) - np.asarray(jax.vmap(lambda x: jnp.sum(setting.prior.log_prob(x)))(xs)) / (64 * np.log(2))
    gap = estimate(found - exact)
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
    objective = ad.LocalDSM(process, steps=32, variance_reduction="none") if name == "underdamped" else None
    options = dict(objective=objective, network=network, steps=4, batch_size=8, progress=False)
    model = ad.fit(process, y0, key=jax.random.key(1), **options)
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
    assert told({"parameters": count, "batch": 4.0}) == f"U-Nets of {size} parameters, 4 evaluations in a step"


def test_images_seen_and_equal_time():
    """Pairs of opposite noise see half as many images, and ISM takes fewer steps."""
    setting = Setting.make(scale_of("digits", quick=True)._replace(steps=42), "mixture")
    score = setting.network(key=jax.random.key(0))
    history = [{"step": 42, "steps_per_s": 2.0}]
    for method, images in (("local-DSM, ELBO", 42 * 32), ("antithetic local-DSM, ELBO", 42 * 16)):
        found = about(score, history, setting.scale, objective=setting.objective(method))
        assert (found["images"], found["seconds"]) == (images, 21.0)
    assert setting.steps("tabulated, ELBO") == 42
    assert setting.steps("ISM, ELBO") == 21


def of_seeds(value, stderr=np.nan):
    return {"value": value, "stderr": stderr}


@pytest.mark.parametrize(
    ("local", "ism", "said"),
    [
        (of_seeds(0.2, 0.01), of_seeds(0.3, 0.01), AGREES),
        (of_seeds(0.3, 0.01), of_seeds(0.2, 0.01), DIFFERS),
        (of_seeds(0.3, 0.04), of_seeds(0.2, 0.04), CANNOT_TELL),
        (of_seeds(0.3), of_seeds(0.2), CANNOT_TELL),
    ],
)
def test_verdicts_on_samples_need_seeds(local, ism, said):
    about = dict.fromkeys(("parameters", "batch", "steps", "seconds", "floor"), of_seeds(1.0))
    found = {"local-DSM, perceptual": local, "ISM": ism, "tabulated, perceptual": of_seeds(0.1, 0.01)}
    text = cifar10_samples.report({f"mixture: {name}": {**about, "mmd2": mmd2} for name, mmd2 in found.items()}, 3)[-1]
    assert text.startswith(said)


@pytest.mark.parametrize(
    ("less", "said"),
    [
        ((0.1, 0.1, 0.1), {AGREES: "local-DSM, ELBO; local-DSM, perceptual"}),
        ((-0.1, 0.1, 0.1), {AGREES: "local-DSM, perceptual", DIFFERS: "local-DSM, ELBO"}),
        ((-0.1, -0.1, -0.1), {DIFFERS: "local-DSM, ELBO; local-DSM, perceptual"}),
        ((0.1, -0.1, 0.1), {AGREES: "local-DSM, ELBO", DIFFERS: "local-DSM, perceptual"}),
        ((0.02, -0.02, 0.1), {CANNOT_TELL: "local-DSM, ELBO; local-DSM, perceptual"}),
    ],
)
@pytest.mark.parametrize("seeds", [1, 3])
def test_verdicts_on_bits_tell_the_weights_of_local_dsm_apart(less, said, seeds):
    trained = {"prior": "mixture", "parameters": 1.0, "batch": 1.0, "steps": 9.0, "images": 9.0, "seconds": 60.0}
    bits = dict.fromkeys(cifar10_bpd.BOUNDS, of_seeds(3.0, 0.1))
    by = dict(zip((cifar10_bpd.PLAIN, "local-DSM, perceptual", cifar10_bpd.PAIRS), less, strict=True))
    by |= {"ISM, ELBO": 0.0, "local-DSM, ELBO, predicting noise": -1.0}
    models = {
        m: {**trained, "method": m, "bits": bits, "less_than_ism": of_seeds(value, 0.01)} for m, value in by.items()
    }
    texts = cifar10_bpd.report({"seeds": seeds, "images": 5, "models": models}, seeds)
    found = [text for text in texts if isinstance(text, str) and text.startswith(VERDICTS)]
    said = said if seeds > 1 else {CANNOT_TELL: "local-DSM, ELBO; local-DSM, perceptual"}
    assert len(found) == len(said)
    for text, (begins, names) in zip(found, said.items(), strict=True):
        assert text.startswith(f"{begins} (mixture")
        assert [name for name in cifar10_bpd.PAPER if f"{name}, 0." in text] == names.split("; ")
        assert ("mostly noise" in text) == (less[0] < 0 and "ELBO" in names)


@pytest.mark.parametrize(
    ("less", "said"),
    [
        (of_seeds(0.0, 0.01), CANNOT_TELL),
        (of_seeds(0.15, 0.01), AGREES),
        (of_seeds(-0.2, 0.01), DIFFERS),
    ],
)
def test_verdicts_over_lambda(less, said):
    model = {"parameters": 1.0, "batch": 1.0, "steps": 1, "images": 2}
    numbers = dict.fromkeys(cifar10_lambda.BOUNDS, of_seeds(3.0, 0.1))
    lesses = dict.fromkeys(cifar10_lambda.BOUNDS, less)
    texts = cifar10_lambda.report({"priors": {"logistic": {**model, "bits": numbers, "less_than_ism": lesses}}}, 3)
    assert [text for text in texts if isinstance(text, str) and text.startswith(VERDICTS)] == [
        text for text in texts if isinstance(text, str) and text.startswith(f"{said} (logistic")
    ]
