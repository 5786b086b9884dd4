"""The neural feature ansatz with a power of the gradient outer product: ``WᵀW ∝ (WᵀKW)^p``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.arrays import Array, as_matrices, unit_scale
from gramscope.linalg.psd import EPS, psd_eigen
from gramscope.measures.gram import matrices

#: powers among which the best one is sought
SMALLEST, LARGEST = 1 / 64, 4.0


@dataclass(frozen=True)
class FittedPower:
    """The power p in ``[1/64, 4]`` with the largest ``ρ(WᵀW, (WᵀKW)^p)``, and that ρ; NaN where a side is zero."""

    power: float
    alignment: float


def power_alignment(W: Array, K: Array, power: float) -> float:
    """``ρ(WᵀW, (WᵀKW)^power)``, zero on the null space of ``WᵀKW``.

    Eigenvalues up to the rounding of W's type (1.2e-7 of the largest for float32) belong to the null space: a small power would
    make them large.

    In deep linear networks with balanced weights the ansatz holds with ``power = 1/L``, where L counts the layers from this one
    to the output (Tansley, Massart and Cartis 2025, "On the neural feature ansatz for deep neural networks").

    Args:
        W: weight ``[..., k, d]``.
        K: tangent kernel ``[..., k, k]``.
        power: p > 0.

    >>> W = torch.diag(torch.tensor([2.0, 1.0]))
    >>> round(power_alignment(W, W.mT @ W, 0.5), 12)  # the AGOP is (WᵀW)²
    1.0
    """
    return _alignment(*_along_eigenvectors(W, K), power)


def fitted_power(W: Array, K: Array) -> FittedPower:
    """The power of the AGOP that fits the weight Gram best: a scan of 65 powers, a factor 1.14 apart, then golden sections.

    Args:
        W: weight ``[..., k, d]``.
        K: tangent kernel ``[..., k, k]``.

    >>> W = torch.diag(torch.tensor([2.0, 1.0]))
    >>> fit = fitted_power(W, W.mT @ W)
    >>> round(fit.power, 4), round(fit.alignment, 6)
    (0.5, 1.0)
    """
    parts = _along_eigenvectors(W, K)
    logs = [math.log(SMALLEST) + i / 64 * math.log(LARGEST / SMALLEST) for i in range(65)]
    found = [_alignment(*parts, math.exp(x)) for x in logs]
    if any(math.isnan(rho) for rho in found):
        return FittedPower(math.nan, math.nan)
    best = max(range(65), key=found.__getitem__)
    low, high = logs[max(best - 1, 0)], logs[min(best + 1, 64)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(50):
        left, right = high - golden * (high - low), low + golden * (high - low)
        if _alignment(*parts, math.exp(left)) >= _alignment(*parts, math.exp(right)):
            high = right
        else:
            low = left
    power = math.exp((low + high) / 2)
    return FittedPower(power, _alignment(*parts, power))


def _along_eigenvectors(W: Array, K: Array) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues of the AGOP, the weight Gram's diagonal along its eigenvectors, and the Gram's squared norm.

    The eigenvalues of ``WᵀKW`` that are not zero are those of ``K^½WWᵀK^½``, so the smaller side is decomposed. Scales are
    dropped: no correlation depends on them.
    """
    (weight, kernel), _ = matrices(W=W, K=K)
    weight, kernel = unit_scale(weight), unit_scale(kernel)
    rtol = max(max(weight.shape[-2:]) * EPS, torch.finfo(as_matrices(W, "W").dtype).eps)
    if weight.shape[-2] >= weight.shape[-1]:
        values, vectors = psd_eigen(weight.mT @ kernel @ weight, rtol)
        along = (weight @ vectors).square().sum(-2)
    else:
        eigenvalues, basis = psd_eigen(kernel, rtol)
        B = eigenvalues.sqrt().unsqueeze(-1) * (basis.mT @ weight)  # BᵀB = WᵀKW
        values, vectors = psd_eigen(B @ B.mT, rtol)
        scaled = torch.where(values > 0, values, 1.0).rsqrt().unsqueeze(-1) * (
            vectors.mT @ B
        )  # its eigenvectors as rows
        along = torch.where(values > 0, (scaled @ weight.mT).square().sum(-1), 0.0)
    small = weight @ weight.mT if weight.shape[-2] < weight.shape[-1] else weight.mT @ weight
    return values.reshape(-1), along.reshape(-1), small.square().sum()


def _alignment(values: Tensor, along: Tensor, square: Tensor, power: float) -> float:
    largest = values.amax()
    if not float(largest) > 0 or not float(square) > 0:
        return math.nan
    raised = torch.where(values > 0, (values / largest).clamp(min=0.0) ** power, 0.0)
    return float((along * raised).sum() / (square.sqrt() * raised.square().sum().sqrt()))
