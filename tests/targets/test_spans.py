"""Ranges of starts against laws whose tails are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import autodsm as ad
from autodsm.process.clock import Clock
from autodsm.targets import Tabulated
from autodsm.targets.laws import Starts, find_laws, spans_of
from autodsm.targets.pilot import Pilot
from autodsm.targets.spans import even_span, span_of

LAWS = {
    "normal": stats.norm(3.0, 0.5),
    "laplace": stats.laplace(),
    "exponential": stats.expon(),
    "lognormal": stats.lognorm(1.0),
    "student, 3": stats.t(3),
    "cauchy": stats.cauchy(),
    "uniform": stats.uniform(-2.0, 4.0),
    "beta": stats.beta(2, 2),
}


@pytest.mark.parametrize("name", LAWS)
def test_no_draw_of_a_long_training_falls_outside(name):
    """Out of 10⁸ draws less than one in a hundred; a bounded law is not given more than a tenth too much."""
    law = LAWS[name]
    span = span_of(law.rvs(1 << 17, random_state=np.random.default_rng(0)), sampled=True, least=1e-3)
    assert law.cdf(span.low) < 1e-10
    assert law.sf(span.high) < 1e-10
    low, high = law.support()
    if np.isfinite(high - low):
        assert span.high - span.low < 1.1 * (high - low)


@pytest.mark.parametrize("scale", [1.0, np.sqrt(2.0), 1.9])
def test_errors_count_in_full_wherever_data_were(scale):
    x = scale * np.random.default_rng(0).uniform(-2.0, 2.0, 1 << 14)
    assert np.all(span_of(x, sampled=True, least=1e-3).weight(x) == 1.0)


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**40])
def test_spans_have_the_units_of_the_data(unit):
    x = np.random.default_rng(0).normal(size=5000)
    first, second = (span_of(a * x, sampled=True, least=1e-3 * a) for a in (1.0, unit))
    assert np.asarray(second) / unit == pytest.approx(np.asarray(first), rel=1e-12)


def test_places_and_starts_are_inverse():
    span = span_of(stats.t(3).rvs(1 << 14, random_state=np.random.default_rng(0)), sampled=True, least=1e-3)
    np.testing.assert_allclose(span.place(span.starts(33)), np.linspace(0.0, 1.0, 33), atol=1e-12)
    assert even_span(-1.0, 2.0).starts(5)[[0, 2, 4]] == pytest.approx([-1.0, 0.5, 2.0])


def test_data_at_one_point():
    for value in (0.0, 3e-9, 1e6):
        span = span_of(np.full(100, value), sampled=False, least=1e-3)
        assert span.low < value < span.high
        assert span.high - span.low < 4e-3


def test_coordinates_of_different_units_have_laws_and_spans_of_their_own():
    unit = np.array([2.0**30, 1.0, 2.0**-30, 1.0], np.float32)
    process = ad.Process(lambda y, t: unit * jnp.sin(y / unit) - y, 0.7 * unit, 1.0)
    x = unit * np.random.default_rng(0).normal(size=(4096, 4))
    starts = Starts(None, x, sampled=True)
    laws = find_laws(process, (4,), starts)
    assert laws.which[1] == laws.which[3]
    assert laws.count == 3
    assert laws.separable
    widths = np.array([span.width for span in spans_of(laws, starts, Clock(process))])[laws.which]
    assert widths / unit == pytest.approx(np.full(4, widths[1]))


def test_a_table_reaches_into_heavy_tails():
    """Ornstein–Uhlenbeck from a law of Laplace: the kernel is known everywhere."""
    process = ad.Process(lambda y, t: -y, 1.0, 1.0)
    pilot = Pilot(process, lambda key, n: jax.random.laplace(key, (n, 1)), key=jax.random.key(0))
    target = Tabulated.find(pilot)
    assert isinstance(target, Tabulated)
    for x, times in ((-25.0, 10.0), (-5.0, 1.0), (0.3, 1.0), (25.0, 10.0)):  # far out ten times the error
        draw = target._draw(target.tables, jnp.array([x]), jnp.asarray(0.5), jnp.array([0.7]))
        std = np.sqrt(-np.expm1(-1.0) / 2)
        error = times * target.tables.error
        moved = 1e-4 * abs(x)  # by the clock, which is right to 10⁻⁴
        assert float(draw.y[0, 0]) == pytest.approx(x * np.exp(-0.5) + 0.7 * std, abs=error * std + moved)
        assert float(draw.score[0, 0]) * std == pytest.approx(-0.7, abs=error)
