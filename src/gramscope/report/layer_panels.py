"""Layer × time maps of every measure, and the layers compared at the end of training."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gramscope.report.loaded_runs import Run, Runs, Setting
from gramscope.report.measure_texts import COLLAPSE, GROUPS, Group, measure_text
from gramscope.report.panel import DataTable, Facet, HeatMap, Line, LinePlot, Panel, View, shorten, thin, thin_table
from gramscope.report.seed_statistics import Summary, layer_curve
from gramscope.report.training_panels import band

#: most moments, layers and settings that are drawn; tables have more
MOMENTS, LAYERS, SETTINGS = 60, 48, 12

_HOW = "measure while training: gramscope train … --measure-every 1"


def layer_panels(runs: Runs) -> list[Panel]:
    """One panel for each group of measures, and one that compares the settings layer by layer."""
    found = recorded_measures(runs)
    grouped = {name for group in GROUPS for name in group.measures} | set(COLLAPSE)
    panels = []
    for group in GROUPS:
        names = [name for name in group.measures if name in found]
        if group is GROUPS[-1]:
            names += [name for name in found if name not in grouped]
        panels.append(_map_panel(runs, group, names))
    return [*panels, _by_layer(runs, found)]


def recorded_measures(runs: Runs) -> list[str]:
    """Measures of which at least one number was recorded, in order of appearance."""
    return list(dict.fromkeys(name for run in runs.all for name in run.measures))


def recorded_layers(runs: Sequence[Run], measure: str) -> list[str]:
    """Layers with a number for a measure, in order of appearance."""
    return list(dict.fromkeys(layer for run in runs for layer in run.measures.get(measure, [])))


def all_positive(lines: Iterable[Line]) -> bool:
    """Whether every point of the lines fits on a logarithmic axis."""
    return all(y is not None and y > 0 for line in lines for y in line.y)


def measure_table(runs: Runs, names: Sequence[str]) -> tuple[DataTable, str]:
    """Every recorded value of some measures, one row for each run, step and layer."""
    epoch = ("epoch",) if runs.clock == "epoch" else ()
    columns = ("setting", "seed", "step", *epoch, "layer", *names)
    records = [
        ChainMap({"setting": setting.name, "seed": run.seed, "epoch": run.time(record["step"])}, record)
        for setting in runs.settings
        for run in setting.runs
        for record in run.measurements
        if any(record.get(name) is not None for name in names)
    ]
    return thin_table(columns, records)


# -- layer × time ---------------------------------------------------------------------------------------------------
def _map_panel(runs: Runs, group: Group, names: Sequence[str]) -> Panel:
    notes: dict[str, None] = {}
    views = []
    for name in names:
        settings = [setting for setting in runs.settings if recorded_layers(setting.runs, name)]
        if len(settings) > SETTINGS:
            notes[f"{SETTINGS} of {len(settings)} settings are drawn; the table has all."] = None
            settings = settings[:SETTINGS]
        grids = [_grid(setting, name, runs.clock) for setting in settings]
        notes |= dict.fromkeys(note for grid in grids for note in grid.notes)
        values = [cell.mean for grid in grids for row in grid.rows for cell in row if cell is not None]
        log = name in group.log and min(values) > 0
        low, high = _colour_range(values, unit=name in group.unit, log=log)
        facets = tuple(
            Facet(setting.name, (grid.map(runs.clock, low, high, log=log),), setting.name)
            for setting, grid in zip(settings, grids, strict=True)
        )
        views.append(View(measure_text(name).label, facets, measure_text(name).formula))
    table, cut = measure_table(runs, names)
    missing = f"None of {', '.join(group.measures)} was recorded; name them in measure.names and {_HOW}"
    return Panel(
        group.key,
        "Layers over training",
        group.title,
        group.sentence,
        tuple(views),
        table,
        missing="" if views else missing,
        note=" ".join([*notes, *([cut] if cut else [])]),
    )


@dataclass(frozen=True)
class _Grid:
    """Summaries of one measure of one setting, ``rows[layer][moment]``."""

    layers: list[str]
    times: list[float]
    rows: list[list[Summary | None]]
    notes: list[str]

    def map(self, clock: str, low: float, high: float, *, log: bool) -> HeatMap:
        """The means as a heat map, with twice the deviations."""
        spread = [[None if c is None or c.deviation is None else 2 * c.deviation for c in row] for row in self.rows]
        return HeatMap(
            [[None if cell is None else cell.mean for cell in row] for row in self.rows],
            low,
            high,
            tuple(f"{time:.4g}" for time in self.times),
            tuple(map(shorten, self.layers)),
            clock,
            spread if any(value is not None for row in spread for value in row) else None,
            log,
        )


def _grid(setting: Setting, measure: str, clock: str) -> _Grid:
    layers = recorded_layers(setting.runs, measure)
    shown = thin(layers, LAYERS)
    curves = [layer_curve(setting, measure, layer, clock) for layer in shown]
    times = {step: time for curve in curves for step, time in zip(curve.steps, curve.times, strict=True)}
    steps = thin(sorted(times), MOMENTS)
    sizes = (len(shown), len(layers), "layers"), (len(steps), len(times), "moments")
    notes = [f"{few} of {many} {what} are drawn; the table has all." for few, many, what in sizes if few < many]
    by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    rows = [[values.get(step) for step in steps] for values in by_step]
    return _Grid(shown, [times[step] for step in steps], rows, notes)


def _colour_range(values: Sequence[float], *, unit: bool, log: bool) -> tuple[float, float]:
    """Ends of the colour scale, the same for all settings."""
    low, high = min(values), max(values)
    if unit:  # a round range, so that noise in the fourth digit does not look like structure
        low, high = math.floor(round(low * 10, 6)) / 10, math.ceil(round(high * 10, 6)) / 10
    if high <= low:
        return (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return low, high


# -- layer by layer -------------------------------------------------------------------------------------------------
def _by_layer(runs: Runs, names: Sequence[str]) -> Panel:
    """Each measure against depth at the last measurement, one line for each setting."""
    views = []
    for group in GROUPS:
        for name in (name for name in group.measures if name in names):
            layers = recorded_layers(runs.all, name)
            lines = []
            for setting in runs.settings:
                points = [(i, _last(setting, name, layer, runs.clock)) for i, layer in enumerate(layers)]
                known = {float(i): value for i, value in points if value is not None}
                if known:
                    means = [value.mean for value in known.values()]
                    lines.append(Line(setting.name, setting.index, [*known], means, *band([*known.values()])))
            text = measure_text(name)
            log = name in group.log and all_positive(lines)
            ticks = tuple(map(shorten, layers))
            plot = LinePlot(tuple(lines), "layer, from input to output", text.label, ticks, log_y=log)
            views.append(View(text.label, (Facet("", (plot,)),), text.formula))
    columns, rows = last_measurements(runs)
    return Panel(
        "by-layer",
        "Layers over training",
        "Layers compared at the end",
        "The last measurement of every layer from input to output: lines are means over seeds, bands mean ± 2σ.",
        tuple(views),
        DataTable(columns, rows),
        missing="" if views else f"No layer was measured; {_HOW}",
    )


def last_measurements(runs: Runs) -> tuple[tuple[str, ...], list[list[str | float | None]]]:
    """A table of the last values: one row for each setting and layer, one column for each measure, means over seeds."""
    names = recorded_measures(runs)
    rows: list[list[str | float | None]] = []
    for setting in runs.settings:
        for layer in dict.fromkeys(layer for run in setting.runs for layer in run.by_layer):
            found = [_last(setting, name, layer, runs.clock) for name in names]
            rows.append([setting.name, layer, *(None if value is None else value.mean for value in found)])
    return ("setting", "layer", *names), rows


def _last(setting: Setting, measure: str, layer: str, clock: str) -> Summary | None:
    curve = layer_curve(setting, measure, layer, clock)
    return curve.values[-1] if curve else None
