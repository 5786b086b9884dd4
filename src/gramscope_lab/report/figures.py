"""Panels as plotly's figures, plain values of data, layout and frames. The page sets colours of text and the geometry.

A panel is one figure: its views are entries of plotly's menu, its moments positions of plotly's slider, and the facets of a
view are subplots, which the page arranges in as many columns as fit.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from gramscope_lab.palette import colour, dash, faint, marker
from gramscope_lab.report.read import PARTS, Runs, Setting, evaluated_parts, spread_sentence
from gramscope_lab.spread import Spread

T = TypeVar("T")
#: a trace as plotly knows it; ``frames`` has what changes at each position of the slider
Trace: TypeAlias = dict[str, Any]
#: values of a map, rows from top to bottom
Grid: TypeAlias = Sequence[Sequence[Spread | None]]

#: most points of a drawn line; a line with more than MARKS has no markers
POINTS, MARKS = 300, 40
_STILL = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
_PLAY = {
    "mode": "immediate",
    "frame": {"duration": 350, "redraw": True},
    "transition": {"duration": 0},
    "fromcurrent": True,
}


@dataclass(frozen=True)
class View:
    """What an entry of a panel's menu shows.

    Args:
        label: its name in the menu.
        facets: the traces of each subplot.
        titles: of the subplots.
        x, y: attributes of all horizontal and vertical axes.
        colours: attributes of the colour scale that the maps share.
    """

    label: str
    facets: Sequence[Sequence[Trace]]
    titles: Sequence[str]
    x: Mapping[str, Any] = field(default_factory=dict)
    y: Mapping[str, Any] = field(default_factory=dict)
    colours: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        key: name for links.
        section: heading it stands under.
        title: its own heading.
        sentence: what it shows.
        views: what can be shown, the first one at first.
        moments: names of the slider's positions, if it has one.
        width, height, columns: least pixels of a subplot's width, its height, and most subplots side by side.
        terms: name, summary and formula of what is drawn.
        note: what was left out.
    """

    key: str
    section: str
    title: str
    sentence: str
    views: Sequence[View]
    moments: Sequence[str] = ()
    width: int = 290
    height: int = 210
    columns: int = 99
    terms: Sequence[tuple[str, str, str]] = ()
    note: str = ""


# -- a panel as one figure ------------------------------------------------------------------------------------------
def figure(panel: Panel) -> dict[str, Any]:
    """Plotly's ``data``, ``layout`` and ``frames`` of a panel."""
    placed = [(v, f, trace) for v, view in enumerate(panel.views) for f, own in enumerate(view.facets) for trace in own]
    named: set[tuple[int, str]] = set()
    data = []
    for view, facet, trace in placed:
        number = "" if facet == 0 else facet + 1
        drawn = {key: value for key, value in trace.items() if key != "frames"}
        in_legend = bool(trace.get("showlegend")) and (view, trace["name"]) not in named
        named |= {(view, trace["name"])} if in_legend else set()
        axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        data.append({**drawn, **axes, "visible": view == 0, "showlegend": in_legend})
    moving = [i for i, (_, _, trace) in enumerate(placed) if "frames" in trace]
    frames = []
    for m, moment in enumerate(panel.moments):
        changed = [{"type": placed[i][2]["type"], **placed[i][2]["frames"][m]} for i in moving]
        frames.append({"name": moment, "traces": moving, "data": changed})
    count = max(len(view.facets) for view in panel.views)
    legend = [] if any("showlegend" not in trace for *_, trace in placed) else sorted({name for _, name in named})
    size = {"facets": count, "width": panel.width, "height": panel.height, "most": panel.columns}
    layout: dict[str, Any] = {
        "meta": {**size, "legend": legend},
        "showlegend": len(legend) > 1,
        "updatemenus": [*_menus(panel, [view for view, *_ in placed], count)],
        "sliders": [_slider(panel.moments)] if len(panel.moments) > 1 else [],
    }
    for path, value in _patch(panel.views[0], count).items():
        *outer, last = path.split(".")
        place = layout
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    return {"data": data, "layout": layout, "frames": frames if len(frames) > 1 else []}


def _patch(view: View, count: int) -> dict[str, Any]:
    """What a view changes in the layout."""
    numbers = ["", *range(2, count + 1)]
    found = {f"xaxis{n}.{key}": value for n in numbers for key, value in view.x.items()}
    for n in numbers:
        own = {"matches": "y", "scaleanchor": f"x{n}"}  # the axis that another one follows
        kept = {key: own.get(key, value) for key, value in view.y.items() if n or key != "matches"}
        found |= {f"yaxis{n}.{key}": value for key, value in kept.items()}
    found |= {f"coloraxis.{key}": value for key, value in view.colours.items()}
    place = {"x": 0.5, "y": 1, "xanchor": "center", "yanchor": "bottom", "showarrow": False}
    titles = [(n, title) for n, title in zip(numbers, view.titles, strict=False) if title]
    texts = [(n, label(title).replace("\n", "<br>")) for n, title in titles]
    axes = [{"xref": f"x{n} domain", "yref": f"y{n} domain", "text": f"<b>{text}</b>"} for n, text in texts]
    return found | {"annotations": [{**one, **place} for one in axes]}


