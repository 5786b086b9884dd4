"""Calling a model on whatever a loader yields, and finding its output and its targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import InputError

#: where the output tensor is: a key, an index, or a function of what the model returns
OutputSelector: TypeAlias = str | int | Callable[[Any], Tensor] | None
#: ``batch -> (inputs, targets)``
Unpack: TypeAlias = Callable[[Any], tuple[Any, Any]]

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_OUTPUT_KEYS = ("logits", "output", "prediction", "predictions", "out")


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(x)`` for a tensor, ``model(*xs)`` for a tuple, ``model(**xs)`` for a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def select_output(value: Any, output: OutputSelector = None) -> Tensor:
    """The output tensor of a model that may return a tensor, a tuple, a dict or a Hugging Face ``ModelOutput``."""
    if callable(output):
        value = output(value)
    elif output is not None:
        try:
            value = value[output]
        except (KeyError, IndexError, TypeError) as error:
            keys = list(value.keys()) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise InputError(f"output={output!r} is not in what the model returned: {keys}") from error
    elif isinstance(value, Mapping):
        found = [key for key in _OUTPUT_KEYS if key in value]
        if not found:
            raise InputError(f"the model returned a mapping with keys {list(value.keys())}; name one with output=")
        value = value[found[0]]
    if not isinstance(value, Tensor):
        raise InputError(f"the model returned a {type(value).__name__}, not a tensor; say which part with output=")
    if not value.is_floating_point():
        raise InputError(f"the model's output has dtype {value.dtype}; a real floating-point output is needed")
    return value


def split_batch(batch: Any, unpack: Unpack | None = None) -> tuple[Any, Any]:
    """``(inputs, targets)`` of one batch of a loader.

    ``(x, y)`` pairs are taken as they are; a mapping gives up its ``labels`` (or label, targets, target, y) and the
    rest are keyword inputs; a bare tensor has no target. Anything else needs ``unpack``.
    """
    if unpack is not None:
        return unpack(batch)
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        rest = dict(batch)
        for key in _TARGET_KEYS:
            if key in rest:
                target = rest.pop(key)
                return rest, target
        return rest, None
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


def batches(loader: Any, unpack: Unpack | None = None) -> Iterator[tuple[Any, Any]]:
    """All batches of a loader, of an ``(x, y)`` pair of tensors (one batch), or of a single tensor."""
    pair = isinstance(loader, tuple) and len(loader) == 2 and all(isinstance(part, Tensor) for part in loader)
    if isinstance(loader, Tensor) or pair:
        loader = [loader]
    elif not isinstance(loader, Iterable):
        raise InputError(
            f"loader is a {type(loader).__name__}; give a DataLoader, an iterable of batches or tensors (x, y)"
        )
    count = 0
    for batch in loader:
        inputs, target = split_batch(batch, unpack)
        if _batch_size(inputs) == 0:
            raise InputError(f"batch {count} of the loader is empty")
        count += 1
        yield inputs, target
    if count == 0:
        raise InputError("the loader yielded no batch")


def _batch_size(inputs: Any) -> int | None:
    from gramscope.layers.hooks import first_tensor

    tensor = first_tensor(inputs)
    return None if tensor is None or tensor.dim() == 0 else tensor.shape[0]


def to_device(value: Any, device: torch.device) -> Any:
    """Move nested tensors to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def model_device(model: nn.Module) -> torch.device:
    """Device of the model's first parameter or buffer (CPU when it has none)."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextmanager
def evaluating(model: nn.Module, eval_mode: bool = True) -> Iterator[None]:
    """Run in eval mode (unless told otherwise) and give every module its own mode and the RNG its state back."""
    flags = [(module, module.training) for module in model.modules()]
    device = model_device(model)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            if eval_mode:
                for module, _ in flags:
                    module.training = False
            yield
        finally:
            for module, training in flags:
                module.training = training
