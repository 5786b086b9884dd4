"""Watching layer applications: one callback per application, for captures and optimizers alike.

An :class:`Observer` calls ``sink(layer, x, z)`` right after each application of a chosen layer, with the module's
native input and output still attached to the autograd graph; what the sink returns (if not ``None``) replaces the
output. The four projections of ``nn.MultiheadAttention`` are computed inside one functional call that no module hook
sees; while such a module runs, that call is taken apart (see :class:`_AttentionMode`) and each projection is reported
with batch-first tensors (those of a single sequence have no batch axis).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gramscope.errors import LayerError
from gramscope.layers.kinds import AttentionProjectionKind
from gramscope.layers.linear_layer import Layer

#: ``(layer, native input, native output) -> replacement of the output or None``
Sink: TypeAlias = Callable[[Layer, Tensor, Tensor], Tensor | None]


class Observer:
    """Calls ``sink`` at every application of ``layers`` between :meth:`attach` and :meth:`detach`."""

    def __init__(self, layers: Iterable[Layer], sink: Sink) -> None:
        self._layers = tuple(layers)
        self._sink = sink
        self._handles: list[RemovableHandle] = []
        self._taps: list[tuple[_AttentionTaps, _AttentionTap]] = []

    def attach(self) -> None:
        """Register the hooks. Ours run before the user's, so that ``z`` is the layer's own output."""
        if self._handles or self._taps:
            raise LayerError("this observer is attached already")
        attention: dict[nn.Module, dict[str, Layer]] = {}
        for layer in self._layers:
            if isinstance(layer.kind, AttentionProjectionKind):
                attention.setdefault(layer.module, {})[layer.kind.part] = layer
            else:
                self._handles.append(
                    layer.module.register_forward_hook(_module_hook(layer, self._sink), prepend=True, with_kwargs=True)
                )
        for module, parts in attention.items():
            tap, taps = _AttentionTap(parts, self._sink), _ATTENTION_TAPS.setdefault(module, _AttentionTaps(module))
            taps.append(tap)
            self._taps.append((taps, tap))

    def detach(self) -> None:
        """Remove every hook of this observer; harmless when there is none."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for taps, tap in self._taps:
            taps.remove(tap)
        self._taps.clear()

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


def _module_hook(layer: Layer, sink: Sink) -> Callable[..., Tensor | None]:
    """A forward hook that reports to ``sink``. A closure, so that deep copies of the model do not copy the sink."""
    module_of_layer = layer.module

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        if module is not module_of_layer:  # a deep copy of the watched model
            return None
        x = first_tensor((args, kwargs))
        if x is None or not isinstance(output, Tensor):
            raise LayerError(f"layer {layer.name!r} was called without a tensor or did not return one")
        return sink(layer, x, output)

    return hook


class _AttentionTap(NamedTuple):
    """The projections of one attention module that one observer watches."""

    parts: dict[str, Layer]
    sink: Sink


class _AttentionTaps:
    """All taps of one attention module, sharing one pair of hooks that switch the interception on and off."""

    def __init__(self, module: nn.Module) -> None:
        self.taps: list[_AttentionTap] = []
        self._modes: list[_AttentionMode] = []
        self._handles: list[RemovableHandle] = []
        self._module = module

    def append(self, tap: _AttentionTap) -> None:
        if not self.taps:
            self._register()
        self.taps.append(tap)

    def remove(self, tap: _AttentionTap) -> None:
        self.taps.remove(tap)
        if not self.taps:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            while self._modes:  # an interrupt inside the module leaves its mode behind
                self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            _ATTENTION_TAPS.pop(self._module, None)  # the entry would keep the module alive

    def _register(self) -> None:
        watched, modes, taps = self._module, self._modes, self.taps

        def enter(module: nn.Module, args: object) -> None:
            if module is watched:
                mode = _AttentionMode(taps)
                mode.__enter__()  # type: ignore[no-untyped-call]
                modes.append(mode)

        def leave(module: nn.Module, args: object, output: object) -> None:
            if module is watched and modes:
                modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        self._handles = [
            watched.register_forward_pre_hook(enter),
            watched.register_forward_hook(leave, prepend=True, always_call=True),
        ]


_ATTENTION_TAPS: WeakKeyDictionary[nn.Module, _AttentionTaps] = WeakKeyDictionary()


class _AttentionMode(TorchFunctionMode):
    """Takes ``F.multi_head_attention_forward`` apart so that its projections become visible.

    The projections are computed here with ``F.linear``; the original function then runs with identity matrices in their
    place, so that masks, dropout, extra biases and every other option stay exactly torch's own.
    """

    def __init__(self, taps: list[_AttentionTap]) -> None:
        super().__init__()
        self._taps = taps

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return self._attention(args, kwargs)
        return func(*args, **kwargs)

    def _apply(self, part: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + b`` for time-first ``x``, reported batch first."""
        z = F.linear(x, weight, bias)
        batched = z.dim() == 3

        def batch_first(tensor: Tensor) -> Tensor:
            return tensor.transpose(0, 1) if batched else tensor

        for tap in self._taps:
            layer = tap.parts.get(part)
            if layer is None:
                continue
            view = batch_first(z)
            new = tap.sink(layer, batch_first(x), view)
            view = view if new is None else new
            z = batch_first(view)
        return z

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = F.multi_head_attention_forward.__code__.co_varnames
        call = dict(zip(names, args, strict=False)) | kwargs
        if call.get("use_separate_proj_weight"):
            weights = [call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]]
        else:
            weights = list(call["in_proj_weight"].chunk(3))
        biases = [None] * 3 if call["in_proj_bias"] is None else list(call["in_proj_bias"].chunk(3))
        for index, (slot, part) in enumerate(
            zip(("query", "key", "value"), AttentionProjectionKind.PARTS, strict=False)
        ):
            call[slot] = self._apply(part, call[slot], weights[index], biases[index])
        query = call["query"]
        identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
        out_weight, out_bias = call["out_proj_weight"], call["out_proj_bias"]
        call |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"), identity)
        call |= dict.fromkeys(("in_proj_weight", "in_proj_bias", "out_proj_bias"))
        call["use_separate_proj_weight"] = True
        output, attention = F.multi_head_attention_forward(**call)
        return self._apply("out_proj", output, out_weight, out_bias), attention
