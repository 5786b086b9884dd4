"""What was run, what came out, and which claims hold."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramscope.report.curves import evaluated_parts
from gramscope.report.layers import last_measurements
from gramscope.report.over_seeds import Curve, Summary, evaluation_curve
from gramscope.report.panel import thin
from gramscope.report.reading import KNOWN_KINDS, Runs, Setting
from gramscope.report.words import PARTS, word
from gramscope.runs.directory import FIGURES, RunDirectory

#: static figures of the report itself start with this; other pictures in a run's folder are shown
OWN_FIGURE = "panel-"
#: bytes of pictures embedded in a page
PICTURE_BYTES = 1_500_000
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


@dataclass(frozen=True)
class Card:
    """One number to see first."""

    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure found in a run's folder, as a data address."""

    name: str
    source: str


@dataclass(frozen=True)
class Overview:
    """Everything above and below the panels."""

    title: str
    headline: str
    status: str
    cards: list[Card]
    claims: Sequence[Mapping[str, Any]]
    facts: list[tuple[str, list[tuple[str, list[str]]]]]
    results: Table | None
    pictures: list[Picture]
    tables: list[Table]

    @property
    def all_tables(self) -> list[Table]:
        """The results and every other table."""
        return [*([self.results] if self.results else []), *self.tables]


def overview(runs: Runs) -> Overview:
    """Summarise runs."""
    claims = runs.records("claim")
    cards = [Card("runs", str(len(runs.all)), _plural(len(runs.settings), "setting"))] if runs.all else []
    cards += _best_card(runs)
    if claims:
        held = sum(claim.get("holds") is True for claim in claims)
        undecided = sum(claim.get("holds") is None for claim in claims)
        cards.append(Card("claims that hold", f"{held} of {len(claims)}", f"{undecided} open" if undecided else ""))
    cards.append(Card("state", runs.status, _progress(runs)))
    return Overview(
        ", ".join(root.name for root in runs.roots),
        _headline(runs),
        runs.status,
        cards,
        claims,
        [(root.name, _facts(runs, number)) for number, root in enumerate(runs.roots)],
        _results(runs),
        _pictures(runs),
        [table for table in (_runs_table(runs), _layer_table(runs), *_other_records(runs)) if table.rows],
    )


# -- what came out --------------------------------------------------------------------------------------------------
def _score(runs: Runs) -> tuple[str, bool] | None:
    """The value by which settings are compared and whether more is better: test accuracy, else another, else a loss."""
    for what, more in (("accuracy", True), ("loss", False)):
        parts = evaluated_parts(runs.all, what)
        if parts:
            return f"{parts[0]}_{what}", more
    return None


def _best(runs: Runs) -> tuple[Setting, Curve, str] | None:
    score = _score(runs)
    if score is None:
        return None
    found = [(setting, evaluation_curve(setting, score[0], runs.clock)) for setting in runs.settings]
    ranked = [(setting, curve) for setting, curve in found if curve]
    pick = max if score[1] else min
    setting, curve = pick(ranked, key=lambda item: item[1].values[-1].mean)
    return setting, curve, score[0]


def _best_card(runs: Runs) -> list[Card]:
    best = _best(runs)
    if best is None:
        return []
    setting, curve, key = best
    return [Card(f"best {_readable(key)}", with_spread(curve.values[-1], key), setting.name)]


def _headline(runs: Runs) -> str:
    best = _best(runs)
    if best is None:
        claims = runs.records("claim")
        held = sum(claim.get("holds") is True for claim in claims)
        if claims:
            return f"{held} of {_plural(len(claims), 'claim')} {'holds' if held == 1 else 'hold'} here."
        return f"{_plural(len(runs.all) + len(runs.others), 'run')} without evaluations of a net."
    setting, curve, key = best
    seeds = _plural(curve.values[-1].count, "seed")
    moment = f"{runs.clock} {curve.moments[-1]:g}"
    value = with_spread(curve.values[-1], key)
    if len(runs.settings) == 1:
        return f"{setting.name} has {_readable(key)} {value} at {moment} ({seeds})."
    return f"Of {len(runs.settings)} settings {setting.name} ends best: {_readable(key)} {value} at {moment} ({seeds})."


def _results(runs: Runs) -> Table | None:
    """One row a setting: the last values, and the best along the way."""
    score = _score(runs)
    if score is None:
        return None
    others = [f"{part}_{what}" for what in ("accuracy", "loss") for part in evaluated_parts(runs.all, what)]
    others.remove(score[0])
    name = _readable(score[0])
    columns = ["setting", "seeds", runs.clock, f"{name}, last", f"{name}, best", f"reached at {runs.clock}"]
    columns += [*(f"{_readable(key)}, last" for key in others), "seconds"]
    rows = []
    for setting in runs.settings:
        main = evaluation_curve(setting, score[0], runs.clock)
        if not main:
            continue
        means = [value.mean for value in main.values]
        top = means.index(max(means) if score[1] else min(means))
        seconds = evaluation_curve(setting, "seconds", runs.clock)
        row = [Cell(setting.name, setting.name), number(len(setting.runs)), number(main.moments[-1])]
        row += [spread_cell(main, score[0]), Cell(with_spread(main.values[top], score[0]), means[top])]
        row += [number(main.moments[top])]
        row += [spread_cell(evaluation_curve(setting, key, runs.clock), key) for key in others]
        rows.append([*row, number(seconds.values[-1].mean if seconds else None)])
    note = "Means over seeds ± 2σ. Best is the best mean along the way, judged on the same data it is shown for."
    return Table("results", "Results", tuple(columns), rows, note)


