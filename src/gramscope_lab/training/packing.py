"""Convert any nested training state to tensors plus JSON, and back, without pickle and without loss.

Optimizers' ``state_dict`` nest dicts with number keys, lists, tuples, tensors and plain values. :func:`pack` moves the
tensors to a flat dict (for safetensors) and leaves a reference in their place; what JSON does not know (number keys,
tuples, infinities) is written as a tagged object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError

_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into flat tensors and a JSON tree that refers to them."""
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(tree, "", tensors)


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = path or "value"
        tensors[key] = portable(value)
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        items = [(key, _pack(item, f"{path}.{key}" if path else str(key), tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        if all(isinstance(key, str | int) for key, _ in items):
            return {_DICT: [list(item) for item in items]}
    elif isinstance(value, list | tuple):
        parts = [_pack(item, f"{path}.{index}" if path else str(index), tensors) for index, item in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    elif isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(f"a checkpoint cannot hold {path or 'the state'} = {value!r} of type {type(value).__name__}")


def unpack(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Put a state back together; the inverse of :func:`pack`."""
    if isinstance(tree, list):
        return [unpack(tensors, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        if tree[_TENSOR] not in tensors:
            raise InputError(f"the checkpoint lacks tensor {tree[_TENSOR]!r}; its files do not belong together")
        return tensors[tree[_TENSOR]]
    if _TUPLE in tree:
        return tuple(unpack(tensors, item) for item in tree[_TUPLE])
    if _DICT in tree:
        return {key: unpack(tensors, item) for key, item in tree[_DICT]}
    if _FLOAT in tree:
        return float(tree[_FLOAT])
    return {key: unpack(tensors, item) for key, item in tree.items()}


def portable(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares memory with nothing (safetensors refuses shared memory)."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
