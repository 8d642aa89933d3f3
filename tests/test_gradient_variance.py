"""The gradient's variance: growing as 1/λ without variance reduction, bounded with it, and the same mean gradient."""

import json

import numpy as np
import pytest

from autodsm.experiments import gradient_variance
from autodsm.experiments.gradient_variance import LAMBDAS, REFERENCE, Gradient, same_mean
from autodsm.run import RunFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", {})
    folder.save_result(gradient_variance.run(folder, quick=True), seed=0)
    return folder


@pytest.fixture(scope="module")
def records(folder):
    return json.loads((folder.path / "result.json").read_text())["numbers"]["processes"]


def test_both_processes_and_a_figure(folder, records):
    assert len(records) == 2
    assert sum("tabulated" in record["variance"] for record in records.values()) == 1
    assert (folder.path / "figures" / "gradient-variance.png").stat().st_size > 10_000


def test_without_reduction_it_grows_as_one_over_lambda(records):
    for record in records.values():
        slope = record["slope_none"]
        assert slope["stderr"] < 0.1
        assert abs(slope["value"] + 1.0) < 4 * slope["stderr"]


def test_with_reduction_it_is_bounded(records):
    for record in records.values():
        for name in ("local-DSM, antithetic", "local-DSM, control"):
            value, stderr = (np.array(record["variance"][name][k]) for k in ("value", "stderr"))
            assert value[-1] - 2 * stderr[-1] <= 3 * value[0]
            assert np.all(value < 100 * stderr)  # an error that is not negligible, nor absent
        assert record["growth"]["local-DSM, none"] > 50


def test_targets_without_lambda_are_below_plain_local_dsm(records):
    at = LAMBDAS.index(1e-2)
    for record in records.values():
        variance = record["variance"]
        plain = variance["local-DSM, none"]["value"][at] - 4 * variance["local-DSM, none"]["stderr"][at]
        for name in {"pathwise", "tabulated", "ISM, Hutchinson"} & set(variance):
            assert variance[name]["value"][0] + 4 * variance[name]["stderr"][0] < plain, name


def test_mean_gradients_agree(records):
    for record in records.values():
        for name, rows in record["variance"].items():
            # Local kernels with λ = 0.1 are visibly not exact for the coupled process.
            p = [p for p, lam in zip(rows["p"], LAMBDAS, strict=False) if lam <= 1e-2 or len(rows["p"]) == 1]
            assert min(p) > 1e-3, name
        assert record["variance"][REFERENCE]["p"] == [1.0]
    coupled = records["swirl, correlated noise"]["variance"]["local-DSM, antithetic"]
    assert coupled["p"][0] < 0.01  # so the comparison can fail


def test_same_mean_notices_a_small_shift():
    noise = np.random.default_rng(0).normal(size=(2, 32, 1000))
    first, second = (Gradient(1.0, 0.1, x) for x in noise)
    assert same_mean(first, second) > 0.01
    assert same_mean(first, second._replace(batch_means=noise[1] + 0.1)) < 0.01
