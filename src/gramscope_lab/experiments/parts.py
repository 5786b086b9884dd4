"""The parts of an experiment: trainings and computations, each with a run directory of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from gramscope_lab.data.dataset import DataSet
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.loop import Measure
from gramscope_lab.training.placement import Placement
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.sample_losses import SampleLoss
from gramscope_lab.training.start import ModelFactory
from gramscope_lab.training.train import train
from gramscope_lab.training.trained import Trained

T = TypeVar("T")


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


class Part(Protocol):
    """A unit of an experiment; a resumed run skips it if it is complete."""

    @property
    def name(self) -> str:
        """Name of its run directory."""

    def complete(self, root: RunDirectory) -> bool:
        """Whether its records are all there."""

    def run(self, root: RunDirectory, reporter: Reporter, placement: Placement | None = None) -> None:
        """Run it, or continue an interrupted run."""


@dataclass(frozen=True)
class Computation:
    """A part that is a function: it writes records and matrices through the :class:`Recorder` it is given.

    An interrupted computation starts again from nothing, so cut long ones into several.
    """

    name: str
    compute: Callable[[Recorder], None]

    def complete(self, root: RunDirectory) -> bool:
        """Whether it has written its last record."""
        return _directory(root, self.name).status() == "finished"

    def run(self, root: RunDirectory, reporter: Reporter, placement: Placement | None = None) -> None:
        """Run it from the start, in this process."""
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
        after: measures the trained nets; its records are in a directory of its own, ``NAME.after``.
        data, model, loss, measure: as in :func:`gramscope_lab.training.train.train`; ``data`` is called only when needed.
    """

    name: str
    config: TrainConfig
    after: Callable[[Trained, Recorder], None] | None = None
    data: Callable[[], DataSet] | None = None
    model: ModelFactory | None = None
    loss: SampleLoss | None = None
    measure: Measure | None = None

    def complete(self, root: RunDirectory) -> bool:
        """Whether all members are trained and measured."""
        trained = _directory(root, self.name).status() == "finished"
        return trained and (self.after is None or _directory(root, f"{self.name}.after").status() == "finished")

    def run(self, root: RunDirectory, reporter: Reporter, placement: Placement | None = None) -> None:
        """Train, continuing from checkpoints; then measure."""
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
            placement=placement,
        )
        if self.after is not None:
            after = self.after
            Computation(f"{self.name}.after", lambda recorder: after(trained, recorder)).run(root, reporter)


def _directory(root: RunDirectory, part: str) -> RunDirectory:
    return root.member(part)