def _menus(panel: Panel, owners: Sequence[int], count: int) -> Iterator[dict[str, Any]]:
    """The choice of a view above the plots, and a button that plays through training beside the slider."""
    place = {"y": 1, "yanchor": "bottom", "pad": {"b": 26}, "showactive": True}
    if len(panel.views) > 1:
        buttons = []
        for v, view in enumerate(panel.views):
            change = [{"visible": [owner == v for owner in owners]}, _patch(view, count)]
            buttons.append({"label": label(view.label), "method": "update", "args": change})
        yield {"type": "dropdown", "x": 0, "xanchor": "left", "buttons": buttons, **place}
    if len(panel.moments) > 1:
        play = {"label": "▶ play", "method": "animate", "args": [None, _PLAY]}
        beside = {"x": 0, "xanchor": "left", "y": 0, "yanchor": "top", "pad": {"t": 56}, "showactive": False}
        yield {"type": "buttons", "buttons": [play], **beside}


def _slider(moments: Sequence[str]) -> dict[str, Any]:
    steps = [{"label": moment, "method": "animate", "args": [[moment], _STILL]} for moment in moments]
    value = {"visible": True, "xanchor": "left", "font": {"size": 13}}
    place = {"x": 0, "len": 1, "y": 0, "yanchor": "top", "pad": {"t": 44, "l": 86}, "ticklen": 0}
    return {"active": len(moments) - 1, "steps": steps, "currentvalue": value, **place}


# -- lines ----------------------------------------------------------------------------------------------------------
def line(name: str, index: int, x: Sequence[Any], values: Sequence[Spread], at: str) -> list[Trace]:
    """A line with a band over seeds, the band first; ``at`` says on hovering where a point is."""
    kept = thin(range(len(x)), POINTS)
    x, values = [x[i] for i in kept], [values[i] for i in kept]
    look = {
        "mode": "lines+markers" if len(x) <= MARKS else "lines",
        "line": {"color": colour(index), "dash": dash(index), "width": 2},
        "marker": {"symbol": marker(index), "size": 6},
        "showlegend": True,
    }
    traces = []
    if any(value.deviation for value in values):
        ends = [*(value.largest for value in values), *(value.least for value in reversed(values))]
        flat = {"fill": "toself", "fillcolor": faint(colour(index), 0.18), "line": {"width": 0}, "hoverinfo": "skip"}
        around = {"type": "scatter", "mode": "lines", "x": [*x, *reversed(x)], "y": rounded(ends), "showlegend": False}
        traces.append({"name": label(name), "legendgroup": name, **around, **flat})
    return [*traces, {**_points(name, x, values, at), **look}]


def null_line(name: str, index: int, x: Sequence[Any], values: Sequence[Spread], at: str) -> Trace:
    """The values to expect without learning, dotted in the colour of what is read against them."""
    drawn = line(name, index, x, values, f"null, {at}")[-1]
    return {
        **drawn,
        "mode": "lines",
        "line": {"color": colour(index), "dash": "dot", "width": 1.5},
        "showlegend": False,
    }


def _points(name: str, x: Sequence[Any], values: Sequence[Spread], at: str) -> Trace:
    trace: Trace = {"type": "scatter", "name": label(name), "legendgroup": name}
    trace |= {"x": list(x), "y": rounded(value.mean for value in values)}
    ends = ""
    if any(value.deviation for value in values):
        trace["customdata"] = [rounded((value.least, value.largest)) for value in values]
        ends = " (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})"
    return trace | {"hovertemplate": f"{label(name)}<br>{at}<br>%{{y:.4~g}}{ends}<extra></extra>"}


