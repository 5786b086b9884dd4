"""One batch of a collection: its forward, its losses and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, NumericalError
from gramscope.layers.hooks import first_tensor
from gramscope.layers.losses import Loss, sample_losses
from gramscope.layers.model_call import OutputSelector, call_model, select_output
from gramscope.layers.tape import Tape
from gramscope.statistics.features import Tokens


@dataclass(frozen=True)
class Options:
    """What a collection keeps; see :func:`gramscope.statistics.collect.collect`."""

    gradients: bool
    features: bool
    jacobians: bool | str
    sketch: int | None
    gram: bool | str
    residuals: bool
    autograd: bool
    tokens: Tokens
    ignore_index: int
    layouts: dict[str, str]
    memory: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """A batch after its forward (and backward).

    Args:
        inputs: as the loader gave them.
        target: what features are compared with; ``None`` for none.
        output: the model's output ``[n, …]``, with its graph.
        n: samples.
        loss: ``Σ_i L_i``.
        residual: ``E = −∂L/∂f``, when asked for.
        autograd: gradients of the parameters themselves by layer, when asked for.
    """

    inputs: Any
    target: Any
    output: Tensor
    n: int
    loss: float = 0.0
    residual: Tensor | None = None
    autograd: dict[str, Tensor] = field(default_factory=dict)


def forward(model: nn.Module, tape: Tape, inputs: Any, target: Any, index: int, output: OutputSelector) -> Step:
    """Run the model on batch number ``index`` and check what can be checked."""
    if first_tensor(inputs) is None:
        raise InputError(f"batch {index} holds no tensor to feed the model")
    value = select_output(call_model(model, inputs), output)
    call = tape.calls[-1]
    n = call.samples
    for name, problem in call.across_samples.items():
        tape.unsupported.setdefault(name, problem)
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
    return Step(inputs, target, value, n)


def backward(step: Step, tape: Tape, loss: Loss, reduction: str | float | None, index: int, options: Options) -> Step:
    """Fill the tape's gradients from the summed per-sample losses."""
    if step.target is None:
        raise InputError(
            f"batch {index} has no target for the loss; give (x, y) as a tuple, a loader of such pairs, or "
            "unpack=lambda batch: (inputs, target)"
        )
    losses = sample_losses(loss, step.output, step.target, step.n, reduction, options.ignore_index)
    total = losses.float().sum() if losses.dtype in (torch.bfloat16, torch.float16) else losses.sum()
    if not torch.isfinite(total):
        raise NumericalError(f"the loss is {total.item()} in batch {index}")
    if not options.gradients:
        return replace(step, loss=float(total.detach()))
    with tape.paused():
        residual, autograd = _extra_gradients(step, tape, total, options)
    tape.backward(total, retain_graph=bool(options.jacobians))
    tape.note_reached("gradient", {record.name for record in tape if record.reached}, "the loss does not reach it")
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
