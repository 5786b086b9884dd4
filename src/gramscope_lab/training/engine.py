"""Engines hold one or several members and take a training step with all of them; the loop drives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from gramscope.errors import InputError
from gramscope_lab.training.job import Job
from gramscope_lab.training.methods import build_method
from gramscope_lab.training.random_state import PrivateRandomState, epoch_order
from gramscope_lab.training.report_matrices import ShiftWatcher
from gramscope_lab.training.sample_losses import evaluate


class Engine(ABC):
    """Members that take their steps together."""

    #: worth telling the user once
    notes: Sequence[str] = ()

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self.plan = jobs[0].plan
        self._mean = jobs[0].config.reduction == "mean"
        self._loss_sum = torch.zeros(len(jobs), dtype=torch.float64, device=jobs[0].device)
        self._loss_count = 0
        self._orders = torch.empty(0, dtype=torch.int64, device=jobs[0].device)
        self._order_epoch = -1

    @property
    def full_batch(self) -> bool:
        """Whether every step uses the whole training set."""
        return self.plan.steps_per_epoch == 1

    def indices(self, step: int) -> Tensor:
        """The samples of each member's batch, ``[runs, batch]``; empty for full batches."""
        if self.full_batch:
            return self._orders
        epoch, part = self.plan.slice(step)
        if epoch != self._order_epoch:
            orders = {s: epoch_order(s, epoch, self.plan.samples) for s in {job.config.seed for job in self.jobs}}
            self._orders = torch.stack([orders[job.config.seed] for job in self.jobs]).to(self._orders.device)
            self._order_epoch = epoch
        return self._orders[:, part]

    def mean_losses(self) -> list[float]:
        """Each member's mean training loss since the last call."""
        means: list[float] = (self._loss_sum / max(self._loss_count, 1)).tolist()
        self._loss_sum.zero_()
        self._loss_count = 0
        return means

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Inside this context torch draws from the members' own random state instead of the caller's."""

    @abstractmethod
    def advance(self, step: int) -> None:
        """Take the step from ``step`` to ``step + 1``."""

    @abstractmethod
    def evaluate(self) -> list[dict[str, float]]:
        """Loss and accuracy of each member on its sets, such as ``test_loss``."""

    @abstractmethod
    def models(self) -> Iterator[nn.Module]:
        """Each member's net with its present weights, valid until the iterator moves on."""

    def shifts(self, index: int) -> Mapping[str, Tensor]:
        """Diagonals of a member's virtual covariance shifts summed over training, by layer, if they are kept."""
        return {}

    @abstractmethod
    def states(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """Each member's model state and training state."""

    @abstractmethod
    def load_states(self, states: Sequence[tuple[dict[str, Tensor], Any]]) -> None:
        """Continue from stored states."""


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
        self._watcher = ShiftWatcher(job.model, config) if config.measure.every and config.measure.matrices else None
        self._random = PrivateRandomState(config.seed, "training", job.device)
        job.model.train()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        data = self.job.data
        if self.full_batch:
            return data.x_train, data.y_train
        index = self.indices(step)[0]
        return data.x_train.index_select(0, index), data.y_train.index_select(0, index)

    @override
    def active(self) -> AbstractContextManager[None]:
        return self._random.active()

    @override
    def advance(self, step: int) -> None:
        """One forward, backward and optimizer step."""
        x, y = self.batch(step)
        factor = self.plan.factor(step)
        self.method.set_factor(factor)
        self.method.zero_grad()
        with nullcontext() if self._watcher is None else self._watcher.step(len(x), factor):
            losses = self.job.loss(self.job.model(x), y)
            loss = losses.mean() if self._mean else losses.sum()
            loss.backward()  # type: ignore[no-untyped-call]
        self.method.step()
        self._loss_sum += loss.detach() if self._mean else loss.detach() / len(x)
        self._loss_count += 1

    @override
    def evaluate(self) -> list[dict[str, float]]:
        found = {}
        for part, (x, y) in self.job.parts().items():
            values = evaluate(self.job.model, x, y, self.job.loss)
            found.update({f"{part}_{name}": value for name, value in values.items()})
        return [found]

    @override
    def models(self) -> Iterator[nn.Module]:
        yield self.job.model

    @override
    def shifts(self, index: int) -> Mapping[str, Tensor]:
        return {} if self._watcher is None else self._watcher.diagonals

    @override
    def states(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        training = {
            "optimizers": self.method.state_dict(),
            "random": self._random.current(),
            "loss_sum": self._loss_sum[0],
            "loss_count": self._loss_count,
            "shifts": dict(self.shifts(0)),
        }
        yield self.job.model.state_dict(), training

    @override
    def load_states(self, states: Sequence[tuple[dict[str, Tensor], Any]]) -> None:
        ((weights, training),) = states
        try:
            self.job.model.load_state_dict(weights)
        except RuntimeError as error:
            raise InputError(f"it has weights of another model: {error}") from error
        self.method.load_state_dict(training["optimizers"])
        self._random.load(training["random"])
        self._loss_sum[0] = training["loss_sum"].to(self.job.device)
        self._loss_count = training["loss_count"]
        if self._watcher is not None:
            self._watcher.load(training["shifts"], self.job.device)
