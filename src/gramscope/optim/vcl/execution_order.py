"""Which layer a model executes last, found in its first forward pass by hooks on the layers.

``torch.compile`` calls these hooks once, while it traces the model, and puts nothing of them into its graphs. Where one traced
function serves several modules (equal blocks that are compiled one by one), the hooks of the others are not called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gramscope.errors import LayerError
from gramscope.layers.hooks import in_backward, tensors_in
from gramscope.layers.linear_layer import Layer
from gramscope.layers.modules import ModuleHook, TracedHook, unwrap
from gramscope.layers.watchers import Watcher
from gramscope.optim.weight_matrix import WeightMatrix

#: a layer, as its matrix where VCL can train it
Trained: TypeAlias = WeightMatrix | Layer


class ExecutionOrder(Watcher):
    """Notes the applications of layers in the first call of a model that builds an autograd graph.

    Args:
        model: the model.
        layers: linear-like layers in the order of their registration.
        matrices: the weights of those that VCL can train.
        traced: let ``torch.compile`` trace the hooks; if False it calls them between its graphs.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], matrices: Sequence[WeightMatrix], *, traced: bool
    ) -> None:
        super().__init__(unwrap(model))
        matrix_of = {layer.name: matrix for matrix in matrices for layer in matrix.layers}
        self._found: dict[str, Trained] = {layer.name: matrix_of.get(layer.name, layer) for layer in layers}
        self._by_module: dict[nn.Module, list[str]] = {}
        for layer in layers:
            self._by_module.setdefault(layer.module, []).append(layer.name)
        self._hook_type = TracedHook if traced else ModuleHook
        #: the layers in the order of their latest application, with the autograd nodes of their outputs; none where traced
        self._order: dict[str, list[Any]] = {}
        self._complete = False
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Place the hooks, and wait for the next call of the model."""
        self.close()
        self._order, self._complete = {}, False
        self._handles.append(self.model.register_forward_pre_hook(self._hook(ExecutionOrder._called)))
        for module, names in self._by_module.items():
            hook = self._hook(ExecutionOrder._applied, module, names)
            self._handles.append(module.register_forward_hook(hook, prepend=True))
        self._handles.append(self.model.register_forward_hook(self._hook(ExecutionOrder._returned)))

    def detach(self) -> None:
        """Stop. Hooks that were traced stay where they are: without them torch would compile the model again."""
        self._complete = True
        if all(self._order.values()) and self._hook_type is TracedHook:
            self.close()
        self._order = {}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def last(self) -> Trained:
        """The layer applied last.

        Where a compiled model did not call the hooks of all layers, it is the one registered last, unless the last one applied
        ran outside its graphs. What enters what is known of eager models alone.

        Raises:
            LayerError: nothing ran, or the output of some matrix does not enter the last layer (a model with two heads).
        """
        if not self._order:
            raise LayerError(
                "no layer was seen in a forward pass, so the last one executed is not known. Run a forward and backward pass "
                "first; a model that ran under torch.compile before VCL was made is not seen (make VCL before its first call)"
            )
        name, nodes = list(self._order.items())[-1]
        if not all(self._order.values()):
            hidden = not nodes and len(self._order) < len(self._found)
            return self._found[list(self._found)[-1] if hidden else name]
        reached, last = _ancestors(nodes), self._found[name]
        apart = {
            found.name
            for other, outputs in self._order.items()
            if (found := self._found[other]) is not last
            and isinstance(found, WeightMatrix)
            and reached.isdisjoint(outputs)
        }
        if apart:
            trainable = dict.fromkeys(found.name for found in self._found.values() if isinstance(found, WeightMatrix))
            raise LayerError(
                f"which layer is the readout is ambiguous: {last.name!r} ran last, but the outputs of "
                f"{', '.join(sorted(apart))} do not enter it. Name the layers that VCL trains with layers=; there are: "
                f"{', '.join(trainable)}"
            )
        return last

    def _hook(self, method: Callable[..., None], *fixed: Any) -> ModuleHook:
        reference = weakref.ref(self)

        def hook(*args: Any) -> None:
            order = reference()
            if order is not None and order.watching and not order._complete and torch.is_grad_enabled():
                method(order, *fixed, *args)

        return self._hook_type(hook)

    # without arguments where torch.compile traces them

    def _called(self, module: nn.Module | None = None, args: object = None) -> None:
        if module in (None, self.model):
            self._order = {}

    def _applied(
        self,
        watched: nn.Module,
        names: Sequence[str],
        module: nn.Module | None = None,
        args: object = None,
        output: object = None,
    ) -> None:
        nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if module is None or (module is watched and nodes and not in_backward()):  # not a copy, not a checkpoint
            for name in names:
                self._order.pop(name, None)
                self._order[name] = nodes

    def _returned(self, module: nn.Module | None = None, args: object = None, output: object = None) -> None:
        if module in (None, self.model):
            self._complete = bool(self._order)


def _ancestors(nodes: Sequence[Any]) -> set[Any]:
    """Autograd nodes and all that they depend on."""
    found: set[Any] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(edge[0] for edge in node.next_functions)
    return found
