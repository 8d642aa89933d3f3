"""One file that shows what is known of a run: HTML with its figures inside, nothing loaded from elsewhere."""

import base64
import html
import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ..base import plot
from ..use.findings import Report

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid; padding: .6rem 1rem; background: #f6f6f6; }
.consistent { border-color: #2a7f3f; } .inconsistent { border-color: #b3261e; } .cannot-tell { border-color: #b58900; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } td.remark { text-align: left; white-space: normal; }
figure { margin: 1rem 0; } img { max-width: 100%; } figcaption { color: #555; font-size: .85rem; }
"""
_READING = (
    "Score error: the share of E‖s‖²_Q that the error has, E‖s_θ − s‖²_Q, as far as test fields see it, with its 95 % "
    "interval; it is a lower bound of the whole. Velocity error: the same of f − ½Qs in the metric Q⁻¹, which is the "
    "share of the entropy production. Stein: how often chance alone gives such residuals of E[s] = 0, of the full "
    "matrix E[s(y−m)ᵀ] = −I and of waves. Cramér–Rao: the smallest eigenvalue of C^½E[ssᵀ]C^½, one or more. "
    "Rates have the score's own error in theirs, and in brackets that of sampling only. The forms of dS/dt are E[∇·v] "
    "and −E[v·s]. Outside: states of the flow where simulated paths never are."
)


def page(title: str, report: Report, rows: Sequence[Sequence[str]], figures: Mapping[str, Figure]) -> str:
    """The file: a verdict, the table of diagnostics, its curves, all that was measured, and more figures."""
    drawn = {"What the diagnostics found, over time": curves(report), **figures}
    heads, body = report.table()
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style></head>',
        "<body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="verdict {report.verdict.replace(" ", "-")}">{_text(report.sentence)}</p>',
        "<h2>Is the score any good?</h2>",
        _table(heads, body),
        f"<p>{_text(_READING)}</p>",
        *(_figure(name, figure) for name, figure in drawn.items()),
        "<h2>What was measured</h2>",
        _table(("quantity", "value", "± / floor", "remark"), rows, remark=True),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def curves(report: Report) -> Figure:
    """Errors with their intervals; what the flow does; rates with their errors."""
    times = np.array([look.t for look in report.looks])
    rates = [look.rates for look in report.looks if look.rates is not None]
    count = 1 + (report.flow is not None) + bool(rates)
    figure, axes = plot.panels(count, width=4.0, height=3.2)
    left = iter(axes)

    axis = next(left)
    for name, sizes in {
        "score": [look.error for look in report.looks],
        "velocity": [rate.velocity for rate in rates],
    }.items():
        if not sizes:
            continue
        value, low, high = (np.array([getattr(s, part) for s in sizes], float) for part in ("value", "low", "high"))
        shown = np.isfinite(high)
        middle = np.clip(value, np.maximum(low, 1e-6), np.where(shown, np.maximum(high, 1e-6), 1.0))
        reach = np.stack([middle - np.maximum(low, 1e-6), np.where(shown, high, middle) - middle])
        axis.errorbar(times, middle, np.maximum(reach, 0.0), fmt="o-", ms=3, capsize=2, lw=1.0, label=name)
    axis.axhline(report.tolerance, color="0.5", ls="--", lw=1.0, label="tolerance")
    axis.set(yscale="log", ylim=(1e-5, None), xlabel="t", title="relative squared error")
    axis.legend(fontsize=7)
    if report.flow is not None:
        axis = next(left)
        for name, found in {
            "mean, deviations": [c.mean for c in report.flow],
            "variance, relative": [c.variance for c in report.flow],
        }.items():
            reach = [2 * e.stderr for e in found]
            axis.errorbar(times, [e.value for e in found], reach, fmt="o-", ms=3, lw=1.0, label=name)
        axis.axhline(0.0, color="k", lw=0.8)
        axis.set(xlabel="t", title="flow − paths, ± 2 errors")
        axis.legend(fontsize=7)
    if rates:
        axis = next(left)
        complete = all(look.complete for look in report.looks)
        for name, found in {
            "dS/dt": [rate.system for rate in rates],
            "production": [rate.total for rate in rates] if complete else [],
        }.items():
            if found:
                reach = [rate.error for rate in found]
                axis.errorbar(times, [rate.value for rate in found], reach, fmt="o-", ms=3, lw=1.0, label=name)
        axis.set(xlabel="t", title="rates of entropy, full errors")
        axis.legend(fontsize=7)
    return figure


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, remark: bool = False) -> str:
    last = ' class="remark"' if remark else ""
    lines = ["<tr>" + "".join(f"<th>{_text(head)}</th>" for head in heads) + "</tr>"]
    for row in rows:
        cells = [f"<td>{_text(cell)}</td>" for cell in row[:-1]] + [f"<td{last}>{_text(row[-1])}</td>"]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return '<div class="wide"><table>' + "\n".join(lines) + "</table></div>"


def _figure(name: str, figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><img alt="{_text(name)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(name)}</figcaption></figure>"
    )


def _text(value: str) -> str:
    return html.escape(str(value))
