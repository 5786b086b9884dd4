"""What an experiment is made of: settings, parts, claims, a figure. See the package's text for an example."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from torch import Tensor

from gramscope.data.dataset import DataSet
from gramscope.errors import InputError
from gramscope.runs.directory import RunDirectory
from gramscope.runs.records import Record
from gramscope.training.config import TrainConfig
from gramscope.training.loop import Measure
from gramscope.training.reporter import Reporter
from gramscope.training.sample_losses import SampleLoss
from gramscope.training.train import ModelFactory, Trained, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale: TypeAlias = Literal["quick", "paper"]
Selection: TypeAlias = Literal["validation", "test"]
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the user chooses beside the settings.

    Args:
        scale: ``quick`` or ``paper``.
        select: where hyper-parameters are chosen: on a ``validation`` split, or on the ``test`` set as the papers did.
        data_dir: folder of downloaded data sets; empty for the usual place.
        device: as in a training configuration.
    """

    scale: Scale = "quick"
    select: Selection = "validation"
    data_dir: str = ""
    device: str = "auto"


@dataclass(frozen=True)
class Claim:
    """One row of the claims table.

    Args:
        claim: what is claimed.
        published: what the paper reports, as text.
        measured: what the records say, as text.
        holds: whether it holds; ``None`` when this scale or data cannot decide it.
        reason: why it does not hold or cannot be decided, or a setting the reader must know.
    """

    claim: str
    published: str
    measured: str
    holds: bool | None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.holds is None and not self.reason:
            raise InputError(f"claim {self.claim!r} is left undecided without a reason")
        if self.holds is not None:
            object.__setattr__(self, "holds", bool(self.holds))  # also from a tensor or NumPy comparison

    def to_record(self) -> Record:
        """The claim as a record of kind ``claim``."""
        return {"kind": "claim", **dataclasses.asdict(self)}


class Recorder:
    """What a computation writes into its run directory, and its progress."""

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


class Part(Protocol):
    """A unit of an experiment that is either complete or run again."""

    @property
    def name(self) -> str:
        """Name of its run directory."""

    def complete(self, root: RunDirectory) -> bool:
        """Whether its records are all there."""

    def run(self, root: RunDirectory, reporter: Reporter) -> None:
        """Run it, or finish what was begun."""


@dataclass(frozen=True)
class Computation:
    """A part that is a function: it writes records and matrices through the :class:`Recorder` it is given.

    A computation that was interrupted starts again, so long ones are better cut into several.
    """

    name: str
    compute: Callable[[Recorder], None]

    def complete(self, root: RunDirectory) -> bool:
        """Whether it has written its last record."""
        return _directory(root, self.name).status() == "finished"

    def run(self, root: RunDirectory, reporter: Reporter) -> None:
        """Run it from the start."""
        directory = _directory(root, self.name)
        RunDirectory.create(directory.path, {"part": self.name}, force=True)
        started = time.perf_counter()
        with directory.lock, closing(directory):
            self.compute(Recorder(directory, reporter, self.name))
            directory.append({"kind": "end", "finished": True, "seconds": time.perf_counter() - started})


@dataclass(frozen=True)
class Training:
    """A part that trains: every seed and sweep value of a configuration.

    Args:
        name: of the part and its directory.
        config: what to train.
        after: measures the trained nets; what it records goes to a directory of its own, ``NAME.after``.
        data, model, loss, measure: as in :func:`gramscope.training.train.train`; ``data`` is called only when needed.
    """

    name: str
    config: TrainConfig
    after: Callable[[Trained, Recorder], None] | None = None
    data: Callable[[], DataSet] | None = None
    model: ModelFactory | None = None
    loss: SampleLoss | None = None
    measure: Measure | None = None

    def complete(self, root: RunDirectory) -> bool:
        """Whether all members have ended and were measured."""
        trained = _directory(root, self.name).status() == "finished"
        return trained and (self.after is None or _directory(root, f"{self.name}.after").status() == "finished")

    def run(self, root: RunDirectory, reporter: Reporter) -> None:
        """Train, going on from checkpoints; then measure."""
        directory = _directory(root, self.name)
        trained = train(
            self.config,
            directory.path,
            resume=directory.exists(),
            reporter=reporter,
            data=None if self.data is None else self.data(),
            model=self.model,
            loss=self.loss,
            measure=self.measure,
        )
        if self.after is not None:
            after = self.after
            Computation(f"{self.name}.after", lambda recorder: after(trained, recorder)).run(root, reporter)


@dataclass(frozen=True)
class Results(Generic[S]):
    """What figures and claims work from: settings, options and everything on disk."""

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
        return _directory(self.directory, part).load_artefact(name)


@dataclass(frozen=True)
class Experiment(Generic[S]):
    """A published result.

    Args:
        quick, paper: the settings of the two scales.
        parts: what is run.
        claims: functions over the results, in the order of the table.
        figure: draws the paper's panels.
        chooses: whether hyper-parameters are chosen, so that ``options.select`` matters.
        classes: whether the data sets of ``--data`` must have classes.
    """

    quick: S
    paper: S
    parts: Callable[[S, Options], Sequence[Part]]
    claims: tuple[Callable[[Results[S]], Claim | Iterable[Claim]], ...]
    figure: Callable[[Results[S]], Figure]
    chooses: bool = False
    classes: bool = False

    def judge(self, results: Results[S]) -> list[Claim]:
        """All rows of the claims table."""
        rows: list[Claim] = []
        for claim in self.claims:
            found = claim(results)
            rows += [found] if isinstance(found, Claim) else list(found)
        return rows


# -- settings -----------------------------------------------------------------------------------------------------
def settings_table(settings: Any) -> dict[str, Any]:
    """Settings as plain values for TOML."""
    return {key: _as_list(value) for key, value in dataclasses.asdict(settings).items() if value is not None}


def with_values(name: str, settings: S, values: Mapping[str, Any]) -> S:
    """Settings with some fields replaced; a value must be of the kind it replaces."""
    known = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}  # type: ignore[arg-type]
    changed = {}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"{name} has no setting {key!r}; it has: {', '.join(known)}")
        changed[key] = _like(f"{name}: {key}", value, known[key])
        _check(f"{name}: {key}", key, changed[key])
    return dataclasses.replace(settings, **changed)  # type: ignore[type-var]


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
        if isinstance(value, str):  # 2,8 of a command line
            value = [_number(item.strip()) for item in value.split(",") if item.strip()]
        items = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not items:
            raise InputError(f"{where} = {value!r}: give at least one value")
        return tuple(_like(where, item, old[0]) for item in items) if old else items
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if old is not None and type(value) is not type(old):
        raise InputError(f"{where} = {value!r}: must be of the kind of {old!r}")
    return value


def _number(text: str) -> int | float | str:
    """What a word stands for."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, list | tuple) else value


def _directory(root: RunDirectory, part: str) -> RunDirectory:
    return RunDirectory(root.path / part)
