"""Layer × time maps of every measure, and the layers compared at the end of training."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Sequence

from gramscope.report.curves import band
from gramscope.report.over_seeds import Summary, layer_curve
from gramscope.report.panel import DataTable, Facet, HeatMap, Line, LinePlot, Panel, View, shorten, thin, thin_table
from gramscope.report.reading import Run, Runs, Setting
from gramscope.report.words import COLLAPSE, GROUPS, Group, word

#: most moments, layers and settings that are drawn; tables have more
MOMENTS, LAYERS, SETTINGS = 60, 48, 12

_HOW = "measure while training: gramscope train … --measure-every 1"


def layer_panels(runs: Runs) -> list[Panel]:
    """One panel a group of measures, and one that compares the settings layer by layer."""
    found = recorded_measures(runs)
    grouped = {name for group in GROUPS for name in group.measures} | set(COLLAPSE)
    panels = []
    for group in GROUPS:
        names = [name for name in group.measures if name in found]
        if group is GROUPS[-1]:
            names += [name for name in found if name not in grouped]
        panels.append(_maps(runs, group, names))
    return [*panels, _by_layer(runs, found)]


def recorded_measures(runs: Runs) -> list[str]:
    """Measures of which at least one number was recorded, in order of appearance."""
    return list(dict.fromkeys(name for run in runs.all for name in run.measures))


def recorded_layers(runs: Sequence[Run], measure: str) -> list[str]:
    """Layers with a number for a measure, in order of appearance."""
    return list(dict.fromkeys(layer for run in runs for layer in run.measures.get(measure, [])))


def measure_table(runs: Runs, names: Sequence[str]) -> tuple[DataTable, str]:
    """Every recorded value of some measures, one row a run, step and layer."""
    epoch = ("epoch",) if runs.clock == "epoch" else ()
    columns = ("setting", "seed", "step", *epoch, "layer", *names)
    records = [
        ChainMap({"setting": setting.name, "seed": run.seed, "epoch": run.moment(record["step"])}, record)
        for setting in runs.settings
        for run in setting.runs
        for record in run.measurements
        if any(record.get(name) is not None for name in names)
    ]
    return thin_table(columns, records)


# -- layer × time ---------------------------------------------------------------------------------------------------
def _maps(runs: Runs, group: Group, names: Sequence[str]) -> Panel:
    notes: dict[str, None] = {}
    views = []
    for name in names:
        settings = [setting for setting in runs.settings if recorded_layers(setting.runs, name)]
        if len(settings) > SETTINGS:
            notes[f"{SETTINGS} of {len(settings)} settings are drawn; the table has all."] = None
            settings = settings[:SETTINGS]
        grids = [_Grid.of(setting, name, runs.clock) for setting in settings]
        log = name in group.log and all(grid.positive for grid in grids)
        low, high = _scale(grids, unit=name in group.unit, log=log)
        for note in (note for grid in grids for note in grid.notes):
            notes[note] = None
        facets = tuple(
            Facet(setting.name, (grid.map(runs.clock, low, high, log=log),), setting.name)
            for setting, grid in zip(settings, grids, strict=True)
        )
        views.append(View(word(name).label, facets, word(name).formula))
    table, cut = measure_table(runs, names)
    return Panel(
        group.key,
        "Layers over training",
        group.title,
        group.sentence,
        tuple(views),
        table,
        missing=""
        if views
        else f"None of {', '.join(group.measures)} was recorded; name them in measure.names and {_HOW}",
        note=" ".join([*notes, *([cut] if cut else [])]),
    )


class _Grid:
    """Summaries of one measure of one setting, ``rows[layer][moment]``."""

    def __init__(self, layers: list[str], moments: list[float], rows: list[list[Summary | None]], notes: list[str]):
        self.layers, self.moments, self.rows, self.notes = layers, moments, rows, notes

    @classmethod
    def of(cls, setting: Setting, measure: str, clock: str) -> _Grid:
        layers = recorded_layers(setting.runs, measure)
        shown, notes = thin(layers, LAYERS), []
        if len(shown) < len(layers):
            notes.append(f"{len(shown)} of {len(layers)} layers are drawn; the table has all.")
        curves = {layer: layer_curve(setting, measure, layer, clock) for layer in shown}
        moments = {step: at for found in curves.values() for step, at in zip(found.steps, found.moments, strict=True)}
        steps = thin(sorted(moments), MOMENTS)
        if len(steps) < len(moments):
            notes.append(f"{len(steps)} of {len(moments)} moments are drawn; the table has all.")
        rows = []
        for found in curves.values():
            values = dict(zip(found.steps, found.values, strict=True))
            rows.append([values.get(step) for step in steps])
        return cls(shown, [moments[step] for step in steps], rows, notes)

    @property
    def values(self) -> list[float]:
        return [cell.mean for row in self.rows for cell in row if cell is not None]

    @property
    def positive(self) -> bool:
        return all(value > 0 for value in self.values)

    def map(self, clock: str, low: float, high: float, *, log: bool) -> HeatMap:
        spread = [[None if c is None or c.deviation is None else 2 * c.deviation for c in row] for row in self.rows]
        return HeatMap(
            [[None if cell is None else cell.mean for cell in row] for row in self.rows],
            low,
            high,
            tuple(f"{moment:.4g}" for moment in self.moments),
            tuple(map(shorten, self.layers)),
            clock,
            "",
            spread if any(value is not None for row in spread for value in row) else None,
            log,
        )


def _scale(grids: Sequence[_Grid], *, unit: bool, log: bool) -> tuple[float, float]:
    """Ends of the colours, the same for all settings."""
    values = [value for grid in grids for value in grid.values]
    low, high = min(values), max(values)
    if unit:  # a round range, so that noise in the fourth digit does not look like structure
        low, high = math.floor(round(low * 10, 6)) / 10, math.ceil(round(high * 10, 6)) / 10
    if log and high <= low:
        return low / 2, high * 2
    if high <= low:
        return low - 0.5, high + 0.5
    return low, high


# -- layer by layer -------------------------------------------------------------------------------------------------
def _by_layer(runs: Runs, names: Sequence[str]) -> Panel:
    """Each measure against depth at the last measurement, one line a setting."""
    order = {name: i for i, name in enumerate(name for group in GROUPS for name in group.measures)}
    chosen = sorted((name for name in names if name in order), key=order.__getitem__)
    logs = frozenset[str]().union(*(group.log for group in GROUPS))
    views = []
    for name in chosen:
        layers = recorded_layers(runs.all, name)
        lines = []
        for setting in runs.settings:
            points = [(i, _last(setting, name, layer, runs.clock)) for i, layer in enumerate(layers)]
            known = [(float(i), value) for i, value in points if value is not None]
            if known:
                low, high = band([value for _, value in known])
                means = [value.mean for _, value in known]
                lines.append(Line(setting.name, setting.index, [i for i, _ in known], means, low, high))
        log = name in logs and all(y is not None and y > 0 for line in lines for y in line.y)
        ticks = tuple(map(shorten, layers))
        plot = LinePlot(tuple(lines), "layer, from input to output", word(name).label, ticks, log_y=log)
        views.append(View(word(name).label, (Facet("", (plot,)),), word(name).formula))
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
    """A table of the last values: one row a setting and layer, one column a measure, means over seeds."""
    names = recorded_measures(runs)
    rows: list[list[str | float | None]] = []
    for setting in runs.settings:
        layers = dict.fromkeys(record["layer"] for run in setting.runs for record in run.measurements)
        for layer in layers:
            found = [_last(setting, name, layer, runs.clock) for name in names]
            rows.append([setting.name, layer, *(None if value is None else value.mean for value in found)])
    return ("setting", "layer", *names), rows


def _last(setting: Setting, measure: str, layer: str, clock: str) -> Summary | None:
    found = layer_curve(setting, measure, layer, clock)
    value = found.values[-1] if found else None
    return value if value is not None and math.isfinite(value.mean) else None
