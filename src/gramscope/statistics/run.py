"""One run over the data: every layer in every batch, as :class:`~gramscope.statistics.sums.Seen`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, NumericalError
from gramscope.layers.batches import batches, label_key, to_device
from gramscope.layers.capture import capture
from gramscope.layers.hooks import first_tensor
from gramscope.layers.jacobians import check_samples_are_independent, jacobian_chunks
from gramscope.layers.labels import LabelReader, ReadBatch
from gramscope.layers.linear_layer import Layer
from gramscope.layers.losses import (
    WHOLE_BATCH,
    Loss,
    Losses,
    class_axis,
    is_torch_criterion,
    losses_and_terms,
    own_losses,
    reduction_of,
    takes_batch,
)
from gramscope.layers.model_call import (
    call_model,
    evaluating,
    model_device,
    model_dtype,
    own_loss,
    run_captured,
    select_output,
)
from gramscope.layers.modules import unwrap
from gramscope.layers.positions import Positions, flattened
from gramscope.layers.record import LayerRecord
from gramscope.layers.select import select_modules
from gramscope.layers.tape import Tape
from gramscope.linalg.budget import trim_malloc
from gramscope.notes import Note
from gramscope.statistics.features import Features
from gramscope.statistics.structure import (
    COUPLED,
    NoSuchSites,
    Structure,
    find_structure,
    layer_rows,
    layout,
    output_of,
    output_rows,
    paired_rows,
)
from gramscope.statistics.sums import EVERY, LeftOut, Plan, Seen

#: losses whose targets are numbers, also where they are stored as integers
REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
REGRESSION_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
REGRESSED_INTEGERS = (
    "integers under a loss of regression are numbers to regress on; targets=lambda x, y: y makes them classes"
)
OWN_LOSS = "no loss was given, so the loss is the one that the model itself returns"
PER_POSITION = (
    "per position: loss, accuracy, gradient norms and steps are means over all positions (tokens, pixels) that count, as the "
    "criterion gives them on all data at once; per sample: K, AGOP and NFA, summed over the positions of a sample"
)
PER_TOKEN = "per token: each labelled token is a row, in target linearity, surrogates and neural collapse"


@dataclass
class BatchResult:
    """A batch after its forward (and backward).

    Args:
        inputs: as the loader gave them.
        target: what features are compared with; ``None`` for none.
        output: the model's output ``[n, …]``, with its graph.
        n: samples.
        positions: tokens and padding of its sequences.
        loss: ``Σ_i L_i``.
        terms: what the mean loss divides by (:mod:`gramscope.layers.losses`); 0 without a loss.
        residual: ``E = −∂L/∂f``, when asked for.
        parameter_gradients: gradients of the parameters themselves by layer, when asked for.
    """

    inputs: Any
    target: Any
    output: Tensor
    n: int
    positions: Positions = field(default_factory=Positions)
    loss: float = 0.0
    terms: float = 0
    residual: Tensor | None = None
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class BatchRunner:
    """Runs a model on batch after batch; the fields are arguments of :func:`gramscope.collect`."""

    model: nn.Module
    loss: Loss | None
    plan: Plan

    def __post_init__(self) -> None:
        own_loss = self.loss is None or takes_batch(self.loss)
        self._reader = LabelReader(self.model, self.plan.ignore_index, own_loss)

    def run(
        self, tape: Tape, inputs: Any, target: Any, index: int, forwarded: Callable[[BatchResult, Tensor], None]
    ) -> BatchResult:
        """Forward, backward where there is a loss, and the targets that features are compared with.

        ``forwarded`` is called between forward and backward, with the random state before the forward.
        """
        given = target
        regression = isinstance(self.loss, REGRESSION) or self.loss in REGRESSION_FUNCTIONS
        if regression and isinstance(target, Tensor) and not target.is_floating_point():
            target = target.to(model_dtype(self.model))
            if self.plan.targets is None:
                self.plan.notes.remark("(targets)", REGRESSED_INTEGERS)
        with tape.ignoring_calls():
            read = self._reader.read(inputs, target)
        for name, note in read.notes.items():
            self.plan.notes.add(name, note)
        random = torch.get_rng_state()
        result, returned = forward(self.model, tape, read, index, self.plan)
        forwarded(result, random)
        trim_malloc()  # what the forward has freed
        losses = self._losses(result, returned, inputs, given, index)
        if losses is not None:
            backward(result, tape, losses, index, self.plan)
            if self.loss is None:
                self.plan.notes.remark("(loss)", OWN_LOSS)
            several = isinstance(result.terms, int) and result.terms != result.n
            if several or (result.output.dim() > 2 and reduction_of(self.loss) == "mean"):
                self.plan.notes.remark("(positions)", PER_POSITION)
        labels = result.target if self.plan.targets is None else None
        if (
            isinstance(labels, Tensor)
            and labels.dim() == 2
            and class_axis(result.output, labels, result.positions.lengths) == -1
        ):
            self.plan.notes.remark("(features)", PER_TOKEN)
        if self.plan.targets is not None:
            result.target = self.plan.targets(inputs, given)
        return result

    def _losses(self, result: BatchResult, returned: Any, inputs: Any, given: Any, index: int) -> Losses | None:
        """The losses of the samples; with no loss given, the model's own where there is one.

        torch's criteria get the targets of the outputs at the same positions, other functions the labels as they came.
        """
        if self.loss is None:
            own = own_loss(returned)
            return (
                None if own is None else own_losses(own, result.output, result.target, result.n, self.plan.ignore_index)
            )
        if takes_batch(self.loss):
            batch = inputs if label_key(inputs) is not None or given is None else (inputs, given)
            return losses_and_terms(self.loss, returned, batch, result.n, self.plan.reduction)
        if result.target is None:
            raise InputError(
                f"batch {index} has no target for the loss; give (x, y) as a tuple, a loader of such pairs, or "
                f"unpack=lambda batch: (inputs, target); {WHOLE_BATCH}"
            )
        target = result.target if is_torch_criterion(self.loss) else given
        ignored = self.plan.ignore_index
        return losses_and_terms(
            self.loss, result.output, target, result.n, self.plan.reduction, ignored, result.positions
        )

    def run_reference(self, reference: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """The output of the reference network, which must have the shape of the model's ``output``."""
        value = select_output(call_model(reference, inputs), self.plan.output)
        if value.shape != output.shape:
            raise InputError(
                f"the reference network's output has shape {tuple(value.shape)} and the model's {tuple(output.shape)}; give "
                "a network of the same architecture"
            )
        return value


