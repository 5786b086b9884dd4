"""The loop: steps, evaluations, measurements, checkpoints; for one member or a stack of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from gramscope.errors import GramscopeError, InputError, NumericalError
from gramscope_lab.runs.checkpoints import Checkpoint, checkpoint_path
from gramscope_lab.runs.directory import RunDirectory, newest_intact
from gramscope_lab.runs.layer_snapshots import save_diagonals, save_spectra
from gramscope_lab.runs.layout import CHECKPOINTS
from gramscope_lab.training.engine import Engine
from gramscope_lab.training.interrupt import StopRequest, stop_on_signal
from gramscope_lab.training.job import Job, probe
from gramscope_lab.training.packing import pack, portable, unpack
from gramscope_lab.training.report_matrices import layer_matrices
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.stopwatch import Stopwatch
from gramscope_lab.training.torch_settings import torch_settings

#: ``(net, job, step) -> records`` of one measurement, one a layer or one for the net
Measure: TypeAlias = Callable[[nn.Module, Job, int], Iterable[Mapping[str, Any]]]


#: seconds between checkpoints by default; not epochs, because an epoch of a small net is shorter than writing to disk
CHECKPOINT_SECONDS = 30.0


@dataclass
class Progress:
    """State of the loop between steps; part of every checkpoint."""

    step: int = 0
    seconds: float = 0.0
    best: list[float] = field(default_factory=list)
    waited: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a loop ended: ``finished``, or ``interrupted``; with the reason when it was early."""

    step: int
    finished: bool
    reason: str = ""


