"""Records in, figures out. Nothing here computes."""

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.rcParams.update(
    {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
)
_STYLES = ("-", "--", ":", "-.")


def panels(
    n: int, *, width: float = 3.2, height: float = 2.8, rows: int = 1, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """n axes, in a row or several."""
    columns = -(-n // rows)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(np.ravel(figure.subplots(rows, columns, sharey=share_y, squeeze=False)))
    for axis in axes[n:]:
        axis.remove()
    return figure, axes[:n]


def densities(
    x: np.ndarray,
    times: Sequence[float],
    curves: Mapping[str, np.ndarray],
    samples: Sequence[np.ndarray] | None = None,
    *,
    label: str = "y",
) -> Figure:
    """One panel for each time: named density curves, each of shape (times, len(x)), over a histogram of samples."""
    figure, axes = panels(len(times), share_y=True)
    for i, (axis, t) in enumerate(zip(axes, times, strict=True)):
        if samples is not None:
            axis.hist(samples[i], bins=120, range=(x[0], x[-1]), density=True, color="0.87", label="simulated")
        for j, (name, values) in enumerate(curves.items()):
            color = "k" if j == 0 else f"C{j - 1}"
            axis.plot(x, values[i], _STYLES[j % 4], color=color, lw=1.6 if j == 0 else 1.3, label=name)
        axis.set(title=f"t = {t:g}", xlabel=label)
    axes[0].set_ylabel("density")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def errors_over_time(
    times: np.ndarray | Mapping[str, np.ndarray],
    rows: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    *,
    ylabels: Mapping[str, str],
) -> Figure:
    """A panel for each quantity; in it each method's error over t, as (value, standard error), on a log scale. `times`:
    of all quantities, or of each."""
    figure, axes = panels(len(rows), width=4.2, height=3.2, rows=1 if len(rows) < 4 else 2)
    for axis, (quantity, methods) in zip(axes, rows.items(), strict=True):
        for j, (name, (value, stderr)) in enumerate(methods.items()):
            at = times[quantity] if isinstance(times, Mapping) else times
            axis.errorbar(at, value, 2 * stderr, marker="o", ms=3, lw=1.2, capsize=2, color=f"C{j}", label=name)
        axis.set(yscale="log", xlabel="t", ylabel=ylabels[quantity], title=quantity)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=5)
    return figure


def generative_summary(
    edges: np.ndarray,
    data: np.ndarray,
    samples: np.ndarray,
    truth: np.ndarray,
    learned: np.ndarray,
    history: np.ndarray,
) -> Figure:
    """Data, samples, exact and learned density on a square, and the loss over steps; `history` is (rounds, 2)."""
    figure, axes = panels(5, width=2.7, height=2.9)
    span = (edges[0], edges[-1])
    for axis, points, title in ((axes[0], data, "data"), (axes[1], samples, "samples")):
        axis.plot(*points.T, ".", ms=0.8, color="C0", rasterized=True)
        axis.set(title=title)
    top = float(np.quantile(truth, 0.995))
    for axis, values, title in ((axes[2], truth, "density, exact"), (axes[3], learned, "density, learned")):
        axis.pcolormesh(edges, edges, values.T, vmin=0.0, vmax=top, cmap="viridis", rasterized=True)
        axis.set(title=title)
    for axis in axes[:4]:
        axis.set(xlim=span, ylim=span, aspect="equal", xlabel="$y_1$")
    axes[0].set_ylabel("$y_2$")
    _draw_loss(axes[4], history)
    return figure


def samples_over_time(
    rows: Mapping[str, Sequence[np.ndarray]], times: Sequence[float], *, labels: tuple[str, str] = ("$y_1$", "$y_2$")
) -> Figure:
    """Points in the plane, a row for each name and a column for each time; all panels show the same rectangle."""
    every = np.concatenate([np.concatenate(list(points)) for points in rows.values()])
    low, high = np.quantile(every, 0.001, axis=0), np.quantile(every, 0.999, axis=0)
    margin = 0.08 * (high - low) + 1e-9
    limits = [(float(a), float(b)) for a, b in zip(low - margin, high + margin, strict=True)]
    return samples_in_panels(rows, [f"t = {t:g}" for t in times], limits=limits, labels=labels)


def samples_in_panels(
    rows: Mapping[str, Sequence[np.ndarray]],
    titles: Sequence[str],
    *,
    limits: Sequence[tuple[float, float]],
    labels: tuple[str, str] = ("$y_1$", "$y_2$"),
    sideways: bool = False,
) -> Figure:
    """Points in the plane, a row for each name and a column for each title; or, sideways, the other way round."""
    names = list(rows)
    down, across = (list(titles), names) if sideways else (names, list(titles))
    width, height = (2.1, 2.0) if sideways else (2.4, 2.3)
    figure = Figure(figsize=(width * len(across) + 0.6, height * len(down) + 0.4), layout="constrained")
    axes = figure.subplots(len(down), len(across), sharex=True, sharey=True, squeeze=False)
    for i, line in enumerate(axes):
        for j, axis in enumerate(line):
            y = rows[names[j]][i] if sideways else rows[names[i]][j]
            axis.plot(*y.T, ".", ms=1.0, alpha=0.5, color="C0", rasterized=True)
            axis.set(xlim=limits[0], ylim=limits[1])
        line[0].set_ylabel(f"{down[i]}\n{labels[1]}")
    for axis, title in zip(axes[0], across, strict=True):
        axis.set_title(title)
    for axis in axes[-1]:
        axis.set_xlabel(labels[0])
    return figure


def current_over_density(
    x1: np.ndarray,
    x2: np.ndarray,
    q: Sequence[np.ndarray],
    current: Sequence[np.ndarray],
    times: Sequence[float],
    *,
    labels: tuple[str, str] = ("$y_1$", "$y_2$"),
    arrows: int = 18,
) -> Figure:
    """The density (len(x1), len(x2)) in colour and the current (len(x1), len(x2), 2) as arrows, at several times."""
    figure, axes = panels(len(times), width=3.3, height=3.0, share_y=True)
    one, two = (np.linspace(0, len(x) - 1, min(arrows, len(x))).astype(int) for x in (x1, x2))
    for axis, t, values, j in zip(axes, times, q, current, strict=True):
        axis.pcolormesh(x1, x2, values.T, cmap="viridis", shading="nearest", rasterized=True)
        shown = j[np.ix_(one, two)]
        size = np.linalg.norm(shown, axis=-1)
        visible = size > 0.02 * size.max()
        at = np.stack(np.meshgrid(x1[one], x2[two], indexing="ij"), axis=-1)[visible]
        axis.quiver(*at.T, *shown[visible].T, color="w", width=0.006, pivot="middle")
        axis.set(title=f"t = {t:g}", xlabel=labels[0], xlim=(x1[0], x1[-1]), ylim=(x2[0], x2[-1]))
    axes[0].set_ylabel(labels[1])
    return figure


def over_time(
    times: np.ndarray,
    quantities: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]],
    *,
    log: bool | Sequence[str] = False,
    deviations: float = 2.0,
) -> Figure:
    """A panel for each quantity; in it each method's value over t with a band of that many standard errors. What is
    called "exact" or "noise floor" is black. `log`: all quantities on a logarithmic scale, or those named."""
    figure, axes = panels(len(quantities), width=3.6, height=3.1, rows=1 if len(quantities) < 4 else 2)
    handles: dict = {}
    for axis, (quantity, methods) in zip(axes, quantities.items(), strict=True):
        for j, (name, (value, stderr)) in enumerate(methods.items()):
            color, style = {"exact": ("k", "--"), "noise floor": ("k", ":")}.get(name, (f"C{j}", "-"))
            handles[name] = axis.plot(times, value, style, color=color, lw=1.4)[0]
            axis.fill_between(times, value - deviations * stderr, value + deviations * stderr, color=color, alpha=0.2)
        scaled = log if isinstance(log, bool) else quantity in log
        axis.set(title=quantity, xlabel="t", yscale="log" if scaled else "linear")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4)
    return figure


