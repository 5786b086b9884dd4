"""Applications of a weight that no module hook sees, because a function computes with it.

While a module with such weights runs, torch's functions are intercepted. Three kinds of modules hide several weights in one
function: ``nn.MultiheadAttention``, recurrent modules and fused experts. Others use the weight of a child without calling the
child (``F.conv1d(x, self.conv1d.weight)``), or override the forward of ``nn.Linear`` around ``F.linear(x, self.weight)``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gramscope.layers.convolution import ConvLayer
from gramscope.layers.experts import ExpertsLayer, Routing, is_quantised, watched
from gramscope.layers.kinds import AttentionProjection, EmbeddingLayer, Layer, LinearLayer, TransposedLinearLayer
from gramscope.layers.modules import ModuleHook
from gramscope.layers.recurrent import SEQUENCES, STEPS, run_sequence, run_step

#: ``(layer, native input, native output) -> replacement of the output or None``
Sink: TypeAlias = Callable[[Layer, Tensor, Tensor], Tensor | None]

_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
_USES = {F.linear, F.embedding, *_PRODUCTS, *_CONVOLUTIONS}


@dataclass(eq=False)
class Tap:
    """What one observer wants reported about one module.

    Attributes:
        sink: gets the reports.
        named: weights inside the module's own function, by their names.
        used: layers whose weight the module may use in a function.
        seen: names of the layers whose weight was used, for the module hook of a layer that is itself the module.
    """

    sink: Sink
    named: dict[str, Layer] = field(default_factory=dict)
    used: list[Layer] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def report(self, layer: Layer, x: Tensor, z: Tensor) -> Tensor:
        """Report an application, and return the output that the module continues with."""
        new = self.sink(layer, x, z)
        return z if new is None else new


class Taps:
    """All taps of one module, sharing one pair of hooks that switch the interception on and off."""

    def __init__(self, module: nn.Module) -> None:
        self.taps: list[Tap] = []
        self._contexts: list[AbstractContextManager[Any]] = []
        self._handles: list[RemovableHandle] = []
        self._module = module

    def append(self, tap: Tap) -> None:
        """Begin to report to a tap."""
        self.taps.append(tap)
        if len(self.taps) == 1:
            self._register()

    def remove(self, tap: Tap) -> None:
        """Stop reporting to a tap."""
        self.taps.remove(tap)
        if not self.taps:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            while self._contexts:  # an interrupt inside the module leaves its context behind
                self._contexts.pop().__exit__(None, None, None)
            _TAPS.pop(self._module, None)  # the entry would keep the module alive

    def _register(self) -> None:
        contexts, taps = self._contexts, self.taps
        if is_quantised(self._module):  # transformers calls them in its own way unless told otherwise
            contexts.append(_interception(self._module, (), taps))
            contexts[0].__enter__()
            return

        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            context = _interception(module, args, taps)
            context.__enter__()
            contexts.append(context)

        def leave(module: nn.Module, args: object, output: object) -> None:
            if contexts:
                contexts.pop().__exit__(None, None, None)

        self._handles = [
            self._module.register_forward_pre_hook(ModuleHook(enter)),
            self._module.register_forward_hook(ModuleHook(leave), prepend=True, always_call=True),
        ]


_TAPS: WeakKeyDictionary[nn.Module, Taps] = WeakKeyDictionary()


def taps_of(module: nn.Module) -> Taps:
    """The taps of a module, none at first."""
    return _TAPS.setdefault(module, Taps(module))


def _interception(module: nn.Module, args: tuple[Any, ...], taps: list[Tap]) -> AbstractContextManager[Any]:
    if any(isinstance(layer, ExpertsLayer) for tap in taps for layer in tap.named.values()):

        def report(name: str, routing: Routing, x: Tensor, z: Tensor) -> Tensor:
            for tap in taps:
                if name in tap.named:
                    layer = tap.named[name]
                    assert isinstance(layer, ExpertsLayer)
                    z = tap.report(replace(layer, routing=routing), x, z)
            return z

        return watched(module, report)
    return _Functions(module, args, taps)


class _Functions(TorchFunctionMode):
    """Intercepts torch's functions while ``module`` runs with the arguments ``args``."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], taps: list[Tap]) -> None:
        super().__init__()
        packed = args[0] if args and isinstance(args[0], PackedSequence) else None
        self._sorted = None if packed is None else packed.sorted_indices  # a packed batch may be sorted by length
        self._unsorted = None if packed is None else packed.unsorted_indices
        self._module = module
        self._taps = taps
        self._uses = any(tap.used for tap in taps)
        self._running: list[nn.Module] = []  # layers whose own module calls the function: their hook reports it
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> _Functions:
        children = {layer.module for tap in self._taps for layer in tap.used if layer.module is not self._module}
        for child in children:
            self._handles.append(child.register_forward_pre_hook(lambda m, _: self._running.append(m)))
            self._handles.append(child.register_forward_hook(self._returned, prepend=True, always_call=True))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def _returned(self, module: nn.Module, args: object, output: object) -> None:
        if module in self._running:
            self._running.remove(module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._uses and func in _USES:
            return self._use(func, args, kwargs)
        if func is F.multi_head_attention_forward and isinstance(self._module, nn.MultiheadAttention):
            return self._attention(args, kwargs)
        if func in SEQUENCES and isinstance(self._module, nn.RNNBase):
            return run_sequence(SEQUENCES[func], self._module._flat_weights_names, self._report_unsorted, args)
        if func in STEPS and isinstance(self._module, nn.RNNCellBase):
            return run_step(STEPS[func], self._report, args, kwargs)
        return func(*args, **kwargs)

    def _report(self, name: str, x: Tensor, z: Tensor) -> Tensor:
        for tap in self._taps:
            if name in tap.named:
                z = tap.report(tap.named[name], x, z)
        return z

    def _report_unsorted(self, name: str, x: Tensor, z: Tensor) -> Tensor:
        if self._unsorted is None or self._sorted is None:
            return self._report(name, x, z)
        return self._report(name, x[self._unsorted], z[self._unsorted])[self._sorted]

    # --- the weight of a layer in a function --------------------------------------------------------------------------

    def _use(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        z = func(*args, **kwargs)
        names = ("input", "other" if func in _PRODUCTS else "weight")
        call = dict(zip((*names, "bias", "stride", "padding", "dilation", "groups"), args, strict=False)) | kwargs
        x, weight = (call.get(name) for name in names)
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not isinstance(z, Tensor):
            return z
        for tap in self._taps:
            for layer in tap.used:
                p = layer.parameter
                if p is None or layer.module in self._running:
                    continue
                told = partial(tap.report, replace(layer, exact=True))
                if func in _PRODUCTS and _plain(layer) and _is(x, p) and weight.dim() > 1:
                    z = told(weight.mT, z.mT).mT  # W x
                elif (
                    (func in _PRODUCTS and _plain(layer) and _is(weight, p.mT))  # x Wᵀ
                    or (func is F.linear and _plain(layer) and _is(weight, p))
                    or (func is F.embedding and isinstance(layer, EmbeddingLayer) and _is(weight, p))
                    or (func in _CONVOLUTIONS and _is(weight, p) and _same_convolution(layer, call))
                ):
                    z = told(x, z)
                else:
                    continue
                tap.seen.add(layer.name)
                break
        return z

    # --- attention ----------------------------------------------------------------------------------------------------

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + b`` for time-first ``x``, reported batch first."""
        z = F.linear(x, weight, bias)
        if z.dim() != 3:
            return self._report(name, x, z)
        return self._report(name, x.transpose(0, 1), z.transpose(0, 1)).transpose(0, 1)

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``F.multi_head_attention_forward`` with its projections computed outside.

        The original function runs with identity matrices in their place, so that masks, dropout, extra biases and every
        other option stay exactly torch's own.
        """
        names = F.multi_head_attention_forward.__code__.co_varnames
        call = dict(zip(names, args, strict=False)) | kwargs
        if call.get("use_separate_proj_weight"):
            weights = [call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]]
        else:
            weights = list(call["in_proj_weight"].chunk(3))
        biases = [None] * 3 if call["in_proj_bias"] is None else list(call["in_proj_bias"].chunk(3))
        arguments = zip(("query", "key", "value"), AttentionProjection.PROJECTIONS, weights, biases, strict=False)
        for argument, name, weight, bias in arguments:
            call[argument] = self._project(name, call[argument], weight, bias)
        query = call["query"]
        identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
        out_weight, out_bias = call["out_proj_weight"], call["out_proj_bias"]
        call |= dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"), identity)
        call |= dict.fromkeys(("in_proj_weight", "in_proj_bias", "out_proj_bias"))
        call["use_separate_proj_weight"] = True
        output, attention = F.multi_head_attention_forward(**call)
        return self._project("out_proj", output, out_weight, out_bias), attention


def _plain(layer: Layer) -> bool:
    return isinstance(layer, LinearLayer) and not isinstance(layer, TransposedLinearLayer)


def _is(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor is the parameter, a copy of it in another dtype, or a view of all of it in the same shape."""
    if tensor is parameter or _cast_from(tensor) is parameter:
        return True
    if tensor.shape != parameter.shape or tensor.device.type == "meta":
        return False
    steps = zip(tensor.shape, tensor.stride(), parameter.stride(), strict=True)
    return all(a == b for size, a, b in steps if size > 1) and tensor.data_ptr() == parameter.data_ptr()


def _cast_from(tensor: Tensor) -> Tensor | None:
    """The parameter whose copy in another dtype this is, known from its autograd graph: routers compute in float32."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def _same_convolution(layer: Layer, call: dict[str, Any]) -> bool:
    """Whether a function call has the options of the layer's module."""
    if not isinstance(layer, ConvLayer) or getattr(layer.module, "padding_mode", "") != "zeros":
        return False
    axes = len(layer.module.kernel_size)  # type: ignore[arg-type]

    def per_axis(value: Any) -> tuple[Any, ...]:
        return (value,) * axes if isinstance(value, int) else tuple(value)

    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return all(
        per_axis(call.get(name, default)) == per_axis(getattr(layer.module, name)) for name, default in defaults.items()
    )
