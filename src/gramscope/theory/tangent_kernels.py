"""Mean pre-activation tangent kernels in closed form: infinite width at any depth, and one hidden layer at any width.

Bias-free MLPs ``z_ℓ = W_ℓ x_ℓ, x_{ℓ+1} = φ(z_ℓ)`` with L hidden layers, one output ``f = W_L x_L`` and
``W_ℓ ~ N(0, s_ℓ / fan-in)`` ([NFA] §2.1). 𝒦_ij = ⟨∂f(x_i)/∂z_ℓ, ∂f(x_j)/∂z_ℓ⟩: the tangents at one layer's
pre-activations, not the tangent kernel of all parameters. The activations are those whose Gaussian averages are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError, no_such


# -- activations --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Activation:
    """φ, φ' and their averages over (u, v) ~ N(0, C), as functions of ``C [n, n]``.

    ``phi_kernel`` is ``E[φ(u)φ(v)]`` and ``slope_kernel`` ``E[φ'(u)φ'(v)]`` for all pairs of samples at once;
    ``slope_fourth`` is ``Σ_m E[φ'(u_m)² φ'(u_i) φ'(u_j)]``, which finite widths need.
    """

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
        raise InputError(no_such("activation with a closed form", name, ACTIVATIONS))
    return ACTIVATIONS[name]


# -- kernels ---------------------------------------------------------------------------------------------------------
def tangent_kernel_at_infinite_width(
    x: Tensor, name: str, depth: int = 1, layer: int = 0, scales: float | Sequence[float] = 1.0
) -> Tensor:
    """``𝒦`` of hidden layer ``layer`` as all widths → ∞, where it equals its mean: ``[n, n]``.

    Forward ``C₀ = s₀ XXᵀ/d``, ``C_ℓ = s_ℓ E[φφ](C_{ℓ−1})``; backward ``𝒦_{L−1} = s_L Ċ_{L−1}``,
    ``𝒦_ℓ = s_{ℓ+1} Ċ_ℓ ∘ 𝒦_{ℓ+1}`` with ``Ċ_ℓ = E[φ'φ'](C_ℓ)``. Then E[𝒦²] = 𝒦². The deviation at width k is of order
    depth/k.

    Args:
        x: inputs ``[n, d]``.
        name: ``"relu"``, ``"erf"``, ``"quadratic"`` (½z²) or ``"linear"``.
        depth: number of hidden layers L.
        layer: which one, from 0.
        scales: s₀ … s_L, or one value for all.
    """
    check_layer(depth, layer)
    phi, s = activation(name), per_layer(scales, depth + 1, "scales")
    covariance = s[0] * x @ x.mT / x.shape[-1]
    kernel = torch.ones_like(covariance)
    for index in range(depth):
        if index >= layer:
            kernel = kernel * s[index + 1] * phi.slope_kernel(covariance)
        covariance = s[index + 1] * phi.phi_kernel(covariance)
    return kernel


def one_hidden_layer_kernel_moments(
    x: Tensor, name: str, width: int, weight_variance: float | None = None, readout_variance: float | None = None
) -> tuple[Tensor, Tensor]:
    """Exact ``E[𝒦]`` and ``E[𝒦²]`` of ``f = aᵀφ(Wx)`` at a finite width k, for Gaussian entries: two ``[n, n]``.

    𝒦 = Σ_s a_s² v_s v_sᵀ with v_s = φ'(w_s·x) independent over the k units, so with C = σ²XXᵀ and τ² = Var a

        E[𝒦] = kτ² Ċ,     E[𝒦²] = k(k−1) τ⁴ Ċ² + 3k τ⁴ Q,     Q_ij = Σ_m E[v_m² v_i v_j].

    The variances are 1/d and 1/k unless given. For the quadratic net with σ² = 1/k, τ = 1 this is [NFA]'s Proposition 10
    with what it drops, the first term and 1/k: E[𝒦²] = (1 − 1/k)(XXᵀ)² + (3/k)(tr(XᵀX) XXᵀ + 2(XXᵀ)²).
    """
    if width < 1:
        raise InputError(f"width={width} must be at least 1")
    phi = activation(name)
    sigma2 = 1 / x.shape[-1] if weight_variance is None else weight_variance
    tau2 = 1 / width if readout_variance is None else readout_variance
    covariance = sigma2 * x @ x.mT
    slope = phi.slope_kernel(covariance)
    square = width * (width - 1) * (slope @ slope) + 3 * width * phi.slope_fourth(covariance)
    return width * tau2 * slope, tau2**2 * square


def check_layer(depth: int, layer: int) -> None:
    """Raise :class:`InputError` unless ``layer`` names a hidden layer."""
    if depth < 1 or not 0 <= layer < depth:
        raise InputError(f"depth={depth}, layer={layer}: at least one hidden layer, counted 0 … depth−1")


def per_layer(value: float | Sequence[float], count: int, name: str) -> list[float]:
    """One value for all, or exactly ``count`` of them; all positive."""
    values = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count or not all(v > 0 for v in values):
        raise InputError(f"{name}={value!r}: give one positive number, or {count} of them")
    return values
