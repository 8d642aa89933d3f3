"""The fuzz command tells outcomes apart, makes the same case each time, and goes on where it was stopped."""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import autodsm as ad

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import fuzz
import fuzz_cases
import fuzz_forward
import fuzz_outcomes
from fuzz_processes import random_process

PROCESS = ad.Process(lambda y, t: -y, 1.0, 1.0)


def exact_is_one(value):
    return fuzz_cases.off(value, 1.0, tol=1e-6)


def compiled_error(text):
    return eqx.error_if(jnp.zeros(1), jnp.asarray(True), text)


@pytest.mark.parametrize(
    ("call", "check", "pointwise", "expected"),
    [
        (lambda: 1.0, exact_is_one, False, "right"),
        (lambda: np.float32(1.1), exact_is_one, False, "silent wrong"),
        (lambda: (1, {"a": jnp.ones(3)}), None, False, "finite"),
        (lambda: (1, {"a": jnp.array([1.0, jnp.nan])}), None, False, "silent NaN"),
        (lambda: jnp.inf, exact_is_one, False, "silent NaN"),
        (lambda: jnp.nan, None, True, "finite"),
        (lambda: jnp.zeros(2) + jnp.zeros(3), None, False, "foreign"),
        (lambda: ad.Process(lambda y, t: 1 / 0, 1.0, 1.0).check(np.zeros(2)), None, False, "foreign"),
        (lambda: ad.ConstantGap(-1.0), None, False, "refused"),
        (lambda: ad.flow(PROCESS, lambda y, t: -y, [0.0], [0.0, 2.0]), None, False, "refused"),
        (lambda: compiled_error("the path exploded: steps=3 are too few for this drift"), None, False, "refused"),
        (lambda: compiled_error("the linear solver failed"), None, False, "foreign"),
    ],
)
def test_outcomes_are_told_apart(call, check, pointwise, expected):
    assert fuzz_outcomes.outcome_of(call, check, pointwise=pointwise)["outcome"] == expected


def test_a_case_follows_from_its_seed_and_number():
    assert fuzz_forward.simulate is fuzz_cases.GENERATORS["simulate"]
    numbers = range(12)
    first, second = ([str(fuzz_cases.make(3, n)) for n in numbers] for _ in range(2))
    assert first == second
    assert first != [str(fuzz_cases.make(4, n)) for n in numbers]


def test_a_wrong_moment_is_noticed():
    """The exact moments, and the limits by which samples are compared with them."""
    rng = np.random.default_rng(0)
    made = random_process(rng, kinds=("linear",), shapes=((2,),), noise=("matrix",), units=1.0)
    mean, cov = made.exact(1.0)
    ys = made.L * (mean + rng.normal(size=(4000, 2)) @ np.linalg.cholesky(cov).T)
    assert fuzz_cases.moments_off(made, ys, 1.0, tol=0.0) is None
    assert "mean" in str(fuzz_cases.moments_off(made, ys + 0.2 * made.L * np.sqrt(cov[0, 0]), 1.0, tol=0.0))
    assert "covariance" in str(fuzz_cases.moments_off(made, made.L * mean + 1.3 * (ys - made.L * mean), 1.0, tol=0.0))


def test_a_stopped_campaign_goes_on(tmp_path, monkeypatch):
    """Outcomes of cases that are in the file are taken from it, but for a line that was cut short."""
    ran = []

    class Counting(fuzz.Worker):
        def run(self, number, limit):
            ran.append(number)
            return {"case": number, "outcome": "hang" if number == 2 else "right", "detail": ""}

    monkeypatch.setattr(fuzz, "Worker", Counting)
    path = tmp_path / "rows.jsonl"
    fuzz.campaign([0, 1], 5, path, workers=1, limit=1.0)
    with path.open("a") as file:
        file.write('{"case": 2, "outc')
    rows = fuzz.campaign([0, 1, 2], 5, path, workers=1, limit=1.0)
    assert fuzz.campaign([0, 1, 2], 5, path, workers=1, limit=1.0) == rows
    assert ran == [0, 1, 2]
    assert "hang     1" in fuzz.table(rows)
    assert "--only 2 --seed 5" in fuzz.worst(rows, 5)
    with pytest.raises(SystemExit, match="another seed"):
        fuzz.campaign([0], 6, path, workers=1, limit=1.0)
    assert json.loads(path.read_text().splitlines()[0])["seed"] == 5


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ('input(); print(\'{"outcome": "right"}\', flush=True)', "right"),
        ("while True: pass", "hang"),
        ("import time; time.sleep(600)", "hang"),
        ("import os; os._exit(3)", "crash"),
    ],
)
def test_a_case_that_computes_or_waits_without_end_is_a_hang(code, outcome, monkeypatch):
    """By the time that it computed, or by many times the limit of the clock."""
    monkeypatch.setattr(fuzz, "PATIENCE", 4.0 if "sleep" in code else 1e3)
    worker = fuzz.Worker(0)
    worker.process = fuzz.subprocess.Popen(
        [sys.executable, "-c", code], stdin=fuzz.subprocess.PIPE, stdout=fuzz.subprocess.PIPE, text=True
    )
    worker.lines = fuzz.queue.Queue()
    fuzz.threading.Thread(target=fuzz._read, args=(worker.process.stdout, worker.lines), daemon=True).start()
    assert worker.run(7, 0.3)["outcome"] == outcome
    worker.stop()
