"""Plots as plain values for plotly's script. The page sets the colours of text and axes, for light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from gramscope.report.palette import colour, dash, faint, marker
from gramscope.report.panel import HeatMap, Line, LinePlot, Numbers, Plot, rounded

#: a line with more points than this has no markers
MARKS = 40
#: matplotlib's RdBu_r, which plotly lacks
TWO_SIDED = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
)  # fmt: skip


def draw(plot: Plot) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A plot as plotly's traces and layout."""
    return _lines(plot) if isinstance(plot, LinePlot) else _map(plot)


def label(text: str) -> str:
    """Text escaped for plotly, which reads ``<b>`` as markup."""
    return html.escape(text, quote=False)


# -- lines ----------------------------------------------------------------------------------------------------------
def _lines(plot: LinePlot) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for line in plot.lines:
        traces += _line(plot, line) if plot.joined else [_points(plot, line)]
    x_axis: dict[str, Any] = {"title": {"text": label(plot.x_label)}, "automargin": True}
    if plot.ticks:
        ticks = {"tickvals": list(range(len(plot.ticks))), "ticktext": [label(name) for name in plot.ticks]}
        x_axis |= {"tickmode": "array", **ticks, "range": [-0.4, len(plot.ticks) - 0.6]}
    y_axis: dict[str, Any] = {"title": {"text": label(plot.y_label)}, "automargin": True}
    if plot.log_y:
        marks = log_ticks(*log_ends(plot))
        y_axis |= {"type": "log", "tickvals": marks, "ticktext": [f"{mark:.3g}" for mark in marks]}
    if plot.y_range is not None:
        y_axis["range"] = [math.log10(end) if plot.log_y else end for end in plot.y_range]
    return traces, {"xaxis": x_axis, "yaxis": y_axis, "showlegend": False, "hovermode": "closest", "height": 320}


def log_ends(plot: LinePlot) -> tuple[float, float]:
    """Range of a logarithmic axis."""
    bands = [band for line in plot.lines for band in (line.y, line.low or (), line.high or ())]
    values = [value for band in bands for value in band if value is not None and value > 0]
    return plot.y_range or ((min(values), max(values)) if values else (1.0, 10.0))


