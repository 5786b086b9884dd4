"""Muon's quintic iteration: an approximate polar factor by a few products."""

from __future__ import annotations

import torch
from torch import Tensor

#: of ``aX + b(XXᵀ)X + c(XXᵀ)²X``, which moves singular values in (0, 1] towards 1 (Jordan et al. 2024, Muon)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def quintic_polar(A: Tensor, steps: int = 5, least_norm: float = 1e-7) -> Tensor:
    """The polar factor of ``A [..., k, d]`` with singular values between about 0.7 and 1.2 in place of 1.

    Args:
        A: computed in its own dtype; bfloat16 is precise enough.
        steps: iterations.
        least_norm: A is divided by its Frobenius norm, or by this where the norm is smaller.
    """
    a, b, c = COEFFICIENTS
    tall = A.shape[-2] > A.shape[-1]
    wide = A.mT if tall else A
    X = wide.reshape(-1, *wide.shape[-2:])
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(least_norm)
    for _ in range(steps):
        gram = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    result: Tensor = X.reshape(wide.shape)
    return result.mT if tall else result


def wide_quintic_polar(A: Tensor, steps: int = 5, least_norm: float = 1e-19) -> Tensor:
    """:func:`quintic_polar` of ``A [..., k, d]`` with k < d by products of k×k matrices, and only two with A itself.

    Every iteration multiplies X from the left by a polynomial in XXᵀ, so ``X₅ = Q X₀`` and XXᵀ follows its own recursion.

    Args:
        A: computed in its own dtype, which must be float32 or float64: a Gram needs the digits.
        steps: iterations.
        least_norm: as for :func:`quintic_polar`.
    """
    a, b, c = COEFFICIENTS
    X = A / torch.linalg.matrix_norm(A, keepdim=True).clamp_min(least_norm)
    gram = X @ X.mT
    product: Tensor | None = None
    for step in range(steps):
        factor = b * gram + c * (gram @ gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if step + 1 < steps:
            gram = factor @ gram @ factor
    result: Tensor = X if product is None else product @ X
    return result
