"""Virtual against actual updates, by coordinates: the bound and the sign of [VCL] Theorem 3 ([Gram] Proposition 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_float_tensor, check_same_device, to_double

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class VirtualAgreement:
    """How far the actual update follows the virtual one.

    Args:
        bound: share of coordinates with ``|σ(W⁺h) − σ(Wh)| ≤ L²‖h‖² γ|g|``.
        sign: share of coordinates where both updates have the same sign or one of them is zero.
        lipschitz: the L used.
        largest_ratio: largest ``|σ(W⁺h) − σ(Wh)| / (L²‖h‖² γ|g|)``; above 1 the bound fails somewhere.
        coordinates: how many were compared.
    """

    bound: float
    sign: float
    lipschitz: float
    largest_ratio: float
    coordinates: int


def virtual_against_actual(
    h: Array, z: Array, g: Array, gamma: float, activation: Activation | str, lipschitz: float | None = None
) -> VirtualAgreement:
    """Compare ``σ(W⁺h_{ℓ−1}) − σ(Wh_{ℓ−1})`` with the virtual ``h_ℓ⁺ − h_ℓ = −γ g`` for every sample on its own.

    ``W⁺ = W − γ δ hᵀ`` is a gradient step on that one sample and layer, so ``W⁺h = z − γ ‖h‖² δ`` with ``δ = σ'(z) g``.
    The published bound is for ``‖h‖ = 1``; here it carries the factor ``‖h‖²``.

    Args:
        h: the layer's inputs ``h_{ℓ−1} [n, d]``.
        z: pre-activations ``W h_{ℓ−1} (+ b) [n, k]``.
        g: gradients of each sample's loss at the layer's output ``h_ℓ = σ(z)``, ``[n, k]``.
        gamma: step size γ > 0.
        activation: σ, a function of a tensor, entry by entry, or its name in ``torch.nn.functional``.
        lipschitz: L; default :func:`lipschitz_constant` of σ. (With L = 1, as [VCL] takes for GELU, the bound fails.)

    >>> h, z, g = torch.ones(1, 1), torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.5]])
    >>> virtual_against_actual(h, z, g, gamma=0.1, activation="relu").bound
    1.0
    """
    inputs, pre, gradients = as_float_tensor(h, "h", 2), as_float_tensor(z, "z", 2), as_float_tensor(g, "g", 2)
    check_same_device(h=inputs, z=pre, g=gradients)
    if pre.shape != gradients.shape or inputs.shape[0] != pre.shape[0]:
        raise InputError(
            f"h [n, d], z [n, k] and g [n, k] must fit, got {tuple(inputs.shape)}, {tuple(pre.shape)}, "
            f"{tuple(gradients.shape)}"
        )
    if not gamma > 0:
        raise InputError(f"gamma must be positive, got {gamma}")
    function = _resolve(activation)
    constant = lipschitz_constant(function) if lipschitz is None else float(lipschitz)
    inputs, pre, gradients = to_double(inputs), to_double(pre), to_double(gradients)
    square = inputs.square().sum(1, keepdim=True)
    slope = _slope(function, pre)
    with torch.no_grad():
        before = function(pre)
        actual = function(pre - gamma * square * slope * gradients) - before
    virtual = -gamma * gradients
    limit = constant**2 * square * virtual.abs()
    rounding = 8 * torch.finfo(torch.float64).eps * (before.abs() + 1e-300)
    size = torch.where(actual.abs() <= rounding, 0.0, actual.abs())
    holds = size <= limit * (1 + 1e-12) + rounding
    agrees = (size == 0) | (virtual == 0) | (actual.sign() == virtual.sign())
    ratio = torch.where(limit > 0, size / torch.where(limit > 0, limit, 1.0), 0.0)
    return VirtualAgreement(
        float(holds.double().mean()), float(agrees.double().mean()), constant, float(ratio.max()), actual.numel()
    )


def lipschitz_constant(activation: Activation | str) -> float:
    """The smallest L with ``|σ(a) − σ(b)| ≤ L|a − b|``: the largest slope, found on a grid and refined around it.

    An activation whose slope still grows beyond |z| = 30 (a quadratic one) has none: pass ``lipschitz=`` for the range
    that occurs.

    >>> [round(lipschitz_constant(name), 4) for name in ("relu", "gelu", "silu", "tanh", "sigmoid")]
    [1.0, 1.1289, 1.0998, 1.0, 0.25]
    """
    function = _resolve(activation)
    points = torch.linspace(-30.0, 30.0, 60_001, dtype=torch.float64, device="cpu")
    best = 0.0
    for _ in range(6):
        slopes = _slope(function, points).abs()
        best = max(best, float(slopes.max()))
        centre, width = points[slopes.argmax()], (points[1] - points[0]) * 2
        points = torch.linspace(float(centre - width), float(centre + width), 2_001, dtype=torch.float64, device="cpu")
    far = torch.tensor([-1e3, -60.0, 60.0, 1e3], dtype=torch.float64, device="cpu")
    if float(_slope(function, far).abs().max()) > best * (1 + 1e-9):
        raise InputError("the activation's slope grows without bound: pass lipschitz= for the range of z that occurs")
    return best


def _slope(function: Activation, z: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        value = function(leaf)
        if value.shape != leaf.shape:
            raise InputError(f"activation must act entry by entry, but {tuple(z.shape)} became {tuple(value.shape)}")
        if not value.requires_grad:
            return torch.zeros_like(z)
        return torch.autograd.grad(value.sum(), leaf)[0]


def _resolve(activation: Activation | str) -> Activation:
    if not isinstance(activation, str):
        return activation
    function = getattr(F, activation, None)
    if function is None:
        raise InputError(f"torch.nn.functional has no activation {activation!r}; pass the function itself")
    named: Activation = function
    return named
