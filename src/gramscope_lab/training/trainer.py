"""The training loop: steps, evaluations, measurements, checkpoints; for one member, or for a stack of them alike."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError, NumericalError
from gramscope_lab.runs.directory import RunDirectory, newest_intact
from gramscope_lab.runs.layer_snapshots import save_diagonals, save_spectra
from gramscope_lab.training.job import Job, probe
from gramscope_lab.training.layer_measures import ShiftWatcher, layer_matrices
from gramscope_lab.training.methods import build_method
from gramscope_lab.training.random_state import PrivateRandomState, epoch_order, torch_settings
from gramscope_lab.training.reporter import Reporter, StopRequest, stop_on_signal
from gramscope_lab.training.sample_losses import evaluate

#: ``(net, job, step) -> records`` of one measurement, one a layer or one for the net
Measure: TypeAlias = Callable[[nn.Module, Job, int], Iterable[Mapping[str, Any]]]

#: seconds between checkpoints by default; not epochs, because an epoch of a small net is shorter than writing to disk
CHECKPOINT_SECONDS = 30.0


# -- members that take their steps together -----------------------------------------------------------------------
class Engine(ABC):
    """Members that take their steps together."""

    #: worth telling the user once
    notes: Sequence[str] = ()

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self.plan = jobs[0].plan
        self.full_batch = self.plan.steps_per_epoch == 1
        self._mean = jobs[0].config.reduction == "mean"
        self._loss_sum = torch.zeros(len(jobs), dtype=torch.float64, device=jobs[0].device)
        self._loss_count = 0
        self._orders = torch.empty(0, dtype=torch.int64, device=jobs[0].device)
        self._order_epoch = -1

    def indices(self, step: int) -> Tensor:
        """The samples of each member's batch, ``[runs, batch]``; empty for full batches."""
        if self.full_batch:
            return self._orders
        epoch, batch = self.plan.slice(step)
        if epoch != self._order_epoch:
            orders = {s: epoch_order(s, epoch, self.plan.samples) for s in {job.config.seed for job in self.jobs}}
            self._orders = torch.stack([orders[job.config.seed] for job in self.jobs]).to(self._orders.device)
            self._order_epoch = epoch
        return self._orders[:, batch]

    def mean_losses(self) -> list[float]:
        """Each member's mean training loss since the last call."""
        means: list[float] = (self._loss_sum / max(self._loss_count, 1)).tolist()
        self._loss_sum.zero_()
        self._loss_count = 0
        return means

    def active(self) -> AbstractContextManager[None]:
        """Inside this context torch draws from the members' own random state instead of the caller's."""
        return nullcontext()

    @abstractmethod
    def advance(self, step: int) -> None:
        """Take the step from ``step`` to ``step + 1``."""

    @abstractmethod
    def evaluate(self) -> list[dict[str, float]]:
        """Loss and accuracy of each member on its sets, such as ``test_loss``."""

    def shifts(self, index: int) -> Mapping[str, Tensor]:
        """Diagonals of a member's virtual covariance shifts summed over training, by layer, if they are kept."""
        return {}

    @abstractmethod
    def training_states(self) -> list[dict[str, Any]]:
        """Each member's training state, beside its weights."""

    @abstractmethod
    def load_training_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from stored training states, after the weights were loaded."""

    def states(self) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Each member's weights and training state."""
        for index, (job, state) in enumerate(zip(self.jobs, self.training_states(), strict=True)):
            losses = {"loss_sum": self._loss_sum[index], "loss_count": self._loss_count}
            yield job.model.state_dict(), {**state, **losses}

    def load_states(self, states: Sequence[tuple[Mapping[str, Tensor], dict[str, Any]]]) -> None:
        """Continue from stored weights and states."""
        for index, (job, (weights, state)) in enumerate(zip(self.jobs, states, strict=True)):
            job.model.load_state_dict(dict(weights))
            self._loss_sum[index] = state["loss_sum"].to(job.device)
            self._loss_count = int(state["loss_count"])
        self.load_training_states([state for _, state in states])


class SingleEngine(Engine):
    """One member: plain PyTorch, data on the device, batches by index."""

    def __init__(self, job: Job) -> None:
        super().__init__([job])
        self.job = job
        config = job.config
        self.method = build_method(
            config.method, job.model, reduction=config.reduction, steps_per_epoch=self.plan.steps_per_epoch
        )
        self.notes = self.method.notes
        self._watcher = ShiftWatcher(job.model, config) if config.measure.samples and config.measure.matrices else None
        self._random = PrivateRandomState(config.seed, "training", job.device)
        job.model.train()

    @override
    def active(self) -> AbstractContextManager[None]:
        return self._random.active()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        data = self.job.data
        if self.full_batch:
            return data.x_train, data.y_train
        index = self.indices(step)[0]
        return data.x_train.index_select(0, index), data.y_train.index_select(0, index)

    @override
    def advance(self, step: int) -> None:
        """One forward, backward and optimizer step."""
        x, y = self.batch(step)
        factor = self.plan.factor(step)
        with nullcontext() if self._watcher is None else self._watcher.step(len(x), factor):
            losses = self.job.loss(self.job.model(x), y)
            loss = losses.mean() if self._mean else losses.sum()
            loss.backward()  # type: ignore[no-untyped-call]
        if self.job.config.clip:
            nn.utils.clip_grad_norm_(self.job.model.parameters(), self.job.config.clip)
        self.method.step(factor)
        self._loss_sum += loss.detach() if self._mean else loss.detach() / len(x)
        self._loss_count += 1

    @override
    def evaluate(self) -> list[dict[str, float]]:
        found = {}
        for split, (x, y) in self.job.splits().items():
            values = evaluate(self.job.model, x, y, self.job.loss)
            found.update({f"{split}_{name}": value for name, value in values.items()})
        return [found]

    @override
    def shifts(self, index: int) -> Mapping[str, Tensor]:
        return {} if self._watcher is None else self._watcher.diagonals

    @override
    def training_states(self) -> list[dict[str, Any]]:
        random = self._random.current()
        return [{"optimizers": self.method.state_dict(), "random": random, "shifts": dict(self.shifts(0))}]

    @override
    def load_training_states(self, states: Sequence[dict[str, Any]]) -> None:
        (state,) = states
        self.method.load_state_dict(state["optimizers"])
        self._random.load(state["random"])
        if self._watcher is not None:
            self._watcher.load(state["shifts"], self.job.device)


