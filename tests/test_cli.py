"""The command line and the experiments behind it."""

import json

import numpy as np
import pytest

from autodsm import cli
from autodsm.experiments import EXPERIMENTS


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["autodsm", *map(str, arguments)])
    cli.main()


def test_list_names_every_experiment(monkeypatch, capsys):
    call(monkeypatch, "list")
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS)


def test_mean_error(monkeypatch, tmp_path):
    call(monkeypatch, "reproduce", "mean-error", "--quick", "--out", tmp_path / "run")
    folder = tmp_path / "run"
    assert (folder / "figures" / "mean-error.png").stat().st_size > 10_000
    assert json.loads((folder / "config.json").read_text())["quick"] is True
    result = json.loads((folder / "result.json").read_text())
    assert result["seed"] == 0
    assert "jax" in result["versions"]
    scheduled, gap = (
        {q: np.array(x["value"]) for q, x in curves.items()} for curves in result["numbers"]["rms_error"].values()
    )
    for quantity in ("local mean", "local variance"):
        assert scheduled[quantity].max() < 1.5 * scheduled[quantity].min()  # flat in t
        assert np.all(np.diff(gap[quantity]) > 0)  # growing with t
        assert gap[quantity][-1] > 30 * gap[quantity][0]
        assert gap[quantity][-1] > 100 * scheduled[quantity][-1]


def test_demo_shows_agreement_and_disagreement(monkeypatch, tmp_path, capsys):
    call(monkeypatch, "reproduce", "demo", "--quick", "--out", tmp_path / "run")
    numbers = json.loads((tmp_path / "run" / "result.json").read_text())["numbers"]
    distance = {float(k): np.array(v) for k, v in numbers["total_variation"].items()}
    assert np.all(distance[0.05] < 0.04)
    assert distance[2.0][-1] > 0.08
    assert "Total variation" in capsys.readouterr().out


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
