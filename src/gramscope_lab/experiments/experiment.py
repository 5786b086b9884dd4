"""What an experiment is made of, and reproducing one: run the missing parts, draw the figure, judge the claims.

docs/howto/extend.md has an example.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.experiments.catalogue import Entry, find
from gramscope_lab.experiments.plots import Figure, figure_style, require_matplotlib, save_figure
from gramscope_lab.runs.directory import RunDirectory, describe_environment
from gramscope_lab.runs.records import Record
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.job import resolve_device
from gramscope_lab.training.reporter import Interrupted, Reporter
from gramscope_lab.training.sample_losses import SampleLoss
from gramscope_lab.training.train import Parallel, Trained, train
from gramscope_lab.training.trainer import Measure

Scale: TypeAlias = Literal["quick", "paper"]
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Options of a run besides its settings.

    Args:
        scale: ``quick`` or ``paper``.
        data_dir: folder of downloaded data sets; the default folder when empty.
        device: as in a training configuration.
    """

    scale: Scale = "quick"
    data_dir: str = ""
    device: str = "auto"


# -- parts --------------------------------------------------------------------------------------------------------
class Recorder:
    """Writes the records and matrices of a computation into its run directory, and shows its progress."""

    def __init__(self, directory: RunDirectory, reporter: Reporter, label: str) -> None:
        self.directory = directory
        self.reporter = reporter
        self._label = label

    def record(self, kind: str, **values: Any) -> None:
        """Add one record."""
        self.directory.append({"kind": kind, **values})

    def save(self, name: str, **tensors: Tensor) -> None:
        """Store matrices for the figure."""
        self.directory.save_artefact(name, tensors)

    def track(self, items: Iterable[T], total: int) -> Iterator[T]:
        """Iterate while showing progress and time left."""
        self.reporter.start(self._label, total)
        try:
            for done, item in enumerate(items, start=1):
                yield item
                self.reporter.advance(done)
        finally:
            self.reporter.finish()


@dataclass(frozen=True)
class Computation:
    """A part that is a function: it writes records and matrices through the :class:`Recorder` it is given.

    An interrupted computation starts again from nothing, so cut long ones into several.
    """

    name: str
    compute: Callable[[Recorder], None]

    def complete(self, root: RunDirectory) -> bool:
        """Whether it has written its last record."""
        return root.member(self.name).status() == "finished"

    def run(self, root: RunDirectory, reporter: Reporter, parallel: Parallel | str = "auto") -> None:
        """Run it from the start, in this process."""
        directory = RunDirectory.create(root.member(self.name).path, {"part": self.name}, force=True)
        started = time.perf_counter()
        with directory.lock:
            self.compute(Recorder(directory, reporter, self.name))
            directory.append({"kind": "end", "finished": True, "seconds": time.perf_counter() - started})


@dataclass(frozen=True)
class Training:
    """A part that trains: every seed and sweep value of a configuration.

    Args:
        name: of the part and its directory.
        config: what to train.
        after: measures the trained nets; its records are in a directory of its own, ``NAME.after``.
        data, loss, measure: as in :func:`gramscope_lab.training.train.train`; ``data`` is called only when needed.
        model: builds a net from the member's configuration, its data and the directory that has the parts before.
    """

    name: str
    config: TrainConfig
    after: Callable[[Trained, Recorder], None] | None = None
    data: Callable[[], DataSet] | None = None
    model: Callable[[TrainConfig, DataSet, RunDirectory], nn.Module] | None = None
    loss: SampleLoss | None = None
    measure: Measure | None = None

    def complete(self, root: RunDirectory) -> bool:
        """Whether all members are trained and measured."""
        names = [self.name] if self.after is None else [self.name, f"{self.name}.after"]
        return all(root.member(name).status() == "finished" for name in names)

    def run(self, root: RunDirectory, reporter: Reporter, parallel: Parallel | str = "auto") -> None:
        """Train, continuing from checkpoints; then measure."""
        directory, after, model = root.member(self.name), self.after, self.model
        trained = train(
            self.config,
            directory.path,
            resume=directory.exists(),
            reporter=reporter,
            data=None if self.data is None else self.data(),
            model=None if model is None else lambda config, data: model(config, data, root),
            loss=self.loss,
            measure=self.measure,
            parallel=parallel,
        )
        if after is not None:
            Computation(f"{self.name}.after", lambda recorder: after(trained, recorder)).run(root, reporter)


#: a unit of an experiment with a run directory of its own; a resumed run skips it if it is complete
Part: TypeAlias = Computation | Training


def training_config(settings: Any, options: Options, *, data: dict[str, Any], **tables: Any) -> TrainConfig:
    """A training with the seeds, epochs and batch size of the settings, on the device of the options.

    ``data`` and ``tables`` are the other entries of the configuration (``model``, ``method``, …), and replace those. Layers
    are measured only where a table ``measure`` says so.
    """
    usual = {key: getattr(settings, key) for key in ("seeds", "epochs", "batch_size") if key not in tables}
    table = {"dir": options.data_dir, **data}
    unmeasured = {"device": options.device, "measure": {"samples": 0}}
    return TrainConfig.from_dict({**usual, **unmeasured, "data": table, **tables})


