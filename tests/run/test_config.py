"""What tells the processes of two runs apart."""

import numpy as np

import autodsm as ad
from autodsm.run.config import fingerprint

STATES = np.random.default_rng(0).normal(size=(4, 2))


def test_fingerprints_differ_in_any_units():
    """Five decimals are no digits at all for a process in micrometres."""
    for unit in (2.0**-30, 1.0, 2.0**30):
        slow = ad.Process(lambda y, t: -1.0e-6 * y, 1.0e-6 * unit, t1=1.0)
        fast = ad.Process(lambda y, t: -1.5e-6 * y, 1.0e-6 * unit, t1=1.0)
        loud = ad.Process(lambda y, t: -1.0e-6 * y, 4.0e-6 * unit, t1=1.0)
        first, second, third = (fingerprint(process, unit * STATES) for process in (slow, fast, loud))
        assert first["drift"] != second["drift"]
        assert first["noise"] != third["noise"]


def test_fingerprints_forgive_rounding():
    exact = ad.Process(lambda y, t: -y, 0.5, t1=1.0)
    rounded = ad.Process(lambda y, t: -(y * 3.0) / 3.0 * (1 + 1e-9), 0.5, t1=1.0)
    assert fingerprint(exact, STATES) == fingerprint(rounded, STATES)
