"""One run over the data: every layer in every batch, as :class:`~gramscope.statistics.sums.Seen`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import LayerError
from gramscope.layers.batches import batches, to_device
from gramscope.layers.capture import capture
from gramscope.layers.jacobians import check_samples_are_independent, jacobian_chunks
from gramscope.layers.linear_layer import Layer
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import evaluating, model_device, model_dtype
from gramscope.layers.modules import unwrap
from gramscope.layers.positions import flattened
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.select import select_modules
from gramscope.layers.tape import Tape
from gramscope.linalg.budget import trim_malloc
from gramscope.statistics.batch import BatchResult, BatchRunner
from gramscope.statistics.feature_sum import Features
from gramscope.statistics.features import NoSuchSites, Tokens, Unpaired, inputs_of, rows_and_targets
from gramscope.statistics.plan import EVERY, Plan
from gramscope.statistics.structure import COUPLED, Structure, find_structure, layout, output_of, output_rows
from gramscope.statistics.sums import LeftOut, Seen

#: why a layer whose inputs serve several samples has no sums of single samples
SERVES_MANY = (
    "no Σ, no K and no features: a row of its inputs serves several samples, so none has a gradient of its own there; batches "
    "of one sample give Σ and K"
)


def run(
    model: nn.Module,
    loader: Any,
    loss: Loss | None,
    plan: Plan,
    reference: nn.Module | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Seen]:
    """Run the model over the data and yield what is seen, batch by batch; the network's own output comes last of a batch.

    What is yielded holds the batch's graph: drop it before asking for the next. Close the generator where it is left early.

    Args:
        model, loader, loss: as in :func:`gramscope.collect`.
        plan: what is wanted.
        reference: the network at initialisation.
        advance: called after every batch.
    """
    root = unwrap(model)
    device = model_device(model)
    runner = BatchRunner(model, loss, plan)
    with _captures(model, reference, plan) as (tape, reference_tape):
        plan.notes.layers = list(tape.records)
        view = _View(model, tape, plan)
        for index, batch in enumerate(batches(loader, plan.unpack, model_dtype(root))):
            inputs, target = (to_device(part, device) for part in batch)
            with nullcontext() if reference_tape is None else reference_tape.ignoring_calls():
                result = runner.run(tape, inputs, target, index, view.find)
            other = None
            if reference is not None and reference_tape is not None:
                with tape.ignoring_calls():
                    other = reference_tape, runner.run_reference(reference, result.inputs, result.output)
            yield from view.layers(result)
            yield from view.outputs(result)
            yield from view.jacobians(result, other)
            yield view.network(result)
            tape.clear()
            if reference_tape is not None:
                reference_tape.clear()
            del result, other  # their graphs, before the next batch makes others
            trim_malloc()
            advance()
        for name, note in tape.unsupported.items():
            plan.notes.add(name, note)
        view.check_sites()


@contextmanager
def _captures(model: nn.Module, reference: nn.Module | None, plan: Plan) -> Iterator[tuple[Tape, Tape | None]]:
    """Capture the model and, if given, the reference network, in the modes that are asked for."""
    root, batch_dim = unwrap(model), plan.batch_dim
    with ExitStack() as stack:
        stack.enter_context(evaluating(root, plan.eval_mode))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(plan.needs_graph))
        check_samples_are_independent(root)
        options: dict[str, Any] = {"batch_dim": batch_dim, "copy_weights": False}
        mine = capture(model, plan.layers, outputs=plan.outputs, gradients=plan.needs_graph, **options)
        tape, other = stack.enter_context(mine), None
        if reference is not None:
            stack.enter_context(evaluating(unwrap(reference), plan.eval_mode))
            other = stack.enter_context(capture(reference, plan.layers, **options))
        yield tape, other


@dataclass
class _View:
    """What is seen of the batches that one tape records."""

    model: nn.Module
    tape: Tape
    plan: Plan

    def __post_init__(self) -> None:
        root, plan = unwrap(self.model), self.plan
        modules = select_modules(root, plan.outputs) if plan.outputs else {}
        inferred = plan.channels == "auto"
        self._layouts = {n: layout(m, root) if inferred else plan.channels for n, m in modules.items()}
        self._structure: Structure | None = None
        self._current = Structure()
        self._generator = plan.generator or torch.Generator().manual_seed(0)
        self._weights: dict[str, Tensor] = {}
        self._tied: set[str] = set()
        self._without_sites: dict[str, str] = {}
        self._sites_found = False

    def find(self, result: BatchResult, random: Tensor) -> None:
        """Find the structure of batches once, in the first batch of several samples."""
        if self._structure is None:
            plan = self.plan
            with torch.set_grad_enabled(plan.needs_graph and plan.eval_mode):
                found = find_structure(self.model, self.tape, result.inputs, result.output, plan.output, random)
            self._structure = found if result.n > 1 else None
            self._current = found
            self._note_structure()

    def _note_structure(self) -> None:
        found, plan = self._current, self.plan
        single = [kind for kind in plan.sums if kind.of_single_samples]
        for name in found.serves_many:
            for kind in single:
                plan.notes.leave_out(name, kind, SERVES_MANY)
        if found.coupled:
            if plan.jacobians is True and plan.wants("J"):
                raise LayerError(COUPLED)
            if any("delta" in kind.needs for kind in single):
                text = "samples influence each other: Σ has gradients of the loss of the whole batch, not of single samples"
                plan.notes.remark("(samples)", text)
            for kind in single:
                if "J" in kind.needs:
                    plan.notes.leave_out(EVERY, kind)
                    plan.notes.left_out(output_of(), f"no Jacobians: {COUPLED}")

    # --- layers -------------------------------------------------------------------------------------------------------

    def layers(self, result: BatchResult) -> Iterator[Seen]:
        """Inputs, output gradients and feature rows of every layer, in order of execution."""
        for record in self.tape:
            name = record.layer.name
            weight = self._weight(record)
            seen = Seen(name, weight, result, result.positions, record, tied=name in self._tied)
            if name in result.parameter_gradients:
                seen.parameter_gradient = record.layer.matrix(result.parameter_gradients[name])
            if self.plan.wants("rows") and self.plan.notes.has(name, Features):
                with self._unpaired(name, name):
                    seen.rows, seen.target, seen.residual = self._rows_of_layer(record, result)
                    self._sites_found = True
            yield seen
            del seen
        for record in self.tape:
            record.forget_gradients()  # Jacobians take as much memory

    def _weight(self, record: LayerRecord) -> Tensor:
        if record.layer.name not in self._weights:
            weight = record.layer.weight()
            self._weights[record.layer.name] = weight.clone() if self.plan.snapshot else weight
            if self.plan.wants("parameter_gradient") and shares_parameter(record.layer, self.tape.model):
                self._tied.add(record.layer.name)
        return self._weights[record.layer.name]

    def _rows_of_layer(self, record: LayerRecord, result: BatchResult) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Feature rows at a layer's inputs, their targets and the residuals of samples."""
        layer, target, lengths = record.layer, _tensor(result.target), result.positions.lengths
        name, x = layer.name, record.applications[0].x
        axis, known = self._current.axis(name, x, self.plan.batch_dim), self._current.axes.get(name) is not None
        labelled = target is not None and target.dim() == 2 and not target.is_floating_point()
        averaged = self.plan.tokens in ("auto", "mean") and not labelled and not lengths
        single = result.residual is not None and result.residual.dim() == 2 and len(record.applications) == 1
        residual = result.residual if single and _sites(record.applications[0], axis) == 1 else None
        h = _cut_sites(layer.module, inputs_of(record, axis, result.n, averaged, lengths, known), lengths)
        valid = result.positions.of(h.shape[-2], len(record.applications))
        return *self._rows(name, h, result, self.plan.tokens, valid), residual

    def _rows(
        self, name: str, h: Tensor, result: BatchResult, tokens: Tokens, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if h.shape[-3] != result.n:
            raise Unpaired(f"it has {h.shape[-3]} rows for {result.n} samples, so rows and targets cannot be paired")
        target = _tensor(result.target)
        return rows_and_targets(h, target, tokens, result.inputs, name, self.plan.ignore_index, valid)

    @contextmanager
    def _unpaired(self, name: str, key: str) -> Iterator[None]:
        """Leave the features of ``key`` out if rows and targets cannot be paired inside this block.

        A statistic missing in one batch is dropped for all: a part of the data would pass for the whole.
        """
        try:
            yield
        except LeftOut as reason:
            self.plan.notes.leave_out(key, Features, f"no features: {reason}")
            if isinstance(reason, NoSuchSites):
                self._without_sites[name] = str(reason)

    def check_sites(self) -> None:
        """Raise if no layer has the sites that ``tokens=`` asks for."""
        if self._without_sites and not set(self._weights) - set(self._without_sites):
            raise NoSuchSites(next(iter(self._without_sites.values())))

    # --- outputs ------------------------------------------------------------------------------------------------------

    def outputs(self, result: BatchResult) -> Iterator[Seen]:
        """Feature rows of the outputs of modules that were asked for."""
        for name, value in self.tape.outputs.items():
            if self.tape.output_counts[name] > 1:
                count = self.tape.output_counts[name]
                text = f"it ran {count} times in a forward; its output is the one of the last time"
                self.plan.notes.remark(name, text)
            key, seen = output_of(name), self._empty(output_of(name), result)
            if self.plan.wants("rows") and self.plan.notes.has(key, Features):
                with self._unpaired(name, key):
                    axis = self._current.axis(key, value, self.plan.batch_dim)
                    rows = output_rows(value, self._layouts[name], name, axis)
                    rows = flattened(rows, result.n, result.positions.lengths)
                    valid = result.positions.of(rows.shape[-2])
                    seen.rows, seen.target = self._rows(name, rows, result, self.plan.tokens, valid)
                yield seen

    def network(self, result: BatchResult) -> Seen:
        """The network's own output, whose rows are samples, whatever the tokens."""
        seen = self._empty(output_of(), result)
        seen.whole_batch = True
        wanted = self.plan.wants("rows") and self.plan.notes.has(output_of(), Features)
        if wanted and isinstance(result.target, Tensor) and result.output.dim() == 2:
            with self._unpaired(output_of(), output_of()):
                h = result.output.detach().unsqueeze(1)
                seen.rows, seen.target = self._rows(output_of(), h, result, "mean")
        return seen

    def _empty(self, key: str, result: BatchResult) -> Seen:
        """Something without a weight."""
        return Seen(key, torch.empty(0, 0, dtype=torch.float64, device=result.output.device), result)

    # --- Jacobians ----------------------------------------------------------------------------------------------------

    def jacobians(self, result: BatchResult, reference: tuple[Tape, Tensor] | None) -> Iterator[Seen]:
        """Jacobians of one block of outputs after the other, and those of a reference network."""
        plan = self.plan
        if not plan.wants("J") or self._current.coupled:
            return
        positions = result.positions
        output = positions.tokens_first(result.output)
        sketch, generator = plan.sketch_of(output), self._generator
        if sketch is not None and plan.sketch is None:
            text = (
                f"K is estimated from {sketch} random combinations of the {output[0].numel():,} outputs of a sample, with a "
                f"fixed seed; sketch={4 * sketch} halves the error, jacobians=True takes every output"
            )
            plan.notes.remark(output_of(), text)
        memory = plan.budget.memory if reference is None else max(plan.budget.memory // 2, 1)  # J and J⁰
        copy = generator.clone_state()  # both networks must see the same random signs
        mine = jacobian_chunks(self.tape, output, sketch=sketch, memory=memory, generator=generator)
        theirs = None
        if reference is not None:
            other, value = reference
            theirs = jacobian_chunks(other, positions.tokens_first(value), sketch=sketch, memory=memory, generator=copy)
        first = 0
        for chunk in mine:
            blocks = {} if theirs is None else next(theirs, {})
            size = next(iter(chunk.values())).shape[0] if chunk else 0
            while chunk:  # a layer's Jacobians are dropped as soon as they are summed
                name, J = chunk.popitem()
                seen = Seen(name, self._weights[name], result, positions, first=first, sketch=sketch)
                if reference is not None:
                    J0 = blocks.pop(name, None)
                    if J0 is None or J0.shape != J.shape:
                        raise LayerError(f"the reference network has no layer {name!r} of the same shape")
                    seen.J_reference = positions.without_padding(J0)
                    seen.reference_weight = reference[0][name].layer.weight()
                    del J0
                seen.J = positions.without_padding(J)
                del J
                yield seen
                del seen
            first += size
            trim_malloc()


def _tensor(target: Any) -> Tensor | None:
    return target if isinstance(target, Tensor) else None


def _sites(a: Application, axis: int) -> int:
    """Sites of a sample in an application that the loss reaches, 0 in others."""
    return 0 if a.dz is None else a.layer.kind.outputs(a.layer.module, a.dz, axis).shape[-2]


def _cut_sites(module: nn.Module, h: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The sites of a causal convolution that belong to tokens: padded on both sides, its last outputs are cut off."""
    extra = module.kernel_size[0] - 1 if isinstance(module, nn.Conv1d) else 0
    length = h.shape[-2] - extra
    causal = extra and getattr(module, "padding", None) == (extra,) and length in lengths and h.shape[-2] not in lengths
    return h[..., :length, :] if causal else h


def shares_parameter(layer: Layer, model: nn.Module) -> bool:
    """Whether another module of the model uses the layer's weight too, so that its gradient is not the layer's own."""
    parameter = layer.parameter
    if parameter is None:
        return False
    return sum(any(p is parameter for p in module._parameters.values()) for module in model.modules()) > 1
