"""One member ready to train: data and net on the device, a loss, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope_lab.data.seeds import generator
from gramscope_lab.training.compatibility import check_fit, fit_inputs, loss_and_data
from gramscope_lab.training.config import DataTable, ScheduleTable, TrainConfig
from gramscope_lab.training.model_factory import build_model
from gramscope_lab.training.random_state import PrivateRandomState
from gramscope_lab.training.sample_losses import SampleLoss

if TYPE_CHECKING:
    from gramscope_lab.data.dataset import DataSet
    from gramscope_lab.training.trainer import Measure

#: makes a member's net in Python instead of from its configuration
ModelFactory: TypeAlias = "Callable[[TrainConfig, DataSet], nn.Module]"


@dataclass(frozen=True)
class Overrides:
    """Python objects in place of those the configuration names."""

    data: DataSet | None = None
    model: ModelFactory | None = None
    loss: SampleLoss | None = None
    measure: Measure | None = None

    def given(self) -> bool:
        """Whether anything is given (such objects cannot be sent to other processes)."""
        return any(getattr(self, item.name) is not None for item in fields(self))


@dataclass(frozen=True)
class Plan:
    """How many steps a run takes, and at which of them something is due."""

    samples: int
    batch_size: int
    steps: int
    steps_per_epoch: int
    evaluate_every: int
    measure_every: int
    checkpoint_every: int
    schedule: ScheduleTable

    @classmethod
    def of(cls, config: TrainConfig, samples: int) -> Plan:
        """The plan for a training set of ``samples``."""
        batch_size = min(config.batch_size or samples, samples)
        per_epoch = -(-samples // batch_size)

        def cadence(epochs: float) -> int:
            return max(1, round(epochs * per_epoch)) if epochs > 0 else 0

        return cls(
            samples=samples,
            batch_size=batch_size,
            steps=round(config.epochs * per_epoch),
            steps_per_epoch=per_epoch,
            evaluate_every=cadence(config.evaluate_every),
            measure_every=cadence(config.measure.every),
            checkpoint_every=cadence(config.checkpoint_every),
            schedule=config.schedule,
        )

    def due(self, every: int, step: int) -> bool:
        """Whether something with cadence ``every`` is due after ``step`` steps; the end always is."""
        return step == self.steps or (every > 0 and step % every == 0)

    def factor(self, step: int) -> float:
        """Schedule factor of the step from ``step`` to ``step + 1``."""
        return schedule_factor(self.schedule, step, self.steps, self.steps_per_epoch)

    def slice(self, step: int) -> tuple[int, slice]:
        """Epoch of the step from ``step`` to ``step + 1``, and its part of the epoch's order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch, slice(position * self.batch_size, min((position + 1) * self.batch_size, self.samples))


def schedule_factor(table: ScheduleTable, step: int, steps: int, steps_per_epoch: int) -> float:
    """Factor for step ``step`` (from 0) of ``steps``.

    A linear warm-up over ``warm_up`` epochs ends at 1. From there ``constant`` stays at 1, ``linear`` and ``cosine`` reach
    ``final`` at the end of the last step, and ``step`` multiplies by ``factor`` every ``every`` epochs.
    """
    warm = min(round(table.warm_up * steps_per_epoch), steps)
    if step < warm:
        return (step + 1) / warm
    if table.name == "constant":
        return 1.0
    if table.name == "step":
        return table.factor ** math.floor((step - warm) / (table.every * steps_per_epoch))
    progress = (step - warm) / max(steps - warm, 1)
    if table.name == "linear":
        return 1.0 + (table.final - 1.0) * progress
    return table.final + (1.0 - table.final) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Job:
    """One member, ready to train."""

    name: str
    config: TrainConfig
    data: DataSet = field(repr=False)
    model: nn.Module = field(repr=False)
    loss: SampleLoss = field(repr=False)
    #: the values that distinguish it from other members, for its records
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where data and net are."""
        return self.data.x_train.device

    @property
    def plan(self) -> Plan:
        """Steps and cadences."""
        return Plan.of(self.config, len(self.data.x_train))

    def head(self, kind: str, step: int) -> dict[str, Any]:
        """What every record of this member begins with."""
        epoch, method = round(step / self.plan.steps_per_epoch, 6), self.config.method
        head = {"kind": kind, "step": step, "epoch": epoch, "method": method.name, "seed": self.config.seed}
        return {**head, **{key: method.options[key] for key in ("lr", "gamma") if key in method.options}, **self.labels}

    def splits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The sets to evaluate on."""
        data = self.data
        found = {"test": (data.x_test, data.y_test)}
        if data.x_val is not None and data.y_val is not None:
            found["validation"] = (data.x_val, data.y_val)
        if self.config.evaluate_train:
            found["train"] = (data.x_train, data.y_train)
        return found


