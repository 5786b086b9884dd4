"""Losses of single samples, free of any reduction over the batch.

What every formula calls ``L_i`` is the loss of sample i before the batch reduction. :func:`sample_losses` obtains them:

- a criterion with a ``reduction`` attribute (``nn.CrossEntropyLoss()``) is copied with ``reduction="none"``;
- a function with a ``reduction`` argument (``F.cross_entropy``) is called with ``reduction="none"``;
- any other function must return one loss per sample, or state its ``reduction``.

Several loss terms of one sample are combined by what the criterion does inside a sample: position-wise losses
(cross-entropy over tokens or pixels) are **summed** over positions, ignored positions counting zero; element-wise
losses (mean squared error) of a ``"mean"`` criterion are **averaged** over the sample's own elements, so that only the
average over the batch is undone. Class weights multiply the loss of their samples: ``L_i = w_{y_i} ℓ_i``.

A stated ``reduction="mean"`` is undone by multiplying by the number of samples n. A function that divides by another
number (class weights, ignored labels, a mean over tokens) needs that number in place of ``"mean"``.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import GramscopeError, InputError

#: ``(output, target) -> loss``
Loss: TypeAlias = Callable[[Any, Any], Tensor]


def sample_losses(
    loss: Loss, output: Any, target: Any, n: int, reduction: str | float | None = None, ignore_index: int = -100
) -> Tensor:
    """``L_i`` for every sample, ``[n]``, or a scalar whose gradient is that of ``Σ_i L_i``.

    Args:
        loss: a torch criterion, a ``torch.nn.functional`` loss, or any function of ``(output, target)``.
        output: the model's output.
        target: the batch's target.
        n: number of samples in the batch.
        reduction: how ``loss`` reduces over the batch, where that cannot be seen: ``"mean"``, ``"sum"``, ``"none"``, or
            the factor that turns what it returns into the sum over samples. A number multiplies whatever comes: several
            losses (one per sample) are summed and then multiplied too. ``"mean"`` stands for a division by n.
        ignore_index: the label that losses leave out; where it occurs, ``"mean"`` does not divide by n.
    """
    if reduction == "mean" and isinstance(target, Tensor) and not target.is_floating_point():
        ignored = int((target == ignore_index).sum())
        if ignored:
            raise InputError(
                f"reduction='mean' stands for a loss divided by the {n} samples, but {ignored} of {target.numel()} labels are "
                f"{ignore_index} and are left out; give the criterion itself, such as nn.CrossEntropyLoss(), without "
                "reduction=, or a loss of every sample"
            )
    try:
        return _sample_losses(loss, output, target, n, reduction)
    except (GramscopeError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        sides = [f"{tuple(v.shape)} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__ for v in (output, target)]
        raise InputError(
            f"{_name(loss)} failed on an output of {sides[0]} and a target of {sides[1]}: {error}"
        ) from error


def _sample_losses(loss: Loss, output: Any, target: Any, n: int, reduction: str | float | None) -> Tensor:
    if reduction is not None:
        return _stated(loss(output, target), n, reduction)
    own = getattr(loss, "reduction", None)
    if isinstance(loss, nn.Module) and isinstance(own, str):
        unreduced = copy.copy(loss)
        unreduced.reduction = "none"  # type: ignore[assignment]
        return _within_samples(unreduced(output, target), output, n, averages=own == "mean")
    default = _reduction_argument(loss)
    if default is not None:
        return _within_samples(loss(output, target, reduction="none"), output, n, averages=default == "mean")  # type: ignore[call-arg]
    value = loss(output, target)
    if not isinstance(value, Tensor):
        raise InputError(f"the loss returned a {type(value).__name__}, not a tensor")
    if value.numel() == 1 and n > 1:
        raise InputError(
            f"the loss {_name(loss)} returns one number for {n} samples; state how "
            "it reduces over the batch with reduction='mean', 'sum' or a factor, or return one loss per sample"
        )
    return _within_samples(value, output, n, averages=False)


def _stated(value: Tensor, n: int, reduction: str | float) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"the loss returned a {type(value).__name__}, not a tensor")
    if not isinstance(check_reduction(reduction), str):
        return value.sum() * float(reduction)
    if reduction == "none":
        return _within_samples(value, None, n, averages=False)
    if value.numel() != 1:
        raise InputError(f"reduction={reduction!r} was stated but the loss has shape {tuple(value.shape)}")
    return value * n if reduction == "mean" else value


def _name(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def check_reduction(reduction: str | float) -> str | float:
    """The reduction, or an error unless it is ``"mean"``, ``"sum"``, ``"none"`` or a positive number."""
    number = isinstance(reduction, int | float) and not isinstance(reduction, bool) and 0 < reduction < math.inf
    if not number and reduction not in ("mean", "sum", "none"):
        raise InputError(f"reduction={reduction!r}: give 'mean', 'sum', 'none' or the factor as a positive number")
    return reduction


def _within_samples(value: Tensor, output: Any, n: int, averages: bool) -> Tensor:
    """One loss per sample from unreduced losses ``[n, …]``."""
    if value.dim() == 0:
        value = value.reshape(1)
    if value.shape[0] % n:
        raise InputError(
            f"the unreduced loss has shape {tuple(value.shape)}, which does not divide into {n} samples; if it reduces over "
            "the batch by itself, say how with reduction='mean', 'sum' or a factor"
        )
    if isinstance(output, Tensor) and value.numel() > output.numel():
        raise InputError(
            f"the loss of an output of shape {tuple(output.shape)} has {value.numel()} terms: output and target were "
            "broadcast against each other; give them one shape"
        )
    elementwise = isinstance(output, Tensor) and value.shape == output.shape
    value = value.reshape(n, -1)
    return value.mean(1) if averages and elementwise else value.sum(1)


def _reduction_argument(loss: Any) -> str | None:
    """Default of the function's ``reduction`` argument, if it has one."""
    try:
        parameter = inspect.signature(loss).parameters.get("reduction")
    except (TypeError, ValueError):
        return None
    return parameter.default if parameter is not None and isinstance(parameter.default, str) else None
