"""Figures: records in, axes out."""

import numpy as np

from autodsm.base import plot

RNG = np.random.default_rng(0)


def test_samples_over_time():
    rows = {"paths": [RNG.normal(size=(50, 2)) for _ in range(3)], "flow": [RNG.normal(size=(40, 2)) for _ in range(3)]}
    figure = plot.samples_over_time(rows, [0.5, 1.0, 2.0], labels=("x", "v"))
    axes = figure.axes
    assert len(axes) == 6
    assert [a.get_title() for a in axes[:3]] == ["t = 0.5", "t = 1", "t = 2"]
    assert "flow" in axes[3].get_ylabel()
    assert len({a.get_xlim() for a in axes}) == 1  # the same square everywhere
    assert len(axes[3].lines[0].get_xdata()) == 40


def test_current_over_density():
    x = np.linspace(-1, 1, 40)
    q = np.exp(-(x[:, None] ** 2) - x[None] ** 2)
    current = np.stack([-x[None] * q, x[:, None] * q], axis=-1)
    figure = plot.current_over_density(x, x, [q], [current], [1.0], arrows=10)
    (quiver,) = [c for c in figure.axes[0].collections if c.__class__.__name__ == "Quiver"]
    assert 50 < quiver.N <= 100
    at = quiver.get_offsets()
    np.testing.assert_allclose(np.asarray(quiver.U) * at[:, 0] + np.asarray(quiver.V) * at[:, 1], 0.0, atol=1e-12)


def test_over_time_and_over_a_parameter():
    t = np.linspace(0, 1, 5)
    bands = {
        "entropy": {"exact": (t, 0 * t), "learned": (t + 0.1, 0.05 + 0 * t)},
        "rate": {"learned": (t, 0.1 + 0 * t)},
    }
    figure = plot.over_time(t, bands)
    assert [a.get_title() for a in figure.axes] == ["entropy", "rate"]
    band = figure.axes[0].collections[1].get_paths()[0].vertices[:, 1]
    assert band.min() == 0.0
    assert np.isclose(band.max(), 1.2)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"exact", "learned"}
    one = plot.over_parameter(np.array([0.01, 0.1]), {"a": (np.ones(2), 0.1 * np.ones(2))}, xlabel="λ", ylabel="gap")
    assert one.axes[0].get_xscale() == "log"
    assert one.axes[0].get_xlabel() == "λ"


def test_images_stand_apart_in_their_grid():
    images = RNG.uniform(size=(5, 1, 4, 6))  # a square of four, and one too many
    figure = plot.image_grids({"mixture: ISM": images})
    (shown,) = figure.axes[0].images
    canvas = np.asarray(shown.get_array())
    assert canvas.shape == (2 * 4 + 1, 2 * 6 + 1)
    np.testing.assert_array_equal(canvas[5:, 7:], images[3, 0])
    assert np.all(canvas[4] == 0.5)
    assert figure.axes[0].get_title() == "mixture\nISM"