def over_parameter(
    x: np.ndarray, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], *, xlabel: str, ylabel: str
) -> Figure:
    """Values over a parameter on a logarithmic scale, with two standard errors, and a line at zero. Methods that do not
    depend on the parameter are bands."""
    figure, (axis,) = panels(1, width=4.6, height=3.2)
    axis.axhline(0.0, color="k", lw=0.8)
    for j, (name, (value, stderr)) in enumerate(curves.items()):
        if np.ptp(value) == 0.0 and len(x) > 1:
            axis.plot(x, value, color=f"C{j}", lw=1.2, label=name)
            axis.fill_between(x, value - 2 * stderr, value + 2 * stderr, color=f"C{j}", alpha=0.15)
        else:
            axis.errorbar(x, value, 2 * stderr, marker="o", ms=3, lw=1.3, capsize=2, color=f"C{j}", label=name)
    axis.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    axis.legend()
    return figure


def dots(rows: Mapping[str, Mapping[str, tuple[float, float]]], *, label: str) -> Figure:
    """A panel for each name; in it a point for each method, as (value, standard error), two errors on each side."""
    figure = Figure(
        figsize=(6.4, 0.6 + sum(0.5 + 0.28 * len(methods) for methods in rows.values())), layout="constrained"
    )
    sizes = [len(methods) for methods in rows.values()]
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=sizes)[:, 0]
    for axis, (name, methods) in zip(axes, rows.items(), strict=True):
        value, stderr = (np.array(column, float) for column in zip(*methods.values(), strict=True))
        places = np.arange(len(methods))[::-1]
        for i, place in enumerate(places):
            axis.errorbar(value[i], place, xerr=2 * stderr[i], fmt="o", color=f"C{i}", capsize=3)
        axis.set_yticks(places, list(methods))
        axis.set_ylim(-0.6, len(methods) - 0.4)
        axis.grid(alpha=0.3)
        axis.set_title(name)
    axes[-1].set_xlabel(label)
    return figure


def image_grids(grids: Mapping[str, np.ndarray]) -> Figure:
    """Images (n, channels, height, width) with values in [0, 1], a square of them for each name."""
    figure, axes = panels(len(grids), width=3.0, height=3.2)
    for axis, (name, images) in zip(axes, grids.items(), strict=True):
        side = int(np.sqrt(len(images)))
        framed = np.pad(images[: side**2], ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=0.5)
        _, channels, height, width = framed.shape
        canvas = framed.reshape(side, side, channels, height, width).transpose(0, 3, 1, 4, 2)
        canvas = canvas.reshape(side * height, side * width, channels)[:-1, :-1]
        axis.imshow(
            canvas[..., 0] if channels == 1 else canvas, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest"
        )
        axis.set_title(name.replace(": ", "\n"))
        axis.axis("off")
    return figure


def loss_curve(history: np.ndarray) -> Figure:
    """The loss over steps; `history` is (rounds, 2)."""
    figure, axes = panels(1, width=4.2, height=3.0)
    _draw_loss(axes[0], history)
    return figure


def _draw_loss(axis: Axes, history: np.ndarray) -> None:
    """Scaled so that the first, large values do not hide the rest."""
    axis.plot(*history.T, lw=0.8, color="0.3")
    low, high = np.quantile(history[:, 1], [0.0, 0.95])
    if high > low:
        axis.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))
    axis.set(title="loss", xlabel="step")
