"""One batch of a run: its forward, its losses and its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    call_model,
    model_dtype,
    own_loss,
    run_captured,
    select_output,
)
from gramscope.layers.positions import Positions
from gramscope.layers.tape import Tape
from gramscope.linalg.budget import trim_malloc
from gramscope.notes import Note
from gramscope.statistics.plan import Plan

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
    terms: int = 0
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
            if result.terms != result.n or (result.output.dim() > 2 and reduction_of(self.loss) == "mean"):
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
