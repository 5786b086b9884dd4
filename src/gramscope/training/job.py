"""From a configuration to what a training step needs: tensors on the device, a net, a loss."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.data.seeds import generator
from gramscope.errors import InputError
from gramscope.training.compatibility import check_fit, fit_inputs, loss_and_data
from gramscope.training.config import DataTable, ModelTable, ScheduleTable, TrainConfig
from gramscope.training.random_state import PrivateRandomState
from gramscope.training.sample_losses import SampleLoss
from gramscope.training.schedule import schedule_factor

if TYPE_CHECKING:
    from gramscope.data.dataset import DataSet


@dataclass(frozen=True)
class Plan:
    """How many steps, and at which of them something is due."""

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


@dataclass(frozen=True)
class Job:
    """One member, ready to train."""

    name: str
    config: TrainConfig
    data: DataSet = field(repr=False)
    model: nn.Module = field(repr=False)
    loss: SampleLoss = field(repr=False)
    #: what distinguishes it from other members, for its records
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where data and net are."""
        return self.data.x_train.device

    @property
    def plan(self) -> Plan:
        """Steps and cadences."""
        return Plan.of(self.config, len(self.data.x_train))

    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
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
    try:
        torch.empty(1, device=device).zero_().item()  # "meta" holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device = {name!r}: this torch finds no such device; use cpu or auto") from error
    return device


def load_data(table: DataTable, dtype: torch.dtype | None = None) -> DataSet:
    """The data set a configuration names, cut, split and noised as it says, on the CPU."""
    from gramscope.data import load

    return arrange(load(table.name, table.dir or None, seed=table.seed, **table.options), table).to(dtype=dtype)


def arrange(data: DataSet, table: DataTable) -> DataSet:
    """Cut the data, split off the validation part and give what is left for training its label noise."""
    if table.samples or table.test_samples:
        data = data.subset(table.samples or len(data.x_train), table.seed, test=table.test_samples or None)
    if table.validation:
        data = data.split_validation(table.validation, table.seed)
    if table.label_noise:
        data = data.with_label_noise(table.label_noise, table.seed)
    return data


def build_model(table: ModelTable, seed: int, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The net a configuration names, on the CPU, initialised from ``seed`` alone."""
    with PrivateRandomState(seed, "factory").active():
        if ":" in table.name:
            factory = load_factory(table.name)
            _check_arguments(table, factory)
            model = factory(**table.options)
            if not isinstance(model, nn.Module):
                raise InputError(f"model.name = {table.name!r}: returned {type(model).__name__}, not a torch module")
            return model
        from gramscope.models import build

        options = {"sampling": True, **table.options} if table.name == "vae" else table.options
        return build(table.name, input_shape, outputs, generator=generator(seed, "weights"), **options)


def load_factory(path: str) -> Callable[..., Any]:
    """The function named ``package.module:function``; modules in the working directory are found too."""
    module_name, _, attribute = path.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(f"{path!r}: give package.module:function, such as mynet:build for build() in mynet.py")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"{path!r}: {error}; give package.module:function, importable from here") from error
    finally:
        if added:
            sys.path.remove(here)
    function = getattr(found, attribute, None)
    if not callable(function):
        raise InputError(f"{path!r}: module {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _check_arguments(table: ModelTable, factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # written in C
        return
    try:
        signature.bind(**table.options)
    except TypeError as error:
        known = ", ".join(map(str, signature.parameters.values())) or "nothing"
        raise InputError(
            f"model.name = {table.name!r}: {error}; it takes {known}, given as model.NAME = value"
        ) from error


def prepare(
    config: TrainConfig,
    name: str = "",
    *,
    data: DataSet | None = None,
    model: nn.Module | None = None,
    loss: SampleLoss | None = None,
    labels: Mapping[str, Any] | None = None,
) -> Job:
    """Load, build and move everything a member needs; what is given in Python replaces what the configuration says."""
    device, dtype = resolve_device(config.device), getattr(torch, config.dtype)
    if data is None:
        data = load_data(config.data, dtype)
    if config.patience and data.x_val is None:
        raise InputError(f"patience = {config.patience}: early stopping needs data.validation above 0")
    data = data.to(device, dtype)
    if model is None:
        model = build_model(config.model, config.seed, data.input_shape, data.outputs)
    model = model.to(device=device, dtype=dtype)
    with PrivateRandomState(config.seed, "trial", device).active():
        data = fit_inputs(model, data, config.data)
        configured = loss is None
        if loss is None:
            loss, data = loss_and_data(config.loss, model, data)
        check_fit(model, data, loss, configured=configured)
    return Job(name, config, data, model, loss, labels or {})


def probe(x: Tensor, y: Tensor, samples: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """The samples that are measured: a fixed random choice of ``samples``, in batches."""
    order = torch.randperm(len(x), generator=generator(0, "probe"))[:samples].to(x.device)
    return [(x[part], y[part]) for part in torch.split(order, batch_size)]
