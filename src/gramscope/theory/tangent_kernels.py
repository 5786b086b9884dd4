"""The pre-activation tangent kernel's mean: infinite width at any depth, and one hidden layer at any width.

Bias-free MLPs ``z_ℓ = W_ℓ x_ℓ, x_{ℓ+1} = φ(z_ℓ)`` with L hidden layers, one output ``f = W_L x_L`` and
``W_ℓ ~ N(0, s_ℓ / fan-in)`` ([NFA] §2.1). 𝒦_ij = ⟨∂f(x_i)/∂z_ℓ, ∂f(x_j)/∂z_ℓ⟩: the tangents at one layer's
pre-activations, not the tangent kernel of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.theory.activations import activation


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
