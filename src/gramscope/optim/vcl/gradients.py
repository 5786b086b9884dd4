"""What a step of Algorithm 1 needs from forward and backward passes: batch sizes, ``D = Σ δhᵀ`` and ``Σ = Σ δδᵀ``.

D is the reduction's factor times ``parameter.grad`` as it is at the step: scaled by clipping, unscaled by GradScaler, summed
over micro-batches. Hooks add up Σ in backward passes. A product of ``.grad`` with one fixed random vector, the probe, taken
after the backward pass and at the step, tells how ``.grad`` was scaled in between; Σ is scaled by the square.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramscope.errors import InputError, LayerError
from gramscope.layers.kinds import Layer
from gramscope.layers.modules import ModuleHook, unwrap
from gramscope.layers.record import Call
from gramscope.layers.select import select_layers
from gramscope.layers.tape import Observer, Watcher, in_backward
from gramscope.optim.weight_matrix import WeightMatrix

#: how the loss is reduced over the batch: ``"mean"``, ``"sum"``, the factor that makes gradients sums over samples, or a
#: function from the batch size to that factor
Reduction: TypeAlias = str | float | Callable[[int], float]
#: relative rounding of gradients in half precision
_ROUGH = 0.05


@dataclass(frozen=True)
class Batch:
    """The gradient of one matrix, summed over samples.

    Attributes:
        D: ``Σ δhᵀ``, ``[…, k, d]``.
        sigma: ``Σ δδᵀ``, ``[…, k, k]``.
        count: over how many rows D is a sum.
        tolerance: the part of D that its rounding explains.
    """

    D: Tensor
    sigma: Tensor
    count: int
    tolerance: float


@dataclass(frozen=True)
class _Part:
    """One application of a layer: autograd's number of the backward pass, the reduction's factor, Σ."""

    task: int
    factor: float
    count: int
    sigma: Tensor
    rough: bool


class GradientCollector:
    """Collects what hooks see of one weight matrix between two steps.

    Args:
        matrix: the matrix.
        dtype: of the results.
        averaged: whether several processes average ``.grad`` among them.
    """

    def __init__(self, matrix: WeightMatrix, dtype: torch.dtype, averaged: bool) -> None:
        self.matrix, self.dtype = matrix, dtype
        self._averaged = averaged
        self._pending: list[_Part] = []
        self._parts: list[_Part] = []
        self._probe: Tensor | None = None
        self._response: Tensor | None = None
        self._grad: Callable[[], Tensor | None] = lambda: None
        self._version = 0

    def clear(self) -> None:
        """Forget everything; gradients start anew."""
        self._pending, self._parts = [], []
        self._response = None
        self._grad = lambda: None

    @torch.no_grad()
    def receive(self, layer: Layer, dz: Tensor, factor: float) -> None:
        """Take in the gradient of one application's output."""
        self._forget_if_zeroed()
        if self._averaged and self.matrix.parameter.grad is None:
            self._parts = []
        delta = layer.outputs(dz).flatten(-3, -2).to(self.dtype)
        rough = dz.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(dz.device.type)
        task, count = int(torch._C._current_graph_task_id()), delta.shape[-2]
        self._pending.append(_Part(task, factor, count, factor**2 * (delta.mT @ delta), rough))

    @torch.no_grad()
    def accumulated(self) -> None:
        """Take over the parts of the backward pass that has just added to ``.grad``, and remember ``.grad``."""
        grad = self.matrix.parameter.grad
        if grad is None:
            return
        # a new tensor: the gradient had been set to None, unless DistributedDataParallel put one of its own there
        if self._grad() is not grad and not self._averaged:
            self._parts = []
        task = int(torch._C._current_graph_task_id())
        self._parts += [part for part in self._pending if part.task == task]
        self._pending = []
        self._grad, self._version = weakref.ref(grad), grad._version
        self._response = self._probed(grad)

    def _forget_if_zeroed(self) -> None:
        """Start anew where ``.grad`` was set to zero in place; its values are read only where its version changed."""
        grad = self._grad()
        if grad is not None and grad._version != self._version:
            self._version = grad._version
            if not bool(grad.any()):
                self.clear()

    @property
    def idle(self) -> bool:
        """Whether no gradient reaches the weight, as that of an expert without tokens."""
        grad = self.matrix.gradient()
        return grad is None or (not self._parts and not bool(grad.any()))

    @property
    def factor(self) -> float | None:
        """The reduction's factor; None where no gradient came through the layer.

        Raises:
            LayerError: micro-batches have different factors.
        """
        found = {part.factor for part in self._parts}
        if len(found) > 1:
            raise LayerError(
                f"{self.matrix.name}: the micro-batches of this step have different sizes (factors {sorted(found)}), so the "
                "gradient of each would need a weight of its own. Sum the losses of the samples and give reduction='sum', or "
                "divide all sums by one number and give that number"
            )
        return next(iter(found), None)

    @property
    def count(self) -> int:
        """How many rows the gradient seen here is a sum over."""
        return sum(part.count for part in self._parts)

    @property
    def tolerance(self) -> float:
        """The part of the gradient that rounding explains."""
        if any(part.rough for part in self._parts):
            return _ROUGH
        return 1e4 * max(torch.finfo(dtype).eps for dtype in (self.dtype, self.matrix.parameter.dtype))

    def sigma(self) -> Tensor:
        """``Σ δδᵀ`` of the samples seen here, as backward passes left it."""
        k = self.matrix.shape[-2]
        nothing = torch.zeros(*self.matrix.shape[:-2], k, k, dtype=self.dtype, device=self.matrix.parameter.device)
        return sum((part.sigma for part in self._parts), nothing)

    def responses(self) -> Tensor:
        """The products of ``.grad`` with the probe, as backward passes left it and as it is now, ``[2, …, k]``."""
        grad = self.matrix.parameter.grad
        nothing = torch.zeros(self.matrix.shape[:-1], dtype=self.dtype, device=self.matrix.parameter.device)
        then = self._response if self._response is not None and self._parts else nothing
        return torch.stack([then, nothing if grad is None else self._probed(grad)])

    def batch(self, factor: float, responses: Tensor, sigma: Tensor, count: int) -> Batch:
        """The gradient of all samples; the arguments may be those of several processes."""
        grad = self.matrix.gradient()
        assert grad is not None
        then, now = responses
        scale = (now * then).sum() / then.square().sum().clamp_min(torch.finfo(then.dtype).tiny)
        return Batch(factor * grad.to(self.dtype), sigma * scale**2, count, self.tolerance)

    def _probed(self, grad: Tensor) -> Tensor:
        """``gradient @ probe``, ``[…, k]``."""
        if self._probe is None or self._probe.device != grad.device:
            generator = torch.Generator(device="cpu").manual_seed(0)
            probe = torch.randn(self.matrix.shape[-1], generator=generator, dtype=torch.float64, device="cpu")
            self._probe = probe.to(grad.device, self.dtype)
        return self.matrix.view(grad.detach()).to(self.dtype) @ self._probe


