"""Sortable tables: results, every run, every layer, and records of other kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gramscope_lab.report.layer_panels import last_measurements
from gramscope_lab.report.loaded_runs import KNOWN_KINDS, Runs
from gramscope_lab.report.measure_texts import measure_text, readable
from gramscope_lab.report.panel import thin
from gramscope_lab.report.seed_statistics import FEW_SEEDS, Curve, Summary, evaluation_curve
from gramscope_lab.report.training_panels import evaluated_keys
from gramscope_lab.runs.records import Record

#: most rows of a table that are shown, and that are kept for the CSV
SHOWN, KEPT = 300, 4000


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and the value by which the table is sorted."""

    text: str
    value: float | str


@dataclass(frozen=True)
class Table:
    """A sortable table."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""

    @property
    def shown(self) -> list[list[Cell]]:
        """The rows in the page; the CSV has all."""
        return self.rows[:SHOWN]

    @property
    def remark(self) -> str:
        """The note, and how many rows are shown."""
        cut = f"The first {SHOWN} of {len(self.rows)} rows; the CSV has all." if len(self.rows) > SHOWN else ""
        return " ".join(part for part in (self.note, cut) if part)


def main_score(runs: Runs) -> tuple[str, bool] | None:
    """The key by which settings are compared and whether more is better: test accuracy, else another, else a loss."""
    keys = evaluated_keys(runs)
    return (keys[0], keys[0].endswith("accuracy")) if keys else None


def results_table(runs: Runs) -> Table | None:
    """One row for each setting: its last values and the best one."""
    score = main_score(runs)
    if score is None:
        return None
    others = evaluated_keys(runs)[1:]
    name = readable(score[0])
    columns = ["setting", f"{name}, last", f"{name}, best", f"reached at {runs.clock}"]
    columns += [*(f"{readable(key)}, last" for key in others), runs.clock, "seeds", "seconds"]
    found = [(setting, evaluation_curve(setting, score[0], runs.clock)) for setting in runs.settings]
    found = [(setting, main) for setting, main in found if main]
    ends = {(main.times[-1], len(setting.runs)) for setting, main in found}
    rows = []
    for setting, main in found:
        means = [value.mean for value in main.values]
        top = means.index(max(means) if score[1] else min(means))
        seconds = evaluation_curve(setting, "seconds", runs.clock)
        row = [cell(setting.name), _last_cell(main, score[0])]
        row += [_spread_cell(main.values[top], score[0]), cell(main.times[top])]
        row += [_last_cell(evaluation_curve(setting, key, runs.clock), key) for key in others]
        row += map(cell, (main.times[-1], len(setting.runs)) if len(ends) > 1 else (None, None))
        rows.append([*row, cell(seconds.values[-1].mean if seconds else None)])
    seeds = max(count for _, count in ends)
    spread = "± 2σ" if seeds >= FEW_SEEDS else "their range in brackets" if seeds > 1 else "of which there is one"
    note = f"Means over seeds, {spread}. “Best” is the best mean during training, chosen on the data for which it is shown."
    if len(ends) == 1:
        ((end, count),) = ends
        note = f"Every setting ends at {runs.clock} {end:g}, with {plural(count, 'seed')}. {note}"
    return _without_empty_columns(Table("results", "Results", tuple(columns), rows, note))


def _without_empty_columns(table: Table) -> Table:
    """The table without columns of which no row has a value, such as the seconds of a user's own loop."""
    kept = [i for i in range(len(table.columns)) if any(row[i].text for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows)


def runs_table(runs: Runs) -> Table:
    """One row for each run: its last values."""
    keys = evaluated_keys(runs)
    rows = []
    for setting in runs.settings:
        for run in setting.runs:
            if not run.evaluations and not run.measurements:
                continue
            last: dict[str, Any] = {}
            for record in run.evaluations:
                last |= {key: value for key, value in record.items() if value is not None}
            time = run.time(last["step"]) if "step" in last else None
            row = [run.name, setting.name, run.seed, run.files.status, time, *(last.get(key) for key in keys)]
            rows.append([cell(value) for value in (*row, last.get("seconds"), run.end.get("reason"))])
    names = ["run", "setting", "seed", "state", runs.clock, *map(readable, keys), "seconds", "note"]
    return _without_empty_columns(Table("runs", "Every run", tuple(names), rows))


def layer_table(runs: Runs) -> Table:
    """One row for each setting and layer: its last measurement."""
    columns, rows = last_measurements(runs)
    names = (*columns[:2], *(measure_text(name).label for name in columns[2:]))
    return Table(
        "layers", "Every layer", names, [[*map(cell, row)] for row in rows], "Last measurement, means over seeds."
    )


def other_records(runs: Runs) -> Iterable[Table]:
    """Records of other kinds as they are, without the lists and tables inside them."""
    by_kind: dict[str, list[tuple[str, Record]]] = {}
    for run in (*runs.all, *runs.others):
        for record in run.records:
            if "layers" not in record:
                by_kind.setdefault(str(record.get("kind", "")), []).append((run.name, record))
    for kind, found in by_kind.items():
        if kind in KNOWN_KINDS:
            continue
        keys = dict.fromkeys(
            k for _, r in found for k, v in r.items() if k != "kind" and not isinstance(v, list | dict)
        )
        kept = thin(found, KEPT)
        rows = [[cell(name), *(cell(record.get(key)) for key in keys)] for name, record in kept]
        note = "" if len(kept) == len(found) else f"{len(kept)} of {len(found)} records are kept, evenly spread."
        yield Table(f"records-{kind}", f"Records: {kind or 'without kind'}", ("run", *keys), rows, note)


# -- text -------------------------------------------------------------------------------------------------------------
def cell(value: Any) -> Cell:
    """A cell that shows a value, numbers with four significant digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Cell("", "")
    if isinstance(value, bool):
        return Cell("yes" if value else "no", float(value))
    if isinstance(value, int):
        return Cell(str(value), float(value))
    if isinstance(value, float):
        return Cell(f"{value:g}" if value.is_integer() else f"{value:#.4g}".removesuffix("."), value)
    return Cell(str(value), str(value))


def _last_cell(curve: Curve, key: str) -> Cell:
    """The last value of a curve with its spread."""
    return _spread_cell(curve.values[-1], key) if curve else Cell("", "")


def _spread_cell(value: Summary, key: str) -> Cell:
    """A value with its spread; its lines break only before a range."""
    return Cell(with_spread(value, key).replace(" ", "\u00a0").replace("\u00a0(", " ("), value.mean)


def with_spread(value: Summary, key: str) -> str:
    """Mean and spread, ± 2σ or the range of few seeds; accuracies in per cent."""
    percent = key.endswith("accuracy")

    def show(number: float) -> str:
        return f"{100 * number:.1f}" if percent else f"{number:#.3g}".removesuffix(".")

    unit = " %" if percent else ""
    if value.deviation is None:
        return show(value.mean) + unit
    if value.count < FEW_SEEDS:
        return f"{show(value.mean)}{unit} ({show(value.least)} to {show(value.largest)})"
    return f"{show(value.mean)} ± {show(2 * value.deviation) if percent else f'{2 * value.deviation:.2g}'}{unit}"


def plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
