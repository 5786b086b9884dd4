"""Run directories sorted into settings: the runs of a setting differ by the seed alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramscope_lab.report.panel import shorten
from gramscope_lab.report.run_files import RunFiles, is_inside, is_number, read_config, read_run_files, run_status, text
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.records import Record

if TYPE_CHECKING:
    from gramscope_lab.report.seed_statistics import Curve

#: configuration keys that say how a run was executed, not what was run
_INCIDENTAL = frozenset(
    {"seed", "seeds", "execution", "device", "keep", "checkpoint_every", "evaluate_every", "data.dir"}
)
#: kinds of records that have a place of their own in the report
KNOWN_KINDS = frozenset({"evaluation", "measurement", "end", "claim"})
#: keys of a measurement that are not measures
_HEAD = frozenset({"kind", "step", "epoch", "method", "seed", "lr", "gamma", "layer", "run", "seconds"})


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        directory: where it is.
        root: the directory given to the report: the run itself, or a group that contains it.
        files: its configuration, records and state; records of a monitor count as measurements.
    """

    directory: RunDirectory
    root: RunDirectory
    files: RunFiles

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration; empty for a run that a training loop of the user's own filled."""
        return self.files.config

    @property
    def records(self) -> list[Record]:
        """All readable records."""
        return self.files.records

    @cached_property
    def name(self) -> str:
        """Its path below the group, or the directory's name."""
        if self.directory.path == self.root.path:
            return text(self.root.name)
        return text(f"{self.root.name}/{self.directory.path.relative_to(self.root.path).as_posix()}")

    @cached_property
    def evaluations(self) -> list[Record]:
        """Records of the whole net, by step; records of a monitor count as those of the monitored sample."""
        found = [record for record in self.records if record.get("kind") == "evaluation"]
        for record in self.records:
            values = {f"monitored_{k}": v for k, v in record.get("network", {}).items() if k in ("loss", "accuracy")}
            if values:
                found.append({"step": record["step"], **values})
        return sorted(found, key=_step)

    @cached_property
    def measurements(self) -> list[Record]:
        """Records of layers, one for each layer and step, by step."""
        found = [record for record in self.records if record.get("kind") == "measurement"]
        for record in self.records:
            head: Record = {key: value for key, value in record.items() if key in ("step", "epoch")}
            found += [{**row, **head, "layer": layer} for layer, row in record.get("layers", {}).items()]
        return sorted(found, key=_step)

    @cached_property
    def by_layer(self) -> dict[str, list[Record]]:
        """The measurements of each layer, layers in order of appearance."""
        found: dict[str, list[Record]] = {}
        for record in self.measurements:
            found.setdefault(record["layer"], []).append(record)
        return found

    @cached_property
    def measures(self) -> dict[str, list[str]]:
        """Layers with at least one number, for each measure, both in order of appearance."""
        found: dict[str, list[str]] = {}
        for layer, records in self.by_layer.items():
            for key in dict.fromkeys(key for record in records for key in record if key not in _HEAD):
                if any(is_number(record.get(key)) for record in records):
                    found.setdefault(key, []).append(layer)
        return found

    @property
    def monitored(self) -> bool:
        """Whether the records come from a monitor in a training loop of the user's own."""
        return "method" not in self.config and any("layers" in record for record in self.records)

    @property
    def seed(self) -> int | None:
        """The seed, where it is known."""
        seeds = self.config.get("seeds", self.config.get("seed"))
        if isinstance(seeds, list) and len(seeds) == 1:
            seeds = seeds[0]
        if isinstance(seeds, int):
            return seeds
        return next((seed for record in self.records if isinstance(seed := record.get("seed"), int)), None)

    @property
    def end(self) -> Record:
        """The last record of an ended run, or nothing."""
        ends = [record for record in self.records if record.get("kind") == "end"]
        return ends[-1] if ends else {}

    def time(self, step: int) -> float:
        """The epoch of a step, or the step itself where epochs are not known."""
        if step in self._epochs or not self._epochs:
            return self._epochs.get(step, float(step))
        last = max(self._epochs)
        return step * self._epochs[last] / last if last else float(step)

    @cached_property
    def _epochs(self) -> dict[int, float]:
        timed = (record for record in self.records if "epoch" in record and "step" in record)
        return {record["step"]: float(record["epoch"]) for record in timed if isinstance(record["step"], int)}

    @property
    def clock(self) -> str:
        """The unit of time: epoch or step."""
        return "epoch" if self._epochs else "step"


