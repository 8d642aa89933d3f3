"""Experiments as units that can be stopped, resumed and shown; and the page made of their results."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

import autodsm as ad
from autodsm.app import cli
from autodsm.app import report as results
from autodsm.experiments import EXPERIMENTS, Experiment, Grid
from autodsm.experiments.shared.experiment import difference, over_seeds, written
from autodsm.experiments.shared.learning import Recipe, ScoreError, carried, distances, learn
from autodsm.experiments.shared.verdict import DIFFERS
from autodsm.run.folder import RunFolder
from oracles import is_drawn

DOCS = Path(__file__).parents[2] / "docs"


class Toy:
    """An experiment that counts its trials, and is stopped before one of them."""

    def __init__(self):
        self.done: list[tuple[str, int]] = []
        self.stop_at: int | None = None

    def trial(self, part, *, quick, seed):
        """A trial."""
        if len(self.done) == self.stop_at:
            raise KeyboardInterrupt
        self.done.append((part, seed))
        return {"value": np.float32(10.0 * seed + len(part)), "lost": np.nan, "quick": quick}

    def combine(self, trials):
        return {part: over_seeds([t["value"] for t in each]) for part, each in trials.items()}

    def figures(self, trials, numbers):
        return {"toy": Figure()}

    def report(self, numbers, seeds):
        rows = [[part, written(found["value"], found["stderr"])] for part, found in numbers.items()]
        return [Grid("Values", ("part", "value"), rows), "They **grow**.", f"{DIFFERS}, where they shrink."]


@pytest.fixture
def toy(monkeypatch):
    toy = Toy()
    parts = {"parts": ("a", "b, c"), "quick_parts": ("a",)}
    found = Experiment(toy.trial, toy.combine, toy.figures, toy.report, **parts, seeds=3)
    monkeypatch.setitem(EXPERIMENTS, "toy", found)
    return toy


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr("sys.argv", ["autodsm", *map(str, arguments)])
    cli.main()


def test_a_stopped_experiment_goes_on_where_it_was(toy, monkeypatch, tmp_path, capsys):
    whole = tmp_path / "whole"
    run(monkeypatch, "reproduce", "toy", "--out", whole)
    assert toy.done == [(part, seed) for seed in range(3) for part in ("a", "b, c")]
    assert "They grow." in capsys.readouterr().out

    toy.done, toy.stop_at = [], 3
    with pytest.raises(SystemExit, match="130"):
        run(monkeypatch, "reproduce", "toy", "--out", tmp_path / "cut")
    assert f"autodsm resume {tmp_path / 'cut'}" in capsys.readouterr().err
    assert not (tmp_path / "cut" / "result.json").exists()
    toy.stop_at = None
    run(monkeypatch, "resume", tmp_path / "cut")
    assert len(toy.done) == 6
    first, second = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "cut"))
    assert first["numbers"] == second["numbers"]
    assert first["numbers"]["a"] == {"value": 11.0, "stderr": pytest.approx(10 / np.sqrt(3))}
    assert first["seeds"] == [0, 1, 2]
    assert first["command"] == "autodsm reproduce toy"
    assert "jax" in first["versions"]


def test_tables_lose_nothing_in_a_narrow_terminal(capsys):
    value = "(2.529 ± 0.081)·10^-4"
    Console(width=30, force_terminal=False).print(results._rich(Grid("Title", ["name"] * 4, [[value] * 4])))
    assert "…" not in capsys.readouterr().out


def test_tables_take_brackets_as_they_are(capsys):
    grid = Grid("Of x[t]", ["", "E[x⁴]"], [["at [t]", "1"]])
    Console(width=80, force_terminal=False).print(results._rich(grid))
    told = capsys.readouterr().out
    assert all(text in told for text in ("Of x[t]", "E[x⁴]", "at [t]"))


def test_a_quick_run_is_of_one_seed_and_says_nothing(toy, monkeypatch, tmp_path, capsys):
    run(monkeypatch, "reproduce", "toy", "--quick", "--seed", "4", "--out", tmp_path / "run")
    assert toy.done == [("a", 4)]
    told = capsys.readouterr().out
    assert "Values" in told
    assert "grow" not in told
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["command"] == "autodsm reproduce toy --quick --seed 4"
    assert result["numbers"]["a"] == {"value": 41.0, "stderr": None}
    trial = json.loads((tmp_path / "run" / "trials" / "a-seed-4.json").read_text())
    assert trial["lost"] is None
    assert trial["quick"] is True


def test_trials_of_different_code_are_not_mixed(toy, monkeypatch, tmp_path, capsys):
    toy.stop_at = 3
    with pytest.raises(SystemExit, match="130"):
        run(monkeypatch, "reproduce", "toy", "--out", tmp_path / "cut")
    toy.stop_at = None
    monkeypatch.setattr(results, "code", lambda: "other")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "resume", tmp_path / "cut")
    told = " ".join(capsys.readouterr().err.split())
    assert "begun by another version" in told
    assert "3 of its 6 trials are missing" in told
    assert len(toy.done) == 3
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["trials/a-seed-0.json", "result.json"])
def test_files_that_lack_something_are_named(toy, monkeypatch, tmp_path, capsys, name):
    run(monkeypatch, "reproduce", "toy", "--quick", "--out", tmp_path / "run")
    (tmp_path / "run" / name).write_text('{"experiment": "toy", "numbers": {}}')
    words = (
        ("resume", tmp_path / "run") if "trial" in name else ("report", tmp_path / "docs", "--add", tmp_path / "run")
    )
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *words)
    assert f"run/{name} is damaged: it has no '" in capsys.readouterr().err


def test_the_code_is_that_of_all_rooms(monkeypatch, tmp_path):
    for name in ("app/report.py", "learn/fit.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    monkeypatch.setattr(results, "__file__", str(tmp_path / "app" / "report.py"))
    before = results.code()
    (tmp_path / "learn" / "fit.py").write_text("steps = 3")
    assert results.code() != before


def test_a_finished_experiment_is_shown_again_with_its_own_versions(toy, monkeypatch, tmp_path):
    run(monkeypatch, "reproduce", "toy", "--out", tmp_path / "run")
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    monkeypatch.setattr(results, "code", lambda: "other")
    monkeypatch.setattr("autodsm.run.folder.versions", lambda: {"jax": "9"})
    run(monkeypatch, "resume", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == first
    assert len(toy.done) == 6


def test_the_digest_of_the_code_is_of_all_rooms(monkeypatch, tmp_path):
    """A change of any file of the package, in whatever room, is another code."""
    package = tmp_path / "autodsm"
    for room in ("app", "learn"):
        (package / room).mkdir(parents=True)
        (package / room / "file.py").write_text("x = 1\n")
    monkeypatch.setattr(results, "__file__", str(package / "app" / "report.py"))
    first = results.code()
    (package / "learn" / "file.py").write_text("x = 2\n")
    assert results.code() != first


def test_an_experiment_holds_no_model(toy, monkeypatch, tmp_path, capsys):
    run(monkeypatch, "reproduce", "toy", "--out", tmp_path / "run")
    for command in ("sample", "evaluate"):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, command, tmp_path / "run")
        assert "holds no model" in capsys.readouterr().err


def test_scales_are_runs_of_their_own(toy, monkeypatch, tmp_path, capsys):
    """A trial is told its scale, and goes on in a folder of its own; results, figures and sections carry the scale."""
    left = tmp_path / "run" / "trials" / "a-seed-0"

    def trial(part, *, quick, seed, scale, folder):
        assert scale == "large"
        assert folder == left
        if not folder.exists():
            folder.mkdir()
            (folder / "half").write_text("done")
            raise KeyboardInterrupt
        return {"value": float(len((folder / "half").read_text()))}

    parts: dict = dict(scales={"small": ("a", "b"), "large": ("a",)}, check=lambda scale: checked.append(scale))
    checked: list[str] = []
    monkeypatch.setitem(EXPERIMENTS, "toy", Experiment(trial, toy.combine, toy.figures, toy.report, **parts))
    with pytest.raises(SystemExit, match="130"):
        run(monkeypatch, "reproduce", "toy", "--scale", "large", "--out", tmp_path / "run")
    assert checked == ["large"]
    run(monkeypatch, "resume", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["command"] == "autodsm reproduce toy --scale large"
    assert result["numbers"]["a"]["value"] == 4.0
    assert (tmp_path / "run" / "figures" / "toy-large.png").exists()
    run(monkeypatch, "report", tmp_path / "docs", "--add", tmp_path / "run")
    assert "## toy-large" in (tmp_path / "docs" / "results.md").read_text()
    assert (tmp_path / "docs" / "results" / "toy-large.json").exists()
    assert results.page(tmp_path / "docs") == (tmp_path / "docs" / "results.md").read_text()


def test_one_seed_is_one_seed(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "reproduce", "gradient-variance", "--seeds", "2", "--out", tmp_path / "run")
    assert "takes one" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_seeds_must_be_a_count(toy, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "reproduce", "toy", "--seeds", "0", "--out", tmp_path / "run")
    assert "seeds=0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_report_takes_numbers_and_figures(toy, monkeypatch, tmp_path, capsys):
    run(monkeypatch, "reproduce", "toy", "--seeds", "2", "--out", tmp_path / "run")
    run(monkeypatch, "report", tmp_path / "docs", "--add", tmp_path / "run")
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "`autodsm reproduce toy --seeds 2`" in page
    assert "| a | 6.0 ± 5.0 |" in page
    assert "They **grow**." in page
    assert page.index("- [toy](#toy): **Differs from the paper**, where they shrink.") < page.index("## toy")
    assert json.loads((tmp_path / "docs" / "results" / "toy.json").read_text())["code"] == results.code()
    assert "(figures/toy.png)" in page
    assert (tmp_path / "docs" / "figures" / "toy.png").exists()
    run(monkeypatch, "report", tmp_path / "docs")
    assert (tmp_path / "docs" / "results.md").read_text() == page
    path = tmp_path / "docs" / "results" / "toy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"caveat": "Made with a worn ruler."}))
    run(monkeypatch, "report", tmp_path / "docs")
    assert "**Made with a worn ruler.**" in (tmp_path / "docs" / "results.md").read_text()
    kept = path.read_text()
    run(monkeypatch, "reproduce", "toy", "--quick", "--out", tmp_path / "quick")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "report", tmp_path / "docs", "--add", tmp_path / "quick")
    assert "does not replace" in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "docs" / "results" / "toy.json").read_text() == kept
    run(monkeypatch, "report", tmp_path / "other", "--add", tmp_path / "quick")
    quick = (tmp_path / "other" / "results.md").read_text()
    assert "a quick run, for a look only" in quick
    assert "grow" not in quick
    assert "Against the paper" not in quick
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.md").write_text("# My thesis")
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "report", tmp_path / "mine", "--add", tmp_path / "run")
    assert (tmp_path / "mine" / "results.md").read_text() == "# My thesis"
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "report", tmp_path / "docs", "--add", tmp_path / "none")
    assert "has no result.json" in capsys.readouterr().err.replace("\n", " ")


def test_the_committed_page_is_what_its_numbers_say():
    assert (DOCS / "results.md").read_text() == results.page(DOCS)
    for path in (DOCS / "results").glob("*.json"):
        found = json.loads(path.read_text())
        assert not found["quick"], path
        for figure in found["figures"]:
            assert is_drawn(DOCS / "figures" / f"{figure}.png")


def test_numbers_as_text():
    assert written(0.1234) == "0.12"
    assert written(0.1234, 0.0123) == "0.123 ± 0.012"
    assert written(12.34, 1.5) == "12.3 ± 1.5"
    assert written(1234.0, 56.0) == "1234 ± 56"
    assert written(123.4) == "123"
    assert written(2e-4, 3e-5) == "(2.00 ± 0.30)·10^-4"
    assert written(0.00123, 0.00012) == "0.00123 ± 0.00012"
    assert written(None) == written(np.nan, 1.0) == "–"
    assert written(0.5, None) == written(0.5, np.nan) == "0.5"


def test_over_seeds():
    found = over_seeds([[1.0, 2.0], [3.0, 2.0]])
    assert found["value"] == [2.0, 2.0]
    assert found["stderr"] == [1.0, 0.0]
    assert np.isnan(over_seeds([1.0])["stderr"])


def test_differences_over_seeds():
    a, b = over_seeds([4.0, 10.0]), over_seeds([1.0, 9.0])  # 7 ± 3 and 5 ± 4
    assert difference(a, b) == pytest.approx((2.0, 5.0))
    assert np.isnan(difference(a, {"value": 5.0, "stderr": None})[1])  # one seed, as read from a file


def test_whole_files_only(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write("result.json", {"a": 1})
    with pytest.raises(TypeError):
        folder.write("result.json", {"a": object()})
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == {"a": 1}


def test_score_error_is_the_metric():
    y = jax.random.normal(jax.random.key(0), (2, 500, 2))
    exact, score = (lambda y, t: -y * (1 + t)), (lambda y, t: -y * (1.1 + t))
    times = np.array([0.5, 1.0])
    truth = np.stack([np.asarray(exact(y[i], t)) for i, t in enumerate(times)])
    found = np.asarray(ScoreError.at(y, truth, times)(score))
    for value, z, t in zip(found, y, times, strict=True):
        assert value == pytest.approx(ad.metrics.relative_score_error(score, exact, z, t).value, rel=1e-4)
    assert found[0] == pytest.approx((0.1 / 1.5) ** 2, rel=1e-3)

    process = ad.Process(lambda y, t: -(1 + t) * y, np.array([0.8, 1.2]), 1.0)
    moving = np.asarray(ScoreError.at(y, truth, times).of_velocity(process, score))
    for value, z, t in zip(moving, y, times, strict=True):
        assert value == pytest.approx(ad.metrics.relative_velocity_error(process, score, exact, z, t).value, rel=1e-4)

    truth[..., 0] = np.nan  # a coordinate that is not compared
    truth[1, 7] = np.nan  # a path that is not
    error = ScoreError.at(y, truth, times)
    assert error.y.shape == (2, 499, 2)
    other = error(lambda y, t: jnp.stack([100.0 + 0 * y[0], -y[1] * (1.1 + t)]))
    assert float(other[0]) == pytest.approx(found[0], rel=1e-3)
    assert np.all(np.isnan(error(lambda y, t: jnp.nan * y)))  # a score that is lost is not a perfect one


def test_learning_is_watched_at_its_marks():
    system = ad.systems.ornstein_uhlenbeck(1)
    seen = []

    def evaluate(score):
        seen.append(score(jnp.array([1.0]), 1.0))
        return {"at": float(seen[-1][0])}

    model, rows = learn(
        *system[:2], Recipe(), steps=96, marks=[20, 40, 500], evaluate=evaluate, key=jax.random.key(0),
        width=8, depth=1, batch_size=64, progress=False,
    )  # fmt: skip
    ends = [row["step"] for row in model.history]
    assert [row["step"] for row in rows] == sorted({next(e for e in ends if e >= mark) for mark in (20, 40, 96)})
    assert rows[-1]["at"] == pytest.approx(float(model.score(jnp.array([1.0]), 1.0)[0]), rel=1e-5)
    assert all(b["seconds"] > a["seconds"] > 0 for a, b in itertools.pairwise(rows))


def test_samples_are_carried_and_compared():
    system = ad.systems.ornstein_uhlenbeck(1, t1=2.0)  # stationary N(0, 1)
    starts = np.asarray(system.y0(jax.random.key(0), 400))
    times = [0.1, 1.0, 2.0]
    ys = carried(system.process, lambda y, t: -y, starts, times).copy()
    np.testing.assert_allclose(ys, np.broadcast_to(starts, ys.shape), atol=1e-4)  # in equilibrium nothing moves
    same = distances(ys, np.asarray(jax.random.normal(jax.random.key(1), ys.shape)), key=jax.random.key(2))
    assert np.mean(np.array(same["mmd2"]) <= np.array(same["floor"])) > 0.5
    ys[1, :300] = np.nan
    ys[2] += 3.0
    lost = distances(ys, np.asarray(jax.random.normal(jax.random.key(1), ys.shape)), key=jax.random.key(2))
    assert np.isnan(lost["mmd2"][1])
    assert lost["mmd2"][2] > 10 * lost["floor"][2]
    assert (same["lost"], lost["lost"]) == (0.0, 0.75)


def test_every_experiment_says_what_it_is():
    for name in EXPERIMENTS:
        assert results.summary(name).endswith(".")