def forward(model: nn.Module, tape: Tape, read: ReadBatch, index: int, plan: Plan) -> tuple[BatchResult, Any]:
    """Run the model on batch number ``index``; check the number of targets and that the output is finite.

    Returns the result and all that the model returned.
    """
    inputs, target = read.inputs, read.target
    if first_tensor(inputs) is None:
        raise InputError(f"batch {index} holds no tensor to feed the model")
    returned = run_captured(model, tape, inputs)
    value = select_output(returned, plan.output)
    call = tape.calls[-1]
    n = call.samples
    for name, problem in call.across_samples.items():
        plan.notes.add(name, Note("unsupported", problem))
    if isinstance(target, int | float) or (isinstance(target, Tensor) and target.dim() == 0):
        raise InputError(
            f"batch {index} has one number as its target: data are batches, not single samples; give "
            "torch.utils.data.DataLoader(samples, batch_size=256), or stacked tensors (x, y)"
        )
    if isinstance(target, Tensor) and target.shape[0] != n:
        axis = tape.batch_dim
        transposed = target.dim() > axis > 0 and target.shape[axis] == n
        remedy = (
            f"; targets have the batch first: unpack=lambda b: (b[0], b[1].movedim({axis}, 0))" if transposed else ""
        )
        raise InputError(f"batch {index} has {n} inputs but {target.shape[0]} targets{remedy}")
    if not torch.isfinite(value).all():
        raise NumericalError(f"the model's output is NaN or infinite in batch {index}; look at its inputs and weights")
    return BatchResult(inputs, target, value, n, read.positions), returned


