"""Batches of inputs and targets from whatever holds the data, and which of their positions hold tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gramscope.errors import InputError
from gramscope.linalg.arrays import as_tensor

#: ``batch -> (inputs, targets)``
Unpack: TypeAlias = Callable[[Any], tuple[Any, Any]]

Array: TypeAlias = Tensor | np.ndarray[Any, Any]

#: names under which a mapping holds its target
LABEL_KEYS = ("labels", "label", "targets", "target", "y")

#: samples of a batch when a data set is given in place of a loader
BATCH = 256


class NoBatchError(InputError):
    """A loader without a batch, such as that of a process for which no data are left."""


def split_batch(batch: Any, unpack: Unpack | None = None) -> tuple[Any, Any]:
    """``(inputs, targets)`` of one batch of a loader.

    ``(x, y)`` pairs are taken as they are. A mapping holds keyword inputs; its ``labels`` (or label, targets, target, y)
    are its target too, and the model gets them if its forward takes an argument of that name. A bare tensor has no target.
    Anything else needs ``unpack``.
    """
    if unpack is not None:
        return unpack(batch)
    if is_array(batch):
        return batch, None
    if isinstance(batch, Mapping):
        key = label_key(batch)
        if key is None:
            return dict(batch), None
        return {name: value for name, value in batch.items() if name != key} | {key: batch[key]}, batch[key]
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        if len(batch) == 2:
            return batch[0], batch[1]
        if len(batch) == 1:
            return batch[0], None
        raise InputError(
            f"the loader yields a {type(batch).__name__} of {len(batch)} items; "
            "pass unpack=lambda batch: (inputs, target)"
        )
    raise InputError(
        f"the loader yields {type(batch).__name__}; tensors, (x, y) pairs and mappings are understood, "
        "anything else needs unpack=lambda batch: (inputs, target)"
    )


def label_key(inputs: Any) -> str | None:
    """The name of the target among keyword inputs, or ``None``.

    >>> label_key({"input_ids": 1, "labels": 2}), label_key({"x": 1})
    ('labels', None)
    """
    return next((key for key in LABEL_KEYS if key in inputs), None) if isinstance(inputs, Mapping) else None


def batches(
    data: Any, unpack: Unpack | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Iterator[tuple[Any, Any]]:
    """``(inputs, target)`` of every batch.

    Args:
        data: a loader or any iterable of batches; a data set, in batches of 256; or one batch: a tensor, ``(x, y)``,
            ``((x1, x2), y)`` for models of several inputs, or a mapping. ``[x, y]`` is one batch too; an error asks for the
            tuple where both have one dtype and equally many axes, and could be two batches.
        unpack: ``batch -> (inputs, target)`` for anything else.
        dtype: what floating-point NumPy arrays are converted to; tensors stay as they are.
        device: where the batches are moved to, unless ``None``.
    """
    count, loader = 0, iter(_loader(data))
    for batch in loader:
        inputs, target = (_tensors(value, dtype) for value in split_batch(batch, unpack))
        if batch_size(inputs) == 0:
            only = count == 0 and next(loader, None) is None
            raise (NoBatchError if only else InputError)(f"batch {count} of the loader is empty")
        count += 1
        yield (inputs, target) if device is None else (to_device(inputs, device), to_device(target, device))
    if count == 0:
        raise NoBatchError("the loader yielded no batch")


def _loader(data: Any) -> Iterable[Any]:
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=BATCH, generator=torch.Generator(device="cpu"))
    if is_array(data) or isinstance(data, Mapping) or _is_pair(data):
        return [data]
    if isinstance(data, tuple) and data and all(map(is_array, data)):
        raise InputError(
            f"a tuple of {len(data)} tensors is neither a batch (x, y) nor a loader; give several inputs as "
            "((x1, x2), y), and several batches as a list"
        )
    if not isinstance(data, Iterable):
        raise InputError(
            f"loader is a {type(data).__name__}; give a DataLoader, a data set, an iterable of batches or tensors (x, y)"
        )
    return data


def is_array(value: object) -> TypeGuard[Array]:
    """Whether this is a tensor or a NumPy array."""
    return isinstance(value, Tensor | np.ndarray)


def _is_pair(data: Any) -> bool:
    """Whether ``data`` is one batch of inputs and target, and not two batches."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    inputs, target = data
    if is_array(inputs) and is_array(target):
        alike = str(inputs.dtype) == str(target.dtype) and inputs.ndim == target.ndim
        if isinstance(data, list) and alike:
            raise InputError(
                f"a list of two arrays of shapes {tuple(inputs.shape)} and {tuple(target.shape)} may be inputs and target or "
                "two batches: write the tuple (x, y), or [(x1, None), (x2, None)]"
            )
        return True
    several = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    return (target is None or is_array(target)) and (is_array(inputs) or any(map(is_array, several)))


