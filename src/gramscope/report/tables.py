"""Tables one can sort: results, every run, every layer, and records of other kinds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gramscope.report.curves import evaluated_parts
from gramscope.report.layers import last_measurements
from gramscope.report.over_seeds import Curve, Summary, evaluation_curve
from gramscope.report.panel import thin
from gramscope.report.reading import KNOWN_KINDS, Runs
from gramscope.report.words import PARTS, word

#: most rows of a table that are shown, and that are kept for the CSV
SHOWN, KEPT = 300, 4000


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is read, and what it is sorted by."""

    text: str
    value: float | str


@dataclass(frozen=True)
class Table:
    """A table one can sort."""

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
    """The value by which settings are compared and whether more is better: test accuracy, else another, else a loss."""
    for what, more in (("accuracy", True), ("loss", False)):
        parts = evaluated_parts(runs.all, what)
        if parts:
            return f"{parts[0]}_{what}", more
    return None


def results_table(runs: Runs) -> Table | None:
    """One row a setting: the last values, and the best along the way."""
    score = main_score(runs)
    if score is None:
        return None
    others = [f"{part}_{what}" for what in ("accuracy", "loss") for part in evaluated_parts(runs.all, what)]
    others.remove(score[0])
    name = readable(score[0])
    columns = ["setting", f"{name}, last", f"{name}, best", f"reached at {runs.clock}"]
    columns += [*(f"{readable(key)}, last" for key in others), runs.clock, "seeds", "seconds"]
    rows = []
    for setting in runs.settings:
        main = evaluation_curve(setting, score[0], runs.clock)
        if not main:
            continue
        means = [value.mean for value in main.values]
        top = means.index(max(means) if score[1] else min(means))
        seconds = evaluation_curve(setting, "seconds", runs.clock)
        row = [Cell(setting.name, setting.name), spread_cell(main, score[0])]
        row += [Cell(with_spread(main.values[top], score[0]), means[top]), number(main.moments[top])]
        row += [spread_cell(evaluation_curve(setting, key, runs.clock), key) for key in others]
        row += [number(main.moments[-1]), number(len(setting.runs))]
        rows.append([*row, number(seconds.values[-1].mean if seconds else None)])
    note = "Means over seeds ± 2σ. Best is the best mean along the way, judged on the same data it is shown for."
    return Table("results", "Results", tuple(columns), rows, note)


def runs_table(runs: Runs) -> Table:
    """One row a run: its last values."""
    keys = [f"{part}_{what}" for what in ("accuracy", "loss") for part in evaluated_parts(runs.all, what)]
    rows = []
    for setting in runs.settings:
        for run in setting.runs:
            if not run.evaluations and not run.measurements:
                continue
            last: dict[str, Any] = {}
            for record in run.evaluations:
                last |= {key: value for key, value in record.items() if value is not None}
            moment = run.moment(last["step"]) if "step" in last else None
            row = [Cell(run.name, run.name), Cell(setting.name, setting.name), number(run.seed)]
            row += [Cell(run.status, run.status), number(moment), *(number(last.get(key)) for key in keys)]
            row += [
                number(last.get("seconds")),
                Cell(str(run.end.get("reason") or ""), str(run.end.get("reason") or "")),
            ]
            rows.append(row)
    names = ["run", "setting", "seed", "state", runs.clock, *map(readable, keys), "seconds", "note"]
    return Table("runs", "Every run", tuple(names), rows)


def layer_table(runs: Runs) -> Table:
    """One row a setting and layer: its last measurement."""
    columns, rows = last_measurements(runs)
    cells = [[Cell(str(row[0]), str(row[0])), Cell(str(row[1]), str(row[1])), *map(number, row[2:])] for row in rows]
    names = tuple(word(name).label if i > 1 else name for i, name in enumerate(columns))
    note = "Last measurement, means over seeds."
    return Table("layers", "Every layer", names, cells, note)


def other_records(runs: Runs) -> Iterable[Table]:
    """Records of other kinds as they are, lists and tables inside them left out."""
    everything = [(run.name, record) for run in (*runs.all, *runs.others) for record in run.records]
    kinds = dict.fromkeys(str(record.get("kind", "")) for _, record in everything if "layers" not in record)
    for kind in kinds:
        if kind in KNOWN_KINDS:
            continue
        found = [(name, record) for name, record in everything if str(record.get("kind", "")) == kind]
        keys = dict.fromkeys(
            k for _, r in found for k, v in r.items() if k != "kind" and not isinstance(v, list | dict)
        )
        kept = thin(found, KEPT)
        rows = [[Cell(name, name), *(number(record.get(key)) for key in keys)] for name, record in kept]
        note = "" if len(kept) == len(found) else f"{len(kept)} of {len(found)} records are kept, evenly spread."
        yield Table(f"records-{kind}", f"Records: {kind or 'without kind'}", ("run", *keys), rows, note)


# -- text -------------------------------------------------------------------------------------------------------------
def number(value: Any) -> Cell:
    """A cell with a value in four significant digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Cell("", "")
    if isinstance(value, bool):
        return Cell("yes" if value else "no", float(value))
    if isinstance(value, int | float):
        return Cell(f"{value:.4g}" if isinstance(value, float) else str(value), float(value))
    return Cell(str(value), str(value))


def spread_cell(curve: Curve, key: str) -> Cell:
    """The last value of a curve with its spread."""
    return Cell(with_spread(curve.values[-1], key), curve.values[-1].mean) if curve else Cell("", "")


def with_spread(value: Summary, key: str) -> str:
    """Mean ± 2σ; accuracies in per cent."""
    if key.endswith("accuracy"):
        text = f"{100 * value.mean:.1f} %"
        return text if value.deviation is None else f"{100 * value.mean:.1f} ± {200 * value.deviation:.1f} %"
    text = f"{value.mean:.4g}"
    return text if value.deviation is None else f"{text} ± {2 * value.deviation:.2g}"


def readable(key: str) -> str:
    """``test_accuracy`` as people say it."""
    part, _, what = key.rpartition("_")
    return f"{PARTS.get(part, part).lower()} {what}"


def plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
