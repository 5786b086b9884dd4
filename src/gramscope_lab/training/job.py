"""One member ready to train: data and net on the device, and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope_lab.data.seeds import generator
from gramscope_lab.training.compatibility import check_fit, fit_inputs, loss_and_data
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.config_tables import DataTable
from gramscope_lab.training.model_factory import build_model
from gramscope_lab.training.plan import Plan
from gramscope_lab.training.random_state import PrivateRandomState
from gramscope_lab.training.sample_losses import SampleLoss

if TYPE_CHECKING:
    from gramscope_lab.data.dataset import DataSet


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


def prepare(
    config: TrainConfig,
    name: str = "",
    *,
    data: DataSet | None = None,
    model: nn.Module | None = None,
    loss: SampleLoss | None = None,
    labels: Mapping[str, Any] | None = None,
) -> Job:
    """Load data, build the net and move both to the device; objects given in Python replace the configured ones."""
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
