"""The summary: what was run, the outcome, and which claims hold."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramscope_lab.report.headline import headline
from gramscope_lab.report.loaded_runs import Run, Runs, decisive, value_text
from gramscope_lab.report.measure_texts import readable
from gramscope_lab.report.run_files import is_inside, read_config, read_environment
from gramscope_lab.report.seed_statistics import evaluation_curve
from gramscope_lab.report.tables import (
    Table,
    layer_table,
    main_score,
    other_records,
    plural,
    results_table,
    runs_table,
    with_spread,
)
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import read_file

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
    """Everything above and below the panels.

    ``problems`` says what could not be read; ``pictures`` are the PNG files of the runs' folders, name -> data address.
    """

    title: str
    headline: str
    problems: list[str]
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
    claims = _claims(runs)
    cards = [Card("runs", str(len(runs.all)), plural(len(runs.settings), "setting"))] if runs.all else []
    cards += _best_card(runs)
    if claims:
        held = sum(claim["holds"] is True for claim in claims)
        undecided = sum(claim["holds"] not in (True, False) for claim in claims)
        cards.append(Card("claims that hold", f"{held} of {len(claims)}", f"{undecided} open" if undecided else ""))
    cards.append(Card("state", runs.status, _progress(runs)))
    return Overview(
        ", ".join(root.name for root in runs.roots),
        headline(runs),
        runs.problems,
        runs.status,
        cards,
        claims,
        [(root.name, _facts(runs, number)) for number, root in enumerate(runs.roots)],
        results_table(runs),
        _pictures(runs),
        [table for table in (runs_table(runs), layer_table(runs), *other_records(runs)) if table.rows],
    )


def _claims(runs: Runs) -> list[dict[str, Any]]:
    """The claims of experiments, with every field."""
    texts = ("claim", "published", "measured", "reason")
    return [
        {**{key: str(record.get(key) or "") for key in texts}, "holds": record.get("holds")}
        for record in runs.records("claim")
    ]


def _best_card(runs: Runs) -> list[Card]:
    """The best last value, if anything was evaluated."""
    score = main_score(runs)
    if score is None:
        return []
    key, more = score
    found = [(setting.name, evaluation_curve(setting, key, runs.clock)) for setting in runs.settings]
    ends = [(curve.values[-1], name) for name, curve in found if curve]
    value, name = (max if more else min)(ends, key=lambda end: end[0].mean)
    best = "best " if len(ends) > 1 else ""
    return [Card(f"{best}{readable(key)}, last value", with_spread(value, key), name)]


# -- what was run ---------------------------------------------------------------------------------------------------
def _facts(runs: Runs, number: int) -> list[tuple[str, list[str]]]:
    """Facts about a directory: names, each with one or several values."""
    root = runs.roots[number]
    mine = [run for run in runs.all if run.root is root]
    config, environment = read_config(root, []), _environment(root)
    trained = [run.config for run in mine if "method" in run.config]
    facts: list[tuple[str, list[str]]] = []
    if "experiment" in config:
        facts.append(("experiment", [f"{config['experiment']}, {config.get('scale', '')} scale"]))
    for key in ("data", "model", "method"):
        tables = [one[key] for one in trained if isinstance(one.get(key), Mapping)]
        facts.append((key, list(dict.fromkeys(map(_describe, tables)))))
    facts.append(("training loop", list(dict.fromkeys(_own_loop(run) for run in mine if "method" not in run.config))))
    settings = (decisive(run.config) for run in mine if run.monitored)
    facts.append(("configuration", list(dict.fromkeys(map(_describe, settings)))))
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


def _own_loop(run: Run) -> str:
    """What is known about a run without a training configuration."""
    steps = [record["step"] for record in (*run.measurements, *run.evaluations)]
    source = "your own, watched by gs.Monitor" if run.monitored else "unknown: records without a configuration"
    found = f"steps {min(steps)} to {max(steps)}, {plural(len(run.by_layer), 'layer')} measured"
    return f"{source}; {found}"


def _environment(root: RunDirectory) -> Mapping[str, Any]:
    """The environment of a run; of a group without one, that of its first member that has one."""
    inside = (root, *root.members(), *root.runs())
    found = (read_environment(run, []) for run in inside if is_inside(run.path, root.path))
    return next((environment for environment in found if environment), {})


def _describe(table: Mapping[str, Any]) -> str:
    """A table of the configuration in one line, without options that are off and switches of single layers."""
    rest = [
        key.replace("_", " ") + ("" if value is True else f" {value_text(key, value)}")
        for key, value in table.items()
        if key not in ("name", "dir") and value not in (0, 0.0, "", False, None, []) and not isinstance(value, Mapping)
        if not (isinstance(value, list) and all(isinstance(item, bool) for item in value))
    ]
    return ", ".join([*([str(table["name"])] if "name" in table else []), *rest])


def _basename(part: str) -> str:
    """The program's name without its folder."""
    return "gramscope" if part.endswith(("/gramscope", "/gramscope/__main__.py")) else part


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
        for path in root.figures(".png"):
            if path.name.startswith(OWN_FIGURE):
                continue
            size = path.stat().st_size
            if size > left:
                continue
            left -= size
            found[path.stem] = "data:image/png;base64," + base64.b64encode(read_file(path, size)).decode()
    return found
