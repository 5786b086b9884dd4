"""Slow, obvious float64 oracles: every fast path of the package is compared with one of these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


# --- layers: gradients at pre-activations by an added zero, one sample at a time --------------------------------------


def preactivation_gradients(
    model: nn.Module, module: nn.Module, x: Tensor, y: Tensor, losses: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """``∂L_i/∂z`` for every sample i, native layout, applications of the module concatenated in call order.

    The module's output gets a zero tensor added; the gradient of sample i's loss with respect to it is δ_i.
    """
    result = []
    for i in range(x.shape[0]):
        zeros: list[Tensor] = []

        def add_zero(_module: nn.Module, _args: object, z: Tensor, zeros: list[Tensor] = zeros) -> Tensor:
            zeros.append(torch.zeros_like(z, requires_grad=True))
            return z + zeros[-1]

        handle = module.register_forward_hook(add_zero)
        loss = losses(model(x[i : i + 1]), y[i : i + 1]).sum()
        handle.remove()
        result.append(torch.stack(torch.autograd.grad(loss, zeros)))
    return result


def output_jacobian(model: nn.Module, module: nn.Module, x: Tensor) -> Tensor:
    """``∂f(x_i)/∂z_i`` for one sample ``x [1, ...]``: ``[outputs, *z.shape[1:]]`` summed over no application but one."""
    zeros: list[Tensor] = []

    def add_zero(_module: nn.Module, _args: object, z: Tensor) -> Tensor:
        zeros.append(torch.zeros_like(z, requires_grad=True))
        return z + zeros[-1]

    handle = module.register_forward_hook(add_zero)
    outputs = model(x).flatten()
    handle.remove()
    rows = [torch.autograd.grad(f, zeros, retain_graph=True) for f in outputs]
    return torch.stack([torch.stack(row) for row in rows])  # [outputs, applications, 1, ...]