def backward(result: BatchResult, tape: Tape, found: Losses, index: int, plan: Plan) -> None:
    """Fill the tape's gradients from the summed per-sample losses."""
    losses, result.terms = found.values, found.terms
    total = losses.float().sum() if losses.dtype in (torch.bfloat16, torch.float16) else losses.sum()
    if not torch.isfinite(total):
        raise NumericalError(f"the loss is {total.item()} in batch {index}")
    result.loss = float(total.detach())
    if not plan.needs_gradients:
        return
    with tape.paused():
        _add_other_gradients(result, tape, total, plan)
    tape.backward(total, retain_graph=plan.wants("J"))
    tape.note_reached("no gradient", {record.name for record in tape if record.reached}, "the loss does not reach it")


def _add_other_gradients(result: BatchResult, tape: Tape, total: Tensor, plan: Plan) -> None:
    """``E = −∂L/∂f`` and the parameters' own gradients, as far as they are wanted."""
    if plan.residuals and total.requires_grad:
        (gradient,) = torch.autograd.grad(total, result.output, retain_graph=True, allow_unused=True)
        result.residual = None if gradient is None else -gradient
    if plan.wants("parameter_gradient"):
        leaves = {record.name: record.layer.parameter for record in tape}
        known = {name: p for name, p in leaves.items() if p is not None and p.requires_grad}
        if known:
            found = torch.autograd.grad(total, list(known.values()), retain_graph=True, allow_unused=True)
            result.parameter_gradients = {name: g for name, g in zip(known, found, strict=True) if g is not None}


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
) -> Generator[Seen, None, None]:
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
        self._rows_wanted, self._own_gradients = plan.wants("rows"), plan.wants("parameter_gradient")
        self._generator = plan.generator or torch.Generator(device="cpu").manual_seed(0)
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
                seen.parameter_gradient = record.layer.to_matrix(result.parameter_gradients[name])
            if self._rows_wanted and self.plan.notes.has(name, Features):
                with self._unpaired(name, name):
                    seen.rows, seen.target, seen.residual = layer_rows(record, result, self._current, self.plan)
                    self._sites_found = True
            yield seen
            del seen
        for record in self.tape:
            record.forget_gradients()  # Jacobians take as much memory

    def _weight(self, record: LayerRecord) -> Tensor:
        if record.layer.name not in self._weights:
            weight = record.layer.weight()
            self._weights[record.layer.name] = weight.clone() if self.plan.snapshot else weight
            if self._own_gradients and shares_parameter(record.layer, self.tape.model):
                self._tied.add(record.layer.name)
        return self._weights[record.layer.name]

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
            if self._rows_wanted and self.plan.notes.has(key, Features):
                with self._unpaired(name, key):
                    axis = self._current.axis(key, value, self.plan.batch_dim)
                    rows = output_rows(value, self._layouts[name], name, axis)
                    rows = flattened(rows, result.n, result.positions.lengths)
                    valid = result.positions.of(rows.shape[-2])
                    seen.rows, seen.target = paired_rows(name, rows, result, self.plan, self.plan.tokens, valid)
                yield seen

    def network(self, result: BatchResult) -> Seen:
        """The network's own output, whose rows are samples, whatever the tokens."""
        seen = self._empty(output_of(), result)
        seen.whole_batch = True
        wanted = self._rows_wanted and self.plan.notes.has(output_of(), Features)
        if wanted and isinstance(result.target, Tensor) and result.output.dim() == 2:
            with self._unpaired(output_of(), output_of()):
                h = result.output.detach().unsqueeze(1)
                seen.rows, seen.target = paired_rows(output_of(), h, result, self.plan, "mean")
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


def shares_parameter(layer: Layer, model: nn.Module) -> bool:
    """Whether another module of the model uses the layer's weight too, so that its gradient is not the layer's own."""
    parameter = layer.parameter
    if parameter is None:
        return False
    return sum(any(p is parameter for p in module._parameters.values()) for module in model.modules()) > 1
