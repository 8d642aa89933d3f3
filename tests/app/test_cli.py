"""The command line and the experiments behind it."""

import html
import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import autodsm as ad
from autodsm.app import cli, commands
from autodsm.app import runs as using
from autodsm.app.problems import Problem, from_file
from autodsm.experiments import EXPERIMENTS
from autodsm.learn.fit import set_up
from autodsm.run.folder import locked
from autodsm.run.watch import Metrics


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
    assert commands.free_path(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert commands.free_path(tmp_path / "demo") == tmp_path / "demo-2"


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


def test_fit_a_file_and_resume(autodsm, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    done = autodsm("fit", "own.py", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "KineticDSM: noise enters some coordinates" in " ".join(done.stdout.split())
    run = tmp_path / "runs" / "own"
    assert {p.name for p in run.iterdir()} == {
        "config.json",
        "model.autodsm",
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

    (tmp_path / "own.py").write_text(OWN + "# a comment\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run.rename(tmp_path / "moved")
    run = tmp_path / "moved"
    assert autodsm("resume", run).returncode == 0
    monkeypatch.setattr("autodsm.app.training.fit", lambda *given, **options: pytest.fail("it is trained again"))
    sampled = autodsm("sample", run, "--n", "20")
    assert sampled.returncode == 0, sampled.stderr
    assert "executes the code of" in sampled.stdout
    exported = autodsm("export", run)
    assert exported.returncode == 0, exported.stderr
    assert "executes" not in exported.stdout  # a score has no need of the drift
    assert (run / "score.stablehlo").stat().st_size > 1000

    monkeypatch.undo()
    (tmp_path / "own.py").write_text(OWN.replace("0.5 * y[1]", "0.6 * y[1]"))
    for command in ("resume", "sample"):
        changed = autodsm(command, run)
        assert changed.returncode == 2
        assert "process.drift: component" in changed.stderr
    (tmp_path / "own.py").rename(tmp_path / "now.py")
    assert "--file FILE.py" in autodsm("sample", run).stderr
    (tmp_path / "now.py").write_text(OWN)
    assert autodsm("sample", run, "--n", "20", "--file", tmp_path / "now.py").returncode == 0


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
    total = rows["entropy rate, total, t = 5"]
    assert abs(total["value"]) < 0.05  # in equilibrium
    assert float(total["remark"].split()[-1]) <= total["error"]  # with the score's own error, not sampling only
    assert "score's own error is included" in total["remark"]
    numbers = json.loads((run / "result.json").read_text())["numbers"]
    assert numbers["diagnostics"]["n=500, seed=0"]["verdict"] in ("consistent", "cannot tell")
    page = (run / "report.html").read_text()
    assert numbers["diagnostics"]["n=500, seed=0"]["sentence"] in html.unescape(page)
    assert page.count('src="data:image/png;base64,') == 2
    assert "://" not in page  # nothing is loaded
    assert ".png" not in page
    refused = autodsm("sample", run, "--method", "sde")
    assert refused.returncode == 2
    assert "has no prior" in refused.stderr


def test_states_are_carried_with_the_right_law(monkeypatch):
    """From a point, with the exact score: the flow starts where the simulated states are, not at t = 0."""
    system = ad.systems.ornstein_uhlenbeck(1, std0=0.01, t1=2.0)
    exact = ad.reference.gaussian_marginals(system.process, [0.0], [[1e-4]])
    run = using.Run(None, {}, Problem(*system[:2]), SimpleNamespace(score=exact.score), (1,))
    y = using.carry(run, 4000, np.array([0.2, 2.0]), key=jax.random.key(0))
    for values, t in zip(y[..., 0], (0.2, 2.0), strict=True):
        want = float(exact.moments(t)[1][0, 0])
        assert abs(values.var() / want - 1.0) < 4.5 * np.sqrt(2 / 4000)


def test_a_run_made_in_python_is_sampled(autodsm, tmp_path):
    import numpyro.distributions as dist

    process = ad.vp(ad.LinearBeta(0.1, 10.0))
    own = ad.Process(lambda y, t: -y, 1.0, 1.0)
    for name, each, prior in (("vp", process, dist.Normal(0.0, 1.0)), ("own", own, None)):
        clock = ad.Clock(each)
        ad.fit(
            each, lambda key, n: jax.random.normal(key, (n, 2)), key=jax.random.key(0), prior=prior, steps=8,
            network=ad.network.Score(ad.network.MLP((2,), clock, key=jax.random.key(0), width=4, depth=1), clock),
            objective=ad.LocalDSM(each, schedule=ad.FromZero()), batch_size=16, progress=False, out=tmp_path / name,
        )  # fmt: skip
    done = autodsm("sample", "vp", "--n", "20", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "vp" / "samples.npz")["y"].shape == (20, 2)
    refused = autodsm("sample", "own")
    assert refused.returncode == 2
    assert "was made in Python, and its process and y0 are your own" in refused.stderr
    (tmp_path / "own.py").write_text(
        "import jax, autodsm as ad\nprocess = ad.Process(lambda y, t: -y, 1.0, 1.0)\n"
        "def y0(key, n): return jax.random.normal(key, (n, 2))\n"
    )
    done = autodsm("sample", "own", "--n", "20", "--file", "own.py")
    assert done.returncode == 0, done.stderr


def test_what_is_no_run_is_not_used(autodsm, tmp_path):
    (tmp_path / "half").mkdir()
    config = {"command": {"problem": "swimmer", "options": {"steps": 5}}}
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    for command in ("sample", "evaluate", "export"):
        done = autodsm(command, "half")
        assert done.returncode == 2
        assert "half/config.json has no field 'shape'" in done.stderr
        assert "is not the folder of a run" in autodsm(command, "nowhere").stderr


def test_dry_run_writes_nothing(autodsm, tmp_path):
    done = autodsm("train", "swimmer", "--objective", "local", "--lam", "0.05", *SMALL, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    said = " ".join(done.stdout.split())
    for text in (
        "swimmer",
        "state of 2 numbers, t from 0 to",
        "coordinates are coupled; the same at all times",
        "in some coordinates",
        "DSM, as given",
        "λ = 0.05",
        "MLP, 1 hidden layer of 8",
        "trained numbers",
        "AdamW",
        "20 steps",
        "runs/swimmer: config.json",
        "Nothing was written.",
    ):
        assert text in said
    assert len(done.stdout.splitlines()) < 30
    assert said.startswith("pilot: ")
    assert not re.search(r"[0-9a-f]{12}", said)  # no digests


def test_dry_run_refuses_a_folder_that_is_taken(autodsm, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("keep")
    done = autodsm("train", "swimmer", "--dry-run", "--out", "taken")
    assert done.returncode == 2
    assert "taken already exists" in done.stderr


def test_the_configuration_is_made_when_it_is_asked_for(monkeypatch, capsys):
    """A dry run makes no sketches."""
    monkeypatch.setattr("autodsm.learn.fit.sketch", lambda *arguments: pytest.fail("a sketch was made"))
    process = ad.Process(lambda y, t: -y, 1.0, 1.0)
    setup = set_up(process, np.zeros((4, 2), np.float32), key=jax.random.key(0), width=8, depth=1, batch_size=8)
    assert setup.rounds.steps == 5000
    monkeypatch.undo()
    assert setup.config is setup.config
    assert capsys.readouterr().out == ""  # what takes long is announced only with progress=True
    assert setup.config.steps == 5000


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
    command = [sys.executable, "-c", "import autodsm.app.cli"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["pip install 'autodsm[images]'", "times lie in [t0, t1]", "[/b]", ":warning:"])
def test_errors_are_printed_as_they_are(autodsm, monkeypatch, text):
    def refuse(console):
        raise ValueError(text)

    monkeypatch.setattr(commands, "show_list", refuse)
    done = autodsm("list")
    assert done.returncode == 2
    assert done.stderr == f"error: {text}\n"


@pytest.mark.parametrize("name", ["[/b]", "a [bold]run[/bold]"])
def test_folders_are_printed_as_they_are(autodsm, name):
    done = autodsm("resume", name)
    assert done.returncode == 2
    assert f"{name} is not the folder of a run" in done.stderr
    done = autodsm("report", name)
    assert done.returncode == 0, done.stderr
    assert f"Written: {name}" in done.stdout


def finished_run(folder, **files):
    """A run folder as far as the command line reads it before it loads a model."""
    folder.mkdir()
    config = {"command": {"problem": "swimmer", "options": {"steps": 5}}}
    for name, text in {"config.json": json.dumps(config), "result.json": '{"numbers": {}}', **files}.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"command": {"prob'),
        ("config.json", "[1, 2]"),
        ("config.json", '{"command": {"problem": "swimmer", "options": {"stepz": 5}}}'),
        ("config.json", '{"command": {"options": {"steps": 5}}}'),
        ("config.json", '{"command": {"problem": "swimmer", "options": 5}}'),
        ("config.json", '{"command": {"problem": ["swimmer"], "options": {}}}'),
        ("config.json", '{"command": {"problem": "swimmer", "options": {"steps": "five"}}}'),
    ],
)
def test_damaged_files_of_a_run_are_named(autodsm, tmp_path, name, text):
    finished_run(tmp_path / "run", **{name: text})
    for command in ("sample", "evaluate", "resume"):
        done = autodsm(command, "run")
        assert done.returncode == 2
        assert f"run/{name}" in done.stderr
        assert any(remedy in done.stderr for remedy in ("backup", "start the run anew"))


def test_modules_in_a_file_are_no_part_of_the_problem(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import jax\nimport autodsm as ad\nfrom autodsm import network, priors as prior, targets as objective\n"
        "process = ad.Process(lambda y, t: -y, 0.5, t1=1.0)\n"
        "def y0(key, n): return jax.random.normal(key, (n, 2))\n"
    )
    assert from_file(file)[2:] == (None, None, None)
    file.write_text(
        file.read_text() + "network = network.MLP((2,), ad.Clock(process), key=jax.random.key(0), width=4)\n"
    )
    assert isinstance(from_file(file).network, ad.network.MLP)
    file.write_text("from autodsm import systems as process\n")
    with pytest.raises(ValueError, match="must define `process`"):
        from_file(file)


def test_a_run_says_which_code_it_executes(autodsm, tmp_path):
    (tmp_path / "own.py").write_text("process = 3\n")
    config = {"command": {"file": "own.py", "options": {"steps": 5}}}
    finished_run(tmp_path / "run", **{"config.json": json.dumps(config)})
    done = autodsm("resume", "run")
    assert "own.py must define `process`" in done.stderr
    assert "run executes the code of own.py" in " ".join(done.stdout.split())


def test_one_process_at_a_time_works_in_a_run_folder(autodsm, tmp_path):
    """The holder is another process; the lock ends with it, also when it is killed."""
    finished_run(tmp_path / "run")
    hold = "import sys, time; from autodsm.run.folder import locked\nwith locked(sys.argv[1]):\n"
    hold += " print('held', flush=True)\n"
    command = [sys.executable, "-c", hold + " time.sleep(600)", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            done = autodsm("resume", "run")
            assert done.returncode == 2
            assert f"process {holder.pid} on {socket.gethostname()}" in done.stderr
        finally:
            holder.kill()
    with locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "lock").exists()


@pytest.mark.parametrize("line", ["nonsense", "5", '{"step": 3}'])
def test_a_damaged_line_of_metrics_is_named(tmp_path, line):
    """A last line may be cut short by a kill; any other is damage."""
    good = '{"step": 8, "loss": 1.0, "grad_norm": 1.0, "steps_per_s": 9.0}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2 .*Remove this line"):
        Metrics(tmp_path / "metrics.jsonl", 8)
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n")
    assert Metrics(tmp_path / "metrics.jsonl", 8).rows == [json.loads(good)]
