"""What tells the processes of two runs apart."""

import numpy as np

import autodsm as ad
from autodsm.run.config import Fingerprint, sketch

STATES = np.random.default_rng(0).normal(size=(4, 2))


def test_fingerprints_differ_in_any_units():
    """Five decimals are no digits at all for a process in micrometres."""
    for unit in (2.0**-30, 1.0, 2.0**30):
        slow = ad.Process(lambda y, t: -1.0e-6 * y, 1.0e-6 * unit, t1=1.0)
        fast = ad.Process(lambda y, t: -1.5e-6 * y, 1.0e-6 * unit, t1=1.0)
        loud = ad.Process(lambda y, t: -1.0e-6 * y, 4.0e-6 * unit, t1=1.0)
        found = Fingerprint.of(slow, unit * STATES)
        assert found.differences(slow) == []
        assert [each.split(":")[0] for each in found.differences(fast)] == ["process.drift"]
        assert [each.split(":")[0] for each in found.differences(loud)] == ["process.noise"]


def test_fingerprints_forgive_rounding():
    exact = ad.Process(lambda y, t: -y, 0.5, t1=1.0)
    rounded = ad.Process(lambda y, t: -(y * 3.0) / 3.0 * (1 + 1e-6), 0.5, t1=1.0)
    assert Fingerprint.of(exact, STATES).differences(rounded) == []


def test_sketches_tell_one_entry_of_many():
    x = np.random.default_rng(0).normal(size=10_000)
    other = np.where(np.arange(10_000) == 777, x + 1.0, x)
    first, second = sketch(x)["sketch"], sketch(other)["sketch"]
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-4 * first[0]
    assert sketch(x)["array"] == "float64[10000]"
