"""``gs.capture``: inputs and pre-activation gradients of every linear-like layer application, in normal form."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gramscope.errors import LayerError, ResultWarning
from gramscope.layers.hooks import Observer, first_tensor, in_backward, own_node
from gramscope.layers.kinds import EmbeddingKind
from gramscope.layers.linear_layer import Layer
from gramscope.layers.losses import check_reduction
from gramscope.layers.modules import ModuleHook, is_compiled, unwrap
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.sample_count import Call
from gramscope.layers.select import LayerSelector, Selection, select_layers, select_modules
from gramscope.layers.validity import batch_dependence, check_seen, is_linear_map
from gramscope.layers.watchers import Watcher
from gramscope.notes import Kind, Note

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
        copy_inputs: bool = False,
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
        self._copy_inputs = copy_inputs
        self._copy_weights = copy_weights
        self._per_sample = False
        self._accepting = True
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

    @property
    def batch_sizes(self) -> list[int]:
        """The most likely number of samples of each forward (:class:`~gramscope.layers.sample_count.Call`)."""
        return [call.samples for call in self.calls]

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
        blind = len(waiting) < len(self.applications())  # under no_grad, or inside a re-entrant checkpoint
        if blind and _has_checkpoint(losses):
            self._backward_through_checkpoints(losses, retain_graph)
            return
        edges = [a.edge for a in waiting if a.edge is not None]
        if not edges:
            refused = "; ".join(f"{name}: {self.unsupported[name]}" for name in sorted(self._refused))
            reason = "all of them ran without a gradient graph" if blind else refused or "none was applied"
            raise LayerError(f"the loss does not depend on any captured layer: {reason}")
        with self.paused():
            gradients = torch.autograd.grad(losses, edges, retain_graph=retain_graph, allow_unused=True)
        for a, gradient in zip(waiting, gradients, strict=True):
            if gradient is not None:
                a.dz = gradient.detach() if a.dz is None else a.dz + gradient.detach()

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
            if (missing, record.name) not in self._had:
                self.unsupported.setdefault(record.name, Note(missing, f"{missing}: {reason}"))
            elif record.name in self.unsupported and self.unsupported[record.name].kind == missing:
                del self.unsupported[record.name]

    def _reached(self, call: int) -> bool:
        """Whether a gradient has come back to forward number ``call``."""
        return any(a.dz is not None for a in self.applications() if a.call == call)

    def _backward_through_checkpoints(self, loss: Tensor, retain_graph: bool) -> None:
        """Re-entrant checkpoints only work with ``backward()``; keep every ``.grad`` as it was around it."""
        parameters = list(self.model.parameters())
        kept = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            for p, gradient in zip(parameters, kept, strict=True):
                p.grad = gradient

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: a new batch begins."""
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

    def _applied(self, layer: Layer, x: Tensor, z: Tensor) -> Tensor | None:
        if not self.watching:
            return None
        record = self.records[layer.name]
        if in_backward():  # activation checkpointing runs the forward again
            return self._recomputed(record, x, z)
        if layer.name in self._refused:
            return None
        problem = self._problem(layer, x, z, first=not record.applications)
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
        x = x.detach().clone() if self._copy_inputs else x.detach()
        version = -1 if x.is_inference() else x._version
        a = Application(layer, x, z.shape, z.dtype, call=max(len(self.calls) - 1, 0), version=version)
        record.applications.append(a)
        if not self._gradients or not torch.is_grad_enabled() or z.is_inference():
            return None
        replaced = own_node(z)
        self._watch(a, z if replaced is None else replaced)
        return replaced

    def _problem(self, layer: Layer, x: Tensor, z: Tensor, first: bool) -> str | None:
        """Why this application cannot be recorded; ``None`` if it can."""
        kind, module = layer.kind, layer.module
        if first and not layer.exact and not kind.is_standard(module) and not is_linear_map(layer, x, z):
            return f"{type(module).__name__} overrides its forward, and its output is not W h + b of its inputs"
        if self.calls and isinstance(kind, EmbeddingKind):
            rows, n = kind.samples(module, x, self.batch_dim), self.calls[-1].samples
            if n and rows != n:
                return f"the same {rows} rows of indices serve all {n} samples (positions), so no sample has its own gradient"
        return None

    def _watch(self, a: Application, z: Tensor) -> None:
        a.edge = get_gradient_edge(z)
        # The edge holds the node, and the node its hook: strong references here would close a cycle that Python's
        # garbage collector cannot see, and the application would live for ever.
        tape_alive, application_alive = weakref.ref(self), weakref.ref(a)

        def receive(gradient: Tensor) -> None:
            tape, application = tape_alive(), application_alive()
            if tape is not None and application is not None and tape._accepting:
                known = application.dz
                application.dz = gradient.detach() if known is None else known + gradient.detach()

        z.register_hook(receive)  # type: ignore[no-untyped-call]

    def _recomputed(self, record: LayerRecord, x: Tensor, z: Tensor) -> Tensor | None:
        """A re-entrant checkpoint recorded its first pass without a graph; its gradient arrives in this one."""
        if not (self._gradients and torch.is_grad_enabled() and z.requires_grad):
            return None
        replaced = own_node(z)
        blind = [a for a in record.applications if a.edge is None and a.dz is None]
        same = [a for a in blind if a.x.shape == x.shape and torch.equal(a.x, x.detach())]
        if same:
            self._watch(same[0], z if replaced is None else replaced)
        elif blind:
            record.lost = True
        return replaced


