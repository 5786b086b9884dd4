"""The summary in words and numbers: the outcome, which claims hold, what was run, and tables."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramscope_lab.report.read import Curve, Runs, decisive, evaluated_keys, key_text, readable, value_text
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import CONFIG, ENVIRONMENT, read_file
from gramscope_lab.spread import Spread

#: most settings whose values are all named, most rows of a table, and most bytes of pictures in a page
NAMED, ROWS, PICTURE_BYTES = 4, 300, 1_500_000


@dataclass(frozen=True)
class Table:
    """A sortable table; a cell is its text and the value by which it is sorted."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[tuple[str, float | str]]]
    note: str = ""


# -- in words -------------------------------------------------------------------------------------------------------
def sentences(runs: Runs) -> list[str]:
    """What was seen: where nets trained by each setting ended, and what their layers learned."""
    key = next(iter(evaluated_keys(runs)), "")  # test accuracy, else another accuracy, else a loss
    curves = {s.name: curve for s in runs.settings if (curve := s.curve(key, None, runs.clock))}
    if curves:
        found = _ends(curves, key, runs.clock)
    elif runs.claims:
        held = sum(claim.get("holds") is True for claim in runs.claims)
        found = [f"Of {plural(len(runs.claims), 'claim')} {held} {'holds' if held == 1 else 'hold'}."]
    else:
        found = [f"{plural(len(runs.all) + len(runs.others), 'run')} without evaluations of a net."]
    return [*found, *_linearity(runs), *_alignment(runs)]


def _ends(curves: Mapping[str, Curve], key: str, clock: str) -> list[str]:
    """Where every setting ends, and which ones cannot be told apart from the best."""
    ends = {name: curve.values[-1] for name, curve in curves.items()}
    time = max(curve.times[-1] for curve in curves.values())
    seeds = plural(max(value.count for value in ends.values()), "seed")
    first, *others = sorted(ends, key=lambda name: ends[name].mean, reverse=key.endswith("accuracy"))
    best = ends[first]
    rest = [f"{first} has {key_text(key)} {_number(best.mean, key)}"]
    rest += [f"{name} {_number(ends[name].mean, key)}" for name in others]
    found = [f"At the end ({clock} {time:g}, {seeds}) {_several(rest)}."]
    rivals = [name for name in others if best.least <= ends[name].largest and ends[name].least <= best.largest]
    if rivals:
        found.append(f"The spread over seeds of {_several(rivals)} overlaps with that of {first}.")
    return found


def _linearity(runs: Runs) -> list[str]:
    """How linear the task became at the last layer that was measured."""
    layer = next(reversed(runs.measures.get("target_linearity", [])), "")
    ends: dict[str, tuple[float, float]] = {}
    nulls = []
    for setting in runs.settings:
        found, null = (setting.curve(f"target_linearity{key}", layer, runs.clock) for key in ("", "_null"))
        if found:
            ends[setting.name] = found.values[0].mean, found.values[-1].mean
            nulls += [null.values[-1].mean] if null else []
    if not ends:
        return []
    rose = all(end > start for start, end in ends.values())
    course = _several([f"{start:.2f} to {end:.2f} with {name}" for name, (start, end) in ends.items()])
    beside = f"; targets that are noise would give {max(nulls):.2f}" if nulls else ""
    what = (
        "became easier to read by a linear map" if rose else "did not everywhere become easier to read by a linear map"
    )
    return [f"At the inputs of {layer} the targets {what}: target linearity went from {course}{beside}."]


def _alignment(runs: Runs) -> list[str]:
    """The layer of every setting whose alignment (NFA) ended farthest above its null."""
    most = []
    for setting in runs.settings:
        above: dict[str, tuple[float, float]] = {}
        for layer in runs.measures.get("nfa_null", []):
            nfa, null = (setting.curve(key, layer, runs.clock) for key in ("nfa", "nfa_null"))
            if nfa and null:
                above[layer] = nfa.values[0].mean - null.values[0].mean, nfa.values[-1].mean - null.values[-1].mean
        if above:
            layer = max(above, key=lambda name: above[name][1])
            start, end = above[layer]
            most.append(f"{layer} with {setting.name} ({start:.2f} to {end:.2f})")
    if not most:
        return []
    told = f"How far weights point where the output is sensitive, above chance, ended highest in {_several(most)}."
    return [told, "These numbers describe layers, they do not grade nets."]


