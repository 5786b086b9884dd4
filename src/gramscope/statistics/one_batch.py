"""One batch of a collection: its forward, its losses and its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramscope.errors import InputError, NumericalError
from gramscope.layers.batches import label_key
from gramscope.layers.hooks import first_tensor
from gramscope.layers.labels import LabelReader, ReadBatch
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
    OutputSelector,
    call_model,
    model_dtype,
    own_loss,
    run_captured,
    select_output,
)
from gramscope.layers.positions import Positions
from gramscope.layers.tape import Tape
from gramscope.notes import Note
from gramscope.statistics.collect_options import Options
from gramscope.statistics.memory import trim_malloc
from gramscope.statistics.structure import Structure, find_structure

#: losses whose targets are numbers, also where they are stored as integers
REGRESSION = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
REGRESSION_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
REGRESSED_INTEGERS = Note(
    "remark", "integers under a loss of regression are numbers to regress on; targets=lambda x, y: y makes them classes"
)
OWN_LOSS = Note("remark", "no loss was given, so the loss is the one that the model itself returns")
PER_POSITION = Note(
    "remark",
    "per position: loss, accuracy, gradient norms and steps are means over all positions (tokens, pixels) that count, as the "
    "criterion gives them on all data at once; per sample: K, AGOP and NFA, summed over the positions of a sample",
)
PER_TOKEN = Note(
    "remark", "per token: each labelled token is a row, in target linearity, surrogates and neural collapse"
)


@dataclass(frozen=True)
class Step:
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
        autograd: gradients of the parameters themselves by layer, when asked for.
        structure: what is known of the samples.
    """

    inputs: Any
    target: Any
    output: Tensor
    n: int
    positions: Positions = field(default_factory=Positions)
    loss: float = 0.0
    terms: int = 0
    residual: Tensor | None = None
    autograd: dict[str, Tensor] = field(default_factory=dict)
    structure: Structure = field(default_factory=Structure)