@dataclass(frozen=True)
class Setting:
    """Runs that differ by the seed alone. ``index`` decides the colour; ``curves`` keeps the curves computed so far."""

    name: str
    index: int
    runs: tuple[Run, ...]
    curves: dict[tuple[str, str | None, str], Curve] = field(default_factory=dict, repr=False, compare=False)

    @property
    def clock(self) -> str:
        """The unit of time; runs without records do not decide."""
        return "step" if any(run.clock == "step" and run.records for run in self.runs) else "epoch"


@dataclass(frozen=True)
class Runs:
    """Everything the report is made from.

    Args:
        roots: the directories that were given.
        settings: the runs in which nets were trained, evaluated or measured.
        others: other runs: claims and computations of an experiment.
        unread: sentences about parts of groups that could not be read.
    """

    roots: tuple[RunDirectory, ...]
    settings: tuple[Setting, ...]
    others: tuple[Run, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def all(self) -> list[Run]:
        """Every run of a setting."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def clock(self) -> str:
        """The unit of time, epoch if every setting has epochs."""
        return "epoch" if self.settings and all(setting.clock == "epoch" for setting in self.settings) else "step"

    @property
    def status(self) -> str:
        """The worst state of all runs."""
        found = {run.files.status for run in (*self.all, *self.others)}
        if any(run_status(root) == "running" for root in self.roots):
            return "running"
        return next((name for name in ("damaged", "stopped", "new", "recorded") if name in found), "finished")

    @property
    def problems(self) -> list[str]:
        """Sentences about everything that could not be read."""
        runs = (*self.all, *self.others)
        return [*self.unread, *(f"{run.name}: {problem}" for run in runs for problem in run.files.problems)]

    def records(self, kind: str) -> list[Record]:
        """Records of a kind from everything that was given."""
        return [record for run in (*self.all, *self.others) for record in run.records if record.get("kind") == kind]


def read_runs(paths: Sequence[Path | str]) -> Runs:
    """Read runs and groups of runs, and sort their single runs into settings."""
    roots = tuple(RunDirectory.open(path) for path in paths)
    groups: dict[tuple[int, str], list[Run]] = {}
    others = []
    unread: list[str] = []
    for number, root in enumerate(roots):
        if root.members():
            read_config(root, unread)
        for directory in root.runs():
            if not is_inside(directory.path, root.path):
                unread.append(f"{directory.path} is a link out of its group and was not read.")
                continue
            run = Run(directory, root, read_run_files(directory))
            if "method" not in run.config and not run.evaluations and not run.measurements:
                others.append(run)
                continue
            key = repr(decisive(run.config)) if {"method", "seed"} & run.config.keys() else run.name
            groups.setdefault((number, key), []).append(run)
    names = _names([runs[0] for runs in groups.values()])
    settings = zip(names, groups.values(), strict=True)
    found = tuple(Setting(name, index, tuple(runs)) for index, (name, runs) in enumerate(settings))
    return Runs(roots, found, tuple(others), tuple(unread))


def _step(record: Record) -> int:
    return int(record["step"])


# -- names of settings ----------------------------------------------------------------------------------------------
def decisive(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The configuration as dotted keys, without the incidental ones."""
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
    return _distinct(names, [run.root.name for run in firsts])


def value_text(key: str, value: Any) -> str:
    """A value of the configuration as text.

    >>> value_text("hidden", [64, 64]), value_text("lr", 0.10), value_text("widths", [8, 16])
    ('64×64', '0.1', '8 / 16')
    """
    if isinstance(value, list):
        return ("×" if key == "hidden" else " / ").join(value_text("", item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _distinct(names: Iterable[str], roots: Sequence[str]) -> list[str]:
    """Short distinct names: equal ones get the name of their group, then a number."""
    plain = [shorten(name, 60) for name in names]
    named = [f"{n} ({root})" if plain.count(n) > 1 else n for n, root in zip(plain, roots, strict=True)]
    return [f"{n} #{named[:i].count(n) + 1}" if named.count(n) > 1 else n for i, n in enumerate(named)]