def _several(parts: Sequence[str]) -> str:
    return ", ".join(parts if len(parts) <= NAMED else [*parts[:NAMED], f"and {len(parts) - NAMED} more"])


# -- numbers --------------------------------------------------------------------------------------------------------
def state(runs: Runs) -> str:
    """How many runs there are, how far they are, and how many claims hold."""
    parts = [f"{plural(len(runs.all), 'run')} of {plural(len(runs.settings), 'setting')}"] if runs.all else []
    last = [run.time(run.evaluations[-1]["step"]) for run in runs.all if run.evaluations]
    if last:
        parts.append(f"{runs.clock} " + " to ".join(dict.fromkeys(f"{end:g}" for end in (min(last), max(last)))))
    if claims := runs.claims:
        parts.append(f"{sum(claim.get('holds') is True for claim in claims)} of {plural(len(claims), 'claim')} hold")
    return " · ".join([runs.status, *parts])


def claims_table(runs: Runs) -> Table | None:
    """What was published, beside what these runs measured."""
    rows = []
    for claim in runs.claims:
        verdict = {"True": "✓ holds", "False": "✗ does not"}.get(str(claim.get("holds")), "? open")
        said = [claim.get(key) for key in ("claim", "published", "measured")]
        rows.append([cell(value) for value in (*said, verdict, claim.get("reason"))])
    return Table("Claims", ["claim", "published", "measured", "holds?", "remark"], rows) if rows else None


def results_table(runs: Runs) -> Table | None:
    """One row for each setting: its last values and the best one."""
    keys = evaluated_keys(runs)
    found = [(s, curve) for s in runs.settings if keys and (curve := s.curve(keys[0], None, runs.clock))]
    if not found:
        return None
    name = key_text(keys[0])
    columns = ["setting", f"{name}, last", f"{name}, best", f"reached at {runs.clock}"]
    columns += [*(f"{key_text(key)}, last" for key in keys[1:]), runs.clock, "seeds", "seconds"]
    rows = []
    for setting, main in found:
        means = [value.mean for value in main.values]
        top = means.index(max(means) if keys[0].endswith("accuracy") else min(means))
        row = [cell(setting.name), _last(main, keys[0]), _spread_cell(main.values[top], keys[0]), cell(main.times[top])]
        row += [_last(setting.curve(key, None, runs.clock), key) for key in keys[1:]]
        seconds = setting.curve("seconds", None, runs.clock)
        last = (main.times[-1], len(setting.runs), seconds.values[-1].mean if seconds else None)
        rows.append([*row, *map(cell, last)])
    several = any(len(setting.runs) > 1 for setting, _ in found)
    note = "Means over seeds with their range." if several else ""
    return _without_empty_columns(Table("Results", columns, rows, note))


def tables(runs: Runs) -> list[Table]:
    """Every run and every layer."""
    return [table for table in (_runs_table(runs), _layer_table(runs)) if table.rows]


def _runs_table(runs: Runs) -> Table:
    """One row for each run: its last values."""
    keys = evaluated_keys(runs)
    rows = []
    for setting in runs.settings:
        for run in setting.runs:
            last: dict[str, Any] = {}
            for record in run.evaluations:
                last |= {key: value for key, value in record.items() if value is not None}
            time = run.time(last["step"]) if "step" in last else None
            row = [run.name, setting.name, run.seed, run.status, time, *(last.get(key) for key in keys)]
            rows.append([cell(value) for value in (*row, last.get("seconds"))])
    names = ["run", "setting", "seed", "state", runs.clock, *map(key_text, keys), "seconds"]
    return _without_empty_columns(Table("Every run", names, rows))


