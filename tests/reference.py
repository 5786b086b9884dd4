"""Slow, obvious float64 oracles: every fast path of the package is compared with one of these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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


# --- theory: freeness by its definition, Gaussian averages by quadrature, tangents by autograd ------------------------


def free_moment_by_definition(elements: tuple[tuple[int, str], ...], moments: Callable[[int, str], float]) -> float:
    """``φ`` of a product of elements ``(family, word)``, only from "alternating products of centred elements vanish".

    Neighbours of one family merge; then 0 = φ(Π (x_i − φ(x_i))) is expanded and solved for φ(Π x_i).
    """
    merged: list[tuple[int, str]] = []
    for family, word in elements:
        if merged and merged[-1][0] == family:
            merged[-1] = (family, merged[-1][1] + word)
        else:
            merged.append((family, word))
    if not merged:
        return 1.0
    if len(merged) == 1:
        return moments(*merged[0])
    total = 0.0
    for mask in range(2 ** len(merged) - 1):  # every proper subset is kept, the rest replaced by minus its moment
        kept = tuple(e for i, e in enumerate(merged) if mask >> i & 1)
        factor = 1.0
        for i, element in enumerate(merged):
            if not mask >> i & 1:
                factor *= -moments(*element)
        total += factor * free_moment_by_definition(kept, moments)
    return -total


def gaussian_average(function: Callable[[Tensor], Tensor], covariance: Tensor, nodes: int = 40) -> float:
    """``E[function(u)]`` for u ~ N(0, covariance) by Gauss–Hermite on a grid; ``[points, m]`` are mapped to ``[points]``."""
    points, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(nodes))
    m = covariance.shape[0]
    grid = torch.cartesian_prod(*[points] * m).reshape(-1, m)
    mass = torch.cartesian_prod(*[weights / weights.sum()] * m).reshape(-1, m).prod(1)
    values, vectors = torch.linalg.eigh(covariance)
    return float((mass * function(grid @ (vectors * values.clamp_min(0).sqrt()).mT)).sum())


def mlp_tangents(weights: list[Tensor], x: Tensor, phi: Callable[[Tensor], Tensor], layer: int) -> Tensor:
    """``∂f(x_i)/∂z`` at one layer of a bias-free MLP, one sample at a time by autograd: ``[n, k]``."""
    rows = []
    for sample in x:
        h = sample
        for index, w in enumerate(weights[:-1]):
            z = w @ h
            if index == layer:
                z = z.detach().requires_grad_()
                kept = z
            h = phi(z)
        rows.append(torch.autograd.grad((weights[-1] @ h).sum(), kept)[0])
    return torch.stack(rows)
