"""Activations whose Gaussian averages are known in closed form.

For (u, v) centred Gaussian with covariance C, each gives ``E[φ(u)φ(v)]`` and ``E[φ'(u)φ'(v)]`` for all pairs of samples
at once, and ``Σ_m E[φ'(u_m)² φ'(u_i) φ'(u_j)]``, which finite widths need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError


@dataclass(frozen=True)
class Activation:
    """φ, φ' and their Gaussian averages as functions of the covariance ``C [n, n]``."""

    name: str
    phi: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    phi_kernel: Callable[[Tensor], Tensor]
    slope_kernel: Callable[[Tensor], Tensor]
    slope_fourth: Callable[[Tensor], Tensor]


def _scales(c: Tensor) -> Tensor:
    """``√(C_ii C_jj)``."""
    root = c.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return root.unsqueeze(-1) * root.unsqueeze(-2)


def _cosines(c: Tensor) -> tuple[Tensor, Tensor]:
    """Correlations, exactly 1 on the diagonal, and where both variances are positive."""
    scale = _scales(c)
    alive = scale > 0
    cosine = torch.where(alive, c / torch.where(alive, scale, 1.0), 0.0).clamp(-1, 1)
    diagonal = torch.eye(c.shape[-1], dtype=torch.bool, device=c.device)
    return torch.where(diagonal & alive, 1.0, cosine), alive


def _relu_phi(c: Tensor) -> Tensor:
    cosine, _ = _cosines(c)
    angle = cosine.arccos()
    return _scales(c) * (angle.sin() + (math.pi - angle) * cosine) / (2 * math.pi)


def _relu_slope(c: Tensor) -> Tensor:
    cosine, alive = _cosines(c)
    return torch.where(alive, (math.pi - cosine.arccos()) / (2 * math.pi), 0.0)


def _relu_fourth(c: Tensor) -> Tensor:
    """``Σ_m P(u_m, u_i, u_j > 0)``, each 1/8 + (arcsin ρ_mi + arcsin ρ_mj + arcsin ρ_ij)/4π (Sheppard)."""
    cosine, alive = _cosines(c)
    arcsin = cosine.arcsin()
    count = alive.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    row = arcsin.sum(-1, keepdim=True)  # a dead m has ρ = 0 and adds nothing
    return torch.where(alive, count / 8 + (row + row.mT + count * arcsin) / (4 * math.pi), 0.0)


def _erf_widths(c: Tensor, factor: float) -> Tensor:
    return 1 + factor * c.diagonal(dim1=-2, dim2=-1)


def _erf_phi(c: Tensor) -> Tensor:
    root = _erf_widths(c, 2).sqrt()
    return (2 / math.pi) * (2 * c / (root.unsqueeze(-1) * root.unsqueeze(-2))).clamp(-1, 1).arcsin()


def _erf_slope(c: Tensor) -> Tensor:
    width = _erf_widths(c, 2)
    return (4 / math.pi) * (width.unsqueeze(-1) * width.unsqueeze(-2) - 4 * c.square()).rsqrt()


def _erf_fourth(c: Tensor) -> Tensor:
    """``Σ_m (2/√π)⁴ E exp(−2u_m² − u_i² − u_j²) = Σ_m (16/π²) det(1 + C T)^(−1/2)``, T = diag(4, 2, 2) on (m, i, j)."""
    two = _erf_widths(c, 2)
    four = _erf_widths(c, 4)
    pair = two.unsqueeze(-1) * two.unsqueeze(-2) - 4 * c.square()  # the (i, j) minor
    total = torch.zeros_like(c)
    for m in range(c.shape[-1]):  # one sample at a time: n×n memory
        row = c[..., m, :]
        left, right = row.unsqueeze(-1), row.unsqueeze(-2)
        mixed = left.square() * two.unsqueeze(-2) + right.square() * two.unsqueeze(-1) - 4 * c * left * right
        total = total + (four[..., m, None, None] * pair - 8 * mixed).rsqrt()
    return (16 / math.pi**2) * total


def _quadratic_phi(c: Tensor) -> Tensor:
    return (_scales(c).square() + 2 * c.square()) / 4


def _quadratic_fourth(c: Tensor) -> Tensor:
    return c.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * c + 2 * c @ c


def _linear_fourth(c: Tensor) -> Tensor:
    return torch.full_like(c, c.shape[-1])


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("relu", torch.relu, lambda z: (z > 0).to(z.dtype), _relu_phi, _relu_slope, _relu_fourth),
        Activation(
            "erf",
            torch.erf,
            lambda z: (2 / math.sqrt(math.pi)) * (-z.square()).exp(),
            _erf_phi,
            _erf_slope,
            _erf_fourth,
        ),
        Activation("quadratic", lambda z: z.square() / 2, lambda z: z, _quadratic_phi, lambda c: c, _quadratic_fourth),
        Activation("linear", lambda z: z, torch.ones_like, lambda c: c, torch.ones_like, _linear_fourth),
    )
}  # fmt: skip


def activation(name: str) -> Activation:
    """Look an activation up by name; ``quadratic`` is ½z²."""
    if name not in ACTIVATIONS:
        raise InputError(f"activation={name!r} has no closed form here; there are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
