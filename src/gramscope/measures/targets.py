"""What a measure regresses on: integer labels become centred one-hot columns, float targets stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_tensor, to_double
from gramscope.linalg.row_blocks import OneHotRows, Rows, spans


def target_rows(Y: Array, n: int | None = None, classes: Tensor | int | None = None) -> Rows:
    """Targets ``[n, c]``, read in blocks of float64, so that labels of many classes are never expanded at once.

    A vector of integers (or booleans) holds labels, any values: they become one-hot columns, one per class in sorted
    order, centred over the samples. A float vector becomes one column. A matrix stays as it is, an integer one (such as
    the result of ``torch.nn.functional.one_hot``) as numbers; only labels are centred.

    Args:
        Y: labels ``[n]`` or values ``[n]`` or ``[n, c]``.
        n: number of samples expected.
        classes: all label values, or their number c for labels 0..c−1; default: the values that occur. A class without
            samples (there may be more classes than samples) has a column of zeros, which changes no measure.

    >>> target_rows(torch.tensor([3, 5, 5])).block(0, 3)
    tensor([[ 0.6667, -0.6667],
            [-0.3333,  0.3333],
            [-0.3333,  0.3333]], dtype=torch.float64)
    """
    tensor = as_tensor(Y, "Y")
    if tensor.numel() == 0:
        raise InputError(f"Y is empty: shape {tuple(tensor.shape)}")
    if n is not None and (tensor.dim() == 0 or tensor.shape[0] != n):
        raise InputError(f"Y has shape {tuple(tensor.shape)} but there are {n} samples")
    if not tensor.is_floating_point():
        if tensor.dim() == 1:
            return label_rows(tensor, classes)
        if tensor.dim() == 2 and tensor.shape[1] == 1:
            raise InputError(
                f"integer Y of shape {tuple(tensor.shape)} could be labels or values; pass Y.squeeze(1) for labels or "
                "Y.double() for values"
            )
        tensor = tensor.to(torch.float32 if tensor.dtype in (torch.bool, torch.uint8, torch.int8) else torch.float64)
    if tensor.dim() not in (1, 2):
        raise InputError(f"Y must be a vector or a matrix [samples, targets], got shape {tuple(tensor.shape)}")
    if classes is not None:
        raise InputError(f"classes= goes with integer labels, but Y is {tensor.dtype} of shape {tuple(tensor.shape)}")
    rows = Rows(tensor[:, None] if tensor.dim() == 1 else tensor, "Y")
    if _is_constant(rows):
        raise InputError(f"Y is constant over the {rows.n} samples: no variance is left to explain")
    return rows


def label_rows(labels: Array, classes: Tensor | int | None = None, name: str = "Y") -> OneHotRows:
    """Centred one-hot rows of integer labels ``[n]``; at least two classes must occur."""
    tensor = as_labels(labels, name)
    present, counts = _count(tensor)
    if present.numel() < 2:
        raise InputError(
            f"{name} has one class only (label {present.tolist()[0]} for all {tensor.numel()} samples); "
            "a sample with at least two classes is needed"
        )
    values = present
    if classes is not None:
        given = classes
        if not isinstance(given, Tensor):
            given = torch.arange(given, dtype=torch.int64, device=tensor.device)
        values = torch.unique(given.to(tensor.device, torch.int64))  # sorted
    frequency = to_double(torch.zeros(values.numel(), dtype=torch.float32, device=tensor.device))
    columns = OneHotRows(present, values, frequency, name).index(0, present.numel())
    frequency[columns.to(frequency.device)] = to_double(counts) / tensor.numel()
    return OneHotRows(tensor, values, frequency, name)


def as_labels(labels: Array, name: str = "labels") -> Tensor:
    """Integer labels ``[n]`` as a tensor of their own dtype.

    >>> as_labels([2, 0, 1])
    tensor([2, 0, 1])
    """
    tensor = as_tensor(labels, name)
    if tensor.is_floating_point() or tensor.dim() != 1 or tensor.numel() == 0:
        raise InputError(
            f"{name} must be a vector of integer labels, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor


def _count(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Values that occur and how often, in blocks: sorting all labels at once would copy them several times."""
    values = torch.empty(0, dtype=torch.int64, device=labels.device)
    counts = torch.empty(0, dtype=torch.int64, device=labels.device)
    for start, stop in spans(labels.numel(), 1):
        new, new_counts = torch.unique(labels[start:stop].to(torch.int64), return_counts=True)
        merged, place = torch.unique(torch.cat([values, new]), return_inverse=True)
        counts = torch.zeros_like(merged).index_add_(0, place, torch.cat([counts, new_counts]))
        values = merged
    return values, counts


def _is_constant(rows: Rows) -> bool:
    first = rows.block(0, 1)
    return all(bool((block == first).all()) for block in rows.blocks())
