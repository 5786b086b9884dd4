"""The form of VCL that has no rate to choose: steps along the orthogonalised mean of recent gradients.

With O in the place of the gradient D, the Gram that a step asks for is ``(W − ρO)ᵀ(W − ρO)``: that of W, the shift
``−ρ(WᵀO + OᵀW)`` and a second-order term. The nearest matrix to ``W − ρO`` with this Gram is ``W − ρO`` itself, so no
decomposition is needed.

Three lengths follow from the number n of steps taken. The mean of gradients reaches back over about 1 + n/20 steps, at most 20:
early gradients come from weights that are soon far away. The step ρ is 0.18, and falls like 0.5/√n from the eighth step on.
Weights decay by the share ρλ in a step; λ is 0 in the first steps and grows towards 0.2 as ρ falls, so that short runs are
not slowed and long ones forget what early gradients wrote.

An embedding is the matrix ``[width, entries]`` that multiplies one-hot vectors. These have length 1, where the inputs of other
layers have about √d. So its steps are longer by ``√width/2``: an entry moves by up to ρ/2 (root mean square).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError, LayerError, NumericalError
from gramscope.layers.kinds import EmbeddingKind
from gramscope.optim.vcl.checks import check_representable
from gramscope.optim.vcl.direction import orthogonalised
from gramscope.optim.weight_matrix import WeightMatrix

#: the largest singular value of the first steps, for matrices with at least as many inputs as outputs
STEP = 0.18
#: λ of late steps
DECAY = 0.2
#: β of the mean of gradients is n/(n + _SPAN), at most _BETA
_SPAN, _BETA = 20, 0.95


def falling(n: int) -> float:
    """The share of the first steps' size that step n has, ``min(1, (25/9)/√n)``.

    >>> falling(7), falling(2500)
    (1.0, 0.05555555555555555)
    """
    return min(1.0, 25 / (9 * math.sqrt(n)))


def mean_weight(n: int) -> float:
    """β of the running mean at step n, ``min(0.95, n/(n + 20))``.

    >>> mean_weight(20), mean_weight(10_000)
    (0.5, 0.95)
    """
    return min(_BETA, n / (n + _SPAN))


def decay(n: int) -> float:
    """λ of step n, ``0.2 (1 − min(1, (25/9)/√n))``: 0 while steps have their first size.

    >>> decay(7), round(decay(6400), 3)
    (0.0, 0.193)
    """
    return DECAY * (1 - falling(n))


@dataclass(frozen=True)
class AveragedReport:
    """What :meth:`gramscope.VCL.diagnostics` tells of a step: ρ, and the norm of the step."""

    step: float
    moved: Tensor

    def numbers(self) -> dict[str, float | list[float]]:
        """The diagnostics by name; waits for the device."""
        return {"step": self.step, "moved": self.moved.tolist()}


@dataclass(frozen=True)
class AveragedStep:
    """New weights and state of one matrix."""

    weights: Tensor
    state: dict[str, Any]
    report: AveragedReport


class AveragedTrainer:
    """One weight matrix that takes these steps. The optimizer holds the state: the mean of gradients and the step count."""

    solver = "averaged"

    def __init__(self, weight: WeightMatrix) -> None:
        self.weight = weight
        self.dtype = torch.promote_types(weight.parameter.dtype, torch.float32)
        k, d = weight.shape[-2:]
        one_hot = bool(weight.layers) and isinstance(weight.layers[0].kind, EmbeddingKind)
        #: the largest singular value of a step over its length ρ
        self.scale = 0.5 * math.sqrt(k) if one_hot else math.sqrt(max(1.0, k / d))
        self.report: AveragedReport | None = None

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an InputError unless a stored state is empty or one of this form and shape."""
        if not state:
            return
        name = self.weight.name
        if "mean" not in state:
            solver = "exact" if "matrix" in state else "recursive"
            raise InputError(
                f"the state of layer {name!r} is one of Algorithm 1: load it into gs.VCL(model, solver={solver!r})"
            )
        if state["mean"].shape != self.weight.shape:
            found, own = tuple(state["mean"].shape), tuple(self.weight.shape)
            raise InputError(f"the state of layer {name!r} is one of weights of shape {found}, not {own}")

    def forget(self) -> None:
        """Nothing to forget."""


def propose_averaged(
    units: Sequence[AveragedTrainer], states: Sequence[Mapping[str, Any]], factor: float
) -> dict[AveragedTrainer, AveragedStep]:
    """One step of every matrix that has a gradient, computed but not written; matrices of one shape together.

    Args:
        units: the matrices.
        states: theirs; empty before the first step.
        factor: multiplies ρ.

    Raises:
        LayerError: no matrix has a gradient.
        NumericalError: a gradient is not finite, or new weights would not be.
    """
    found = [
        (unit, state, grad) for unit, state in zip(units, states, strict=True) if (grad := _gradient(unit)) is not None
    ]
    if not found:
        raise LayerError(
            f"VCL layer {units[0].weight.name!r} has no gradient, and no other has: run backward() of a loss that depends on "
            "the layers before step()"
        )
    norms = torch._foreach_norm([grad for _, _, grad in found])
    sizes = torch.stack([norm.to(norms[0]) for norm in norms]).tolist()
    bad = [unit.weight.name for (unit, _, _), size in zip(found, sizes, strict=True) if not math.isfinite(size)]
    if bad:
        raise NumericalError(
            f"the gradient of VCL layer {bad[0]!r} has NaN or infinite values; weights and state are as before this step"
        )
    groups: dict[Any, list[tuple[AveragedTrainer, Tensor, int, Tensor]]] = {}
    for (unit, state, grad), size in zip(found, sizes, strict=True):
        if size:
            n = int(state.get("steps", 0)) + 1
            beta = mean_weight(n)
            mean = grad * (1 - beta) if "mean" not in state else torch.lerp(state["mean"], grad, 1 - beta)
            leading = torch.lerp(grad, mean, beta)  # as Nesterov: the newest gradient counts once more
            groups.setdefault((grad.shape, grad.dtype, grad.device), []).append((unit, mean, n, leading))
    steps: dict[AveragedTrainer, AveragedStep] = {}
    for members in groups.values():
        leads = [leading for *_, leading in members]
        directions = orthogonalised(torch.stack(leads) if len(leads) > 1 else leads[0].unsqueeze(0))
        for (unit, mean, n, _), O in zip(members, directions, strict=True):
            length = factor * STEP * falling(n)
            rho = length * unit.scale
            if rho > torch.finfo(unit.dtype).max / 4:
                raise NumericalError(
                    f"the step of VCL layer {unit.weight.name!r} has the length {rho:.1e}; weights and state are as before "
                    "this step. Lower gamma"
                )
            before = unit.weight.read()
            change = O.mul_(rho).add_(before, alpha=length * decay(n))
            report = AveragedReport(rho, torch.linalg.matrix_norm(change))
            weights = torch.sub(before, change, out=change)  # new memory would cost more than the difference
            check_representable(unit.weight, weights)
            steps[unit] = AveragedStep(weights, {"mean": mean, "steps": n}, report)
    return steps


def _gradient(unit: AveragedTrainer) -> Tensor | None:
    grad = unit.weight.gradient()
    return None if grad is None else grad.to(unit.dtype)
