"""Early-time objects of any module and loss.

A thin adaptor: the layers' Jacobians and gradients come from :mod:`gramscope.layers`, the formulas from
:mod:`gramscope.theory.early_time`. The model is only read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gramscope.layers.capture import capture
from gramscope.layers.jacobians import check_samples_are_independent, jacobian_chunks
from gramscope.layers.losses import Loss, losses_and_terms
from gramscope.layers.model_call import call_model, evaluating, select_output
from gramscope.layers.select import LayerSelector
from gramscope.theory.early_time import Speeds, speeds_from_gradient


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
        model: any module with linear-like layers, in eval mode here; samples must not depend on each other.
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
    with evaluating(model), torch.enable_grad(), capture(model, layers) as tape:
        check_samples_are_independent(model)
        output = select_output(call_model(model, x))
        n = output.shape[0]
        covariances: dict[str, Tensor] = {}
        for chunk in jacobian_chunks(tape, output):
            for name, j in chunk.items():  # [m, …, batch, sites, k]
                rows = j.movedim(0, -2).flatten(-4, -2)
                covariances[name] = covariances.get(name, 0) + rows.mT @ rows / n
        tape.backward(losses_and_terms(loss, output, y, n, reduction).values)
        return {name: speeds_from_gradient(tape[name].D, covariance) for name, covariance in covariances.items()}