# -- maps -----------------------------------------------------------------------------------------------------------
def heat_map(
    grids: Sequence[Grid], x: Sequence[str], y: Sequence[str], at: str, *, nulls: Sequence[Grid] = (), log: bool = False
) -> Trace:
    """A map, or one for each moment of a slider, of which the last is shown at first.

    Args:
        grids: the values at each moment.
        x, y: labels of columns and rows, each different.
        at: what is shown on hovering above the value.
        nulls: values to expect without learning, shown on hovering.
        log: logarithmic colours; values must be positive.
    """
    told = log or any(cell and cell.deviation for grid in grids for row in grid for cell in row) or bool(nulls)
    frames = []
    for moment, grid in enumerate(grids):
        means = ([None if cell is None else cell.mean for cell in row] for row in grid)
        frame: Trace = {"z": [rounded(math.log10(m) if log and m else m for m in row) for row in means]}
        if told:
            null = nulls[moment] if nulls else [[None] * len(x)] * len(y)
            frame["text"] = [[*map(_cell_text, *rows)] for rows in zip(grid, null, strict=True)]
        frames.append(frame)
    return {
        "type": "heatmap", "coloraxis": "coloraxis", "xgap": 1, "ygap": 1, "hoverongaps": False,
        "x": [*map(label, x)], "y": [*map(label, y)], **frames[-1],
        "hovertemplate": f"{at}<br>{'%{text}' if told else '%{z:.4~g}'}<extra></extra>",
        **({"frames": frames} if len(frames) > 1 else {}),
    }  # fmt: skip


def _cell_text(cell: Spread | None, null: Spread | None) -> str:
    if cell is None:
        return ""
    ends = f" ({cell.least:.4g} to {cell.largest:.4g})" if cell.deviation else ""
    return f"{cell.mean:.4g}{ends}" + ("" if null is None else f", null {null.mean:.4g}")


def colour_scale(values: Sequence[float], *, log: bool) -> dict[str, Any]:
    """A colour scale for all maps of a view.

    Values of order one have ends at tenths, so that noise does not look like structure; values up to 0.005 beyond an end
    have its colour.
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    scale: dict[str, Any] = {"colorscale": "Cividis", "colorbar": {"thickness": 10, "outlinewidth": 0, "ticklen": 3}}
    if not log and low >= -1.005 and high <= 1.005:
        low, high = math.floor(low * 10 + 0.05) / 10, math.ceil(high * 10 - 0.05) / 10
        low = min(low, round(high - 0.1, 1))
    if high <= low:
        low, high = (low / 2, high * 2) if log else (low - max(0.5, abs(low) / 2), high + max(0.5, abs(high) / 2))
    if log:
        scale["colorbar"] |= {"tickprefix": "10<sup>", "ticksuffix": "</sup>"}
        low, high = math.log10(low), math.log10(high)
    return {**scale, "cmin": low, "cmax": high}


# -- both -----------------------------------------------------------------------------------------------------------
def label(text: str) -> str:
    """Text escaped for plotly, which reads ``<b>`` as markup."""
    return html.escape(text, quote=False)


def thin(items: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` items, evenly spread, the first and the last among them.

    >>> thin(range(11), 3)
    [0, 5, 10]
    """
    if len(items) <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Values with five significant digits, more than a screen shows, to keep the page small."""
    return [None if value is None else float(f"{value:.5g}") for value in values]


# -- accuracy and loss over training --------------------------------------------------------------------------------
_TERMS = {
    "accuracy": ("share of samples (or labelled tokens) classified correctly", "(1/n) Σ_i [argmax f(x_i) = y_i]"),
    "loss": ("mean loss of a sample (or labelled token)", "(1/n) Σ_i L_i"),
}


def training_panels(runs: Runs) -> list[Panel]:
    """Accuracy and loss, where they were recorded."""
    return [panel for what in _TERMS if (panel := _over_training(runs, what)) is not None]


def _over_training(runs: Runs, what: str) -> Panel | None:
    parts = evaluated_parts(runs.all, what)
    curves = [s.curve(f"{part}_{what}", None, runs.clock) for s in runs.settings for part in parts]
    positive = all(value.least > 1e-300 for curve in curves for value in curve.values)
    scales = ("linear", "log") if what == "loss" and positive else ("linear",)
    views = []
    for clock, scale in [*((runs.clock, scale) for scale in scales), ("seconds", "linear")]:
        facets = [[t for s in runs.settings for t in _lines(s, f"{part}_{what}", clock)] for part in parts]
        label = f"over {clock}, logarithmic" if scale == "log" else f"over {clock}"
        titles = [PARTS.get(part, part) for part in parts]
        if any(facets):
            views.append(View(label, facets, titles, {"title.text": clock}, {"matches": True, "type": scale}))
    if not views:
        return None
    sentence = f"For each setting; lines are means over seeds. {spread_sentence(runs)}"
    return Panel(what, "Training", what.capitalize(), sentence, views, terms=[(what, *_TERMS[what])])


def _lines(setting: Setting, key: str, clock: str) -> list[Trace]:
    curve = setting.curve(key, None, clock)
    at = f"{clock} %{{x:.4~g}}"
    return line(setting.name, setting.index, curve.times, curve.values, at) if curve else []
