"""Panels as PNG and PDF, drawn with matplotlib's objects: without pyplot no global state changes."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope_lab.report.palette import (
    DIVERGING,
    MATPLOTLIB_DASHES,
    MATPLOTLIB_MARKERS,
    SEQUENTIAL,
    colour,
    dash,
    marker,
)
from gramscope_lab.report.panel import HeatMap, Line, LinePlot, Panel, Plot, View
from gramscope_lab.report.plotly_figures import log_ends, log_ticks, tick_positions
from gramscope_lab.runs.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}
DPI = 150
#: facets side by side
COLUMNS = 3


def save_panel(panel: Panel, folder: Path, prefix: str) -> list[Path]:
    """Write all views of a panel as one figure, PNG and PDF; of a slider the last moment is drawn."""
    import matplotlib as mpl

    if not panel.views:
        return []
    paths = [folder / f"{prefix}{panel.key}.{ending}" for ending in ("png", "pdf")]
    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a user's names, in any script
        figure = draw_panel(panel)
        for path in paths:
            write_figure(path, figure)
            figure.set_layout_engine("none")  # keep the layout for the next format
    return paths


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure in the format of the path's ending; it replaces what is there, also a link."""
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, format=path.suffix[1:])
    write_file(path, content.getvalue())


def draw_panel(panel: Panel) -> Figure:
    """All facets of all views in a grid; each view starts a new row unless every view has one facet."""
    from matplotlib.figure import Figure

    rows = _rows(panel)
    heights = [max(_height(plot) for _, plot in row) for row in rows]
    columns = max(map(len, rows))
    figure = Figure(figsize=(max(4.2, 3.1 * columns), sum(heights) + 0.7), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for row, places in zip(rows, grid, strict=True):
        for axes in places[len(row) :]:
            axes.set_visible(False)
        for (title, plot), axes in zip(row, places, strict=False):
            axes.set_title(_plain(title))
            if isinstance(plot, LinePlot):
                _lines(axes, plot)
            else:
                image = _map(axes, plot)
                if plot.picture or axes is places[len(row) - 1]:  # a row of maps shares one colour scale
                    _colour_bar(figure, image, axes if plot.picture else list(places[: len(row)]), plot)
    figure.suptitle(_plain(panel.title), fontsize=10)
    _legend(figure, [plot for row in rows for _, plot in row])
    return figure


def _rows(panel: Panel) -> list[list[tuple[str, Plot]]]:
    def titled(view: View) -> list[tuple[str, Plot]]:
        label = ", ".join(part for part in (view.label, *view.moments[-1:]) if part)
        return [("\n".join(part for part in (label, f.title) if part), f.frames[-1]) for f in view.facets]

    cells = [titled(view) for view in panel.views]
    if all(len(view) == 1 for view in cells):
        cells = [[cell for view in cells for cell in view]]
    return [view[i : i + COLUMNS] for view in cells for i in range(0, len(view), COLUMNS)]


def _height(plot: LinePlot | HeatMap) -> float:
    if isinstance(plot, LinePlot):
        return 2.4 + 0.11 * plot.legend * len(plot.lines)
    if plot.picture:
        return 2.4
    return max(1.4, min(9.0, 0.8 + 0.22 * len(plot.values)))


def _legend(figure: Figure, plots: Sequence[Plot]) -> None:
    from matplotlib.lines import Line2D

    shared = [plot for plot in plots if isinstance(plot, LinePlot) and plot.joined]
    lines = {line.name: line for plot in shared for line in plot.lines}
    if len(lines) > 1:
        handles = [Line2D([], [], label=_plain(name), **_style(line)) for name, line in lines.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))


def _style(line: Line) -> dict[str, Any]:
    kind = MATPLOTLIB_DASHES[dash(line.index)]
    shape = MATPLOTLIB_MARKERS[marker(line.index)] if len(line.x) <= 40 else ""
    return {"color": colour(line.index), "linestyle": kind, "marker": shape, "markersize": 3}


def _lines(axes: Axes, plot: LinePlot) -> None:
    if plot.log_y:
        marks = log_ticks(*log_ends(plot))
        axes.set_yscale("log")
        axes.set_yticks(marks, [f"{mark:.3g}" for mark in marks])
        axes.minorticks_off()
    for line in plot.lines:
        y = [math.nan if value is None else value for value in line.y]
        if plot.joined:
            axes.plot(line.x, y, **_style(line))
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour(line.index), alpha=0.18, linewidth=0)  # type: ignore[arg-type]
        else:
            reach = None
            if line.low is not None and line.high is not None:
                above = [high - m for high, m in zip(line.high, y, strict=True) if high is not None]
                reach = [[m - low for low, m in zip(line.low, y, strict=True) if low is not None], above]
            shape = MATPLOTLIB_MARKERS[marker(line.index)]
            axes.errorbar(line.x, y, reach, color=colour(line.index), marker=shape, linestyle="", capsize=4)
    if plot.ticks:
        chosen = tick_positions(len(plot.ticks), 20)
        names = [_plain(plot.ticks[i]) for i in chosen]
        long = sum(map(len, names)) > 40
        axes.set_xticks(chosen, names, rotation=30 * long, ha="right" if long else "center")
        axes.set_xlim(-0.4, len(plot.ticks) - 0.6)
    if plot.y_range is not None:
        axes.set_ylim(*plot.y_range)
    axes.set_xlabel(_plain(plot.x_label))
    axes.set_ylabel(_plain(plot.y_label))


def _map(axes: Axes, plot: HeatMap) -> AxesImage:
    from matplotlib.colors import LogNorm, Normalize

    values = [[math.nan if value is None else value for value in row] for row in plot.values]
    norm = LogNorm(plot.low, plot.high) if plot.log else Normalize(plot.low, plot.high)
    shades = DIVERGING if plot.diverging else SEQUENTIAL
    image = axes.imshow(values, cmap=shades, norm=norm, interpolation="nearest")
    axes.set_aspect("equal" if plot.picture else "auto")
    axes.grid(visible=False)
    if plot.picture:
        axes.set_axis_off()
        return image
    chosen = tick_positions(len(plot.x_ticks), 8)
    axes.set_xticks(chosen, [_plain(plot.x_ticks[i]) for i in chosen])
    named = tick_positions(len(plot.y_ticks), 60)
    axes.set_yticks(named, [_plain(plot.y_ticks[i]) for i in named])
    axes.set_xlabel(_plain(plot.x_label))
    return image


def _colour_bar(figure: Figure, image: AxesImage, axes: Axes | list[Axes], plot: HeatMap) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    if plot.log:
        marks = log_ticks(plot.low, plot.high)
        bar.set_ticks(marks, labels=[f"{mark:.3g}" for mark in marks])
        bar.minorticks_off()


def _plain(text: str) -> str:
    """Text escaped for matplotlib, which reads dollars as mathematics."""
    return text.replace("$", r"\$")