# -- the loop -----------------------------------------------------------------------------------------------------
class Stopwatch:
    """Seconds of training; :meth:`paused` leaves out evaluating, measuring and saving."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self._before = seconds
        self._began: float | None = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before if self._began is None else self._before + time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside; GPU work queued before still counts."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._before, self._began = self.seconds, None
        try:
            yield
        finally:
            self._began = time.perf_counter()


@dataclass
class Progress:
    """State of the loop between steps; part of every checkpoint."""

    step: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a loop ended: ``finished``, or interrupted; with the reason when it was early."""

    step: int
    finished: bool
    reason: str = ""


class Trainer:
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
        self._diverged = [False] * len(engine.jobs)
        self._config = engine.jobs[0].config

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
        for index in range(len(self.engine.jobs)):
            self._append(index, "end", outcome.step, [{"finished": outcome.finished, "reason": outcome.reason}])
        return outcome

    def _advance_to_end(self, stop: StopRequest) -> Outcome:
        plan, progress = self.engine.plan, self._progress
        while progress.step < plan.steps:
            try:
                self.engine.advance(progress.step)
            except NumericalError as error:
                self._save()
                return Outcome(progress.step, True, f"diverged: {error}")
            progress.step += 1
            if self._reporter.advance(progress.step):
                stop.asked = True
            self._observe(progress.step)
            diverged = all(self._diverged)
            if diverged or stop.asked or self._checkpoint_due(progress.step):
                self._save()
            if diverged:
                return Outcome(progress.step, True, "diverged: the loss is not finite")
            if stop.asked and progress.step < plan.steps:
                return Outcome(progress.step, False, "interrupted")
        return Outcome(progress.step, True)

    def _checkpoint_due(self, step: int) -> bool:
        plan = self.engine.plan
        if plan.checkpoint_every or step == plan.steps:
            return plan.due(plan.checkpoint_every, step)
        return time.perf_counter() - self._saved > CHECKPOINT_SECONDS

    # -- evaluation and measurement -------------------------------------------------------------------------------
    def _observe(self, step: int) -> None:
        """Evaluate and measure if due."""
        plan = self.engine.plan
        if plan.due(plan.evaluate_every, step):
            with self._clock.paused():
                self._progress.seconds = self._clock.seconds
                self._evaluate(step)
        if self._measure is not None and (step == 0 or plan.due(plan.measure_every, step)):
            with self._clock.paused():
                for index, job in enumerate(self.engine.jobs):
                    if not self._diverged[index]:
                        self._append(index, "measurement", step, self._measure(job.model, job, step))
                        self._keep_matrices(index, job, step)

    def _keep_matrices(self, index: int, job: Job, step: int) -> None:
        table = job.config.measure
        if self.runs is not None and table.matrices:
            batches = probe(job.data.x_train, job.data.y_train, table.samples, table.batch_size)
            spectra, diagonals = layer_matrices(job.model, batches, self.engine.shifts(index), table.layers or None)
            save_spectra(self.runs[index], step, spectra)
            if diagonals:
                save_diagonals(self.runs[index], step, diagonals)

    def _evaluate(self, step: int) -> None:
        losses: Sequence[float | None] = self.engine.mean_losses() if step else [None] * len(self.engine.jobs)
        found = []
        for index, (loss, values) in enumerate(zip(losses, self.engine.evaluate(), strict=True)):
            record = {"batch_loss": loss, **values, "seconds": round(self._progress.seconds, 3)}
            self._diverged[index] = any(not math.isfinite(value) for value in values.values())
            found += self._append(index, "evaluation", step, [record])
        self._reporter.records(found)

    def _append(self, index: int, kind: str, step: int, records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        head = self.engine.jobs[index].head(kind, step)
        full = [{**head, **record} for record in records]
        self.records[index] += full
        if self.runs is not None:
            self.runs[index].append(*full)
        return full

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def _save(self) -> None:
        if self.runs is None:
            return
        with self._clock.paused():
            self._progress.seconds = self._clock.seconds
            for index, (weights, training) in enumerate(self.engine.states()):
                state = {**asdict(self._progress), "diverged": self._diverged[index], "training": training}
                self.runs[index].save_checkpoint(self._progress.step, weights, state)
            self._saved = time.perf_counter()
            for run in self.runs:  # after all are written, so that some step is always there for every member
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
        try:
            self.engine.load_states([(c.model, c.state["training"]) for c in checkpoints])
            state = checkpoints[0].state
            self._progress = Progress(checkpoints[0].step, float(state["seconds"]))
            self._diverged = [bool(checkpoint.state["diverged"]) for checkpoint in checkpoints]
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"the checkpoint of {self.runs[0].path} does not fit its configuration ({type(error).__name__}: {error}); "
                "restore both, or start again with --force"
            ) from error
        for index, (run, checkpoint) in enumerate(zip(self.runs, checkpoints, strict=True)):
            run.rewind(checkpoint)
            self.records[index] = run.records()
        return self._progress.step