@dataclass
class BatchRunner:
    """Runs a model on the batches of a collection; the fields are arguments of :func:`gramscope.collect`."""

    model: nn.Module
    loss: Loss | None
    reduction: str | float | None
    output: OutputSelector
    targets: Callable[[Any, Any], Tensor] | None
    options: Options

    def __post_init__(self) -> None:
        own_loss = self.loss is None or takes_batch(self.loss)
        self._reader = LabelReader(self.model, self.options.ignore_index, own_loss)
        self._structure: Structure | None = None

    def run(self, tape: Tape, inputs: Any, target: Any, index: int) -> Step:
        """Forward, backward where there is a loss, and the targets that features are compared with."""
        given = target
        regression = isinstance(self.loss, REGRESSION) or self.loss in REGRESSION_FUNCTIONS
        if regression and isinstance(target, Tensor) and not target.is_floating_point():
            target = target.to(model_dtype(self.model))
            if self.targets is None:
                tape.unsupported["(targets)"] = REGRESSED_INTEGERS
        with tape.ignoring_calls():
            read = self._reader.read(inputs, target)
        tape.unsupported |= read.notes
        random = torch.get_rng_state()
        step, returned = forward(self.model, tape, read, index, self.output)
        step = replace(step, structure=self._structure_of(tape, step, random))
        trim_malloc()  # what the forward has freed
        losses = self._losses(step, returned, inputs, given, index)
        if losses is not None:
            step = backward(step, tape, losses, index, self.options)
            if self.loss is None:
                tape.unsupported["(loss)"] = OWN_LOSS
            if step.terms != step.n or (step.output.dim() > 2 and reduction_of(self.loss) == "mean"):
                tape.unsupported["(positions)"] = PER_POSITION
        labels = step.target if self.targets is None else None
        if (
            isinstance(labels, Tensor)
            and labels.dim() == 2
            and class_axis(step.output, labels, step.positions.lengths) == -1
        ):
            tape.unsupported["(features)"] = PER_TOKEN
        return step if self.targets is None else replace(step, target=self.targets(inputs, given))

    def _losses(self, step: Step, returned: Any, inputs: Any, given: Any, index: int) -> Losses | None:
        """The losses of the samples; with no loss given, the model's own where there is one.

        torch's criteria get the targets of the outputs at the same positions, other functions the labels as they came.
        """
        if self.loss is None:
            own = own_loss(returned)
            return None if own is None else own_losses(own, step.output, step.target, step.n, self.options.ignore_index)
        if takes_batch(self.loss):
            batch = inputs if label_key(inputs) is not None or given is None else (inputs, given)
            return losses_and_terms(self.loss, returned, batch, step.n, self.reduction)
        if step.target is None:
            raise InputError(
                f"batch {index} has no target for the loss; give (x, y) as a tuple, a loader of such pairs, or "
                f"unpack=lambda batch: (inputs, target); {WHOLE_BATCH}"
            )
        target = step.target if is_torch_criterion(self.loss) else given
        ignored = self.options.ignore_index
        return losses_and_terms(self.loss, step.output, target, step.n, self.reduction, ignored, step.positions)

    def _structure_of(self, tape: Tape, step: Step, random: Tensor) -> Structure:
        """The structure of batches, found once, in the first batch of several samples."""
        if self._structure is not None:
            return self._structure
        with torch.set_grad_enabled(self.options.needs_graph and self.options.eval_mode):
            found = find_structure(self.model, tape, step.inputs, step.output, self.output, random)
        self._structure = found if step.n > 1 else None
        return found

    def run_reference(self, reference: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """The output of the reference network, which must have the shape of the model's ``output``."""
        value = select_output(call_model(reference, inputs), self.output)
        if value.shape != output.shape:
            raise InputError(
                f"the reference network's output has shape {tuple(value.shape)} and the model's {tuple(output.shape)}; give "
                "a network of the same architecture"
            )
        return value


def forward(model: nn.Module, tape: Tape, read: ReadBatch, index: int, output: OutputSelector) -> tuple[Step, Any]:
    """Run the model on batch number ``index``; check the number of targets and that the output is finite.

    Returns the step and all that the model returned.
    """
    inputs, target = read.inputs, read.target
    if first_tensor(inputs) is None:
        raise InputError(f"batch {index} holds no tensor to feed the model")
    returned = run_captured(model, tape, inputs)
    value = select_output(returned, output)
    call = tape.calls[-1]
    n = call.samples
    for name, problem in call.across_samples.items():
        tape.unsupported.setdefault(name, Note("unsupported", problem))
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
    return Step(inputs, target, value, n, read.positions), returned


def backward(step: Step, tape: Tape, found: Losses, index: int, options: Options) -> Step:
    """Fill the tape's gradients from the summed per-sample losses."""
    losses = found.values
    step = replace(step, terms=found.terms)
    total = losses.float().sum() if losses.dtype in (torch.bfloat16, torch.float16) else losses.sum()
    if not torch.isfinite(total):
        raise NumericalError(f"the loss is {total.item()} in batch {index}")
    if not options.gradients:
        return replace(step, loss=float(total.detach()))
    with tape.paused():
        residual, autograd = _extra_gradients(step, tape, total, options)
    tape.backward(total, retain_graph=bool(options.jacobians))
    tape.note_reached("no gradient", {record.name for record in tape if record.reached}, "the loss does not reach it")
    return replace(step, loss=float(total.detach()), residual=residual, autograd=autograd)


def _extra_gradients(
    step: Step, tape: Tape, total: Tensor, options: Options
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """``E = −∂L/∂f`` and the parameters' own gradients, as far as they were asked for."""
    residual = None
    if options.residuals and total.requires_grad:
        (gradient,) = torch.autograd.grad(total, step.output, retain_graph=True, allow_unused=True)
        residual = None if gradient is None else -gradient
    autograd: dict[str, Tensor] = {}
    if options.autograd:
        leaves = {r.name: r.layer.parameter for r in tape}
        known = {name: p for name, p in leaves.items() if p is not None and p.requires_grad}
        if known:
            found = torch.autograd.grad(total, list(known.values()), retain_graph=True, allow_unused=True)
            autograd = {name: g for name, g in zip(known, found, strict=True) if g is not None}
    return residual, autograd