def resolve_device(name: str) -> torch.device:
    """The device of a configuration; ``auto`` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device = {name!r}: use auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return device  # nothing is allocated there
    try:
        torch.empty(1, device=device).zero_().item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, AttributeError) as error:
        raise InputError(f"device = {name!r}: this torch finds no such device; use cpu or auto") from error
    return device


def load_data(table: DataTable, dtype: torch.dtype | None = None) -> DataSet:
    """The data set a configuration names, on the CPU, with its subset, validation split and label noise."""
    from gramscope_lab.data import load

    return arrange(load(table.name, table.dir or None, seed=table.seed, **table.options), table).to(dtype=dtype)


def arrange(data: DataSet, table: DataTable) -> DataSet:
    """Take a subset, split off the validation part, and add label noise to the remaining training samples."""
    if table.samples or table.test_samples:
        data = data.subset(table.samples or len(data.x_train), table.seed, test=table.test_samples or None)
    if table.validation:
        data = data.split_validation(table.validation, table.seed)
    if table.label_noise:
        data = data.with_label_noise(table.label_noise, table.seed)
    return data


class Preparer:
    """Makes members ready to train. A data set is loaded once, however many members share it."""

    def __init__(self, overrides: Overrides | None = None, device: str | None = None) -> None:
        self.overrides = overrides or Overrides()
        self._device = device
        self._loaded: list[tuple[DataTable, DataSet]] = []
        self._fitted: list[tuple[DataSet, DataSet]] = []

    def __call__(self, config: TrainConfig, name: str = "", labels: Mapping[str, Any] | None = None) -> Job:
        """One member, on its device or the one given to this object."""
        given, device = self.overrides, self.device(config)
        dtype = getattr(torch, config.dtype)
        raw = self._data(config, device, dtype)
        if config.patience and raw.x_val is None:
            raise InputError(f"patience = {config.patience}: early stopping needs data.validation above 0")
        if given.model is not None:
            model = given.model(config, raw)
        else:
            model = build_model(config.model, config.seed, raw.input_shape, raw.outputs)
        model = model.to(device=device, dtype=dtype)
        loss = given.loss
        with PrivateRandomState(config.seed, "trial", device).active():
            data = fit_inputs(model, raw, config.data)
            if loss is None:
                loss, data = loss_and_data(config.loss, model, data)
            check_fit(model, data, loss, configured=given.loss is None)
        if data is not raw:  # members whose nets take the same form share it
            same = (found for before, found in self._fitted if before is raw and _same_form(found, data))
            data = next(same, data)
            self._fitted.append((raw, data))
        return Job(name, config, data, model, loss, labels or {})

    def device(self, config: TrainConfig) -> torch.device:
        """Where a member is built."""
        return resolve_device(self._device or config.device)

    def _data(self, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> DataSet:
        for table, found in self._loaded:
            if table == config.data:
                return found
        given = self.overrides.data
        data = load_data(config.data, dtype) if given is None else arrange(given, config.data)
        self._loaded.append((config.data, data.to(device, dtype)))
        return self._loaded[-1][1]


def _same_form(one: DataSet, other: DataSet) -> bool:
    """Whether a data set prepared for two nets has the same form for both."""
    return one.x_train.dtype == other.x_train.dtype and one.classes == other.classes


def prepare(config: TrainConfig, name: str = "", *, labels: Mapping[str, Any] | None = None, **given: Any) -> Job:
    """Load data, build the net and move both to the device; ``data``, ``model`` and ``loss`` replace the configured ones."""
    return Preparer(Overrides(**given))(config, name, labels)


def probe(x: Tensor, y: Tensor, samples: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """The samples that are measured: a fixed random choice of ``samples``, in batches."""
    order = torch.randperm(len(x), generator=generator(0, "probe"))[:samples].to(x.device)
    return [(x[batch], y[batch]) for batch in torch.split(order, batch_size)]
