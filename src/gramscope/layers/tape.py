"""Watching a model: one callback per application of a layer, and the records of a capture.

An :class:`Observer` calls ``sink(layer, x, z)`` right after each application of a chosen layer, with the module's
native input and output still attached to the autograd graph; what the sink returns (if not ``None``) replaces the
output. Applications that no module hook sees are found by :mod:`gramscope.layers.intercepted_functions`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gramscope.errors import Kind, LayerError, Note, ResultWarning
from gramscope.layers.batches import first_tensor
from gramscope.layers.intercepted_functions import Sink, Tap, taps_of
from gramscope.layers.kinds import EmbeddingLayer, Layer, NamedWeightLayer
from gramscope.layers.losses import check_reduction
from gramscope.layers.modules import ModuleHook
from gramscope.layers.record import DIFFERENTIATED, OTHER_GRADIENT, Application, Call, LayerRecord
from gramscope.layers.select import Selection

_WATCHERS: WeakSet[Watcher] = WeakSet()
#: the model whose measurement is under way here
_MEASURED: ContextVar[nn.Module | None] = ContextVar("measured", default=None)


class Watcher:
    """Something with hooks on ``model``, which must do nothing while :attr:`watching` is false."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._away = 0
        self._measured = _MEASURED.get()
        _WATCHERS.add(self)

    @property
    def watching(self) -> bool:
        """Whether to notice passes of the model."""
        return self._away == 0

    @contextmanager
    def ignoring_calls(self) -> Iterator[None]:
        """Ignore passes of the model inside this block."""
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1

    def is_foreign(self, model: nn.Module, modules: set[nn.Module]) -> bool:
        """Whether this watches one of ``modules`` for the user or for another measurement of ``model``.

        A measurement of two networks that share modules has a watcher for each, and leaves both alone.
        """
        return self._measured in (None, model) and not modules.isdisjoint(self.model.modules())