def _tensors(value: Any, dtype: torch.dtype | None) -> Any:
    """Nested NumPy arrays as tensors, floating-point ones of ``dtype``."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensor = as_tensor(value, "an array of the data")
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return nested(value, lambda item: _tensors(item, dtype))


def nested(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The items of a mapping (as a dict), tuple or list converted; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: convert(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [convert(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def batch_size(inputs: Any) -> int | None:
    """Rows of the first tensor of a batch, if it has one."""
    tensor = first_tensor(inputs)
    return None if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def to_device(value: Any, device: torch.device) -> Any:
    """Move nested tensors to a device; those made under ``torch.inference_mode`` are copied, so that autograd can use them."""
    if isinstance(value, Tensor):
        return (value.clone() if value.is_inference() else value).to(device)
    return nested(value, lambda item: to_device(item, device))


def head(value: Any, count: int, n: int) -> Any:
    """A copy of the first ``count`` samples of nested tensors with ``n`` rows."""
    if isinstance(value, Tensor):
        return value[:count].clone() if value.dim() and value.shape[0] == n and n > count else value.clone()
    return nested(value, lambda item: head(item, count, n))


def check_target(target: Any, n: int, index: int, batch_dim: int) -> None:
    """Raise unless the target has one row for each of n samples."""
    if isinstance(target, int | float) or (isinstance(target, Tensor) and target.dim() == 0):
        raise InputError(
            f"batch {index} has one number as its target: data are batches, not single samples; give "
            "torch.utils.data.DataLoader(samples, batch_size=256), or stacked tensors (x, y)"
        )
    if isinstance(target, Tensor) and target.shape[0] != n:
        transposed = target.dim() > batch_dim > 0 and target.shape[batch_dim] == n
        remedy = f"; targets have the batch first: unpack=lambda b: (b[0], b[1].movedim({batch_dim}, 0))"
        raise InputError(f"batch {index} has {n} inputs but {target.shape[0]} targets{remedy if transposed else ''}")


def tensors_in(values: object) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    items: Any = values.values() if isinstance(values, Mapping) else values
    nested = isinstance(values, Mapping | Sequence) and not isinstance(values, str | bytes)
    return [tensor for item in items for tensor in tensors_in(item)] if nested else []


def first_tensor(values: object) -> Tensor | None:
    """The first tensor found in nested tuples, lists and dicts."""
    return next(iter(tensors_in(values)), None)


# --- positions of sequences -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Positions:
    """The sequences of one batch of ``n`` samples.

    Args:
        lengths: of the sequences in the batch, with padding; the encoder and the decoder of a sequence-to-sequence model
            have different ones (:mod:`gramscope.layers.labels` sees to that).
        masks: boolean ``[n, length]`` by length, true at tokens; lengths without padding have none.
    """

    lengths: tuple[int, ...] = ()
    masks: dict[int, Tensor] = field(default_factory=dict)

    def of(self, sites: int, times: int = 1) -> Tensor | None:
        """``[n, sites]``, true at tokens, for a layer that was applied ``times`` times; ``None`` without padding.

        >>> Positions((2,), {2: torch.tensor([[True, False]])}).of(4, times=2)
        tensor([[ True, False,  True, False]])
        """
        mask = self.masks.get(sites // times) if sites % times == 0 else None
        return None if mask is None else mask.repeat(1, times)

    def without_padding(self, rows: Tensor) -> Tensor:
        """Gradients ``[…, n, sites, k]`` at a layer's outputs, also ``[…, n·length, 1, k]``, with zeros at padding.

        A model may let tokens see their padding (Mamba's convolution reads the zeros before the first token), so that
        gradients at padding are not always zero.

        >>> Positions((2,), {2: torch.tensor([[True, False]])}).without_padding(torch.ones(1, 2, 1)).flatten()
        tensor([1., 0.])
        """
        batch, sites = rows.shape[-3:-1]
        for mask in self.masks.values():
            if batch * sites == mask.numel() and sites in (1, mask.shape[1]):
                return rows.masked_fill(~mask.reshape(batch, sites, 1).to(rows.device), 0)
        return rows

    def tokens_first(self, value: Tensor) -> Tensor:
        """A batch of sequences ``[n, length, …]`` with tokens moved to the front, zeros after them, padding cut off.

        Padding on the left or right does not change the result. Anything else is returned as it is.

        >>> Positions((3,), {3: torch.tensor([[False, True, True]])}).tokens_first(torch.arange(3.0).reshape(1, 3, 1))
        tensor([[[1.],
                 [2.]]])
        """
        mask = self.masks.get(value.shape[1]) if value.dim() > 2 else None
        if mask is None or mask.shape[0] != value.shape[0]:
            return value
        length = max(int(mask.sum(1).max()), 1)
        order = torch.argsort(~mask, dim=1, stable=True)[:, :length]
        shape = (*order.shape, *(1,) * (value.dim() - 2))
        tokens = value.gather(1, order.reshape(shape).expand(*order.shape, *value.shape[2:]))
        return tokens * mask.gather(1, order).reshape(shape).to(value.dtype)


def positions_in(inputs: Any, decoder: Tensor | None = None) -> Positions:
    """The sequences of a batch, from the ``attention_mask`` (and ``decoder_attention_mask``) among its keyword inputs.

    Args:
        inputs: of the model; anything but a mapping has no known padding.
        decoder: boolean ``[n, length]``, the tokens of the decoder where no ``decoder_attention_mask`` tells them.
    """
    if not isinstance(inputs, Mapping):
        return Positions()
    known = [inputs.get("attention_mask"), inputs.get("decoder_attention_mask", decoder)]
    masks = {m.shape[1]: m.bool() for m in known if isinstance(m, Tensor) and m.dim() == 2}
    ids = [inputs.get(name) for name in ("input_ids", "decoder_input_ids", "labels")]
    lengths = [t.shape[1] for t in ids if isinstance(t, Tensor) and t.dim() == 2]
    padded = {length: mask for length, mask in masks.items() if not mask.all()}
    return Positions(tuple(dict.fromkeys([*masks, *lengths])), padded)


def flattened(h: Tensor, n: int, lengths: tuple[int, ...]) -> Tensor:
    """Rows ``[…, n·length, 1, d]`` of a layer that saw all tokens in one axis as ``[…, n, length, d]``; others as they are.

    >>> flattened(torch.zeros(6, 1, 4), 2, (3,)).shape
    torch.Size([2, 3, 4])
    """
    rows, sites = h.shape[-3:-1]
    if rows != n and sites == 1 and n and rows % n == 0 and rows // n in lengths:
        return h.reshape(*h.shape[:-3], n, rows // n, h.shape[-1])
    return h
