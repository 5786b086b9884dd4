"""One measure of many layers as a view: lines or a map over training, by block, or over depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gramscope_lab.report.block_layout import block_layout, layer_label
from gramscope_lab.report.loaded_runs import Setting
from gramscope_lab.report.measure_texts import measure_text
from gramscope_lab.report.panel import Facet, HeatMap, Line, LinePlot, Numbers, View, thin
from gramscope_lab.report.seed_statistics import Curve, Summary, layer_curve
from gramscope_lab.report.training_panels import all_positive, as_line, band, common_range

#: most columns and rows of a map, and most positions of a slider; tables have more
COLUMNS, ROWS, MOMENTS = 60, 240, 12
#: most cells of a map, and most cells of all moments of a slider, so that a page stays below 8 MB
MAP_CELLS, SLIDER_CELLS = 3000, 1000


def layer_lines_view(
    settings: Sequence[Setting], measure: str, layers: Sequence[str], clock: str, *, log: bool
) -> View:
    """Lines over training for a few layers: one plot for each layer, one line for each setting."""
    lines = {
        layer: [line for s in settings if (line := as_line(s, layer_curve(s, measure, layer, clock))) is not None]
        for layer in layers
    }
    drawn = [line for found in lines.values() for line in found]
    log = log and all_positive(drawn)
    ends = None if log else common_range(drawn)
    plots = {layer: LinePlot(tuple(found), clock, "", log_y=log, y_range=ends) for layer, found in lines.items()}
    facets = tuple(Facet(layer_label(layer), (plot,)) for layer, plot in plots.items())
    text = measure_text(measure)
    return View(text.label, facets, text.formula, sentence=text.sentence)


def map_view(
    settings: Sequence[Setting], measure: str, layers: Sequence[str], clock: str, *, log: bool, unit: bool
) -> tuple[View, list[str]]:
    """A map layer × time for each setting, and notes about what is not drawn."""
    shown = thin(layers, ROWS)
    curves = {s.name: [layer_curve(s, measure, layer, clock) for layer in shown] for s in settings}
    times = _times([curve for found in curves.values() for curve in found])
    steps = thin(sorted(times), min(COLUMNS, max(2, MAP_CELLS // len(shown))))
    grids = {name: [[curve.by_step.get(step) for step in steps] for curve in found] for name, found in curves.items()}
    ticks = tuple(f"{times[step]:.4g}" for step in steps), tuple(map(layer_label, shown))
    facets = _map_facets({name: [grid] for name, grid in grids.items()}, ticks, clock, log=log, unit=unit)
    sizes = (len(shown), len(layers), "layers"), (len(steps), len(times), "moments")
    notes = [f"{few} of {many} {what} are drawn; the table has all." for few, many, what in sizes if few < many]
    text = measure_text(measure)
    label = f"{text.label}: every layer over training" if block_layout(layers) else text.label
    return View(label, facets, text.formula, sentence=text.sentence), notes


def block_view(
    settings: Sequence[Setting], measure: str, layers: Sequence[str], clock: str, *, log: bool, unit: bool
) -> tuple[View | None, list[str]]:
    """A map kind × block for each setting with a slider over training; ``None`` if the net has no blocks."""
    layout = block_layout(layers)
    if layout is None:
        return None, []
    curves = {
        s.name: [
            [None if layer is None else layer_curve(s, measure, layer, clock) for layer in row] for row in layout.layers
        ]
        for s in settings
    }
    times = _times([curve for grid in curves.values() for row in grid for curve in row if curve is not None])
    steps = thin(sorted(times), min(MOMENTS, max(2, SLIDER_CELLS // len(layers))))
    grids = {
        name: [
            [[None if curve is None else curve.by_step.get(step) for curve in row] for row in grid] for step in steps
        ]
        for name, grid in curves.items()
    }
    facets = _map_facets(grids, (layout.blocks, layout.kinds), "block", log=log, unit=unit)
    moments = tuple(f"{clock} {times[step]:.4g}" for step in steps)
    notes = [f"The slider has {len(steps)} of {len(times)} moments."] if len(steps) < len(times) else []
    text = measure_text(measure)
    return View(text.label, facets, text.formula, moments, text.sentence), notes


def depth_view(settings: Sequence[Setting], measure: str, layers: Sequence[str], clock: str, *, log: bool) -> View:
    """The last values over depth: one line for each setting, or in deep nets one for each kind of layer."""
    text = measure_text(measure)
    layout = block_layout(layers)

    def line(setting: Setting, name: str, index: int, row: Sequence[str | None]) -> Line | None:
        curves = [layer and layer_curve(setting, measure, layer, clock) for layer in row]
        known = {float(i): curve.values[-1] for i, curve in enumerate(curves) if curve}
        values = [*known.values()]
        return Line(name, index, [*known], [value.mean for value in values], *band(values)) if known else None

    if layout is None:
        found = (line(setting, setting.name, setting.index, layers) for setting in settings)
        groups = {"": [one for one in found if one is not None]}
        ticks, x_label = tuple(map(layer_label, layers)), "layer, from input to output"
    else:
        rows = list(enumerate(zip(layout.kinds, layout.layers, strict=True)))
        found_lines = {s.name: [line(s, kind, i, row) for i, (kind, row) in rows] for s in settings}
        groups = {name: [one for one in lines if one is not None] for name, lines in found_lines.items()}
        ticks, x_label = layout.blocks, "block"
    drawn = [one for lines in groups.values() for one in lines]
    log = log and all_positive(drawn)
    ends = None if log or not drawn else common_range(drawn)
    plots = {
        name: LinePlot(tuple(lines), x_label, text.label, ticks, legend=layout is not None, log_y=log, y_range=ends)
        for name, lines in groups.items()
        if lines
    }
    facets = tuple(Facet(name, (plot,), name) for name, plot in plots.items())
    return View(text.label, facets, text.formula, sentence=text.sentence)


# -- maps -----------------------------------------------------------------------------------------------------------
def _times(curves: Sequence[Curve]) -> dict[int, float]:
    return {step: time for curve in curves for step, time in zip(curve.steps, curve.times, strict=True)}


def _map_facets(
    grids: dict[str, list[list[list[Summary | None]]]],
    ticks: tuple[tuple[str, ...], tuple[str, ...]],
    x_label: str,
    *,
    log: bool,
    unit: bool,
) -> tuple[Facet, ...]:
    """Grids ``[moment][row][column]`` of each setting as maps with one colour scale."""
    cells = [cell for grid in grids.values() for rows in grid for row in rows for cell in row if cell is not None]
    log = log and min(cell.mean for cell in cells) > 1e-300
    low, high = _colour_range([cell.mean for cell in cells], unit=unit, log=log)
    spread = any(cell.deviation for cell in cells)

    def part(rows: list[list[Summary | None]], get: Callable[[Summary], float]) -> list[Numbers]:
        return [[None if cell is None else get(cell) for cell in row] for row in rows]

    def heat_map(rows: list[list[Summary | None]]) -> HeatMap:
        ends = (part(rows, lambda cell: cell.low), part(rows, lambda cell: cell.high)) if spread else None
        return HeatMap(part(rows, lambda cell: cell.mean), low, high, *ticks, x_label, ends, log)

    return tuple(Facet(name, tuple(map(heat_map, grid)), name) for name, grid in grids.items())


def _colour_range(values: Sequence[float], *, unit: bool, log: bool) -> tuple[float, float]:
    """Ends of the colour scale, the same for all settings."""
    low, high = min(values), max(values)
    if unit:  # tenths, so that noise does not look like structure; values up to 0.005 beyond an end have its colour
        low, high = math.floor(low * 10 + 0.05) / 10, math.ceil(high * 10 - 0.05) / 10
        low = min(low, round(high - 0.1, 1))
    if high <= low:
        return (low / 2, high * 2) if log else (low - max(0.5, abs(low) / 2), high + max(0.5, abs(high) / 2))
    return low, high
