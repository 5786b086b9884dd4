"""Panels of layers: measures over training, by block in deep nets, and the layers compared at the end."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

from gramscope_lab.report.layer_views import block_view, depth_view, layer_lines_view, map_view
from gramscope_lab.report.loaded_runs import Run, Runs, Setting
from gramscope_lab.report.measure_texts import COLLAPSE, GROUPS, Group
from gramscope_lab.report.panel import DataTable, Panel, View, thin_table
from gramscope_lab.report.recording import how_to_measure
from gramscope_lab.report.seed_statistics import Summary, layer_curve, spread_sentence

#: most settings that are drawn as maps, and most layers that are drawn as lines over training
SETTINGS, LINES = 12, 6


def layer_panels(runs: Runs) -> list[Panel]:
    """One panel for each group of measures, and one that compares the layers at the end."""
    found = recorded_measures(runs)
    grouped = {name for group in GROUPS for name in group.measures} | set(COLLAPSE)
    panels = []
    for group in GROUPS:
        names = [name for name in group.measures if name in found]
        if group is GROUPS[-1]:
            names += [name for name in found if name not in grouped]
        panels.append(_group_panel(runs, group, names))
    return [*panels, _depth_panel(runs, found)]


def recorded_measures(runs: Runs) -> list[str]:
    """Measures of which at least one number was recorded, in order of appearance."""
    return list(dict.fromkeys(name for run in runs.all for name in run.measures))


def recorded_layers(runs: Sequence[Run], measure: str) -> list[str]:
    """Layers with a number for a measure, in order of appearance."""
    return list(dict.fromkeys(layer for run in runs for layer in run.measures.get(measure, [])))


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


def _group_panel(runs: Runs, group: Group, names: Sequence[str]) -> Panel:
    views: list[View] = []
    single_layers: list[View] = []
    notes: dict[str, None] = {}
    for name in names:
        settings = [setting for setting in runs.settings if recorded_layers(setting.runs, name)]
        layers = recorded_layers(runs.all, name)
        log = name in group.log
        if len(layers) <= LINES:
            views.append(layer_lines_view(settings, name, layers, runs.clock, log=log))
            continue
        if len(settings) > SETTINGS:
            notes[f"{SETTINGS} of {len(settings)} settings are drawn; the table has all."] = None
        unit = name in group.unit
        by_block, block_notes = block_view(settings[:SETTINGS], name, layers, runs.clock, log=log, unit=unit)
        by_time, time_notes = map_view(settings[:SETTINGS], name, layers, runs.clock, log=log, unit=unit)
        if by_block is None:
            views.append(by_time)
        else:
            views.append(by_block)
            single_layers.append(by_time)
        notes |= dict.fromkeys([*block_notes, *time_notes])
    table, cut = measure_table(runs, names)
    missing = f"None of {', '.join(group.measures)} was recorded; {how_to_measure(runs, group.measures)}."
    return Panel(
        group.key,
        "Layers over training",
        group.title,
        group.sentence,
        (*views, *single_layers),
        table,
        missing="" if views else missing,
        note=" ".join([*notes, *([cut] if cut else [])]),
    )


def _depth_panel(runs: Runs, names: Sequence[str]) -> Panel:
    """Each measure against depth at the last measurement."""
    log = frozenset().union(*(group.log for group in GROUPS))
    ordered = [name for group in GROUPS for name in group.measures if name in names]
    views = tuple(
        depth_view(runs.settings, name, recorded_layers(runs.all, name), runs.clock, log=name in log)
        for name in dict.fromkeys([*ordered, *names])
    )
    columns, rows = last_measurements(runs)
    return Panel(
        "by-layer",
        "Layers over training",
        "Layers compared at the end",
        "The last measurement of every layer, from input to output; in deep nets one line for each kind of layer over "
        f"the blocks. Lines are means over seeds. {spread_sentence(runs)}",
        views,
        DataTable(columns, rows),
        missing="" if views else f"No layer was measured; {how_to_measure(runs)}.",
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
