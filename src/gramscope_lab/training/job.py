"""One member ready to train: data and net on the device, a loss, and its steps."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import GramscopeError, InputError
from gramscope.layers.model_call import evaluating
from gramscope_lab.data.dataset import DataSet, generator
from gramscope_lab.nets.vae import VAE
from gramscope_lab.training.config import DataTable, ModelTable, ScheduleTable, TrainConfig
from gramscope_lab.training.random_state import PrivateRandomState
from gramscope_lab.training.sample_losses import SampleLoss, reconstruction, sample_loss

if TYPE_CHECKING:
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
    from gramscope_lab.data.named_sets import load

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

    def __call__(self, config: TrainConfig, name: str = "", labels: Mapping[str, Any] | None = None) -> Job:
        """One member, on its device or the one given to this object."""
        given, device = self.overrides, self.device(config)
        dtype = getattr(torch, config.dtype)
        raw = self._data(config, device, dtype)
        if given.model is not None:
            model = given.model(config, raw)
        else:
            model = build_model(config.model, config.seed, raw.input_shape, raw.outputs)
        model = model.to(device=device, dtype=dtype)
        loss = given.loss
        data = raw
        with PrivateRandomState(config.seed, "trial", device).active():
            if loss is None:
                loss, data = loss_and_data(config.loss, model, raw)
            check_fit(model, data, loss, configured=given.loss is None)
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


def prepare(config: TrainConfig, name: str = "", *, labels: Mapping[str, Any] | None = None, **given: Any) -> Job:
    """Load data, build the net and move both to the device; ``data``, ``model`` and ``loss`` replace the configured ones."""
    return Preparer(Overrides(**given))(config, name, labels)


def probe(x: Tensor, y: Tensor, samples: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """The samples that are measured: a fixed random choice of ``samples``, in batches."""
    order = torch.randperm(len(x), generator=generator(0, "probe"))[:samples].to(x.device)
    return [(x[batch], y[batch]) for batch in torch.split(order, batch_size)]


# -- the net ------------------------------------------------------------------------------------------------------------
def build_model(table: ModelTable, seed: int, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The net a configuration names, on the CPU, initialised from ``seed`` alone."""
    with PrivateRandomState(seed, "factory").active():
        if ":" in table.name:
            factory = load_factory(table.name)
            try:
                inspect.signature(factory).bind(**table.options)
            except TypeError as error:
                raise InputError(f"model.name = {table.name!r} with {table.options}: {error}") from error
            model = factory(**table.options)
            if not isinstance(model, nn.Module):
                raise InputError(f"model.name = {table.name!r}: returned {type(model).__name__}, not a torch module")
            return model
        from gramscope_lab.nets import build

        options = {"sampling": True, **table.options} if table.name == "vae" else table.options
        try:
            return build(table.name, input_shape, outputs, generator=generator(seed, "weights"), **options)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            raise InputError(f"model.name = {table.name!r} with {table.options} does not fit into memory") from error


def load_state(model: nn.Module, state: Mapping[str, Any], where: Path) -> None:
    """Give a net stored weights, with an error that names the file or run they come from."""
    try:
        model.load_state_dict(dict(state))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where} does not fit {type(model).__name__}: {error}") from error


def load_factory(path: str) -> Callable[..., Any]:
    """The function named ``package.module:function``; modules in the working directory are found, also later."""
    module_name, _, attribute = path.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise InputError(f"{path!r}: give package.module:function, such as mynet:build for build() in mynet.py")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"{path!r}: {error}; give package.module:function, importable from here") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        raise InputError(f"{path!r}: module {module_name} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


# -- do net, data and loss fit? Two samples tell, before anything is written ----------------------------------------------
def loss_and_data(name: str, model: nn.Module, data: DataSet) -> tuple[SampleLoss, DataSet]:
    """The loss by its name in the configuration, and the data with its targets (for a VAE, the inputs)."""
    if data.labels_tokens:
        raise InputError(
            f"{data.name} has a label for every token, which `gramscope measure` takes and training does not; train in a loop "
            "of your own, with gs.Monitor"
        )
    if not isinstance(model, VAE):
        return sample_loss(name, data.task), data
    if name != "auto":
        raise InputError(f"loss = {name!r}: a VAE has its own loss, reconstruction and divergence; leave it at 'auto'")
    low, high = float(data.x_train.min()), float(data.x_train.max())
    if not data.x_train.is_floating_point() or low < 0 or high > 1:
        raise InputError(
            f"{data.name} has {data.x_train.dtype} inputs from {low:g} to {high:g}; a VAE needs floats from 0 to 1, for "
            "images data.scale = 'unit'"
        )
    return reconstruction, replace(
        data,
        y_train=data.x_train.flatten(1),
        y_test=data.x_test.flatten(1),
        y_val=None if data.x_val is None else data.x_val.flatten(1),
        classes=None,
    )


def check_fit(model: nn.Module, data: DataSet, loss: SampleLoss, *, configured: bool) -> None:
    """Raise an error that says what does not fit: inputs and net, or outputs and loss.

    Args:
        model, data, loss: on one device.
        configured: the loss is one of ours, so that the shape it needs is known.
    """
    net = type(model).__name__
    x, y = _samples(data)
    try:
        with torch.no_grad(), evaluating(model):
            output = model(x)
    except GramscopeError:
        raise
    except Exception as error:
        shape = ", ".join(map(str, ("n", *data.input_shape)))
        raise InputError(
            f"the net {net} fails on the inputs of {data.name}, {_type(x)} [{shape}]: {_first_line(error)}"
            + ("" if x.is_floating_point() else "; whole numbers are tokens, so store features as floats")
        ) from error
    if configured and loss is not reconstruction:
        _check_output(net, output, y, data)
    try:
        losses = loss(output, y)
    except Exception as error:
        raise InputError(
            f"the loss fails on what the net {net} returns, {_described(output)}: {_first_line(error)}"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (len(x),):
        raise InputError(
            f"the loss gives {_described(losses)} for {len(x)} samples; it must give one value a sample, [n]"
        )


def _check_output(net: str, output: Any, y: Tensor, data: DataSet) -> None:
    fits = isinstance(output, Tensor) and output.dim() > 1 and len(output) == len(y)
    if fits and data.classes is None:
        fits = output.numel() == y.numel()
    elif fits:
        fits = output.dim() == 2 and output.shape[1] >= data.classes
    if not fits:
        raise InputError(
            f"the net {net} returns {_described(output)} for two samples, but {data.task} of {data.name} takes a tensor "
            f"[n, {data.outputs}]; return that, or train from Python with a loss of your own"
        )


def _samples(data: DataSet) -> tuple[Tensor, Tensor]:
    """Two samples; whole numbers include the largest, the token most likely to be outside the vocabulary."""
    largest = int(data.x_train.flatten(1).amax(1).argmax()) if not data.x_train.is_floating_point() else -1
    chosen = torch.tensor([0, largest % len(data.x_train)], device=data.x_train.device)
    return data.x_train[chosen], data.y_train[chosen]


def _described(value: Any) -> str:
    return f"{_type(value)} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
