"""Run directories, read once: records by layer, and runs that differ by the seed alone sorted into settings.

What is damaged is left out and named, never raised. :class:`~gramscope_lab.runs.directory.RunDirectory` follows no links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from gramscope.errors import GramscopeError, InputError
from gramscope.names import printable
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import CONFIG, ENVIRONMENT, RECORDS
from gramscope_lab.runs.records import Record
from gramscope_lab.spread import Spread, spread

if TYPE_CHECKING:
    pass

#: parts of the data on which a net is evaluated
PARTS = {
    "test": "Test",
    "validation": "Validation",
    "train": "Training",
    "batch": "Training batches",
    "monitored": "Monitored sample",
}
#: larger numbers are left out: their squares would overflow
LARGEST = 1e150
#: configuration keys that say how a run was executed, not what was run
_INCIDENTAL = frozenset(
    {"seed", "seeds", "parallel", "execution", "device", "keep", "checkpoint_every", "evaluate_every", "data.dir"}
)
#: keys of a measurement that are not measures
_HEAD = frozenset({"kind", "step", "epoch", "method", "seed", "lr", "gamma", "layer", "run", "seconds"})
#: names of layers and measures return in every record
_shown = lru_cache(maxsize=100_000)(printable)


# -- runs -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Run:
    """One run; what a monitor recorded in a loop of the user's own counts as evaluations and measurements.

    Args:
        directory: where it is.
        root: the directory given to the report: the run itself, or a group that contains it.
        config, environment: what it was made with; empty where that is not known.
        evaluations: records of the whole net, by step.
        by_layer: the measurements of each layer by step, layers in order of appearance.
        claims: of an experiment.
        monitored: whether it was recorded by a monitor.
        status: ``running``, ``finished``, ``stopped``, ``recorded``, ``new`` or ``damaged``.
        problems: sentences about what could not be read.
    """

    directory: RunDirectory
    root: RunDirectory
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    evaluations: list[Record]
    by_layer: dict[str, list[Record]]
    claims: list[Record]
    monitored: bool
    status: str
    problems: list[str]

    @cached_property
    def name(self) -> str:
        """Its path below the group, or the directory's name."""
        if self.directory.path == self.root.path:
            return _shown(self.root.name)
        return _shown(f"{self.root.name}/{self.directory.path.relative_to(self.root.path).as_posix()}")

    @cached_property
    def measures(self) -> dict[str, list[str]]:
        """Layers with at least one number, for each measure, both in order of appearance."""
        found: dict[str, dict[str, None]] = {}
        for layer, records in self.by_layer.items():
            for record in records:
                for key, value in record.items():
                    if key not in _HEAD and is_number(value):
                        found.setdefault(key, {})[layer] = None
        return {name: list(layers) for name, layers in found.items()}

    @property
    def seed(self) -> int | None:
        """The seed, where it is known."""
        seeds = self.config.get("seeds", self.config.get("seed"))
        seed = seeds[0] if isinstance(seeds, list) and len(seeds) == 1 else seeds
        return seed if isinstance(seed, int) else None

    @cached_property
    def epochs(self) -> dict[int, float]:
        """The epoch of each recorded step; empty where epochs are not known."""
        records = (record for rows in (self.evaluations, *self.by_layer.values()) for record in rows)
        return {record["step"]: float(record["epoch"]) for record in records if "epoch" in record}

    def time(self, step: int) -> float:
        """The epoch of a step, or the step itself where epochs are not known."""
        if step in self.epochs or not self.epochs:
            return self.epochs.get(step, float(step))
        last = max(self.epochs)
        return step * self.epochs[last] / last if last else float(step)


@dataclass(frozen=True)
class Curve:
    """A value over training: steps, the time of each (epoch, step or seconds) and the spread over seeds."""

    steps: list[int]
    times: list[float]
    values: list[Spread]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @cached_property
    def by_step(self) -> dict[int, Spread]:
        """The spread at each step."""
        return dict(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True)
