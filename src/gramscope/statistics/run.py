"""One run over the data: every layer in every batch, as :class:`~gramscope.statistics.sums.Seen`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError, Note, NumericalError
from gramscope.layers.batches import batches, check_target, first_tensor, flattened, label_key
from gramscope.layers.capture import capture
from gramscope.layers.jacobians import Readout, at_own_inputs, check_samples_are_independent, jacobian_chunks
from gramscope.layers.kinds import Layer, check_weights_have_data, shares_parameter
from gramscope.layers.labels import LabelReader, reduction_of_own_loss
from gramscope.layers.losses import (
    WHOLE_BATCH,
    Loss,
    Losses,
    class_axis,
    is_torch_criterion,
    losses_and_terms,
    own_losses,
    own_terms,
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
from gramscope.layers.record import Application, LayerRecord
from gramscope.layers.select import matched_layers, select_layers, select_modules
from gramscope.layers.tape import Observer, Tape
from gramscope.linalg.budget import trim_malloc
from gramscope.names import match_names
from gramscope.statistics.structure import (
    COUPLED,
    NoSuchSites,
    Structure,
    depends_on_batch,
    find_structure,
    layer_rows,
    layout,
    output_rows,
    paired_rows,
)
from gramscope.statistics.sums import EVERY, OUTPUT, BatchResult, LeftOut, Plan, Seen

#: losses whose targets are numbers, also where they are stored as integers
REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
REGRESSION_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
REGRESSED_INTEGERS = (
    "integers under a loss of regression are numbers to regress on; targets=lambda x, y: y makes them classes"
)
OWN_LOSS = "no loss was given, so the loss is the one that the model itself returns"
COUPLED_LOSS = (
    "the loss of a sample depends on the other samples of its batch: loss, gradients, steps and Σ are those of the batches as "
    "they came; K, AGOP, NFA and everything of features are of single samples as ever"
)
OWN_REDUCTIONS = {"sum": "the model sums it over samples; the table gives means over samples", "coupled": COUPLED_LOSS}
PER_POSITION = (
    "per position: loss, accuracy, gradient norms and steps are means over all positions (tokens, pixels) that count, as the "
    "criterion gives them on all data at once; per sample: K, AGOP and NFA, summed over the positions of a sample"
)
PER_TOKEN = "per token: each labelled token is a row, in target linearity, surrogates and neural collapse"
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
    with _captures(model, reference, plan) as (tape, other, order):
        plan.notes.layers = list(tape.records)
        state = _Run(model, loss, plan, tape, order)
        data = batches(loader, plan.unpack, model_dtype(unwrap(model)), model_device(model))
        for index, (inputs, target) in enumerate(data):
            with nullcontext() if other is None else other.ignoring_calls():
                result = state.run_batch(inputs, target, index)
            pair = None
            if reference is not None and other is not None:
                with tape.ignoring_calls():
                    value = state.run_reference(reference, result)
                    pair = None if value is None else (other, value)
                    if value is None:
                        other.applied_layers.update(other.records)  # nothing more is asked of it
            yield from state.layers(result)
            yield from state.outputs(result)
            yield from state.jacobians(result, pair)
            yield state.network(result)
            for seen_by in (tape, other):
                if seen_by is not None:
                    seen_by.clear()
            del result, pair  # their graphs, before the next batch makes others
            trim_malloc()
            advance()
        tape.note_unapplied()
        for name, note in tape.unsupported.items():
            plan.notes.add(name, note)
        state.check_sites()


@contextmanager
def _captures(
    model: nn.Module, reference: nn.Module | None, plan: Plan
) -> Iterator[tuple[Tape, Tape | None, list[str]]]:
    """Captures of the model and of the reference network, if given, and the layers of a batch in their order.

    Layers that are not measured have their place in the order too: the readout is the last layer that ran.
    """
    root = unwrap(model)
    with ExitStack() as stack:
        stack.enter_context(evaluating(root, plan.eval_mode))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(plan.needs_graph))
        check_samples_are_independent(root)
        options: dict[str, Any] = {"batch_dim": plan.batch_dim, "copy_weights": False}
        mine = capture(model, plan.layers, outputs=plan.outputs, gradients=plan.needs_graph, **options)
        tape, other = stack.enter_context(mine), None
        check_weights_have_data(tape.selection)
        order = tape.order
        if plan.layers is not None:
            order = []
            stack.enter_context(Observer(select_layers(root), partial(_note_order, tape, order)).attached())
        if reference is not None:
            stack.enter_context(evaluating(unwrap(reference), plan.eval_mode))
            pairs = matched_layers(root, reference, plan.layers)
            chosen = None if plan.layers is None else [layer.name for _, layer in pairs.values()]
            other = stack.enter_context(capture(reference, chosen, **options))
        yield tape, other, order


def _note_order(tape: Tape, order: list[str], layer: Layer, x: Tensor, z: Tensor) -> None:
    if tape.watching and layer.name not in order and tape.problem(layer, x, z, first=True) is None:
        order.append(layer.name)


class _Run:
    """Runs a model on batch after batch, and says what is seen of each.

    Args:
        model, loss: as in :func:`gramscope.collect`.
        plan: what is wanted.
        tape: the capture of the model.
        order: the layers that ran in the batch, filled by the captures.
    """

    def __init__(self, model: nn.Module, loss: Loss | None, plan: Plan, tape: Tape, order: list[str]) -> None:
        self.model, self.loss, self.plan, self.tape, self.order = model, loss, plan, tape, order
        tape.compares = "delta" in plan.needs
        root = unwrap(model)
        modules = select_modules(root, plan.outputs) if plan.outputs else {}
        inferred = plan.channels == "auto"
        self._layouts = {n: layout(m, root) if inferred else plan.channels for n, m in modules.items()}
        self._own_criterion = loss is not None and is_torch_criterion(loss)
        self._of_batch = loss is not None and takes_batch(loss)
        self._regresses = isinstance(loss, REGRESSION) or loss in REGRESSION_FUNCTIONS
        self._reader = LabelReader(model, plan.ignore_index, own_loss=loss is None or self._of_batch)
        self._own_reduction: str | None = None
        self._without_output = False
        self._structure: Structure | None = None  # of batches with several samples
        self._current = Structure()
        self._generator = plan.generator or torch.Generator(device="cpu").manual_seed(0)
        self._weights: dict[str, Any] = {}
        self._roots: dict[str, Tensor] = {}
        self._tied: set[str] = set()
        self._without_sites: dict[str, str] = {}

    # --- forward and backward -----------------------------------------------------------------------------------------

    def run_batch(self, inputs: Any, given: Any, index: int) -> BatchResult:
        """Forward, backward where there is a loss, and the targets that features are compared with."""
        plan, tape, target = self.plan, self.tape, given
        if self._regresses and isinstance(target, Tensor) and not target.is_floating_point():
            target = target.to(model_dtype(self.model))
            if plan.targets is None:
                plan.notes.remark("(targets)", REGRESSED_INTEGERS)
        with tape.ignoring_calls() if isinstance(inputs, Mapping) else nullcontext():
            read = self._reader.read(inputs, target)
        for name, note in read.notes.items():
            plan.notes.add(name, note)
        if first_tensor(read.inputs) is None:
            raise InputError(f"batch {index} holds no tensor to feed the model")
        random = torch.get_rng_state()
        returned = run_captured(self.model, tape, read.inputs)
        call = tape.calls[-1]
        n = call.samples
        for name, problem in call.across_samples.items():
            plan.notes.add(name, Note("unsupported", problem))
        check_target(read.target, n, index, tape.batch_dim)
        result = BatchResult(read.inputs, read.target, self._output(returned, n), n, read.positions)
        if not torch.isfinite(result.output).all():
            raise NumericalError(
                f"the model's output is NaN or infinite in batch {index}; look at its inputs and weights"
            )
        with tape.paused():  # the loss may differentiate too
            losses = self._losses(result, returned, inputs, given, index)
        self._find_structure(
            result, random, losses is not None
        )  # after the loss, which may read what the forward left behind
        trim_malloc()  # what the forward has freed
        if losses is not None:
            self._backward(result, losses, index)
        labels = result.target
        if plan.targets is not None:
            result.target = plan.targets(inputs, given)
        elif (
            isinstance(labels, Tensor)
            and labels.dim() == 2
            and class_axis(result.output, labels, result.positions.lengths) == -1
        ):
            plan.notes.remark("(features)", PER_TOKEN)
        return result

    def _output(self, returned: Any, n: int) -> Tensor:
        """The output tensor; where none can be told and the loss needs none, zeros that no column reads."""
        plan = self.plan
        try:
            return select_output(returned, plan.output)
        except InputError as problem:
            loss_without = self._of_batch or (self.loss is None and own_loss(returned) is not None)
            value = first_tensor(returned)
            if plan.output is not None or not loss_without or value is None:
                raise
            plan.notes.left_out(OUTPUT, f"no Jacobians and no accuracy: {problem}")
            for kind in plan.sums:
                if "J" in kind.needs:
                    plan.notes.leave_out(EVERY, kind)
            self._without_output = True
            return torch.zeros(n, dtype=torch.float32, device=value.device)

    def _losses(self, result: BatchResult, returned: Any, inputs: Any, given: Any, index: int) -> Losses | None:
        """The losses of the samples; with no loss given, the model's own where there is one.

        torch's criteria get the targets of the outputs at the same positions, other functions the labels as they came.
        """
        loss, plan = self.loss, self.plan
        if loss is None:
            own = own_loss(returned)
            if own is None:
                return None
            plan.notes.remark("(loss)", OWN_LOSS)
            terms = own_terms(result.output, result.target, result.n, plan.ignore_index)
            if self._own_reduction is None:
                with self.tape.ignoring_calls():
                    self._own_reduction = reduction_of_own_loss(self.model, result.inputs, terms)
            if self._own_reduction in OWN_REDUCTIONS:
                plan.notes.remark("(loss)", OWN_REDUCTIONS[self._own_reduction])
            return own_losses(own, terms, result.output, self._own_reduction == "sum")
        output: Any = result.output
        if self._of_batch:
            output, target = returned, inputs if label_key(inputs) is not None or given is None else (inputs, given)
        elif result.target is None:
            raise InputError(
                f"batch {index} has no target for the loss; give (x, y) as a tuple, a loader of such pairs, or "
                f"unpack=lambda batch: (inputs, target); {WHOLE_BATCH}"
            )
        else:
            target = result.target if self._own_criterion else given

        def evaluate(output: Any, target: Any, n: int) -> Losses:
            positions = None if self._of_batch else result.positions
            return losses_and_terms(loss, output, target, n, plan.reduction, plan.ignore_index, positions)

        losses = evaluate(output, target, result.n)
        asked = index == 0 and not self._own_criterion and not result.positions.masks
        if asked and depends_on_batch(evaluate, losses.values, output, target, result.n):
            plan.notes.remark("(loss)", COUPLED_LOSS)
        return losses

    def _backward(self, result: BatchResult, losses: Losses, index: int) -> None:
        """Fill the tape's gradients from the summed per-sample losses."""
        plan, tape, values = self.plan, self.tape, losses.values
        total = values.float().sum() if values.dtype in (torch.bfloat16, torch.float16) else values.sum()
        if not torch.isfinite(total):
            raise NumericalError(f"the loss is {total.item()} in batch {index}")
        result.loss, result.terms = float(total.detach()), losses.terms
        several = isinstance(losses.terms, int) and losses.terms != result.n
        if several or (result.output.dim() > 2 and reduction_of(self.loss) == "mean"):
            plan.notes.remark("(positions)", PER_POSITION)
        if not plan.needs_gradients:
            return
        if plan.residuals or "parameter_gradient" in plan.needs:
            with tape.paused():
                self._add_other_gradients(result, total)
        tape.backward(total, retain_graph="J" in plan.needs)
        for record in tape:
            for kind in plan.sums if record.problem else ():
                if "delta" in kind.needs:
                    plan.notes.leave_out(record.name, kind, record.problem)

    def _add_other_gradients(self, result: BatchResult, total: Tensor) -> None:
        """``E = −∂L/∂f`` and the parameters' own gradients, as far as they are wanted."""
        if self.plan.residuals and total.requires_grad and result.output.requires_grad:
            (gradient,) = torch.autograd.grad(total, result.output, retain_graph=True, allow_unused=True)
            result.residual = None if gradient is None else -gradient
        if "parameter_gradient" in self.plan.needs:
            leaves = {record.name: record.layer.parameter for record in self.tape}
            known = {name: p for name, p in leaves.items() if p is not None and p.requires_grad}
            if known:
                found = torch.autograd.grad(total, list(known.values()), retain_graph=True, allow_unused=True)
                result.parameter_gradients = {n: g for n, g in zip(known, found, strict=True) if g is not None}

    def run_reference(self, reference: nn.Module, result: BatchResult) -> Tensor | None:
        """The output of the reference network; ``None``, with a note, where it has none of the model's shape."""
        try:
            value = select_output(call_model(reference, result.inputs), self.plan.output)
            if value.shape == result.output.shape:
                return value
            problem = f"its output has shape {tuple(value.shape)} and the model's {tuple(result.output.shape)}"
        except IndexError as error:  # tokens that it does not know
            problem = f"it cannot run on these inputs: {error}"
        self._without_reference(EVERY, f"no J⁰ of the reference network: {problem}")
        return None

    def _without_reference(self, name: str, reason: str) -> None:
        for kind in self.plan.sums:
            if "J_reference" in kind.needs:
                self.plan.notes.leave_out(name, kind)
                self.plan.notes.left_out(OUTPUT if name == EVERY else name, reason)

    # --- structure ----------------------------------------------------------------------------------------------------

    def _find_structure(self, result: BatchResult, random: Tensor, has_loss: bool) -> None:
        """Find the structure of batches once, in the first batch of several samples, and note what follows from it."""
        if self._structure is not None:
            return
        plan = self.plan
        with torch.set_grad_enabled(plan.needs_graph and plan.eval_mode):
            found = find_structure(self.model, self.tape, result.inputs, result.output, plan.output, random)
        self._structure = found if result.n > 1 else None
        self._current = found
        single = [kind for kind in plan.sums if kind.of_single_samples]
        for name in found.serves_many:
            for kind in single:
                plan.notes.leave_out(name, kind, SERVES_MANY)
        if found.coupled:
            if plan.jacobians is True and "J" in plan.needs:
                raise LayerError(COUPLED)
            if has_loss and any("delta" in kind.needs for kind in single):
                text = "samples influence each other: Σ has gradients of the loss of the whole batch, not of single samples"
                plan.notes.remark("(samples)", text)
            for kind in single:
                if "J" in kind.needs:
                    plan.notes.leave_out(EVERY, kind)
                    plan.notes.left_out(OUTPUT, f"no Jacobians: {COUPLED}")

    # --- what is seen -------------------------------------------------------------------------------------------------

    def layers(self, result: BatchResult) -> Iterator[Seen]:
        """Inputs, output gradients and feature rows of every layer, in order of execution."""
        for record in self.tape:
            name = record.layer.name
            if name not in self._weights:
                self._see_weight(name, record)
            seen = Seen(name, self._weights[name], result, result.positions, record, tied=name in self._tied)
            if name in result.parameter_gradients:
                seen.parameter_gradient = record.layer.to_matrix(result.parameter_gradients[name])
            if self._wants_rows(name):
                with self._unpaired(name, name):
                    seen.rows, seen.target, seen.residual = layer_rows(record, result, self._current, self.plan)
            yield seen
            del seen
        self.tape.forget_gradients()  # Jacobians take as much memory

    def _see_weight(self, name: str, record: LayerRecord) -> None:
        self._weights[name] = record.layer.weight().clone() if self.plan.snapshot else record.layer.weight_source()
        if record.layer.remark:
            self.plan.notes.remark(name, record.layer.remark)
        if "parameter_gradient" in self.plan.needs and shares_parameter(record.layer, self.tape.model):
            self._tied.add(name)

    def _wants_rows(self, name: str) -> bool:
        return "rows" in self.plan.needs and (name, "Features") not in self.plan.notes.without

    @contextmanager
    def _unpaired(self, name: str, key: str) -> Iterator[None]:
        """Leave the features of ``key`` out if rows and targets cannot be paired inside this block.

        A statistic missing in one batch is dropped for all: a part of the data would pass for the whole.
        """
        try:
            yield
        except LeftOut as reason:
            self.plan.notes.without.add((key, "Features"))
            self.plan.notes.left_out(key, f"no features: {reason}")
            if isinstance(reason, NoSuchSites):
                self._without_sites[name] = str(reason)

    def check_sites(self) -> None:
        """Raise if no layer has the sites that ``tokens=`` asks for."""
        if self._without_sites and not set(self._weights) - set(self._without_sites):
            raise NoSuchSites(next(iter(self._without_sites.values())))

    def outputs(self, result: BatchResult) -> Iterator[Seen]:
        """Feature rows of the outputs of modules that were asked for."""
        for name, value in self.tape.outputs.items():
            count, key = self.tape.output_counts[name], f"{name} {OUTPUT}".strip()
            if count > 1:
                text = f"it ran {count} times in a forward; its output is the one of the last time"
                self.plan.notes.remark(name, text)
            if self._wants_rows(key):
                seen = Seen(key, _no_weight(result), result)
                with self._unpaired(name, key):
                    axis = self._current.axis(key, value, self.plan.batch_dim)
                    rows = output_rows(value, self._layouts[name], name, axis)
                    rows = flattened(rows, result.n, result.positions.lengths)
                    valid = result.positions.of(rows.shape[-2])
                    seen.rows, seen.target = paired_rows(name, rows, result, self.plan, self.plan.tokens, valid)
                yield seen

    def network(self, result: BatchResult) -> Seen:
        """The network's own output, whose rows are samples, whatever the tokens."""
        seen = Seen(OUTPUT, _no_weight(result), result, whole_batch=True)
        result.order = list(self.order)
        self.order.clear()
        if isinstance(result.target, Tensor) and result.output.dim() == 2 and self._wants_rows(OUTPUT):
            with self._unpaired(OUTPUT, OUTPUT):
                h = result.output.detach().unsqueeze(1)
                seen.rows, seen.target = paired_rows(OUTPUT, h, result, self.plan, "mean")
        return seen

    def jacobians(self, result: BatchResult, reference: tuple[Tape, Tensor] | None) -> Iterator[Seen]:
        """Jacobians of one block of outputs after the other, and those of a reference network."""
        plan = self.plan
        if "J" not in plan.needs or self._current.coupled or self._without_output:
            return
        positions = result.positions
        output = positions.tokens_first(result.output) if positions.masks else result.output
        sketch, generator = plan.sketch_of(output), self._generator
        if sketch is not None and plan.sketch is None:
            text = (
                f"K is estimated from {sketch} random combinations of the {output[0].numel():,} outputs of a sample, with a "
                f"fixed seed; sketch={4 * sketch} halves the error, jacobians=True takes every output"
            )
            plan.notes.remark(OUTPUT, text)
        memory = plan.budget.memory if reference is None else max(plan.budget.memory // 2, 1)  # J and J⁰
        copy = generator.clone_state()  # both networks must see the same random signs
        inside: dict[str, Application] = {}
        if reference is None and all(kind in plan.at_inputs for kind in plan.sums if "J" in kind.needs):
            inside = at_own_inputs(self.tape, output, plan.budget)
        readout = None if sketch is None else Readout.find(inside, output, self._roots)
        if readout is not None:
            name = readout.application.layer.name
            yield Seen(name, self._weights[name], result, positions, J=readout.jacobians(), at_inputs=True)
        mine = jacobian_chunks(
            self.tape, output, sketch=sketch, memory=memory, generator=generator, readout=readout, at_inputs=inside
        )
        theirs = None
        if reference is not None:
            other, value = reference
            names = match_names(self.tape.records, other.records)
            theirs = jacobian_chunks(other, positions.tokens_first(value), sketch=sketch, memory=memory, generator=copy)
        first = 0
        for chunk in mine:
            blocks = {} if theirs is None else next(theirs, {})
            size = next(iter(chunk.values())).shape[0] if chunk else 0
            while chunk:  # a layer's Jacobians are dropped as soon as they are summed
                name, J = chunk.popitem()
                seen = Seen(
                    name, self._weights[name], result, positions, first=first, sketch=sketch, at_inputs=name in inside
                )
                if reference is not None:
                    J0 = blocks.pop(names.get(name, ""), None)
                    if J0 is None or J0.shape != J.shape:
                        self._without_reference(name, "the reference network has no such layer of the same shape")
                    else:
                        seen.J_reference = positions.without_padding(J0)
                        seen.reference_weight = reference[0][names[name]].layer.weight()
                    del J0
                seen.J = positions.without_padding(J) if positions.masks else J
                del J
                yield seen
                del seen
            first += size
            trim_malloc()


def _no_weight(result: BatchResult) -> Tensor:
    """What stands for the weight of an output."""
    return torch.empty(0, 0, dtype=torch.float64, device=result.output.device)
