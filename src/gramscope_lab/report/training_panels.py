"""Accuracy and loss over training, and their last values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

from gramscope_lab.report.loaded_runs import Run, Runs, Setting
from gramscope_lab.report.measure_texts import PARTS, readable
from gramscope_lab.report.panel import DataTable, Facet, Line, LinePlot, Panel, View, shorten, thin, thin_table
from gramscope_lab.report.recording import own_loop
from gramscope_lab.report.run_files import is_number
from gramscope_lab.report.seed_statistics import Curve, Summary, evaluation_curve, spread_sentence

#: most points of a drawn line
POINTS = 300

_SENTENCES = {
    "accuracy": "Share of samples (or labelled tokens) classified correctly, for each setting; lines are means over seeds.",
    "loss": "Mean loss of a sample (or labelled token), for each setting; lines are means over seeds.",
}
#: when a monitor records them
_WHERE = {
    "accuracy": "gs.Monitor records it where the targets are classes",
    "loss": "gs.Monitor records it where it is given a loss, or the model returns its own",
}
_FORMULAS = {"accuracy": "(1/n) Σ_i [argmax f(x_i) = y_i]", "loss": "(1/n) Σ_i L_i"}


def training_panels(runs: Runs) -> list[Panel]:
    """Accuracy, loss, and both at the end of training where there is something to compare."""
    return [_panel(runs, "accuracy"), _panel(runs, "loss"), *([_last_values(runs)] if len(runs.all) > 1 else [])]


def evaluated_parts(runs: Sequence[Run], what: str) -> list[str]:
    """Parts of the data for which ``accuracy`` or ``loss`` was recorded, test first."""
    ending = f"_{what}"
    found = {
        key.removesuffix(ending)
        for run in runs
        for record in run.evaluations
        for key, value in record.items()
        if key.endswith(ending) and is_number(value)
    }
    return [part for part in PARTS if part in found] + sorted(found - set(PARTS))


def evaluated_keys(runs: Runs) -> list[str]:
    """Everything that was evaluated, accuracies first: ``test_accuracy``, ``test_loss`` …"""
    return [f"{part}_{what}" for what in ("accuracy", "loss") for part in evaluated_parts(runs.all, what)]


def _panel(runs: Runs, what: str) -> Panel:
    parts = evaluated_parts(runs.all, what)
    views, drawn = [], list[Line]()
    for clock in (runs.clock, "seconds"):
        lines: dict[str, list[Line]] = {}
        for part in parts:
            for setting in runs.settings:
                line = as_line(setting, evaluation_curve(setting, f"{part}_{what}", clock))
                if line is not None:
                    lines.setdefault(PARTS.get(part, part), []).append(line)
        if lines:
            drawn = [line for found in lines.values() for line in found]
            ends = common_range(drawn, 1.0 if what == "accuracy" else None)
            plots = {title: LinePlot(tuple(found), clock, what, y_range=ends) for title, found in lines.items()}
            label = "over seconds of training" if clock == "seconds" else f"over {clock}s"
            views.append(View(label, tuple(Facet(t, (plot,)) for t, plot in plots.items()), _FORMULAS[what]))
    table, note = _table(runs, [f"{part}_{what}" for part in parts])
    missing = (
        ""
        if views
        else f"No {what} was recorded: {_WHERE[what] if own_loop(runs) else f'records of kind “evaluation” hold test_{what}'}."
    )
    sentence = f"{_SENTENCES[what]} {spread_sentence(runs)}"
    switch = what == "loss" and all_positive(drawn)
    return Panel(what, "Training", what.capitalize(), sentence, tuple(views), table, missing, note, switch)


def all_positive(lines: Iterable[Line]) -> bool:
    """Whether every point of the lines fits on a logarithmic axis."""
    return all(y is not None and y > 1e-300 for line in lines for y in line.y)


def as_line(setting: Setting, curve: Curve) -> Line | None:
    """A curve as a line with its band."""
    if not curve:
        return None
    chosen = thin(range(len(curve.steps)), POINTS)
    values = [curve.values[i] for i in chosen]
    return Line(setting.name, setting.index, [curve.times[i] for i in chosen], [v.mean for v in values], *band(values))


def band(values: Sequence[Summary]) -> tuple[list[float] | None, list[float] | None]:
    """Lower and upper ends of the band, or ``(None, None)`` if no value has a spread."""
    if not any(value.deviation for value in values):
        return None, None
    return [value.low for value in values], [value.high for value in values]


def common_range(lines: Sequence[Line], ceiling: float | None = None) -> tuple[float, float]:
    """One vertical range for all facets.

    Bands extend it, but not below zero if all means are at least 0, nor above ``ceiling`` if no mean exceeds it.
    """
    means = [y for line in lines for y in line.y if y is not None]
    bands = [y for line in lines for ends in (line.low or (), line.high or ()) for y in ends if y is not None]
    low, high = min(means + bands), max(means + bands)
    if min(means) >= 0:
        low = max(low, 0.0)
    if ceiling is not None and max(means) <= ceiling:
        high = min(high, ceiling)
    margin = max(0.04 * (high - low), 1e-6 * abs(high)) or 0.1
    return low - margin, high + margin


def _last_values(runs: Runs) -> Panel:
    """The last value of each setting, side by side."""
    views, rows = [], []
    names = tuple(shorten(setting.name) for setting in runs.settings)
    for key in evaluated_keys(runs):
        lines = []
        what = key.rpartition("_")[2]
        for setting in runs.settings:
            curve = evaluation_curve(setting, key, runs.clock)
            if curve:
                last = curve.values[-1]
                lines.append(Line(setting.name, setting.index, [float(setting.index)], [last.mean], *band([last])))
                rows.append((setting.name, key, *astuple(last), curve.times[-1]))
        plot = LinePlot(tuple(lines), "", what, ticks=names, joined=False)
        views.append(View(readable(key).capitalize(), (Facet("", (plot,)),), _FORMULAS[what]))
    return Panel(
        "ends",
        "Training",
        "Last values",
        f"The last value of each setting: the point is the mean over seeds. {spread_sentence(runs)}",
        tuple(views),
        DataTable(("setting", "measure", "mean", "sigma", "seeds", "least", "largest", runs.clock), rows),
        missing="" if views else "Nothing was evaluated.",
    )


def _table(runs: Runs, keys: Sequence[str]) -> tuple[DataTable, str]:
    """Every recorded value of ``keys``, one row for each run and step."""
    with_seconds = any("seconds" in record for run in runs.all for record in run.evaluations)
    columns = ("setting", "seed", "step", *(["epoch"] if runs.clock == "epoch" else []), *(["seconds"] * with_seconds))
    records = [
        {"setting": setting.name, "seed": run.seed, **record}
        for setting in runs.settings
        for run in setting.runs
        for record in run.evaluations
        if any(record.get(key) is not None for key in keys)
    ]
    return thin_table((*columns, *keys), records)