class Setting:
    """Runs that differ by the seed alone. ``index`` decides the colour."""

    name: str
    index: int
    runs: tuple[Run, ...]
    _curves: dict[tuple[str, str | None, str], Curve] = field(default_factory=dict, repr=False, compare=False)

    def curve(self, key: str, layer: str | None, clock: str) -> Curve:
        """A value of a layer, or of the whole net, over training; ``clock`` is epoch, step or seconds."""
        if (key, layer, clock) not in self._curves:
            self._curves[key, layer, clock] = _curve(self.runs, key, layer, clock)
        return self._curves[key, layer, clock]


def _curve(runs: Sequence[Run], key: str, layer: str | None, clock: str) -> Curve:
    values: dict[int, list[float]] = {}
    times: dict[int, list[float]] = {}
    for run in runs:
        for record in run.evaluations if layer is None else run.by_layer.get(layer, []):
            value, step = record.get(key), record["step"]
            time = record.get("seconds") if clock == "seconds" else run.time(step) if clock == "epoch" else step
            if is_number(value) and is_number(time):
                values.setdefault(step, []).append(float(value))
                times.setdefault(step, []).append(float(time))
    steps = sorted(values)
    spreads = [found for step in steps if (found := spread(values[step])) is not None]
    return Curve(steps, [math.fsum(times[step]) / len(times[step]) for step in steps], spreads)


@dataclass(frozen=True)
class Runs:
    """Everything the report is made from.

    Args:
        roots: the directories that were given.
        settings: the runs in which nets were trained, evaluated or measured.
        others: other runs: claims and computations of an experiment.
    """

    roots: tuple[RunDirectory, ...]
    settings: tuple[Setting, ...]
    others: tuple[Run, ...] = ()

    @cached_property
    def all(self) -> list[Run]:
        """Every run of a setting."""
        return [run for setting in self.settings for run in setting.runs]

    @cached_property
    def clock(self) -> str:
        """The unit of time: epochs if every run with records has them."""
        recorded = [run for run in self.all if run.evaluations or run.by_layer]
        return "epoch" if recorded and all(run.epochs for run in recorded) else "step"

    @cached_property
    def status(self) -> str:
        """The worst state of all runs."""
        found = {run.status for run in (*self.all, *self.others)}
        if any(root.lock.held_by_other() for root in self.roots):
            return "running"
        return next(
            (name for name in ("running", "damaged", "stopped", "new", "recorded") if name in found), "finished"
        )

    @property
    def problems(self) -> list[str]:
        """Sentences about everything that could not be read."""
        return [f"{run.name}: {problem}" for run in (*self.all, *self.others) for problem in run.problems]

    @cached_property
    def measures(self) -> dict[str, list[str]]:
        """Layers with at least one number, for each measure, both in order of appearance."""
        found: dict[str, dict[str, None]] = {}
        for run in self.all:
            for name, layers in run.measures.items():
                found.setdefault(name, {}).update(dict.fromkeys(layers))
        return {name: list(layers) for name, layers in found.items()}

    @property
    def claims(self) -> list[Record]:
        """The claims of experiments."""
        return [claim for run in (*self.all, *self.others) for claim in run.claims]


def read_runs(paths: Sequence[Path | str]) -> Runs:
    """Read runs and groups of runs, and sort their single runs into settings."""
    if not paths:
        raise InputError("name at least one run directory")
    roots = tuple(RunDirectory.open(path) for path in paths)
    groups: dict[tuple[int, str], list[Run]] = {}
    others = []
    for number, root in enumerate(roots):
        for directory in root.runs():
            run = _read_run(directory, root)
            if not ("method" in run.config or run.evaluations or run.by_layer):
                others.append(run)
                continue
            key = repr(decisive(run.config)) if {"method", "seed"} & run.config.keys() else run.name
            groups.setdefault((number, key), []).append(run)
    names = _names([runs[0] for runs in groups.values()])
    settings = zip(names, groups.values(), strict=True)
    found = tuple(Setting(name, index, tuple(runs)) for index, (name, runs) in enumerate(settings))
    return Runs(roots, found, tuple(others))


