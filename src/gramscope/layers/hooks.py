"""Watching layer applications: one callback per application, for captures and optimizers alike.

An :class:`Observer` calls ``sink(layer, x, z)`` right after each application of a chosen layer, with the module's
native input and output still attached to the autograd graph; what the sink returns (if not ``None``) replaces the
output. Applications that no module hook sees are found by :mod:`gramscope.layers.intercepted_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import LayerError
from gramscope.layers.intercepted_functions import Sink, Tap, taps_of
from gramscope.layers.kinds import NamedWeightLayer
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import ModuleHook


class Observer:
    """Calls ``sink`` at every application of ``layers`` between :meth:`attach` and :meth:`detach`."""

    def __init__(self, layers: Iterable[Layer], sink: Sink) -> None:
        self._layers = tuple(layers)
        self._sink = sink
        self._hooks: ExitStack | None = None

    def attach(self) -> None:
        """Register the hooks. Ours run before the user's, so that ``z`` is the layer's own output."""
        if self._hooks is not None:
            raise LayerError("this observer is attached already")
        self._hooks = ExitStack()
        taps: dict[nn.Module, Tap] = {}
        for layer in self._layers:
            if isinstance(layer, NamedWeightLayer):
                taps.setdefault(layer.module, Tap(self._sink)).named[layer.weight_name] = layer
                continue
            tap = None
            if layer.scope is not None:
                tap = taps.setdefault(layer.scope, Tap(self._sink))
                tap.used.append(layer)
            hook = ModuleHook(_reporter(layer, self._sink, tap))
            self._hooks.callback(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True).remove)
        for module, tap in taps.items():
            shared = taps_of(module)
            shared.append(tap)
            self._hooks.callback(shared.remove, tap)

    def detach(self) -> None:
        """Remove every hook of this observer; harmless when there is none."""
        if self._hooks is not None:
            self._hooks.close()
        self._hooks = None

    def __enter__(self) -> Observer:
        try:
            self.attach()
        except BaseException:
            self.detach()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def tensors_in(values: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for item in values.values():
            yield from tensors_in(item)
    elif isinstance(values, Sequence) and not isinstance(values, str | bytes):
        for item in values:
            yield from tensors_in(item)


def first_tensor(values: object) -> Tensor | None:
    """The first tensor found in nested tuples, lists and dicts."""
    return next(tensors_in(values), None)


def own_node(z: Tensor) -> Tensor | None:
    """A replacement of ``z`` whose gradient can be watched; ``None`` if ``z`` itself can be.

    After frozen layers only, ``z`` has no gradient; and an in-place operation on a view (``Linear`` on sequences returns
    one) rewrites the view's history, so that its gradient no longer passes through this node.
    """
    if not z.requires_grad:
        return z + torch.zeros((), dtype=z.dtype, device=z.device, requires_grad=True)
    return z.clone() if z._is_view() else None


def in_backward() -> bool:
    """Whether this runs inside a backward pass, where activation checkpoints repeat their forward."""
    return int(torch._C._current_graph_task_id()) != -1


def _reporter(layer: Layer, sink: Sink, tap: Tap | None) -> Callable[..., Tensor | None]:
    """A forward hook that reports to ``sink`` what no function inside the module has reported."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        if tap is not None and layer.name in tap.seen:
            tap.seen.discard(layer.name)
            return None
        x = first_tensor((args, kwargs))
        if x is not None and isinstance(output, Tensor):
            return sink(layer, x, output)
        if layer.scope is module:
            return None
        raise LayerError(f"layer {layer.name!r} was called without a tensor or did not return one")

    return hook
