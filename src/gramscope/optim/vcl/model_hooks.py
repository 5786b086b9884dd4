"""The hooks that VCL places on a model: batch sizes, layer applications, accumulated gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gramscope.errors import InputError, LayerError
from gramscope.layers.hooks import Observer
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import ModuleHook, unwrap
from gramscope.layers.sample_count import Call
from gramscope.layers.watchers import Watcher
from gramscope.optim.vcl.gradients import Gatherer

#: how the loss is reduced over the batch: ``"mean"``, ``"sum"``, the factor that makes gradients sums over samples, or a
#: function from the batch size to that factor
Reduction: TypeAlias = str | float | Callable[[int], float]


class ModelHooks(Watcher):
    """Feeds the gatherers of a model's layers from its forward and backward passes.

    ``untrained`` are layers without a gatherer whose inputs help to count the samples. The hooks refer to this object weakly,
    so that a model does not keep an old optimizer alive.
    """

    def __init__(
        self, model: nn.Module, gatherers: Sequence[Gatherer], reduction: Reduction, untrained: Sequence[Layer] = ()
    ) -> None:
        super().__init__(unwrap(model))
        self._reduction = reduction
        self._by_layer = {layer.name: gatherer for gatherer in gatherers for layer in gatherer.weight.layers}
        self._gatherers = list(gatherers)
        self._call: Call | None = None
        self._handles: list[RemovableHandle] = []
        self._place(untrained)

    def clear(self) -> None:
        """Forget the gathered gradients."""
        for gatherer in self._gatherers:
            gatherer.clear()

    def close(self) -> None:
        """Remove every hook."""
        self._observer.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _place(self, untrained: Sequence[Layer]) -> None:
        self._entrances = _entrances(self.model)
        several = len(self._entrances) > 1
        for module in self._entrances:
            self._handles.append(module.register_forward_pre_hook(_weakly(self, ModelHooks._called), with_kwargs=True))
            self._handles.append(module.register_forward_hook(_weakly(self, ModelHooks._returned), always_call=several))
        self._entrance: nn.Module | None = None
        layers = [layer for gatherer in self._gatherers for layer in gatherer.weight.layers]
        self._observer = Observer([*layers, *untrained], _weakly(self, ModelHooks._applied))
        self._observer.attach()
        accumulated = _weakly(self, ModelHooks._accumulated)
        for number, gatherer in enumerate(self._gatherers):
            for parameter in gatherer.weight.parameters:
                hook = partial(accumulated, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

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
        self._gatherers[number].accumulated()

    def _applied(self, layer: Layer, x: Tensor, z: Tensor) -> None:
        if not torch.is_grad_enabled() or not z.requires_grad:
            return
        call, x = self._call, x.detach()
        if call is not None:
            call.applied(layer, x)
        gatherer = self._by_layer.get(layer.name)
        if gatherer is None:
            return
        me = weakref.ref(self)

        def receive(dz: Tensor) -> None:
            hooks = me()
            if hooks is not None and gatherer.weight.parameter.requires_grad:
                gatherer.receive(layer, x, dz.detach(), hooks._factor(call, layer.name))

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