class Loop:
    """Drives an engine from its present step to its last one."""

    def __init__(
        self,
        engine: Engine,
        runs: Sequence[RunDirectory] | None = None,
        *,
        measure: Measure | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.engine = engine
        self.runs = runs
        self.records: list[list[dict[str, Any]]] = [[] for _ in engine.jobs]
        self._measure = measure
        self._reporter = reporter or Reporter()
        self._progress = Progress()
        self._resumed: Path | None = None  # the checkpoint that the next step continues
        self._diverged = [False] * len(engine.jobs)
        self._config = engine.jobs[0].config

    # -- running --------------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """Train to the end, or until the user interrupts. Everything due is recorded and saved on the way."""
        plan, progress = self.engine.plan, self._progress
        label = self.engine.jobs[0].name if len(self.engine.jobs) == 1 else f"{len(self.engine.jobs)} runs"
        self._reporter.start(label, plan.steps)
        with stop_on_signal() as stop, self.engine.active(), torch_settings(self.engine.jobs):
            self._saved = time.perf_counter()
            self._clock = Stopwatch(self.engine.jobs[0].device, progress.seconds)
            if progress.step == 0:
                self._observe(0)
                if plan.steps == 0:
                    self._save()
            outcome = self._advance_to_end(stop)
        self._reporter.finish()
        self._write_end(outcome)
        return outcome

    def _advance_to_end(self, stop: StopRequest) -> Outcome:
        plan, progress = self.engine.plan, self._progress
        while progress.step < plan.steps:
            try:
                with _continuing(self._resumed):
                    self.engine.advance(progress.step)
                self._resumed = None
            except NumericalError as error:
                self._save()
                return Outcome(progress.step, True, f"diverged: {error}")
            progress.step += 1
            self._reporter.advance(progress.step)
            self._observe(progress.step)
            early = self._early_end()
            stop.asked |= self._reporter.stop_asked()
            if early or stop.asked or self._checkpoint_due(progress.step):
                self._save()
            if early:
                return Outcome(progress.step, True, early)
            if stop.asked and progress.step < plan.steps:
                return Outcome(progress.step, False, "interrupted")
        return Outcome(progress.step, True)

    def _checkpoint_due(self, step: int) -> bool:
        plan = self.engine.plan
        if plan.checkpoint_every or step == plan.steps:
            return plan.due(plan.checkpoint_every, step)
        return time.perf_counter() - self._saved > CHECKPOINT_SECONDS

    def _early_end(self) -> str:
        if all(self._diverged):
            return "diverged: the loss is not finite"
        if self._config.patience and self._progress.waited >= self._config.patience:
            return f"no improvement in {self._config.patience} evaluations"
        return ""

    # -- evaluation and measurement -------------------------------------------------------------------------------
    def _observe(self, step: int) -> None:
        """Evaluate and measure if due."""
        plan = self.engine.plan
        if plan.due(plan.evaluate_every, step):
            with self._clock.paused():
                self._progress.seconds = self._clock.seconds
                self._evaluate(step)
        if self._measure is not None and plan.measure_every and plan.due(plan.measure_every, step):
            with self._clock.paused():
                self._measure_all(self._measure, step)

    def _measure_all(self, measure: Measure, step: int) -> None:
        for index, (job, model) in enumerate(zip(self.engine.jobs, self.engine.models(), strict=True)):
            if not self._diverged[index]:
                self._append(index, "measurement", step, measure(model, job, step))
                self._keep_matrices(index, model, step)

    def _keep_matrices(self, index: int, model: nn.Module, step: int) -> None:
        job = self.engine.jobs[index]
        table = job.config.measure
        if self.runs is not None and table.matrices:
            batches = probe(job.data.x_train, job.data.y_train, table.samples, table.batch_size)
            found = layer_matrices(model, batches, self.engine.shifts(index), table.layers or None)
            save_spectra(self.runs[index], step, found.spectra)
            if found.diagonals:
                save_diagonals(self.runs[index], step, found.diagonals)

    def _evaluate(self, step: int) -> None:
        losses: Sequence[float | None] = self.engine.mean_losses() if step else [None] * len(self.engine.jobs)
        found = []
        for index, (loss, values) in enumerate(zip(losses, self.engine.evaluate(), strict=True)):
            record = {"batch_loss": loss, **values, "seconds": round(self._progress.seconds, 3)}
            self._diverged[index] = any(not math.isfinite(value) for value in values.values())
            found += self._append(index, "evaluation", step, [record])
        self._reporter.records(found)
        if self._config.patience:
            self._look_for_improvement(found[0])

    def _look_for_improvement(self, record: Mapping[str, Any]) -> None:
        """Early stopping looks at validation accuracy, or the loss where there are no classes."""
        score = record.get("validation_accuracy", -record["validation_loss"])
        if not self._progress.best or score > self._progress.best[0]:
            self._progress.best, self._progress.waited = [score], 0
        else:
            self._progress.waited += 1

    def _append(self, index: int, kind: str, step: int, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        job = self.engine.jobs[index]
        head = {
            "kind": kind,
            "step": step,
            "epoch": round(step / self.engine.plan.steps_per_epoch, 6),
            "method": job.config.method.name,
            "seed": job.config.seed,
        }
        for key in ("lr", "gamma"):
            if key in job.config.method.options:
                head[key] = job.config.method.options[key]
        full = [{**head, **job.labels, **record} for record in records]
        self.records[index] += full
        if self.runs is not None:
            self.runs[index].append(*full)
        return full

    def _write_end(self, outcome: Outcome) -> None:
        end = {"finished": outcome.finished, "reason": outcome.reason}
        for index in range(len(self.engine.jobs)):
            self._append(index, "end", outcome.step, [end])
            if self.runs is not None:
                self.runs[index].close()

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def _save(self) -> None:
        if self.runs is not None:
            with self._clock.paused():
                self._progress.seconds = self._clock.seconds
                self._write_checkpoints(self.runs)

    def _write_checkpoints(self, runs: Sequence[RunDirectory]) -> None:
        for index, (weights, training) in enumerate(self.engine.states()):
            run = runs[index]
            tensors, tree = pack(training)
            state = {
                "step": self._progress.step,
                "seconds": self._progress.seconds,
                "best": pack(self._progress.best)[1],
                "waited": self._progress.waited,
                "diverged": self._diverged[index],
                "records": run.records_position(),
                "training": tree,
            }
            model = {name: portable(tensor) for name, tensor in weights.items()}
            run.save_checkpoint(Checkpoint(self._progress.step, model, tensors, state))
        self._saved = time.perf_counter()
        for run in runs:  # after all are written, so that some step is always there for every member
            run.prune_checkpoints(self._config.keep)

    def resume(self) -> int:
        """Go back to the newest step all members have a checkpoint of, and drop later records; 0 if there is none."""
        if self.runs is None:
            return 0
        common = set.intersection(*(set(run.checkpoint_steps()) for run in self.runs))
        if not common:
            for run in self.runs:
                run.rewind(None)
            return 0
        checkpoints = newest_intact(self.runs, common)
        self._resumed = checkpoint_path(self.runs[0].at(CHECKPOINTS), checkpoints[0].step)
        with _continuing(self._resumed):
            self._load(checkpoints)
        for index, (run, checkpoint) in enumerate(zip(self.runs, checkpoints, strict=True)):
            run.rewind(checkpoint)
            self.records[index] = run.records()
        return self._progress.step

    def _load(self, checkpoints: Sequence[Checkpoint]) -> None:
        self.engine.load_states([(dict(c.model), unpack(c.tensors, c.state["training"])) for c in checkpoints])
        state = checkpoints[0].state
        best = [float(score) for score in unpack({}, state["best"])]
        self._progress = Progress(checkpoints[0].step, float(state["seconds"]), best, int(state["waited"]))
        self._diverged = [bool(checkpoint.state["diverged"]) for checkpoint in checkpoints]


@contextmanager
def _continuing(checkpoint: Path | None) -> Iterator[None]:
    """Name the checkpoint where what it holds cannot be loaded, or fails in the first step: it may be somebody else's."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        documented = isinstance(error, InputError)
        if checkpoint is None or (isinstance(error, torch.OutOfMemoryError | GramscopeError) and not documented):
            raise
        reason = str(error) if documented else f"{type(error).__name__}: {error}"
        raise InputError(
            f"{checkpoint} does not fit its configuration ({reason}); restore both, or start again with --force"
        ) from error
