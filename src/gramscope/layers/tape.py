"""The records of a capture: every call of the model, and inputs and pre-activation gradients of every layer application."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gramscope.errors import LayerError, ResultWarning
from gramscope.layers.hooks import in_backward, own_node, tensors_in
from gramscope.layers.kinds import AttentionProjection, EmbeddingLayer
from gramscope.layers.linear_layer import Layer
from gramscope.layers.losses import check_reduction
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.select import Selection
from gramscope.layers.watchers import Watcher
from gramscope.notes import Kind, Note

#: how the loss was reduced over the batch: ``"sum"``, ``"none"`` (already per sample), ``"mean"``, or the factor itself
Reduction: TypeAlias = str | float


class Call:
    """One call of a model and its number of samples.

    Candidates are the sizes of the arguments along ``batch_dim``, in the order of the arguments, and the lengths of lists
    (of images, say). A size of one comes last, since it may be broadcast. The candidate that occurs as the number of rows
    of a layer's input and of the output is taken.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: int = 0) -> None:
        self._batch_dim = batch_dim
        lengths = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, list)]
        self._arguments = sorted(self._sizes((args, kwargs)) + lengths, key=lambda size: size == 1)
        self._outputs: set[int] = set()
        self._rows: set[int] = set()
        self._ranked: set[bool] = set()  # whether layers that know the rank of their inputs saw a batch axis
        self._vectors: set[bool] = set()  # whether the others saw single vectors
        self._attention: dict[str, tuple[int, int, bool]] = {}
        self._over = False

    def applied(self, layer: Layer, x: Tensor) -> None:
        """A layer was applied to the native input ``x``."""
        if self._over:
            return
        unbatched = layer.is_unbatched(x)
        (self._ranked if layer.fixed_rank else self._vectors).add(unbatched)
        self._rows.add(layer.samples(x, self._batch_dim))
        if isinstance(layer, AttentionProjection) and not unbatched:
            self._attention[layer.name] = (x.shape[0], x.shape[1], bool(getattr(layer.module, "batch_first", False)))

    def returned(self, output: object) -> None:
        """The model returned ``output``."""
        self._outputs = set(self._sizes(output))
        self._over = True

    @property
    def arguments(self) -> bool:
        """Whether there was a tensor, or a list, that may hold samples."""
        return bool(self._arguments) or self._unbatched

    @property
    def samples(self) -> int:
        """The most likely number of samples; 0 if there was no tensor."""
        if self._unbatched:
            return 1
        return max(self._arguments, key=self._known, default=0)

    @property
    def doubt(self) -> str | None:
        """Why the number of samples is uncertain; ``None`` if it is not."""
        n = self.samples
        if self._unbatched:
            return None
        if not self.arguments:
            return "the model was called with no tensor that has a batch axis"
        if n == 0:
            return None  # an empty batch
        across = self.across_samples
        if across:
            return next(iter(across.values()))
        if self._known(n) or not any(rows % n for rows in self._rows):  # tokens as rows
            return None
        inputs, rows = (", ".join(map(str, sorted(sizes))) for sizes in (set(self._arguments), self._rows))
        return f"the model's inputs have {inputs} rows and its layers saw {rows}"

    @property
    def across_samples(self) -> dict[str, str]:
        """Attention layers whose sequences run along the axis taken for the batch, each with an explanation.

        Attention in windows (``samples × windows`` sequences) does not count, unless the module has the batch second.
        """
        n = self.samples
        return {
            name: f"attention layer {name!r} saw {batch} sequences of {length} positions where the batch has {n} samples: "
            "a sequence-first model needs batch_dim=1; where samples attend to each other none has gradients of its own"
            for name, (batch, length, batch_first) in self._attention.items()
            if length == n != batch and (not batch_first or batch % n)
        }

    @property
    def _unbatched(self) -> bool:
        """Whether this was one sample without a batch axis.

        Convolutions and attention show it by the rank of their inputs; a model of linear layers by inputs that are vectors.
        """
        seen = self._ranked or self._vectors
        return bool(seen) and all(seen)

    def _known(self, size: int) -> int:
        return (size in self._rows) + (size in self._outputs)

    def _sizes(self, values: object) -> list[int]:
        return [t.shape[self._batch_dim] for t in tensors_in(values) if t.dim() > self._batch_dim]


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
        with self.paused():
            gradients = torch.autograd.grad(losses, edges, retain_graph=retain_graph, allow_unused=True)
        for a, gradient in zip(waiting, gradients, strict=True):
            if gradient is not None:
                a.dz = gradient.detach() if a.dz is None else a.dz + gradient.detach()
        reached = {a.layer.name for a in self.applications() if a.dz is not None}
        self.note_reached("no gradient", reached, "the loss does not reach it")

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

    def _reached(self, call: int) -> bool:
        """Whether a gradient has come back to forward number ``call``."""
        return any(a.dz is not None for a in self.applications() if a.call == call)

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
        x = x.detach()
        version = -1 if x.is_inference() else x._version
        a = Application(layer, x, z.shape, z.dtype, call=max(len(self.calls) - 1, 0), version=version)
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
            several = x.dim() > 1 and rows > n  # choices side by side
            if n and rows != n and not (several and rows % n == 0):
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
        bias = getattr(layer.module, "bias", None)
        expected = (h.flatten(-3, -2) @ layer.weight().double().mT).reshape(output.shape)
        if bias is not None:
            expected = expected + bias.detach().double().reshape(layer.groups, 1, 1, -1).squeeze(0)
    except RuntimeError:  # shapes that do not fit
        return False
    tolerance = 200 * max(torch.finfo(z.dtype).eps, torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0)
    return bool((output - expected).norm() <= tolerance * expected.norm() + 1e-30)