def spread_sentence(runs: Runs) -> str:
    """What bands and error bars show."""
    counts = sorted({len(setting.runs) for setting in runs.settings})
    if not counts or counts[-1] == 1:
        return "There is one seed, so no spread is shown."
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    return f"{seeds}: bands and bars show the range of the values, from the least to the largest."


# -- one directory --------------------------------------------------------------------------------------------------
def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a recorded value is a finite number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _read_run(directory: RunDirectory, root: RunDirectory) -> Run:
    problems: list[str] = []
    config = readable(CONFIG, lambda: directory.config, {}, problems)
    environment = readable(ENVIRONMENT, lambda: directory.environment, {}, problems)
    evaluations, by_layer, claims, monitored = readable(
        RECORDS, lambda: _sorted_records(directory, problems), ([], {}, [], False), problems
    )
    status = "damaged" if problems else readable("", directory.status, "damaged", problems)
    return Run(directory, root, config, environment, evaluations, by_layer, claims, monitored, status, problems)


def readable(name: str, load: Callable[[], Any], default: Any, problems: list[str]) -> Any:
    """What ``load`` reads, all texts as they can be shown; ``default``, with a sentence in ``problems``, where it cannot."""
    try:
        return _spelled_out(load())
    except (GramscopeError, OSError, TypeError, ValueError, RecursionError) as error:
        problems.append(_shown(f"{name}: {error}"))
        return default


def _spelled_out(value: Any) -> Any:
    if isinstance(value, str):
        return _shown(value)
    if isinstance(value, dict):
        return {_shown(str(key)): _spelled_out(item) for key, item in value.items()}
    return [_spelled_out(item) for item in value] if isinstance(value, list) else value


def _sorted_records(
    directory: RunDirectory, problems: list[str]
) -> tuple[list[Record], dict[str, list[Record]], list[Record], bool]:
    """Evaluations, measurements by layer, claims, and whether a monitor wrote them; what cannot be used is named."""
    evaluations, by_layer, claims = [], dict[str, list[Record]](), []
    left_out: Counter[str] = Counter()
    monitored = False
    for record in map(_spelled_out, directory.iter_records(damaged=problems)):
        kind, layers, network = record.get("kind"), record.get("layers", {}), record.get("network", {})
        if kind == "claim":
            claims.append(_scalars(record, left_out))
        elif not isinstance(layers, dict) or not isinstance(network, dict):
            left_out["records whose 'layers' is not a table"] += 1
        elif kind in ("evaluation", "measurement") or layers or network:
            step, layer = record.get("step"), record.get("layer")
            if not is_number(step) or step != int(step) or not 0 <= step < 2**53:
                left_out["records without a step, a whole number from 0"] += 1
            elif kind == "evaluation":
                evaluations.append(_scalars(record, left_out) | {"step": int(step)})
            elif kind == "measurement" and isinstance(layer, str):
                by_layer.setdefault(layer, []).append(_scalars(record, left_out) | {"step": int(step)})
            elif kind == "measurement":
                left_out["measurements without the name of a layer"] += 1
            else:
                monitored = True
                values = {
                    f"monitored_{k}": v for k, v in _scalars(network, left_out).items() if k in ("loss", "accuracy")
                }
                evaluations += [{**values, "step": int(step)}] if values else []
                for name, row in layers.items():
                    if isinstance(row, dict):
                        by_layer.setdefault(name, []).append(_scalars(row, left_out) | {"step": int(step)})
    problems += [f"{RECORDS}: {count} {reason}." for reason, count in left_out.items() if count]
    evaluations.sort(key=lambda record: record["step"])
    return evaluations, {layer: _by_step(rows) for layer, rows in by_layer.items()}, claims, monitored


def _by_step(rows: Iterable[Record]) -> list[Record]:
    """One record a step, of what was measured while training and afterwards."""
    found: dict[int, Record] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(row)
    return [found[step] for step in sorted(found)]