def part_name(method: str, data: str) -> str:
    """Name of a part; of an ``.npz`` file the path and the ending are left out."""
    return f"{method}-{data.replace(chr(92), '/').rsplit('/', 1)[-1].removesuffix('.npz')}"


# -- results ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Claim:
    """One row of the claims table.

    Args:
        claim: what is claimed.
        published: what the paper reports, as text.
        measured: what the records say, as text.
        holds: whether it holds; ``None`` when this scale or data cannot decide it.
        reason: why it does not hold or cannot be decided, or settings that the reader should know.
    """

    claim: str
    published: str
    measured: str
    holds: bool | None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.holds is None and not self.reason:
            raise InputError(f"claim {self.claim!r} is undecided without a reason; give reason=")
        if self.holds is not None:
            object.__setattr__(self, "holds", bool(self.holds))  # also from a tensor or NumPy comparison


@dataclass(frozen=True)
class Results(Generic[S]):
    """What figures and claims read: settings, options and everything stored on disk."""

    name: str
    settings: S
    options: Options
    directory: RunDirectory

    @cached_property
    def _all(self) -> list[Record]:
        return self.directory.records()

    def records(self, kind: str | None = None, *, part: str | None = None, **match: Any) -> list[Record]:
        """Records of a kind, of a part, and with given values: ``records("evaluation", part="sgd", epoch=2.0)``."""
        return [
            record
            for record in self._all
            if (kind is None or record["kind"] == kind)
            and (part is None or record["run"].split("/")[0] == part)
            and all(record.get(key) == value for key, value in match.items())
        ]

    def artefact(self, part: str, name: str) -> dict[str, Tensor]:
        """Matrices a part stored."""
        return self.directory.member(part).load_artefact(name)


@dataclass(frozen=True)
class Experiment(Generic[S]):
    """A published result.

    Args:
        quick, paper: the settings of the two scales.
        parts: what is run.
        claims: functions over the results, in the order of the table.
        figure: draws the paper's panels.
        classes: whether the data sets of ``--data`` must have classes.
    """

    quick: S
    paper: S
    parts: Callable[[S, Options], Sequence[Part]]
    claims: tuple[Callable[[Results[S]], Claim | Iterable[Claim]], ...]
    figure: Callable[[Results[S]], Figure]
    classes: bool = False

    def judge(self, results: Results[S]) -> list[Claim]:
        """All rows of the claims table."""
        rows: list[Claim] = []
        for claim in self.claims:
            found = claim(results)
            rows += [found] if isinstance(found, Claim) else found
        return rows


# -- reproducing --------------------------------------------------------------------------------------------------
#: the member that holds the claims
CLAIMS = "claims"


@dataclass(frozen=True)
class Reproduction:
    """The outcome of :func:`reproduce`."""

    entry: Entry
    options: Options
    path: Path
    figures: tuple[Path, ...]
    claims: tuple[Claim, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.entry.to_dict(),
            "scale": self.options.scale,
            "path": self.path,
            "figures": list(self.figures),
            "seconds": self.seconds,
            "claims": [asdict(claim) for claim in self.claims],
        }


def reproduce(
    name: str,
    options: Options | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    force: bool = False,
    reporter: Reporter | None = None,
    parallel: Parallel | str = "auto",
) -> Reproduction:
    """Reproduce a published result.

    Args:
        name: of the catalogue.
        options: scale, data directory, device.
        values: settings that differ from the scale's own, such as ``{"seeds": (0, 1)}``.
        out: run directory, ``runs/NAME-SCALE`` unless given. Complete parts there are kept and the others are run.
        force: delete what is there and start again.
        reporter: receives notes and progress.
        parallel: how the runs of a training train, see :class:`~gramscope_lab.training.train.Parallel`.

    Raises:
        Interrupted: the user asked to stop; the same call continues.
    """
    require_matplotlib()
    started = time.perf_counter()
    entry = find(name)
    experiment = entry.load()
    options = options or Options()
    path = Path(out) if out is not None else default_directory(entry.name, options)
    settings = with_values(entry.name, getattr(experiment, options.scale), values or {})
    if experiment.classes:
        _check_classes(entry.name, settings.data, options)
    parts = experiment.parts(settings, options)
    config = {"experiment": entry.name, "scale": options.scale, "settings": settings_table(settings)}
    root = _root(path, config, options.device, force=force)
    with root.lock:
        _run_parts(parts, root, reporter or Reporter(), parallel)
    results: Results[Any] = Results(entry.name, settings, options, root)
    with figure_style():
        figures = save_figure(experiment.figure(results), root, entry.name)
    claims = tuple(experiment.judge(results))
    directory = RunDirectory.create(root.path / CLAIMS, {"part": CLAIMS}, force=True)
    directory.append(*({"kind": "claim", **asdict(claim)} for claim in claims), {"kind": "end", "finished": True})
    return Reproduction(entry, options, path, figures, claims, time.perf_counter() - started)


