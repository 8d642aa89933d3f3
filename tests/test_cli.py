"""The command line and the experiments behind it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import autodsm as ad
from autodsm import cli, using
from autodsm.experiments import EXPERIMENTS
from autodsm.problems import Problem


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["autodsm", *map(str, arguments)])
    cli.main()


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def autodsm(monkeypatch, capsys, tmp_path):
    """The command, run in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments) -> Done:
        code = 0
        try:
            call(monkeypatch, *arguments)
        except SystemExit as stop:
            code = stop.code
        return Done(code, *capsys.readouterr())

    return run


def test_list_names_every_experiment(monkeypatch, capsys):
    call(monkeypatch, "list")
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS)


def test_nothing_is_overwritten(monkeypatch, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "reproduce", "demo", "--quick", "--out", tmp_path / "mine")
    assert "already exists" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_all_is_refused_before_any_work(monkeypatch, tmp_path, capsys):
    (tmp_path / "mean-error").mkdir()
    (tmp_path / "mean-error" / "result.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "reproduce", "all", "--quick", "--out", tmp_path)
    assert "mean-error already exists" in capsys.readouterr().err.replace("\n", "")
    assert not (tmp_path / "demo").exists()


def test_default_folder_is_the_first_free_one(tmp_path):
    assert cli.free_path(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert cli.free_path(tmp_path / "demo") == tmp_path / "demo-2"


def test_unknown_experiment(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "reproduce", "mean-eror")
    assert "Did you mean 'mean-error'?" in capsys.readouterr().err


OWN = """
import jax, jax.numpy as jnp, autodsm as ad
process = ad.Process(lambda y, t: jnp.stack([y[1], -jnp.sin(y[0]) - 0.5 * y[1]]), jnp.array([0.0, 0.7]), t1=3.0)
def y0(key, n):
    return jax.random.normal(key, (n, 2))
"""
SMALL = ("--steps", "20", "--batch-size", "64", "--width", "8", "--depth", "1")


def test_fit_a_file_and_resume(autodsm, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    done = autodsm("fit", "own.py", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "LocalDSM, antithetic pairs: noise enters only some coordinates" in " ".join(done.stdout.split())
    run = tmp_path / "runs" / "own"
    assert {p.name for p in run.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        "figures",
        "result.json",
    }
    assert json.loads((run / "result.json").read_text())["numbers"]["steps"] == 20
    before = (run / "metrics.jsonl").read_text()
    again = autodsm("resume", "runs/own")
    assert again.returncode == 0, again.stderr
    assert (run / "metrics.jsonl").read_text() == before

    (tmp_path / "own.py").write_text(OWN.replace("0.5 * y[1]", "0.6 * y[1]"))
    changed = autodsm("resume", "runs/own")
    assert changed.returncode == 2
    assert "process.drift" in changed.stderr


GENERATIVE = """
import jax, numpyro.distributions as dist, autodsm as ad
prior = dist.Normal(0.0, 1.0)
process = ad.vp(ad.LinearBeta(0.1, 10.0))
def y0(key, n):
    return 1.0 + 0.5 * jax.random.normal(key, (n, 2))
"""


def test_sample_and_evaluate_a_generative_model(autodsm, tmp_path):
    """A Gaussian under VP: the likelihood of the data is known."""
    (tmp_path / "own.py").write_text(GENERATIVE)
    assert autodsm("fit", "own.py", "--steps", "400", "--width", "32", "--depth", "2").returncode == 0
    run = tmp_path / "runs" / "own"
    for name in ("samples", "samples-2"):
        done = autodsm("sample", run, "--n", "3000", "--steps", "60")
        assert done.returncode == 0, done.stderr
        y = np.load(run / f"{name}.npz")["y"]
        assert y.shape == (3000, 2)
        assert np.all(np.abs(y.mean(0) - 1.0) < 0.05)
        assert np.all(np.abs(y.std(0) - 0.5) < 0.05)
    assert autodsm("sample", run, "--n", "100", "--method", "ode").returncode == 0
    done = autodsm("evaluate", run, "--n", "1000")
    assert done.returncode == 0, done.stderr
    found = json.loads((run / "result.json").read_text())["numbers"]
    assert found["steps"] == 400
    rows = found["evaluation"]["n=1000, seed=0"]
    want = -np.log(2 * np.pi * np.e * 0.25)
    for name in ("log-likelihood, ISM bound", "log-likelihood, local-DSM bound", "log-likelihood, flow"):
        assert abs(rows[name]["value"] - want) < 0.05 + 4.5 * rows[name]["error"]
    assert rows["MMD², sde samples to data"]["value"] < 5 * rows["MMD², sde samples to data"]["error"]
    assert (run / "figures" / "evaluation.png").exists()
    assert autodsm("resume", run).returncode == 0  # finished; what was measured stays
    assert json.loads((run / "result.json").read_text())["numbers"]["evaluation"] == found["evaluation"]


def test_sample_and_evaluate_a_physical_system(autodsm, tmp_path):
    done = autodsm("train", "ornstein-uhlenbeck", "--steps", "300", "--width", "32", "--depth", "2")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "ornstein-uhlenbeck"
    done = autodsm("sample", run, "--n", "500")
    assert done.returncode == 0, done.stderr
    saved = np.load(run / "samples.npz")
    assert saved["y"].shape == (3, 500, 1)
    assert np.all(np.abs(saved["y"].var(axis=1) - 1.0) < 4.5 * np.sqrt(2 / 500) + 0.05)  # stationary
    assert autodsm("evaluate", run, "--n", "500").returncode == 0
    rows = json.loads((run / "result.json").read_text())["numbers"]["evaluation"]["n=500, seed=0"]
    assert rows["relative score error, t = 5"]["value"] < 0.05
    assert abs(rows["entropy rate, total, t = 5"]["value"]) < 0.05  # in equilibrium
    refused = autodsm("sample", run, "--method", "sde")
    assert refused.returncode == 2
    assert "has no prior" in refused.stderr


def test_states_are_carried_with_the_right_law(monkeypatch):
    """From a point, with the exact score: the flow starts where the simulated states are, not at t = 0."""
    system = ad.systems.ornstein_uhlenbeck(1, std0=0.01, t1=2.0)
    exact = ad.reference.gaussian_marginals(system.process, [0.0], [[1e-4]])
    run = using.Run(None, {}, None, Problem(*system[:2]), SimpleNamespace(score=exact.score), (1,))
    y = using.carry(run, 4000, np.array([0.2, 2.0]), key=jax.random.key(0))
    for values, t in zip(y[..., 0], (0.2, 2.0), strict=True):
        want = float(exact.moments(t)[1][0, 0])
        assert abs(values.var() / want - 1.0) < 4.5 * np.sqrt(2 / 4000)


def test_an_unfinished_run_is_not_used(autodsm, tmp_path):
    (tmp_path / "half").mkdir()
    config = {"command": {"problem": "swimmer", "options": {"steps": 5}}}
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    for command in ("sample", "evaluate"):
        done = autodsm(command, "half")
        assert done.returncode == 2
        assert "autodsm resume half" in done.stderr
        assert "is not the folder of a run" in autodsm(command, "nowhere").stderr


def test_dry_run_writes_nothing(autodsm, tmp_path):
    done = autodsm("train", "swimmer", "--objective", "local", "--lam", "0.05", *SMALL, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "dry run: nothing was written" in done.stdout
    assert "20 steps" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("train", "chekerboard"), "Did you mean 'checkerboard'?"),
        (("train", "swimmer", "--lam", "0.1"), "--lam 0.1 has no meaning for --objective auto"),
        (("train", "swimmer", "--objective", "pathwise"), "Use LocalDSM"),
        (("train", "swimmer", "--steps", "0"), "steps=0"),
        (("fit", "missing.py"), "does not exist"),
        (("fit", "empty.py"), "must define `process`"),
        (("fit", "half.py"), "must define `y0`"),
        (("fit", "net.py", "--width", "8"), "width=8 is for the default network"),
        (("resume", "nowhere"), "is not the folder of a run"),
    ],
)
def test_bad_training_commands(autodsm, tmp_path, arguments, text):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "half.py").write_text(OWN.split("def y0")[0])
    (tmp_path / "net.py").write_text(OWN + "network = lambda y, t: y\n")
    done = autodsm(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "runs").exists()


def test_importing_starts_no_device():
    """It takes a share of a second or of a device's memory, and comes before a program may join others by `jax`."""
    environment = {**os.environ, "JAX_PLATFORMS": "none-such"}
    command = [sys.executable, "-c", "import autodsm.cli"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