def _line(plot: LinePlot, line: Line) -> list[dict[str, Any]]:
    """The band first, so that the line is drawn over it."""
    traces = []
    if line.low is not None and line.high is not None:
        around = [*line.x, *reversed(line.x)]
        low = _positive(line.low, line.y) if plot.log_y else line.low
        band = {"x": rounded(around), "y": rounded([*line.high, *reversed(low)]), "fill": "toself", "mode": "lines"}
        flat = {"fillcolor": faint(colour(line.index), 0.18), "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append({"type": "scatter", "legendgroup": line.name, **band, **flat})
    look = {
        "mode": "lines+markers" if len(line.x) <= MARKS else "lines",
        "line": {"color": colour(line.index), "dash": dash(line.index), "width": 2},
        "marker": {"symbol": marker(line.index), "size": 6},
    }
    return [*traces, {**_values(plot, line), **look}]


def _x(x: Sequence[float]) -> dict[str, Any]:
    """Positions of points; equal steps of 1 are given by the first."""
    if len(x) > 1 and list(x) == [x[0] + i for i in range(len(x))]:
        return {"x0": x[0], "dx": 1}
    return {"x": rounded(x)}


def _points(plot: LinePlot, line: Line) -> dict[str, Any]:
    look = {"mode": "markers", "marker": {"symbol": marker(line.index), "size": 11, "color": colour(line.index)}}
    trace = {**_values(plot, line), **look}
    if line.high is not None:
        trace["error_y"] = {"type": "data", "array": trace["customdata"], "thickness": 2, "width": 8}
    return trace


def _values(plot: LinePlot, line: Line) -> dict[str, Any]:
    """The points of a line and the text shown on hovering."""
    where = "%{text}" if plot.ticks else f"{label(plot.x_label)} %{{x:.4~g}}"
    spread = ""
    trace = {"type": "scatter", "name": label(line.name), "legendgroup": line.name, **_x(line.x), "y": rounded(line.y)}
    if line.high is not None:
        spread = " ± %{customdata:.2~g}"
        pairs = zip(line.high, line.y, strict=True)
        trace["customdata"] = rounded(None if high is None or y is None else high - y for high, y in pairs)
    if plot.ticks:
        trace["text"] = [label(plot.ticks[int(x)]) for x in line.x]
    return trace | {"hovertemplate": f"{label(line.name)}<br>{where}<br>%{{y:.4~g}}{spread}<extra></extra>"}


def _positive(low: Numbers, middle: Numbers) -> list[float | None]:
    """The lower end of a band on a logarithmic axis: a hundredth of the line where it is not positive."""
    pairs = zip(low, middle, strict=True)
    return [end if end is None or m is None or end > 0 else m / 100 for end, m in pairs]


# -- maps -----------------------------------------------------------------------------------------------------------
def _map(plot: HeatMap) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows, columns = len(plot.values), len(plot.values[0])
    z = [rounded(row) for row in plot.values]
    shown = [[_log(value) for value in row] for row in z] if plot.log else z
    low, high = (math.log10(plot.low), math.log10(plot.high)) if plot.log else (plot.low, plot.high)
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": shown,
        "zmin": low,
        "zmax": high,
        "colorscale": [[i / 10, shade] for i, shade in enumerate(TWO_SIDED)] if plot.diverging else "Cividis",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "ticks": "outside", "ticklen": 3, **_bar_ticks(plot)},
        "xgap": 0 if plot.picture else 1,
        "ygap": 0 if plot.picture else 1,
        "hoverongaps": False,
    }
    if plot.picture:
        trace["hovertemplate"] = "row %{y}, column %{x}<br>%{z:.4~g}<extra></extra>"
        square = {"visible": False, "constrain": "domain"}
        x_axis = {**square, "range": [-0.5, columns - 0.5]}
        y_axis = {**square, "range": [rows - 0.5, -0.5], "scaleanchor": "x"}
        return [trace], {"xaxis": x_axis, "yaxis": y_axis, "height": 300}
    trace |= {"hovertext": _cells(plot), "hovertemplate": "%{hovertext}<extra></extra>"}
    chosen = tick_positions(columns)
    names = [label(plot.x_ticks[i]) for i in chosen]
    x_axis = {"tickvals": chosen, "ticktext": names, "title": {"text": label(plot.x_label)}}
    y_axis = {"tickvals": [*range(rows)], "ticktext": [*map(label, plot.y_ticks)], "autorange": "reversed"}
    hidden = {"showgrid": False, "zeroline": False, "automargin": True}
    return [trace], {"xaxis": x_axis | hidden, "yaxis": y_axis | hidden, "height": max(190, 110 + 34 * rows)}


def tick_positions(count: int, most: int = 8) -> list[int]:
    """Evenly spaced positions out of ``count``, at most ``most``."""
    return list(range(0, count, max(1, math.ceil(count / most))))


def _bar_ticks(plot: HeatMap) -> dict[str, Any]:
    """Ticks of a logarithmic colour bar, at round numbers."""
    if not plot.log:
        return {}
    marks = log_ticks(plot.low, plot.high)
    return {"tickvals": [math.log10(mark) for mark in marks], "ticktext": [f"{mark:.3g}" for mark in marks]}


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range of positive numbers: powers of ten, or with 2 and 5 between where these are few.

    >>> log_ticks(3, 150)
    [5, 10, 20, 50, 100]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [factor * 10**power for power in powers for factor in (1, 2, 5)]
    inside = [mark for mark in marks if low <= mark <= high]
    tens = [mark for mark in inside if math.isclose(math.log10(mark) % 1, 0, abs_tol=1e-9)]
    return tens[:: max(1, len(tens) // 6)] if len(tens) >= 3 else inside or [low, high]


def _log(value: float | None) -> float | None:
    return math.log10(value) if value is not None and value > 0 else None


def _cells(plot: HeatMap) -> list[list[str]]:
    """The text of each cell on hovering."""
    found = []
    for i, (row, name) in enumerate(zip(plot.values, plot.y_ticks, strict=True)):
        line = []
        for j, (value, moment) in enumerate(zip(row, plot.x_ticks, strict=True)):
            spread = None if plot.spread is None else plot.spread[i][j]
            number = "" if value is None else f"{value:.4g}" + ("" if spread is None else f" ± {spread:.2g}")
            line.append(f"{label(name)}<br>{label(plot.x_label)} {label(moment)}<br>{number}")
        found.append(line)
    return found
