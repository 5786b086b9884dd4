"""Muon's quintic iteration: an approximate polar factor by a few products (Jordan et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

#: of ``aX + b(XXᵀ)X + c(XXᵀ)²X``, which moves singular values in (0, 1] towards 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: from this ratio of the sides on a matrix is orthogonalised through its small Gram
_WIDE = 3
#: up to this side float32 is as fast as bfloat16
_SMALL = 128
#: matrices of so many entries or more are computed in this many pieces, to save memory
_LARGE, _PIECES = 1 << 20, 8


def orthogonalised(D: Tensor) -> Tensor:
    """The polar factor of ``D [..., k, d]`` with singular values between about 0.7 and 1.2, in the cheapest sufficient way."""
    k, d = D.shape[-2:]
    if k > d:
        return orthogonalised(D.mT).mT
    X = torch.empty(D.shape, dtype=working_dtype(D.shape, D.dtype, D.device), device=D.device).copy_(D)
    return orthogonalise_(X.view(-1, k, d)).view(D.shape).to(D.dtype)


def working_dtype(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 for large matrices of float32 where the device multiplies it fast, as three digits are enough."""
    fast = dtype == torch.float32 and min(shape[-2:]) > _SMALL and has_bfloat16(device)
    return torch.bfloat16 if fast else dtype


def orthogonalise_(X: Tensor) -> Tensor:
    """:func:`orthogonalised` of a contiguous ``X [count, k, d]`` with k ≤ d, whose memory is used. Large X need little more.

    Of matrices that are not in bfloat16 those much wider than high go through their small Gram.
    """
    k, d = X.shape[-2:]
    if X.dtype == torch.bfloat16 or d < _WIDE * k:
        return quintic_polar_(X)
    return _through_gram_(X)


def quintic_polar_(X: Tensor, steps: int = 5) -> Tensor:
    """Five products ``(a + bG + cG²) X`` with ``G = XXᵀ`` of ``X [count, k, d]``, k ≤ d, after a division by its norm."""
    a, b, c = COEFFICIENTS
    X.div_(torch.linalg.matrix_norm(X, keepdim=True).clamp_min(math.sqrt(torch.finfo(X.dtype).tiny)))
    for _ in range(steps):
        if not _is_large(X) or X.shape[-1] >= 2 * X.shape[-2]:
            X = _multiplied(_quadratic(torch.bmm(X, X.mT)), X, a)
            continue
        gram = torch.bmm(X, X.mT)
        for part in _columns(X):  # without a second matrix of the size of G
            image = torch.bmm(gram, part)
            part.mul_(a).add_(torch.baddbmm(image, gram, image, beta=b, alpha=c))
        del gram
    return X


def _through_gram_(X: Tensor, steps: int = 5) -> Tensor:
    """:func:`quintic_polar_` by products of k×k matrices, and only two with X itself.

    Every iteration multiplies X from the left by a polynomial in XXᵀ, so ``X₅ = Q X₀`` and XXᵀ follows its own recursion. X
    must be float32 or float64: a Gram needs the digits.
    """
    X.div_(torch.linalg.matrix_norm(X, keepdim=True).clamp_min(1e-19))
    gram = torch.bmm(X, X.mT)
    product: Tensor | None = None
    for step in range(steps):
        factor = _quadratic(gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(COEFFICIENTS[0])
        product = factor if product is None else torch.bmm(factor, product)
        if step + 1 < steps:
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    assert product is not None
    return _multiplied(product, X)


def _quadratic(gram: Tensor) -> Tensor:
    """``bG + cG²``."""
    _, b, c = COEFFICIENTS
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


def _multiplied(factor: Tensor, X: Tensor, a: float = 0.0) -> Tensor:
    """``a X + factor X``, in the memory of X where that is large."""
    if not _is_large(X):
        return torch.baddbmm(X, factor, X, beta=a)
    for part in _columns(X):
        part.copy_(torch.baddbmm(part, factor, part, beta=a))
    return X


def _is_large(X: Tensor) -> bool:
    return X.numel() >= _LARGE


def _columns(X: Tensor) -> tuple[Tensor, ...]:
    return torch.split(X, -(-X.shape[-1] // _PIECES), -1)


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of equally many rows, of which large ones in pieces of some rows."""
    whole = max(tensors, key=Tensor.numel)
    if not _is_large(whole):
        return iter([tensors])
    rows = -(-len(whole) // _PIECES)
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))
