"""The summary: what was run, the outcome, and which claims hold."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramscope.report.loaded_runs import Runs, Setting, value_text
from gramscope.report.measure_texts import readable
from gramscope.report.seed_statistics import Curve, evaluation_curve
from gramscope.report.tables import (
    Table,
    layer_table,
    main_score,
    other_records,
    plural,
    results_table,
    runs_table,
    with_spread,
)
from gramscope.runs.directory import FIGURES, RunDirectory

#: static figures of the report itself start with this; other pictures in a run's folder are shown
OWN_FIGURE = "panel-"
#: bytes of pictures embedded in a page
PICTURE_BYTES = 1_500_000


@dataclass(frozen=True)
class Card:
    """One of the large numbers at the top of the page."""

    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Overview:
    """Everything above and below the panels. ``pictures`` are the PNG files of the runs' folders, name -> data address."""

    title: str
    headline: str
    status: str
    cards: list[Card]
    claims: Sequence[Mapping[str, Any]]
    facts: list[tuple[str, list[tuple[str, list[str]]]]]
    results: Table | None
    pictures: dict[str, str]
    tables: list[Table]

    @property
    def all_tables(self) -> list[Table]:
        """The results and every other table."""
        return [*([self.results] if self.results else []), *self.tables]


def overview(runs: Runs) -> Overview:
    """Summarise runs."""
    claims = runs.records("claim")
    cards = [Card("runs", str(len(runs.all)), plural(len(runs.settings), "setting"))] if runs.all else []
    best = _best(runs)
    if best is not None:
        setting, curve, key = best
        cards.append(Card(f"best {readable(key)}", with_spread(curve.values[-1], key), setting.name))
    if claims:
        undecided = sum(claim.get("holds") is None for claim in claims)
        cards.append(Card("claims that hold", _held(claims), f"{undecided} open" if undecided else ""))
    cards.append(Card("state", runs.status, _progress(runs)))
    return Overview(
        ", ".join(root.name for root in runs.roots),
        _headline(runs, best),
        runs.status,
        cards,
        claims,
        [(root.name, _facts(runs, number)) for number, root in enumerate(runs.roots)],
        results_table(runs),
        _pictures(runs),
        [table for table in (runs_table(runs), layer_table(runs), *other_records(runs)) if table.rows],
    )


# -- the outcome ----------------------------------------------------------------------------------------------------
def _held(claims: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(claim.get('holds') is True for claim in claims)} of {len(claims)}"


def _best(runs: Runs) -> tuple[Setting, Curve, str] | None:
    """The setting with the best last value, its curve and the key that was compared."""
    score = main_score(runs)
    if score is None:
        return None
    found = [(setting, evaluation_curve(setting, score[0], runs.clock)) for setting in runs.settings]
    ranked = [(setting, curve) for setting, curve in found if curve]
    pick = max if score[1] else min
    setting, curve = pick(ranked, key=lambda item: item[1].values[-1].mean)
    return setting, curve, score[0]


def _headline(runs: Runs, best: tuple[Setting, Curve, str] | None) -> str:
    if best is None:
        claims = runs.records("claim")
        if claims:
            return f"Claims that hold: {_held(claims)}."
        return f"{plural(len(runs.all) + len(runs.others), 'run')} without evaluations of a net."
    setting, curve, key = best
    seeds = plural(curve.values[-1].count, "seed")
    outcome = f"{readable(key)} {with_spread(curve.values[-1], key)} at {runs.clock} {curve.times[-1]:g} ({seeds})"
    if len(runs.settings) == 1:
        return f"{setting.name} has {outcome}."
    return f"Of {len(runs.settings)} settings {setting.name} ends best: {outcome}{_rivals(runs, setting, curve, key)}."


def _rivals(runs: Runs, best: Setting, curve: Curve, key: str) -> str:
    """The settings whose mean ± 2σ overlaps with that of the best."""
    top, close = curve.values[-1], []
    for setting in runs.settings:
        found = evaluation_curve(setting, key, runs.clock)
        if setting is not best and found and found.values[-1].high >= top.low and found.values[-1].low <= top.high:
            close.append(setting.name)
    if not close or top.deviation is None:
        return ""
    names = " and ".join(close) if len(close) < 3 else f"{len(close)} others"
    return f"; the ± 2σ range of {names} overlaps with it"


# -- what was run ---------------------------------------------------------------------------------------------------
def _facts(runs: Runs, number: int) -> list[tuple[str, list[str]]]:
    """Facts about a directory: names, each with one or several values."""
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
        values = dict.fromkeys(value_text(key, one[key]) for one in trained if key in one)
        facts.append((key.replace("_", " "), list(values)))
    if isinstance(config.get("settings"), Mapping):
        facts.append(("settings", [_describe(config["settings"])]))
    facts += [(key, [str(environment[key])]) for key in ("device", "torch", "started") if environment.get(key)]
    if isinstance(environment.get("command"), list):
        facts.append(("command", [" ".join(_basename(str(part)) for part in environment["command"])]))
    facts.append(("directory", [str(root.path)]))
    return [(key, values) for key, values in facts if any(values)]


def _environment(root: RunDirectory) -> Mapping[str, Any]:
    """The environment of a run; of a group without one, that of its first member that has one."""
    inside = (root, *root.members(), *root.runs())
    return next((found for run in inside if (found := run.environment)), {})


def _describe(table: Mapping[str, Any]) -> str:
    """A table of the configuration in one line, without options that are off."""
    rest = [
        f"{key.replace('_', ' ')} {value_text(key, value)}"
        for key, value in table.items()
        if key not in ("name", "dir") and value not in (0, 0.0, "", False, None, []) and not isinstance(value, Mapping)
    ]
    return ", ".join([*([str(table["name"])] if "name" in table else []), *rest])


def _basename(part: str) -> str:
    """The program's name without its folder."""
    return part.rsplit("/", 1)[-1] if part.endswith("/gramscope") else part


def _progress(runs: Runs) -> str:
    """How far the slowest and the fastest run are."""
    last = [run.time(run.evaluations[-1]["step"]) for run in runs.all if run.evaluations]
    if not last:
        return ""
    ends = f"{min(last):g}" if min(last) == max(last) else f"{min(last):g} to {max(last):g}"
    return f"{runs.clock} {ends}"


def _pictures(runs: Runs) -> dict[str, str]:
    """Figures that an experiment wrote into the runs' folders, name -> data address."""
    found, left = {}, PICTURE_BYTES
    for root in runs.roots:
        for path in sorted((root.path / FIGURES).glob("*.png")):
            size = path.stat().st_size
            if path.name.startswith(OWN_FIGURE) or size > left:
                continue
            left -= size
            found[path.stem] = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return found
