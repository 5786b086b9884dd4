"""Early-time objects of any module and loss, and the check that a real run starts where they say.

A thin adaptor: the layers' Jacobians and gradients come from :mod:`gramscope.layers`, the formulas from
:mod:`gramscope.theory.early_time`. The model is only read; runs work on a float64 copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.layers.capture import capture
from gramscope.layers.jacobians import check_samples_are_independent, jacobian_chunks
from gramscope.layers.losses import Loss, losses_and_terms
from gramscope.layers.model_call import call_model, evaluating, select_output
from gramscope.layers.select import LayerSelector, select_layers
from gramscope.theory.early_time import Speeds, speeds_from_gradient


@dataclass(frozen=True)
class LayerState:
    """What the early-time formulas need of one layer: ``W``, ``D [k, d]`` (summed loss) and ``K [k, k]``."""

    weight: Tensor
    gradient: Tensor
    covariance: Tensor

    @property
    def speeds(self) -> Speeds:
        """``ẆᵀẆ`` and ``ẆᵀKẆ`` under gradient flow on the summed loss."""
        return speeds_from_gradient(self.gradient, self.covariance)


def layer_states(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    layers: LayerSelector = None,
    *,
    reduction: str | float | None = None,
) -> dict[str, LayerState]:
    """``W``, ``D`` and ``K`` of the chosen layers on one batch, in eval mode; see :func:`early_alignment`."""
    with evaluating(model), torch.enable_grad(), capture(model, layers) as tape:
        check_samples_are_independent(model)
        output = select_output(call_model(model, x))
        n = output.shape[0]
        covariances: dict[str, Tensor] = {}
        for chunk in jacobian_chunks(tape, output):
            for name, j in chunk.items():
                rows = _rows(j)
                covariances[name] = covariances.get(name, 0) + rows.mT @ rows / n
        tape.backward(losses_and_terms(loss, output, y, n, reduction).values)
        return {
            name: LayerState(tape[name].weight, tape[name].D, covariance) for name, covariance in covariances.items()
        }


def early_alignment(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    layers: LayerSelector = None,
    *,
    reduction: str | float | None = None,
) -> dict[str, Speeds]:
    """``ẆᵀẆ`` and ``ẆᵀKẆ`` of each layer at the model's present weights, and their correlation ([NFA] Proposition 4).

    Args:
        model: any module with linear-like layers; samples must not depend on each other.
        x: one batch of inputs; y: its targets.
        loss: a torch criterion or any function of ``(output, target)``, as everywhere in the package.
        layers: names, globs or types; all layers unless given.
        reduction: how ``loss`` reduces over the batch, where that cannot be seen.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> speeds = early_alignment(model, torch.randn(20, 3), torch.randn(20, 1), torch.nn.MSELoss(), "0")
    >>> speeds["0"].gram.shape, 0 < speeds["0"].correlation <= 1
    (torch.Size([3, 3]), tensor(True))
    """
    states = layer_states(model, x, y, loss, layers, reduction=reduction)
    return {name: state.speeds for name, state in states.items()}


@dataclass(frozen=True)
class SecondDifference:
    """Two gradient-descent steps of size ``step`` against the prediction, for one layer.

    ``gram_error`` and ``agop_error`` are relative Frobenius errors of the second differences
    ``(M₂ − 2M₁ + M₀)/step²`` of M = W̄ᵀW̄ and W̄ᵀKW̄ against 2ẆᵀẆ and 2ẆᵀKẆ; ``correlation`` is the centred NFA after
    both steps.
    """

    step: float
    gram_error: float
    agop_error: float
    correlation: float
    predicted: float


def second_differences(
    model: nn.Module,
    x: Any,
    y: Any,
    loss: Loss,
    layer: str,
    *,
    relative_steps: Sequence[float] = (1e-4, 5e-5, 2.5e-5),
    reduction: str | float | None = None,
) -> list[SecondDifference]:
    """Train a float64 copy for two plain gradient steps per size and compare with :func:`early_alignment`.

    All trainable parameters move, by gradient descent on the summed loss. The first step moves this layer's weights by
    ``relative_steps`` times their norm. The errors fall in proportion to the step where the prediction is right.
    """
    start = copy.deepcopy(model).double()
    x, y = _double(x), _double(y)
    (name,) = select_layers(start, layer).names
    initial = layer_states(start, x, y, loss, layer, reduction=reduction)[name]
    expected = initial.speeds
    results = []
    for relative in relative_steps:
        step = float(relative * initial.weight.norm() / initial.gradient.norm())
        run = copy.deepcopy(start)
        centred: list[Speeds] = []
        for _ in range(2):
            _descend(run, x, y, loss, step, reduction)
            state = layer_states(run, x, y, loss, layer, reduction=reduction)[name]
            moved = state.weight - initial.weight
            centred.append(speeds_from_gradient(moved, state.covariance))
        first, second = centred
        results.append(
            SecondDifference(
                step=step,
                gram_error=_relative((second.gram - 2 * first.gram) / step**2, 2 * expected.gram),
                agop_error=_relative((second.agop - 2 * first.agop) / step**2, 2 * expected.agop),
                correlation=float(second.correlation.mean()),
                predicted=float(expected.correlation.mean()),
            )
        )
    return results


def _descend(model: nn.Module, x: Any, y: Any, loss: Loss, step: float, reduction: str | float | None) -> None:
    """One step of gradient descent on the summed loss, in place."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with evaluating(model), torch.enable_grad():
        output = select_output(call_model(model, x))
        total = losses_and_terms(loss, output, y, output.shape[0], reduction).values.sum()
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(gradient, alpha=step)


def _rows(j: Tensor) -> Tensor:
    """``[m, …, batch, sites, k]`` as ``[…, batch·sites·m, k]``."""
    return j.movedim(0, -2).flatten(-4, -2)


def _relative(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