# -- what was run ---------------------------------------------------------------------------------------------------
def _facts(runs: Runs, number: int) -> list[tuple[str, list[str]]]:
    """What a directory says about itself: names, each with one or several values."""
    root = runs.roots[number]
    mine = [run for run in runs.all if run.root is root]
    config, environment = root.config, _environment(root)
    trained = [run.config for run in mine if "method" in run.config]
    facts: list[tuple[str, list[str]]] = []
    if "experiment" in config:
        facts.append(("experiment", [f"{config['experiment']}, {config.get('scale', '')} scale"]))
    for key in ("data", "model", "method"):
        tables = [one[key] for one in trained if isinstance(one.get(key), Mapping)]
        facts.append((key, list(dict.fromkeys(map(_describe, tables)))))
    facts.append(("seeds", [", ".join(map(str, sorted({run.seed for run in mine if run.seed is not None})))]))
    for key in ("epochs", "batch_size", "dtype"):
        facts.append((key.replace("_", " "), list(dict.fromkeys(_value(one[key]) for one in trained if key in one))))
    if isinstance(config.get("settings"), Mapping):
        facts.append(("settings", [_describe(config["settings"])]))
    facts += [(key, [str(environment[key])]) for key in ("device", "torch", "started") if environment.get(key)]
    if isinstance(environment.get("command"), list):
        facts.append(("command", [" ".join(_basename(str(part)) for part in environment["command"])]))
    facts.append(("directory", [str(root.path)]))
    return [(key, values) for key, values in facts if any(values)]


def _environment(root: RunDirectory) -> Mapping[str, Any]:
    """What a run was made with; of a group without a word, the first that was found inside."""
    inside = (root, *root.members(), *root.runs())
    return next((found for run in inside if (found := run.environment)), {})


def _describe(table: Mapping[str, Any]) -> str:
    """A table of the configuration in a line, without what is off."""
    rest = [
        f"{key.replace('_', ' ')} {_value(value, '×' if key == 'hidden' else ', ')}"
        for key, value in table.items()
        if key not in ("name", "dir") and value not in (0, 0.0, "", False, None, []) and not isinstance(value, Mapping)
    ]
    return ", ".join([*([str(table["name"])] if "name" in table else []), *rest])


def _value(value: Any, between: str = ", ") -> str:
    if isinstance(value, list):
        text = between.join(_value(item) for item in value)
        return text if between == "×" else f"[{text}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _basename(part: str) -> str:
    """The program's name without its folder."""
    return part.rsplit("/", 1)[-1] if part.endswith("/gramscope") else part


def _progress(runs: Runs) -> str:
    """How far the slowest and the fastest run are."""
    last = [run.moment(run.evaluations[-1]["step"]) for run in runs.all if run.evaluations]
    if not last:
        return ""
    ends = f"{min(last):g}" if min(last) == max(last) else f"{min(last):g} to {max(last):g}"
    return f"{runs.clock} {ends}"


def _pictures(runs: Runs) -> list[Picture]:
    """Figures that others (an experiment) wrote into the runs' folders."""
    found, left = [], PICTURE_BYTES
    for root in runs.roots:
        for path in sorted((root.path / FIGURES).glob("*.png")):
            size = path.stat().st_size
            if path.name.startswith(OWN_FIGURE) or size > left:
                continue
            left -= size
            found.append(Picture(path.stem, "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()))
    return found


# -- tables ---------------------------------------------------------------------------------------------------------
def _runs_table(runs: Runs) -> Table:
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
    names = ["run", "setting", "seed", "state", runs.clock, *map(_readable, keys), "seconds", "note"]
    return Table("runs", "Every run", tuple(names), rows)


def _layer_table(runs: Runs) -> Table:
    columns, rows = last_measurements(runs)
    cells = [[Cell(str(row[0]), str(row[0])), Cell(str(row[1]), str(row[1])), *map(number, row[2:])] for row in rows]
    names = tuple(word(name).label if i > 1 else name for i, name in enumerate(columns))
    note = "Last measurement, means over seeds."
    return Table("layers", "Every layer", names, cells, note)


def _other_records(runs: Runs) -> Iterable[Table]:
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


# -- text -----------------------------------------------------------------------------------------------------------
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


def _readable(key: str) -> str:
    part, _, what = key.rpartition("_")
    return f"{PARTS.get(part, part).lower()} {what}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