def _scalars(record: Mapping[str, Any], left_out: Counter[str]) -> Record:
    """The numbers, texts and truth values of a record; numbers that cannot be drawn become ``None``."""
    found: Record = {}
    for key, value in record.items():
        if key in ("epoch", "seconds") and not is_number(value):
            continue
        if value is None or isinstance(value, bool | str) or is_number(value):
            found[key] = value
        elif isinstance(value, int | float):
            found[key] = None
            left_out[f"numbers beyond {LARGEST:g}"] += isinstance(value, int) or math.isfinite(value)
    return found


# -- what was evaluated --------------------------------------------------------------------------------------------
def evaluated_keys(runs: Runs) -> list[str]:
    """Everything that was evaluated, accuracies first: ``test_accuracy``, ``test_loss`` …"""
    return [f"{part}_{what}" for what in ("accuracy", "loss") for part in evaluated_parts(runs.all, what)]


def key_text(key: str) -> str:
    """An evaluated key as people say it.

    >>> key_text("test_accuracy")
    'test accuracy'
    """
    part, _, what = key.rpartition("_")
    return f"{PARTS.get(part, part).lower()} {what}"


def evaluated_parts(runs: Sequence[Run], what: str) -> list[str]:
    """Parts of the data for which ``accuracy`` or ``loss`` was recorded, test first."""
    numbers = {key for run in runs for record in run.evaluations for key, value in record.items() if is_number(value)}
    found = {key.removesuffix(f"_{what}") for key in numbers if key.endswith(f"_{what}")}
    return [part for part in PARTS if part in found] + sorted(found - set(PARTS))


# -- names of settings ----------------------------------------------------------------------------------------------
def decisive(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration as dotted keys, without those that say how a run was executed."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= decisive(value, f"{dotted}.")
        elif dotted not in _INCIDENTAL:
            found[dotted] = value
    return found


def _names(firsts: Sequence[Run]) -> list[str]:
    """A name for each setting: its method and the options in which it differs from the others, or its directory.

    Runs of one's own loop with a seed in their configuration are named by their options too.
    """
    configs = [decisive(run.config) for run in firsts]
    keys = dict.fromkeys(key for config in configs for key in config)
    names = []
    for run, config in zip(firsts, configs, strict=True):
        method = config.get("method.name")
        if method is None and "seed" not in run.config:
            names.append(run.name)
            continue
        rivals = [other for other in configs if other.get("method.name") == method]
        apart = [key for key in keys if key in config and len({repr(other.get(key)) for other in rivals}) > 1]
        short = [(key.rsplit(".", 1)[-1], config[key]) for key in apart if not key.endswith(".name")]
        parts = [f"{key} {value_text(key, value)}" for key, value in short]
        named = [str(config[key]) for key in apart if key.endswith(".name")]
        label = ", ".join([*([] if method is None else [str(method)]), *named, *parts]) or run.root.name
        names.append(label if len(parts) <= 3 else run.name)
    plain = [shorten(name, 60) for name in names]
    pairs = zip(plain, (run.root.name for run in firsts), strict=True)
    return distinct(f"{name} ({root})" if plain.count(name) > 1 else name for name, root in pairs)


def value_text(key: str, value: Any) -> str:
    """A value of the configuration as text.

    >>> value_text("hidden", [64, 64]), value_text("lr", 0.10), value_text("widths", [8, 16])
    ('64×64', '0.1', '8 / 16')
    """
    if isinstance(value, list):
        return ("×" if key == "hidden" else " / ").join(value_text("", item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def distinct(labels: Iterable[str]) -> list[str]:
    """Labels, equal ones told apart by strokes.

    >>> distinct(["a", "b", "a"])
    ['a', 'b', 'a′']
    """
    found: dict[str, None] = {}
    for label in labels:
        while label in found:
            label += "′"
        found[label] = None
    return list(found)


def shorten(name: str, limit: int = 24) -> str:
    """A long name without its middle.

    >>> shorten("encoder.layer.11.attention.self.query", 20)
    'encoder.l…self.query'
    """
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"
