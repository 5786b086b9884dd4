"""The summary in words and numbers: the outcome, which claims hold, what was run, and tables."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramscope_lab.report.read import Curve, Runs, decisive, evaluated_keys, key_text, readable, value_text
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import CONFIG, ENVIRONMENT, read_file
from gramscope_lab.spread import FEW, Spread

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
        found = _course(curves, key, runs.clock) if len(curves) == 1 else _comparison(curves, key, runs.clock)
    elif runs.claims:
        held = sum(claim.get("holds") is True for claim in runs.claims)
        found = [f"Of {plural(len(runs.claims), 'claim')} {held} {'holds' if held == 1 else 'hold'}."]
    else:
        found = [f"{plural(len(runs.all) + len(runs.others), 'run')} without evaluations of a net."]
    best = _ranked({name: curve.values[-1] for name, curve in curves.items()}, key)[:1]
    return [*found, *_linearity(runs), *_alignment(runs, best)]


def _course(curves: Mapping[str, Curve], key: str, clock: str) -> list[str]:
    """Where one setting begins and ends."""
    ((name, curve),) = curves.items()
    first, last = curve.values[0], curve.values[-1]
    end = f"{with_spread(last, key)} at {clock} {curve.times[-1]:g} ({plural(last.count, 'seed')})"
    start = f"{_number(first.mean, key)} at {clock} {curve.times[0]:g}"
    return [f"The {key_text(key)} of {name} goes from {start} to {end}."]


def _comparison(curves: Mapping[str, Curve], key: str, clock: str) -> list[str]:
    """Who is ahead early, where that is clear, and where everybody ends."""
    ends = {name: curve.values[-1] for name, curve in curves.items()}
    time = max(curve.times[-1] for curve in curves.values())
    seeds = plural(max(value.count for value in ends.values()), "seed")
    ranked = _ranked(ends, key)
    found = [*_lead(curves, key, clock), f"At the end ({clock} {time:g}, {seeds}) {_listed(ends, key)}."]
    rivals = [name for name in ranked[1:] if not _apart(ends[ranked[0]], ends[name])]
    if rivals:
        found.append(f"The spread over seeds of {_several(rivals)} overlaps with that of {ranked[0]}.")
    return found


def _lead(curves: Mapping[str, Curve], key: str, clock: str) -> list[str]:
    """The first time at which the best setting is half as far ahead as it ever is, if its spread is then apart."""
    common = sorted(set.intersection(*(set(curve.steps) for curve in curves.values())) - {0})[:-1]
    at = {step: {name: curve.by_step[step] for name, curve in curves.items()} for step in common}
    leads = {step: abs(at[step][a].mean - at[step][b].mean) for step in common for a, b in [_ranked(at[step], key)[:2]]}
    step = next((step for step in common if leads[step] >= max(leads.values()) / 2), None)
    if step is None:
        return []
    leader, *others = _ranked(at[step], key)
    if not all(_apart(at[step][leader], at[step][other]) for other in others):
        return []
    time = curves[leader].times[curves[leader].steps.index(step)]
    return [f"After {time:g} {clock if time == 1 else f'{clock}s'} {_listed(at[step], key)}."]


def _listed(values: Mapping[str, Spread], key: str) -> str:
    """``vcl has test accuracy 95 %, sgd 94 %``, the best first."""
    first, *others = _ranked(values, key)
    rest = _several([f"{name} {_number(values[name].mean, key)}" for name in others])
    return f"{first} has {key_text(key)} {_number(values[first].mean, key)}, {rest}"


def _ranked(values: Mapping[str, Spread], key: str) -> list[str]:
    """Names by their means, the best first."""
    return sorted(values, key=lambda name: values[name].mean, reverse=key.endswith("accuracy"))


def _apart(a: Spread, b: Spread) -> bool:
    """Whether the spreads of two values do not overlap."""
    return a.low > b.high or b.low > a.high


def _linearity(runs: Runs) -> list[str]:
    """How linear the task became at the last layer that was measured."""
    layer = next(reversed(runs.measures.get("target_linearity", [])), "")
    ends: dict[str, tuple[float, float]] = {}
    nulls = []
    for setting in runs.settings:
        curve, null = (setting.curve(f"target_linearity{key}", layer, runs.clock) for key in ("", "_null"))
        if curve:
            ends[setting.name] = curve.values[0].mean, curve.values[-1].mean
            nulls += [null.values[-1].mean] if null else []
    if not ends:
        return []
    rose = all(end > start for start, end in ends.values())
    course = _several([f"{start:.2f} to {end:.2f} with {name}" for name, (start, end) in ends.items()])
    null = f"; random features would give {max(nulls):.2f}" if nulls else ""
    what = "the task became more linear: its" if rose else "the task's"
    return [f"Seen from {layer}, {what} target linearity went from {course}{null}."]


def _alignment(runs: Runs, best: Sequence[str]) -> list[str]:
    """The layer that stands out from the null of the ansatz most; who ends ``best`` is named if another one leads there."""
    above: dict[str, dict[str, float]] = {}
    for setting in runs.settings:
        for layer in runs.measures.get("nfa_null", []):
            nfa, null = (setting.curve(key, layer, runs.clock) for key in ("nfa", "nfa_null"))
            if nfa and null:
                above.setdefault(layer, {})[setting.name] = nfa.values[-1].mean - null.values[-1].mean
    if not above:
        return []
    layer = max(above, key=lambda layer: max(above[layer].values()))
    ranked = sorted(above[layer].items(), key=lambda pair: -pair[1])
    distance = _several([f"{value:+.2f} with {name}" for name, value in ranked])
    rest = "".join(f"; the best net at the end is that of {name}" for name in best if name != ranked[0][0])
    what = f"The weights of {layer} agree with what the output depends on, relative to chance (nfa − null)"
    return [f"{what}: {distance}{rest}."]


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
    note = f"Means over seeds with ± 2σ, of fewer than {FEW} seeds with their range." if several else ""
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
    """Facts about a directory: names, each with one or several values."""
    mine = [run for run in runs.all if run.root is root]
    group = not any(run.directory.path == root.path for run in mine)
    config = readable(CONFIG, lambda: root.config, {}, []) if group else mine[0].config
    above = [root, *root.members()] if group else []
    environments = [_environment(run) for run in above]
    environment: Mapping[str, Any] = next(filter(None, [*environments, *(run.environment for run in mine)]), {})
    trained = [run.config for run in mine if "method" in run.config]
    found: list[tuple[str, Iterable[str]]] = []
    if "experiment" in config:
        found.append(("experiment", [f"{config['experiment']}, {config.get('scale', '')} scale"]))
    for key in ("data", "model", "method"):
        found.append((key, [_describe(one[key]) for one in trained if isinstance(one.get(key), Mapping)]))
    found.append(("training loop", ["your own, watched by gs.Monitor" for run in mine if run.monitored]))
    found.append(("configuration", [_describe(decisive(run.config)) for run in mine if run.monitored]))
    found.append(("seeds", [", ".join(map(str, sorted({run.seed for run in mine if run.seed is not None})))]))
    for key in ("epochs", "batch_size", "dtype"):
        found.append((key.replace("_", " "), [value_text(key, one[key]) for one in trained if key in one]))
    if isinstance(config.get("settings"), Mapping):
        found.append(("settings", [_describe(config["settings"])]))
    found += [(key, [str(environment[key])]) for key in ("device", "torch", "started") if environment.get(key)]
    if isinstance(environment.get("command"), list):
        program, *words = map(str, environment["command"]) if environment["command"] else [""]
        own = program.endswith(("/gramscope", "/gramscope_lab/__main__.py"))
        found.append(("command", [" ".join(["gramscope" if own else program, *words])]))
    found.append(("directory", [str(root.path)]))
    return [(key, values) for key, given in found if any(values := list(dict.fromkeys(given)))]


def _environment(run: RunDirectory) -> Mapping[str, Any]:
    found: Mapping[str, Any] = readable(ENVIRONMENT, lambda: run.environment, {}, [])
    return found


def _describe(table: Mapping[str, Any]) -> str:
    """A table of the configuration in one line, without options that are off and switches of single layers."""
    rest = [
        key.replace("_", " ") + ("" if value is True else f" {value_text(key, value)}")
        for key, value in table.items()
        if key not in ("name", "dir") and value not in (0, 0.0, "", False, None, []) and not isinstance(value, Mapping)
        if not (isinstance(value, list) and all(isinstance(item, bool) for item in value))
    ]
    return ", ".join([*([str(table["name"])] if "name" in table else []), *rest])


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
    """Mean and spread, ± 2σ or the range of few seeds; accuracies in per cent."""
    if value.count == 1:
        return _number(value.mean, key)
    if value.count < FEW:
        low, high = (_number(end, key).removesuffix(" %") for end in (value.least, value.largest))
        return f"{_number(value.mean, key)} ({low} to {high})"
    if key.endswith("accuracy"):
        return f"{100 * value.mean:.1f} ± {200 * value.deviation:.1f} %"
    return f"{_number(value.mean, key)} ± {2 * value.deviation:.2g}"


def plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
