"""Plots as plain values for plotly's script. The page sets the colours of text and axes, for light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from gramscope_lab.report.palette import colour, dash, faint, marker
from gramscope_lab.report.panel import HeatMap, Line, LinePlot, Numbers, Plot, rounded

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
        chosen = tick_positions(len(plot.ticks), 20)
        ticks = {"tickvals": chosen, "ticktext": [label(plot.ticks[i]) for i in chosen]}
        x_axis |= {"tickmode": "array", **ticks, "range": [-0.4, len(plot.ticks) - 0.6]}
    y_axis: dict[str, Any] = {"title": {"text": label(plot.y_label), "standoff": 12}, "automargin": True}
    if plot.log_y:
        marks = log_ticks(*log_ends(plot))
        y_axis |= {"type": "log", "tickvals": marks, "ticktext": [f"{mark:.3g}" for mark in marks]}
    if plot.y_range is not None:
        y_axis["range"] = [math.log10(end) if plot.log_y else end for end in plot.y_range]
    legend = {"orientation": "h", "y": -0.28, "font": {"size": 11}}
    height = 320 + plot.legend * 14 * len(plot.lines)
    layout = {"xaxis": x_axis, "yaxis": y_axis, "hovermode": "closest", "height": height, "showlegend": plot.legend}
    return traces, layout | ({"legend": legend} if plot.legend else {})


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
        traces.append({"type": "scatter", "legendgroup": line.name, "showlegend": False, **band, **flat})
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
    if line.low is not None and line.high is not None:
        ends = [(h or 0.0, y or 0.0, low or 0.0) for h, y, low in zip(line.high, line.y, line.low, strict=True)]
        above, below = rounded(h - y for h, y, _ in ends), rounded(y - low for _, y, low in ends)
        error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 2, "width": 8}
        trace["error_y"] = error
    return trace


def _values(plot: LinePlot, line: Line) -> dict[str, Any]:
    """The points of a line and the text shown on hovering."""
    where = "%{text}" if plot.ticks else f"{label(plot.x_label)} %{{x:.4~g}}"
    spread = ""
    trace = {"type": "scatter", "name": label(line.name), "legendgroup": line.name, **_x(line.x), "y": rounded(line.y)}
    if line.low is not None and line.high is not None:
        spread = " (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})"
        trace["customdata"] = [list(ends) for ends in zip(rounded(line.low), rounded(line.high), strict=True)]
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
    trace |= {"meta": _hover_parts(plot), "hovertemplate": "%{hovertext}<extra></extra>"}
    chosen = tick_positions(columns)
    names = [label(plot.x_ticks[i]) for i in chosen]
    x_axis = {"tickvals": chosen, "ticktext": names, "title": {"text": label(plot.x_label)}}
    named = tick_positions(rows, 80)
    y_axis = {"tickvals": named, "ticktext": [label(plot.y_ticks[i]) for i in named], "autorange": "reversed"}
    row, font = (30, 12) if rows <= 12 else (21, 11) if rows <= 30 else (max(4, min(15, 1200 // rows)), 10)
    hidden = {"showgrid": False, "zeroline": False, "automargin": True}
    height = max(200, 110 + row * rows)
    return [trace], {
        "xaxis": x_axis | hidden,
        "yaxis": y_axis | hidden | {"tickfont": {"size": font}},
        "height": height,
    }


def tick_positions(count: int, most: int = 12) -> list[int]:
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


def _hover_parts(plot: HeatMap) -> dict[str, Any]:
    """The parts from which the page's script puts together the text of each cell on hovering."""
    low, high = plot.spread or (None, None)
    return {
        "x": [f"{label(plot.x_label)} {label(name)}" for name in plot.x_ticks],
        "y": [label(name) for name in plot.y_ticks],
        "log": plot.log,
        "low": None if low is None else [rounded(row) for row in low],
        "high": None if high is None else [rounded(row) for row in high],
    }