def default_directory(name: str, options: Options) -> Path:
    """The default run directory of an experiment."""
    return Path("runs") / f"{name}-{options.scale}"


def _run_parts(parts: Sequence[Part], root: RunDirectory, reporter: Reporter, parallel: Parallel | str) -> None:
    missing = [part for part in parts if not part.complete(root)]
    if len(missing) < len(parts):
        reporter.note(f"{root.path}: {len(parts) - len(missing)} of {len(parts)} parts are complete and are kept")
    started = time.perf_counter()
    for number, part in enumerate(missing):
        left = ""
        if number:
            minutes = (time.perf_counter() - started) / number * (len(missing) - number) / 60
            left = f", about {minutes:.0f} min left" if minutes > 1.5 else f", about {60 * minutes:.0f} s left"
        if len(missing) > 1:
            reporter.note(f"part {number + 1} of {len(missing)}: {part.name}{left}")
        try:
            part.run(root, reporter, parallel)
        except (KeyboardInterrupt, Interrupted):
            raise Interrupted(
                f"stopped in part {part.name} of {root.path}; complete parts are kept and the same command continues"
            ) from None


def _check_classes(name: str, data: tuple[str, ...], options: Options) -> None:
    """Refuse data sets without classes before anything is run."""
    from gramscope_lab.data.named_sets import catalogue, find_entry, load

    for chosen in data:
        if chosen.endswith(".npz"):
            has_classes = load(chosen, options.data_dir or None).classes is not None
        else:
            has_classes = find_entry(chosen).classes is not None
        if not has_classes:
            known = ", ".join(entry.name for entry in catalogue() if entry.classes)
            raise InputError(
                f"data set {chosen} has no classes and {name} needs them: {known}, or an .npz file with labels"
            )


# -- the run directory --------------------------------------------------------------------------------------------
def _root(path: Path, config: dict[str, Any], device: str, *, force: bool) -> RunDirectory:
    """The directory to run in: the one that is there if it was made with this configuration, else a new one."""
    found = describe_environment(str(resolve_device(device)))
    root = RunDirectory(path)
    if root.exists() and not force:
        stored = root.config
        if stored == config:
            return root
        differing = [key for key in config if stored.get(key) != config[key]]
        if differing[0] == "experiment" or root.members():  # otherwise it failed before anything ran
            said = ", ".join(_difference(key, stored.get(key), config[key]) for key in differing)
            raise InputError(f"{path} was made with {said}; start again with --force, or choose another --out")
        force = True
    root = RunDirectory.create(path, config, force=force)
    root.write_environment(found)
    return root


def _difference(key: str, stored: Any, wanted: Any) -> str:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        return ", ".join(_difference(k, stored.get(k), v) for k, v in wanted.items() if stored.get(k) != v)
    return f"{key} = {stored}, not {wanted}"


# -- settings of the user -----------------------------------------------------------------------------------------
def settings_table(settings: Any) -> dict[str, Any]:
    """Settings as plain values for TOML."""
    return {key: _as_list(value) for key, value in asdict(settings).items() if value is not None}


def with_values(name: str, settings: S, values: Mapping[str, Any]) -> S:
    """Settings with some fields replaced; a value must have the type of the one it replaces."""
    known = {item.name: getattr(settings, item.name) for item in fields(settings)}  # type: ignore[arg-type]
    changed = {}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"{name} has no setting {key!r}; it has: {', '.join(known)}")
        changed[key] = _like(f"{name}: {key}", value, known[key])
        _check(f"{name}: {key}", key, changed[key])
    return replace(settings, **changed)  # type: ignore[type-var]


#: settings in which a value may occur twice: sizes of layers, and epochs by data set
_REPEATING = ("hidden", "channels", "epochs")
#: settings that must be above zero
_POSITIVE = ("epochs", "every")


def _check(where: str, key: str, value: Any) -> None:
    """Numbers are finite and not negative, counts are at least 1, and no value occurs twice."""
    if isinstance(value, tuple):
        if len(set(value)) < len(value) and key not in _REPEATING:
            raise InputError(f"{where} = {list(value)!r}: a value occurs twice")
    elif isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise InputError(f"{where} = {value!r}: must be at least 1")
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, int | float):
            continue
        if not math.isfinite(item):
            raise InputError(f"{where} = {item!r}: must be finite")
        if item < 0 or (item == 0 and key in _POSITIVE):
            raise InputError(f"{where} = {item!r}: must {'be above zero' if key in _POSITIVE else 'not be negative'}")


def _like(where: str, value: Any, old: Any) -> Any:
    if isinstance(old, tuple):
        if isinstance(value, str):  # "2,8" from the command line
            value = [_number(item.strip()) for item in value.split(",") if item.strip()]
        items = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not items:
            raise InputError(f"{where} = {value!r}: give at least one value")
        return tuple(_like(where, item, old[0]) for item in items) if old else items
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if old is not None and type(value) is not type(old):
        raise InputError(f"{where} = {value!r}: give a value of the same type as {old!r}")
    return value


def _number(text: str) -> int | float | str:
    """The number that a text stands for, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, list | tuple) else value