@contextmanager
def capture(
    model: nn.Module,
    layers: LayerSelector = None,
    *,
    outputs: str | Sequence[str] = (),
    reduction: Reduction = "sum",
    batch_dim: int = 0,
    gradients: bool = True,
    copy_inputs: bool = False,
    copy_weights: bool = True,
) -> Iterator[Tape]:
    """Record every linear-like layer application of the forwards and backwards run inside the ``with`` block.

    Args:
        model: any module, also inside ``torch.compile`` (run eagerly meanwhile) or DDP.
        layers: names, globs or module types; ``None`` for every linear-like layer.
        outputs: names or globs of modules whose output is kept too (the hidden state of a Transformer block): the one of
            the last time the module ran.
        reduction: how the loss you call ``backward`` on was reduced over the batch. ``"sum"`` takes gradients as they
            come; ``"mean"`` multiplies them by the number of samples n, so that ``delta`` is per sample; a number multiplies
            them whatever the loss was. A capture sees gradients, not the loss: ``"mean"`` is right only for a loss that
            divided by n. One that divided by something else (the weights of the classes, the labels that are not
            ignored, n times the tokens) needs that divisor as a number, or ``tape.backward(losses)`` with one loss per
            sample, or :func:`gramscope.collect` with the criterion itself.
        batch_dim: axis of the batch in the inputs of Linear layers (1 for sequence-first models).
        gradients: ``False`` records inputs only.
        copy_inputs: copy each input, for models that overwrite it in place afterwards.
        copy_weights: copy each weight when its layer is first applied; ``False`` reads it when asked for.

    The model is left as it was, also after an exception. Layers that cannot be captured are in ``tape.unsupported``.
    Batch normalisation in train mode makes the samples of a batch depend on each other, so that gradients of single
    samples do not exist: a :class:`~gramscope.errors.ResultWarning` says so; ``model.eval()`` first gives them.

    >>> import torch, gramscope as gs
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> with gs.capture(model) as tape:
    ...     model(torch.ones(5, 3)).square().sum().backward()
    >>> tape["0"].h.shape, tape["0"].delta.shape, tape["0"].D.shape
    (torch.Size([5, 1, 3]), torch.Size([5, 1, 4]), torch.Size([4, 3]))
    """
    root = unwrap(model)
    if isinstance(root, torch.jit.ScriptModule):
        raise LayerError(
            f"{type(root).__name__} is a scripted module, whose layers cannot be watched; use the original"
        )
    selection = select_layers(root, layers)
    tape = Tape(
        root,
        selection,
        reduction=reduction,
        batch_dim=batch_dim,
        gradients=gradients,
        copy_inputs=copy_inputs,
        copy_weights=copy_weights,
    )
    tape.explicit = layers is not None
    wanted = select_modules(root, outputs) if outputs else {}
    with ExitStack() as stack:
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        called, returned = _model_hooks(tape)
        stack.callback(root.register_forward_pre_hook(called, with_kwargs=True).remove)
        stack.callback(root.register_forward_hook(returned).remove)
        for name, module in wanted.items():
            stack.callback(module.register_forward_hook(_output_hook(tape, name, module)).remove)
        stack.enter_context(Observer(selection, tape._applied))
        yield tape
    check_seen(tape)


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


def _model_hooks(tape: Tape) -> tuple[ModuleHook, ModuleHook]:
    """Hooks before and after the model's forward."""

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is tape.model and tape.watching and not in_backward():
            tape._called(args, kwargs)

    def returned(module: nn.Module, args: object, output: object) -> None:
        if module is tape.model and tape.watching and tape.calls and not in_backward():
            tape.calls[-1].returned(output)

    return ModuleHook(called), ModuleHook(returned)


def _output_hook(tape: Tape, name: str, watched: nn.Module) -> ModuleHook:
    def hook(module: nn.Module, args: object, output: object) -> None:
        if module is not watched:  # a deep copy of it
            return
        value = first_tensor(output)
        if value is None:
            raise LayerError(f"module {name!r} returned no tensor but {type(output).__name__}")
        if not in_backward() and tape.watching:
            tape.outputs[name] = value.detach().clone()  # what follows may overwrite it
            tape.output_counts[name] = tape.output_counts.get(name, 0) + 1

    return ModuleHook(hook)