def _layer_table(runs: Runs) -> Table:
    """One row for each setting and layer: its last measurement."""
    names = list(runs.measures)
    rows = []
    for setting in runs.settings:
        for layer in dict.fromkeys(layer for run in setting.runs for layer in run.by_layer):
            curves = [setting.curve(name, layer, runs.clock) for name in names]
            rows.append([cell(setting.name), cell(layer), *(cell(c.values[-1].mean if c else None) for c in curves)])
    columns = ["setting", "layer", *(name.replace("_", " ") for name in names)]
    return Table("Every layer", columns, rows, "Last measurement, means over seeds.")


def _without_empty_columns(table: Table) -> Table:
    kept = [i for i in range(len(table.columns)) if any(row[i][0] for row in table.rows)]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.title, [table.columns[i] for i in kept], rows, table.note)


# -- what was run ---------------------------------------------------------------------------------------------------
def facts(runs: Runs, root: RunDirectory) -> list[tuple[str, list[str]]]:
    """Facts about a directory: the configuration of its runs, and how they were run; each fact with its different values."""
    mine = [run for run in (*runs.all, *runs.others) if run.root is root]
    found: dict[str, dict[str, None]] = {}
    for config in (readable(CONFIG, lambda: root.config, {}, []), *(run.config for run in mine)):
        for key, value in decisive(config).items():
            if value not in (0, "", False, None, []) and key.split(".")[0] not in ("part", "sweep"):
                text = value_text(key.rsplit(".", 1)[-1], value)
                found.setdefault(key.removesuffix(".name").replace("_", " "), {})[text] = None
    environments = [readable(ENVIRONMENT, lambda: root.environment, {}, []), *(run.environment for run in mine)]
    environment: Mapping[str, Any] = next(filter(None, environments), {})
    seeds = ", ".join(map(str, sorted({run.seed for run in mine if run.seed is not None})))
    if any(run.monitored for run in mine):
        found["training loop"] = {"your own, watched by gs.Monitor": None}
    rest = {"seeds": seeds, **{key: environment.get(key) for key in ("device", "torch", "started")}}
    if isinstance(environment.get("command"), list):
        rest["command"] = " ".join(map(str, environment["command"]))
    known = {**rest, "directory": root.path}
    return [(key, list(values)) for key, values in found.items()] + [(k, [str(v)]) for k, v in known.items() if v]


def pictures(runs: Runs) -> dict[str, str]:
    """Figures that an experiment wrote into the runs' folders, name -> data address."""
    found, left = {}, PICTURE_BYTES
    for path in (path for root in runs.roots for path in root.figures(".png")):
        size = path.stat().st_size
        if size <= left:
            left -= size
            found[path.stem] = "data:image/png;base64," + base64.b64encode(read_file(path)).decode()
    return found


# -- text -----------------------------------------------------------------------------------------------------------
def cell(value: Any) -> tuple[str, float | str]:
    """The text of a value, numbers with four significant digits, and the value to sort by."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "", ""
    if isinstance(value, bool):
        return "yes" if value else "no", float(value)
    if isinstance(value, float):
        return f"{value:g}" if value.is_integer() else f"{value:#.4g}".removesuffix("."), value
    return str(value), float(value) if isinstance(value, int) else str(value)


def _last(curve: Curve, key: str) -> tuple[str, float | str]:
    return _spread_cell(curve.values[-1], key) if curve else ("", "")


def _spread_cell(value: Spread, key: str) -> tuple[str, float | str]:
    """A value with its spread; its lines break only before a range."""
    return with_spread(value, key).replace(" ", "\u00a0").replace("\u00a0(", " ("), value.mean


def _number(value: float, key: str) -> str:
    return f"{100 * value:.1f} %" if key.endswith("accuracy") else f"{value:#.3g}".removesuffix(".")


def with_spread(value: Spread, key: str) -> str:
    """Mean and range over seeds; accuracies in per cent."""
    if value.count == 1:
        return _number(value.mean, key)
    low, high = (_number(end, key).removesuffix(" %") for end in (value.least, value.largest))
    return f"{_number(value.mean, key)} ({low} to {high})"


def plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