@contextmanager
def unseen(model: nn.Module, by_all_but: Watcher | None = None) -> Iterator[None]:
    """Hide passes of ``model`` inside this block from the watchers that exist already, except ``by_all_but``."""
    modules = set(model.modules())
    with ExitStack() as stack:
        for watcher in list(_WATCHERS):
            if watcher is not by_all_but and watcher.is_foreign(model, modules):
                stack.enter_context(watcher.ignoring_calls())
        stack.callback(_MEASURED.reset, _MEASURED.set(model))
        yield


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

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attached inside this block."""
        try:
            self.attach()
            yield
        finally:
            self.detach()


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
        x = args[0] if args and isinstance(args[0], Tensor) else first_tensor((args, kwargs))
        if x is not None and isinstance(output, Tensor):
            # accelerate moves inputs inside the module
            return sink(layer, x if x.device == output.device else x.to(output.device), output)
        if layer.scope is module:
            return None
        raise LayerError(f"layer {layer.name!r} was called without a tensor or did not return one")

    return hook


#: how the loss was reduced over the batch: ``"sum"``, ``"none"`` (already per sample), ``"mean"``, or the factor itself
Reduction: TypeAlias = str | float


class Tape(Watcher):
    """The records of one capture: ``tape[name]`` is a :class:`LayerRecord`.

    ``tape.outputs[name]`` is the output of a module that was asked for, as it was in the last of the
    ``tape.output_counts[name]`` times the module ran.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        *,
        reduction: Reduction = "sum",
        batch_dim: int = 0,
        gradients: bool = True,
        copy_weights: bool = True,
    ) -> None:
        super().__init__(model)
        self.selection = selection
        self.reduction = check_reduction(reduction)
        self.batch_dim = batch_dim
        self.unsupported = {name: Note("unsupported", why) for name, why in selection.unsupported.items()}
        self.records = {layer.name: LayerRecord(layer, self.factor, self._reached, batch_dim) for layer in selection}
        self.outputs: dict[str, Tensor] = {}
        self.output_counts: dict[str, int] = {}
        self.order: list[str] = []
        self.calls: list[Call] = []
        self._gradients = gradients
        self._copy_weights = copy_weights
        self._per_sample = False
        self._accepting = True
        #: whether the next backward pass compares D with autograd's gradients of the weights
        self.compares = False
        self.explicit = False
        self.ran = False
        self.applied_layers: set[str] = set()
        self._refused: set[str] = set()
        self._had: set[tuple[str, str]] = set()

    def __getitem__(self, name: str) -> LayerRecord:
        if name not in self.records:
            raise LayerError(f"no captured layer {name!r}; there are: {', '.join(self.records)}")
        return self.records[name]

    def __iter__(self) -> Iterator[LayerRecord]:
        return iter([self.records[name] for name in self.order])  # in order of execution

    def __len__(self) -> int:
        return sum(bool(record.applications) for record in self.records.values())

    def __repr__(self) -> str:
        seen = ", ".join(f"{r.name} {tuple(r.applications[0].x.shape)}" for r in self)
        return f"Tape({seen or 'nothing seen yet'})"

    def factor(self, call: int = 0) -> float:
        """What the gradients of forward number ``call`` are multiplied by to undo the loss's reduction."""
        if not isinstance(self.reduction, str):
            return float(self.reduction)
        if self.reduction != "mean" or self._per_sample:
            return 1.0
        if not self.calls:
            raise LayerError("reduction='mean' needs the batch size: call the model itself, not one of its parts")
        made = self.calls[min(call, len(self.calls) - 1)]
        if made.doubt is not None:
            raise LayerError(
                f"reduction='mean' needs the number of samples, but {made.doubt}; or give the factor that undoes the loss's "
                "mean, reduction=<number>"
            )
        return float(made.samples)

    def clear(self) -> None:
        """Forget everything seen so far; the hooks stay."""
        for record in self.records.values():
            record.forget()
        self.outputs.clear()
        self.output_counts.clear()
        self.order.clear()
        self.calls.clear()
        self._per_sample = False

    def applications(self) -> list[Application]:
        """All applications, layer by layer."""
        return [a for record in self.records.values() for a in record.applications]

    def backward(self, losses: Tensor, retain_graph: bool = False) -> None:
        """Fill in every ``delta`` from a scalar loss, or from per-sample losses, without touching any ``.grad``.

        A scalar is read according to ``reduction``; a tensor of several losses counts as unreduced and is summed.
        """
        if losses.dim() > 0 and losses.numel() > 1:
            self._per_sample = True
            losses = losses.sum()
        if not losses.requires_grad:
            raise LayerError("the loss does not depend on any captured layer (it has no gradient graph)")
        waiting = [a for a in self.applications() if a.edge is not None]
        edges = [a.edge for a in waiting if a.edge is not None]
        blind = sorted({a.layer.name for a in self.applications() if a.edge is None})
        if blind and _has_checkpoint(losses):
            raise LayerError(
                f"{', '.join(blind[:3])}: a re-entrant activation checkpoint hides these layers' gradients; "
                "checkpoint(..., use_reentrant=False) shows them and gives the same numbers"
            )
        if not edges:
            refused = "; ".join(f"{name}: {self.unsupported[name]}" for name in sorted(self._refused))
            reason = "all of them ran without a gradient graph" if blind else refused or "none was applied"
            raise LayerError(f"the loss does not depend on any captured layer: {reason}")
        kept: dict[str, Tensor] = {}
        with self.paused(), self._keeping(kept) as weights:
            gradients = torch.autograd.grad(losses, [*edges, *weights], retain_graph=retain_graph, allow_unused=True)
        for a, gradient in zip(waiting, gradients, strict=False):
            if gradient is not None:
                a.dz = gradient.detach() if a.dz is None else a.dz + gradient.detach()
        self._compare(kept)
        reached = {a.layer.name for a in self.applications() if a.dz is not None}
        reached |= {record.name for record in self if record.problem}  # through its weight
        self.note_reached("no gradient", reached, "the loss does not reach it")

    @contextmanager
    def _keeping(self, kept: dict[str, Tensor]) -> Iterator[list[GradientEdge]]:
        """Weights of single layers whose gradients, asked for in this block, are dropped once a little of them is ``kept``."""
        modules = self.model.modules() if self.compares else ()
        uses = Counter(p for module in modules for p in module._parameters.values() if p is not None)
        owners: dict[nn.Parameter, list[LayerRecord]] = {}
        for record in self:
            p = record.layer.parameter
            if p is not None and p.requires_grad and uses[p] == 1:
                owners.setdefault(p, []).append(record)  # several where it holds queries, keys and values

        def keep(records: list[LayerRecord], gradient: Tensor) -> Tensor | None:
            kept.update({record.name: record.of_gradient(gradient) for record in records})
            return None if gradient.is_sparse else gradient.new_zeros(()).expand_as(gradient)

        with ExitStack() as hooks:
            for p, records in owners.items():
                hooks.callback(p.register_hook(partial(keep, records)).remove)  # type: ignore[no-untyped-call]
            yield [get_gradient_edge(p) for p in owners]

    def _compare(self, kept: dict[str, Tensor]) -> None:
        """Note the layers whose D is not autograd's gradient of the weight."""
        errors = {name: self[name].gradient_error(value) for name, value in kept.items() if not self[name].problem}
        for name in [name for name, error in errors.items() if error]:
            self[name].problem = OTHER_GRADIENT.format(100 * max(errors.values()))
        self.compares = self.compares and not any(value.any() for value in kept.values())

    def forget_gradients(self) -> None:
        """Drop the gradients that have come back."""
        for a in self.applications():
            a.dz = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record gradients that flow inside this block."""
        before, self._accepting = self._accepting, False
        try:
            yield
        finally:
            self._accepting = before

    def note_reached(self, missing: Kind, reached: set[str], reason: str) -> None:
        """Note the layers seen that were never ``reached`` so far, and remove such notes from the others.

        ``missing`` is the kind of the notes, ``"no gradient"`` or ``"no Jacobians"``.
        """
        self._had |= {(missing, name) for name in reached}
        for record in self:
            if (missing, record.layer.name) not in self._had:
                self.unsupported.setdefault(record.layer.name, Note(missing, f"{missing}: {reason}"))
            elif record.layer.name in self.unsupported and self.unsupported[record.layer.name].kind == missing:
                del self.unsupported[record.layer.name]

    def note_unapplied(self) -> None:
        """Note the layers that never ran."""
        for name in self.records:
            if name not in self.applied_layers:
                self.unsupported.setdefault(name, Note("not applied", "the forward did not call it"))

    def _reached(self, call: int) -> bool:
        """Whether a gradient has come back to forward number ``call``."""
        return any(a.dz is not None for a in self.applications() if a.call == call)

    @property
    def _forward_runs(self) -> bool:
        """Whether the model has been called and has not returned yet."""
        return bool(self.calls) and not self.calls[-1].over

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: a new batch begins."""
        if not self.watching or in_backward():
            return
        if not self.ran and self._gradients and torch.is_grad_enabled():
            problem = batch_dependence(self.model)
            if problem is not None:
                warnings.warn(
                    f"{problem}; .D is still the weight gradient, while .delta and .Sigma are not those of single samples",
                    ResultWarning,
                    stacklevel=3,
                )
        self.ran = True
        self.calls.append(Call(args, kwargs, self.batch_dim))

    def returned(self, module: nn.Module, args: object, output: object) -> None:
        """The model returned ``output``."""
        if self.watching and self.calls and not in_backward():
            self.calls[-1].returned(output)

    def keep_output(self, name: str, module: nn.Module, args: object, output: object) -> None:
        """A module whose output is asked for returned it."""
        value = first_tensor(output)
        if value is None:
            raise LayerError(f"module {name!r} returned no tensor but {type(output).__name__}")
        if self.watching and not in_backward():
            self.outputs[name] = value.detach().clone()  # what follows may overwrite it
            self.output_counts[name] = self.output_counts.get(name, 0) + 1

    def applied(self, layer: Layer, x: Tensor, z: Tensor) -> Tensor | None:
        """A layer is applied; returns what the forward goes on with in place of ``z``, if not ``z`` itself."""
        if not self.watching:
            return None
        record = self.records[layer.name]
        if in_backward():  # an activation checkpoint runs the forward again, with the same operations
            return own_node(z) if self._gradients and torch.is_grad_enabled() and z.requires_grad else None
        if layer.name in self._refused:
            return None
        problem = self.problem(layer, x, z, first=not record.applications)
        if problem is not None:
            self._refused.add(layer.name)
            self.unsupported[layer.name] = Note("unsupported", problem)
            return None
        if self.calls:
            self.calls[-1].applied(layer, x)
        if not record.applications:
            self.order.append(layer.name)
            self.applied_layers.add(layer.name)
            if self._copy_weights:
                _ = record.weight
        x_edge = get_gradient_edge(x) if x.requires_grad else None
        x = x.detach()
        version = -1 if x.is_inference() else x._version
        a = Application(layer, x, z.shape, z.dtype, max(len(self.calls) - 1, 0), version=version, x_edge=x_edge)
        record.applications.append(a)
        if not self._gradients or not torch.is_grad_enabled() or z.is_inference():
            return None
        replaced = own_node(z)
        self._watch(a, z if replaced is None else replaced)
        return replaced

    def problem(self, layer: Layer, x: Tensor, z: Tensor, first: bool) -> str | None:
        """Why this application cannot be recorded; ``None`` if it can."""
        if torch._C._functorch.is_functorch_wrapped_tensor(z):
            return "it runs inside torch.func (jvp, vmap, grad), which hides its gradients"
        if first and not layer.exact and not layer.is_standard() and not is_linear_map(layer, x, z):
            return f"{type(layer.module).__name__} overrides its forward, and its output is not W h + b of its inputs"
        if self.calls and isinstance(layer, EmbeddingLayer):
            rows, n = layer.samples(x, self.batch_dim), self.calls[-1].samples
            several = x.dim() > 1 and rows > n and rows % n == 0  # choices side by side
            transposed = x.dim() > 1 and x.shape[1] == n and rows > 1  # positions first, as in XLNet
            if n and rows != n and not several and not transposed:
                return f"the same {rows} rows of indices serve all {n} samples (positions), so no sample has its own gradient"
        return None

    def _watch(self, a: Application, z: Tensor) -> None:
        a.edge = get_gradient_edge(z)
        # The edge holds the node, and the node its hook: strong references here would close a cycle that Python's
        # garbage collector cannot see, and the application would live for ever.
        tape_alive, application_alive = weakref.ref(self), weakref.ref(a)

        def receive(gradient: Tensor) -> None:
            tape, application = tape_alive(), application_alive()
            if tape is None or application is None:
                return
            if tape._accepting and not tape._forward_runs:
                known = application.dz
                application.dz = gradient.detach() if known is None else known + gradient.detach()
            elif torch.is_grad_enabled():  # this backward pass will be differentiated itself
                tape.records[application.layer.name].problem = DIFFERENTIATED

        z.register_hook(receive)  # type: ignore[no-untyped-call]


