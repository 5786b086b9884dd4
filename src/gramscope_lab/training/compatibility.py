"""Try net, data and loss together on two samples, before anything is written."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import GramscopeError, InputError, ResultWarning
from gramscope.layers.model_call import evaluating
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.nets.vae import VAE
from gramscope_lab.training.config import DataTable
from gramscope_lab.training.sample_losses import SampleLoss, reconstruction, sample_loss


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


def fit_inputs(model: nn.Module, data: DataSet, table: DataTable) -> DataSet:
    """The data, with whole numbers made floats if the net takes only floats."""
    if data.x_train.is_floating_point() or _accepts(model, data):
        return data
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    numbers = data.as_numbers().to(dtype=dtype)
    if not _accepts(model, numbers):
        return data  # check_fit then names the reason
    net = type(model).__name__
    if table.options.get("encoding") == "tokens":
        raise InputError(
            f"data.encoding = 'tokens': the net {net} takes numbers, not tokens; use data.encoding = 'one_hot', or a net "
            "with an embedding, such as model.name = 'transformer' with model.vocabulary"
        )
    warnings.warn(
        f"{data.name}: inputs are whole numbers and the net {net} takes none, so they are used as real numbers as they "
        "are; scale them, or use a net with an embedding, if they are not features",
        ResultWarning,
        stacklevel=3,
    )
    return numbers


def check_fit(model: nn.Module, data: DataSet, loss: SampleLoss, *, configured: bool) -> None:
    """Raise an error that says what does not fit: inputs and net, or outputs and loss.

    Args:
        model, data, loss: on one device.
        configured: the loss is one of ours, so that the shape it needs is known.
    """
    net = type(model).__name__
    x, y = _samples(data)
    try:
        output = _output(model, x)
    except GramscopeError:
        raise
    except Exception as error:
        shape = ", ".join(map(str, ("n", *data.input_shape)))
        raise InputError(
            f"the net {net} fails on the inputs of {data.name}, {_type(x)} [{shape}]: {_first_line(error)}"
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


@torch.no_grad()
def _output(model: nn.Module, x: Tensor) -> Any:
    with evaluating(model):
        return model(x)


def _accepts(model: nn.Module, data: DataSet) -> bool:
    try:
        _output(model, _samples(data)[0])
    except Exception:
        return False
    return True


def _described(value: Any) -> str:
    return f"{_type(value)} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
