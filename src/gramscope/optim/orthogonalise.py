"""Muon's quintic iteration: an approximate polar factor by a few products (Jordan et al. 2024)."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

#: of ``aX + b(XXᵀ)X + c(XXᵀ)²X``, which moves singular values in (0, 1] towards 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: from this ratio of the sides on a matrix is orthogonalised through its small Gram
_WIDE = 3
#: up to this side float32 is as fast as bfloat16
_SMALL = 128


def orthogonalised(D: Tensor) -> Tensor:
    """The polar factor of ``D [..., k, d]`` with singular values between about 0.7 and 1.2, in the cheapest sufficient way.

    Large matrices are computed in bfloat16 where the device multiplies it fast; its three digits are enough. Of the others,
    those much wider or taller than the other side go through their small Gram.
    """
    k, d = D.shape[-2:]
    if k > d:
        return orthogonalised(D.mT).mT
    fast = D.dtype == torch.float32 and k > _SMALL and has_bfloat16(D.device)
    if d >= _WIDE * k and D.dtype != torch.bfloat16 and not fast:
        return _through_gram(D)
    X = D.to(torch.bfloat16) if fast else D
    return quintic_polar(X, least_norm=math.sqrt(torch.finfo(X.dtype).tiny)).to(D.dtype)


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


def _through_gram(A: Tensor, steps: int = 5, least_norm: float = 1e-19) -> Tensor:
    """:func:`quintic_polar` of ``A [..., k, d]`` with k < d by products of k×k matrices, and only two with A itself.

    Every iteration multiplies X from the left by a polynomial in XXᵀ, so ``X₅ = Q X₀`` and XXᵀ follows its own recursion. A
    must be float32 or float64: a Gram needs the digits.
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


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))