def batch_of(collector: GradientCollector) -> Batch:
    """The gradient of one matrix in a single process.

    Raises:
        LayerError: there is no gradient, or it did not come through the layer.
    """
    name = collector.matrix.name
    if collector.matrix.gradient() is None:
        raise LayerError(
            f"{name} has no gradient: run backward() of a loss that depends on it before step(), or leave the layer out of "
            "layers="
        )
    factor = collector.factor
    if factor is None:
        raise LayerError(unseen_gradient(name))
    return collector.batch(factor, collector.responses(), collector.sigma(), collector.count)


def unseen_gradient(name: str) -> str:
    """The text of an error for a gradient that did not come through its layer."""
    return (
        f"{name} has a gradient but was not seen in a forward pass. VCL must be made before the model runs (under "
        "torch.compile: before its first call), the layer must be called, or its weight used by F.linear, a product or a "
        "convolution, and gradients must come from backward(), not from a CUDA graph, whose replay calls no hooks. Or leave it "
        "out of layers="
    )


class ModelHooks(Watcher):
    """Feeds the collectors of a model's layers from its forward and backward passes.

    The hooks refer to this object weakly, so that a model does not keep an old optimizer alive.
    """

    def __init__(self, model: nn.Module, collectors: Sequence[GradientCollector], reduction: Reduction) -> None:
        super().__init__(unwrap(model))
        self._reduction = reduction
        self._by_layer = {layer.name: c for c in collectors for layer in c.matrix.layers}
        self._collectors = list(collectors)
        self._call: Call | None = None
        self._handles: list[RemovableHandle] = []
        #: the layer applied last in a forward pass
        self.last: Layer | None = None
        self._place()

    def clear(self) -> None:
        """Forget the collected gradients."""
        for collector in self._collectors:
            collector.clear()

    def close(self) -> None:
        """Remove every hook."""
        self._observer.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _place(self) -> None:
        self._entrances = _entrances(self.model)
        several = len(self._entrances) > 1
        for module in self._entrances:
            self._handles.append(module.register_forward_pre_hook(_weakly(self, ModelHooks._called), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_weakly(self, ModelHooks._returned), always_call=several))
        self._entrance: nn.Module | None = None
        layers = [layer for layer in select_layers(self.model, factors=True) if not layer.not_for_vcl]
        self._observer = Observer(layers, _weakly(self, ModelHooks._applied))
        self._observer.attach()
        accumulated = _weakly(self, ModelHooks._accumulated)
        for number, collector in enumerate(self._collectors):
            hook = partial(accumulated, number)
            self._handles.append(collector.matrix.parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(module is entrance for entrance in self._entrances):  # a copy that shares the hooks
            return
        if self._entrance not in (None, module) and module is not self.model:
            return
        self._call, self._entrance = Call(args, kwargs), module

    def _returned(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is not self._entrance:
            return
        self._entrance = None
        if self._call is not None:
            self._call.returned(output)

    def _accumulated(self, number: int, parameter: Tensor) -> None:
        self._collectors[number].accumulated()

    def _applied(self, layer: Layer, x: Tensor, z: Tensor) -> None:
        if not torch.is_grad_enabled() or not z.requires_grad:
            return
        if not in_backward():
            self.last = layer
        call = self._call
        if call is not None:
            call.applied(layer, x.detach())
        collector = self._by_layer.get(layer.name)
        if collector is None:
            return
        me = weakref.ref(self)

        def receive(dz: Tensor) -> None:
            hooks = me()
            if hooks is not None and collector.matrix.parameter.requires_grad:
                collector.receive(layer, dz.detach(), hooks._factor(call, layer.name))

        z.register_hook(ModuleHook(receive))  # type: ignore[no-untyped-call]

    def _factor(self, call: Call | None, name: str) -> float:
        reduction = self._reduction
        if reduction == "sum":
            return 1.0
        if isinstance(reduction, int | float):
            return float(reduction)
        if call is None or not call.arguments:
            raise LayerError(
                f"layer {name!r} ran outside a call of the model with a tensor, so the batch size is not known; call the "
                "model itself, or give the factor of the gradients as reduction="
            )
        batch_size = call.samples
        if isinstance(reduction, str):
            if call.doubt is not None:
                raise LayerError(f"reduction='mean': {call.doubt}; or give the factor of the gradients as reduction=")
            return float(batch_size)
        factor = float(reduction(batch_size))
        if not (math.isfinite(factor) and factor > 0):
            raise InputError(f"reduction({batch_size}) returned {factor}; the factor of the gradients must be positive")
        return factor


def _entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose call is one batch: the model, and its parts where a training loop inside it calls them.

    A LightningModule does so in ``training_step``; a model without a forward of its own must.
    """
    if not hasattr(model, "training_step") and type(model).forward is not nn.Module.forward:
        return [model]
    parts, found = list(model.children()), [model]
    while parts:
        part = parts.pop(0)
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            parts += part.children()
        else:
            found.append(part)
    return found


def _weakly(hooks: ModelHooks, method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls ``method(hooks, …)`` while ``hooks`` lives and is watching."""
    reference = weakref.ref(hooks)

    def hook(*args: Any) -> None:
        found = reference()
        if found is not None and found.watching:
            method(found, *args)

    return ModuleHook(hook)
