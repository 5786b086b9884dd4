"""Figures of tables and series, by matplotlib or plotly: layers as a line, blocks × kinds or steps × depth as a map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from gramscope.errors import InputError, MissingExtraError, no_such
from gramscope.measures.columns import COLUMNS
from gramscope.measures.table_files import write_whole
from gramscope.names import split_name

if TYPE_CHECKING:
    from gramscope.measures.series import Series
    from gramscope.measures.table import Table

Backend: TypeAlias = Literal["matplotlib", "plotly"]
_COLOURS = "viridis"
#: width and height of a small plot of a notebook, and its margin on all sides; layers that it shows
WIDTH, HEIGHT, MARGIN, MOST_LAYERS = 260, 150, 22, 12


class Grid(NamedTuple):
    """A map: rows by columns of numbers, NaN where there is none."""

    rows: list[str]
    columns: list[str]
    values: list[list[float]]


def plot_table(table: Table, column: str, backend: Backend = "matplotlib") -> Any:
    """A figure of one measure: kinds of layers × depth where there are two blocks or more, else a line over the layers.

    The measure that ``column`` is to be read against (:attr:`Column.null`) is drawn into the same line plot.
    """
    if column not in table.columns:
        raise InputError(no_such("measure", column, table.columns))
    values = table.column(column)
    grid = by_block(values)
    if grid is not None:
        return _map(grid, column, backend, "block", "")
    known = COLUMNS.get(column)
    lines = {column: values}
    if known is not None and known.null in table.columns:
        lines[str(known.null)] = table.column(str(known.null))
    return _lines(lines, backend)


def by_block(values: Mapping[str, float | None]) -> Grid | None:
    """Values of layers in blocks as kinds × blocks; ``None`` unless there are two blocks or more.

    >>> by_block({"h.0.fc": 1.0, "h.1.fc": 2.0, "head": 3.0})
    Grid(rows=['fc'], columns=['0', '1'], values=[[1.0, 2.0]])
    """
    names = {layer: split_name(layer.removesuffix(" (output)")) for layer in values}
    blocks = sorted({name.block for name in names.values() if name.block is not None})
    if len(blocks) < 2:
        return None
    stacks = {name.stack for name in names.values() if name.block is not None}
    rows: dict[str, list[float]] = {}
    for layer, value in values.items():
        name = names[layer]
        if name.block is None:
            continue
        kind = f"{name.stack}: {name.kind}" if len(stacks) > 1 else name.kind
        rows.setdefault(kind, [math.nan] * len(blocks))[blocks.index(name.block)] = _number(value)
    return Grid(list(rows), [str(block) for block in blocks], list(rows.values()))


def plot_series(series: Series, column: str, backend: Backend = "matplotlib") -> Any:
    """A figure of one measure over steps (across) and layers (down), with the loss below where it was measured."""
    grid, losses = _over_steps(series, column), series.network("loss")
    known = {step: value for step, value in losses.items() if value is not None}
    return _map(grid, column, backend, "step", "layer", known)


def _over_steps(series: Series, column: str) -> Grid:
    """Layers by steps: layers of one kind below each other, from the first block to the last."""
    found = {layer: [_number(row.get(step)) for step in series.steps] for layer, row in series[column].items()}
    names = {layer: split_name(layer) for layer, row in found.items() if not all(map(math.isnan, row))}
    if not names:
        raise InputError(f"{column} has no value at any step; the notes of the tables say why")
    kinds = list(dict.fromkeys((name.stack, name.kind) for name in names.values()))
    order = sorted(
        names, key=lambda layer: (kinds.index((names[layer].stack, names[layer].kind)), names[layer].block or 0)
    )
    short = len({name.stack for name in names.values() if name.block is not None}) == 1
    labels = [f"{names[x].kind} {names[x].block}" if short and names[x].block is not None else x for x in order]
    return Grid(labels, [str(step) for step in series.steps], [found[layer] for layer in order])


def _limits(grid: Grid) -> tuple[float, float]:
    """Ends of the colours: those of all rows but the lowest and the highest, as one layer must not hide what the others do."""
    known = [[value for value in row if math.isfinite(value)] for row in grid.values]
    lows, highs = (sorted(end(row) for row in known if row) for end in (min, max))
    if len(lows) < 4:
        return (lows[0], highs[-1]) if lows else (0.0, 1.0)
    return lows[1], highs[-2]


def write_report(series: Series, path: str | Path, title: str = "Series") -> None:
    """A page that needs no network: every measure over steps and layers, chosen from a menu, with the loss below it."""
    curves = series.curves()
    columns = [name for name in series.columns if name in curves]
    if not columns:
        raise InputError("the series has no table with measures: nothing was recorded yet")
    _plotly()
    import plotly.io as pio

    figures = [plot_series(series, column, "plotly") for column in columns]
    first = figures[0].update_layout(title=None)
    count = len(first.data)
    buttons = []
    for i, (column, figure) in enumerate(zip(columns, figures, strict=True)):
        if i:
            first.add_traces(figure.data)
        shown = [j // count == i for j in range(count * len(figures))]
        buttons.append({"label": column, "method": "restyle", "args": [{"visible": shown}]})
    for j, trace in enumerate(first.data):
        trace.visible = j < count
    first.update_layout(updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.12, "yanchor": "bottom"}])
    remarks = "".join(f"<p>{escape(line)}</p>" for line in str(series).splitlines() if not line.startswith(" "))
    body = pio.to_html(first, include_plotlyjs=True, full_html=False, config={"responsive": True})
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    style = "<style>body{font:15px/1.5 sans-serif;margin:1rem auto;max-width:70rem;padding:0 1rem}</style>"
    page = f"<!doctype html><html lang=en><head>{head}{style}</head><body><h1>{escape(title)}</h1>{remarks}{body}</body></html>"
    write_whole(Path(path), page.encode())


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _map(
    grid: Grid, title: str, backend: Backend, across: str, down: str, losses: Mapping[int, float] | None = None
) -> Any:
    height = 1.2 + 0.22 * len(grid.rows)
    low, high = _limits(grid)
    if backend == "plotly":
        go, subplots = _plotly()
        shares = [0.75, 0.25] if losses else [1.0]
        figure = subplots.make_subplots(len(shares), 1, shared_xaxes=True, row_heights=shares, vertical_spacing=0.04)
        figure.add_trace(
            go.Heatmap(
                z=grid.values, x=grid.columns, y=grid.rows, colorscale=_COLOURS, name=title, zmin=low, zmax=high
            ),
            1,
            1,
        )
        if losses:
            steps = [str(step) for step in losses]
            figure.add_trace(go.Scatter(x=steps, y=list(losses.values()), name="loss", showlegend=False), 2, 1)
            figure.update_yaxes(title="loss", row=2, col=1)
        figure.update_yaxes(autorange="reversed", title=down, row=1, col=1)
        figure.update_xaxes(type="category", title=across, row=len(shares), col=1)
        figure.update_layout(title=title, height=max(320, 96 * height + 120 * bool(losses)), margin={"t": 110})
        return figure
    pyplot = _matplotlib(backend)
    ratios = [max(height, 1.5), 1.0] if losses else [1.0]
    size = (6.5, max(2.5, height + 1.2 * bool(losses)))
    figure, axes = pyplot.subplots(
        len(ratios), 1, squeeze=False, sharex=True, figsize=size, height_ratios=ratios, layout="constrained"
    )
    top = axes[0, 0]
    image = top.imshow(grid.values, aspect="auto", interpolation="nearest", cmap=_COLOURS, vmin=low, vmax=high)
    top.set_yticks(range(len(grid.rows)), grid.rows, fontsize=7)
    top.set(title=title, ylabel=down)
    figure.colorbar(image, ax=top, extend="both" if low < high else "neither")
    bottom = axes[-1, 0]
    if losses:
        places = [grid.columns.index(str(step)) for step in losses]
        bottom.plot(places, list(losses.values()), marker=".")
        bottom.set_ylabel("loss")
    every = max(1, len(grid.columns) // 12)
    bottom.set_xticks(range(0, len(grid.columns), every), grid.columns[::every], fontsize=7)
    bottom.set_xlabel(across)
    return figure


def _lines(lines: Mapping[str, Mapping[str, float | None]], backend: Backend) -> Any:
    layers = list(next(iter(lines.values())))
    values = {name: [_number(line[layer]) for layer in layers] for name, line in lines.items()}
    if backend == "plotly":
        go, _ = _plotly()
        traces = [go.Scatter(x=layers, y=y, name=name, mode="lines+markers") for name, y in values.items()]
        return go.Figure(traces).update_layout(title=next(iter(lines)), xaxis_type="category")
    pyplot = _matplotlib(backend)
    figure, axis = pyplot.subplots(figsize=(6.5, 3), layout="constrained")
    for i, (name, y) in enumerate(values.items()):
        axis.plot(range(len(layers)), y, marker="o", label=name, linestyle="--" if i else "-")
    axis.set_xticks(range(len(layers)), layers, rotation=30, ha="right", fontsize=7)
    axis.set_title(next(iter(lines)))
    if len(lines) > 1:
        axis.legend()
    return figure


def small_curves(curves: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """One small plot of each measure that changes, as SVG in HTML; curves are ``{measure: {layer: {step: value}}}``.

    >>> small_curves({"nc1": {"fc": {0: 1.0, 1: 0.5}}, "nfa": {"fc": {0: 0.5, 1: 0.5}}}).count("<polyline")
    1
    """
    names = list(dict.fromkeys(layer for lines in curves.values() for layer in lines))[:MOST_LAYERS]
    colours = {layer: f"hsl({360 * i // len(names)} 65% 45%)" for i, layer in enumerate(names)}
    changing = (n for n, lines in curves.items() if any(len(set(line.values())) > 1 for line in lines.values()))
    plots = [_svg(name, {k: v for k, v in curves[name].items() if k in colours}, colours) for name in changing]
    legend = " ".join(f'<span style="color:{colour}">■ {escape(layer)}</span>' for layer, colour in colours.items())
    return f'<div style="display:flex;flex-wrap:wrap">{"".join(plots)}</div><div>{legend if plots else ""}</div>'


def _svg(name: str, lines: Mapping[str, Mapping[int, float]], colours: Mapping[str, str]) -> str:
    """One measure over steps, on a logarithmic axis ``log(1 + step)``."""
    points = [point for line in lines.values() for point in line.items()]
    if not points:  # all of its layers are beyond the first few
        return ""
    steps, values = [math.log1p(step) for step, _ in points], [value for _, value in points]
    left, right, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> str:
        x = (math.log1p(step) - left) / ((right - left) or 1)
        y = (value - low) / ((high - low) or 1)
        return f"{MARGIN + x * (WIDTH - 2 * MARGIN):.1f},{HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN):.1f}"

    traces = {colours[layer]: " ".join(place(*point) for point in line.items()) for layer, line in lines.items()}
    drawn = "".join(
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{trace}"/>'
        for colour, trace in traces.items()
    )
    texts = (
        (MARGIN, 14, "start", name),
        (WIDTH - MARGIN, 14, "end", f"{low:.3g} to {high:.3g}"),
        (MARGIN, HEIGHT - 6, "start", f"step {min(step for step, _ in points)}"),
        (WIDTH - MARGIN, HEIGHT - 6, "end", f"{max(step for step, _ in points)}"),
    )
    words = "".join(f'<text x="{x}" y="{y}" text-anchor="{at}">{escape(text)}</text>' for x, y, at, text in texts)
    style = "font:10px sans-serif;fill:currentColor"
    return f'<svg width="{WIDTH}" height="{HEIGHT}" style="{style}">{drawn}{words}</svg>'


def _matplotlib(backend: str) -> Any:
    if backend != "matplotlib":
        raise InputError(f"backend={backend!r}: give 'matplotlib' or 'plotly'")
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingExtraError("figures need matplotlib: pip install 'gramscope[lab]'") from error
    return plt


def _plotly() -> tuple[Any, Any]:
    try:
        import plotly.graph_objects as go
        from plotly import subplots
    except ImportError as error:
        raise MissingExtraError("backend='plotly' needs plotly: pip install 'gramscope[lab]'") from error
    return go, subplots
