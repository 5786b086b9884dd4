"""What an experiment is made of: options, parts to run, claims and a figure. docs/howto/extend.md has an example."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.experiments.plots import Figure
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.records import Record
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.reporter import Reporter
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

    ``data`` and ``tables`` are the other entries of the configuration (``model``, ``method``, …), and replace those.
    """
    usual = {key: getattr(settings, key) for key in ("seeds", "epochs", "batch_size") if key not in tables}
    table = {"dir": options.data_dir, **data}
    return TrainConfig.from_dict({**usual, "device": options.device, "data": table, **tables})


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