def _has_checkpoint(loss: Tensor) -> bool:
    """Whether a re-entrant activation checkpoint is in the graph of a loss."""
    waiting, known = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        if "CheckpointFunction" in node.name():
            return True
        known.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return False


def batch_dependence(model: nn.Module) -> str | None:
    """Why a sample's output depends on its batch (batch normalisation in train mode); ``None`` where it does not."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            return (
                f"{type(module).__name__} {name!r} is in train mode (or keeps no running statistics), so samples of a "
                "batch depend on each other and per-sample gradients do not exist; measure in eval mode"
            )
    return None


@torch.no_grad()
def is_linear_map(layer: Layer, x: Tensor, z: Tensor) -> bool:
    """Whether ``z = W h + b`` holds for the first sample, in the precision of ``z``."""
    try:
        h = layer.inputs(x.detach())[..., :1, :, :].double()
        output = layer.outputs(z.detach())[..., :1, :, :].double()
        bias = layer.bias()
        expected = (h.flatten(-3, -2) @ layer.weight().double().mT).reshape(output.shape)
        if bias is not None:
            expected = expected + bias.double().reshape(layer.groups, 1, 1, -1).squeeze(0)
    except RuntimeError:  # shapes that do not fit
        return False
    eps = max(torch.finfo(z.dtype).eps, torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0)
    tolerance = max(200 * eps, layer.rounding)
    return bool((output - expected).norm() <= tolerance * expected.norm() + 1e-30)
