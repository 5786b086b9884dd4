"""The nearest matrix with a given Gram when the given matrices are close: a few small rotations in a basis that is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gramscope.linalg.psd import symmetric_product

#: changes beyond this part of ‖W‖ are left to the general method
_LARGEST = 0.03
#: the rotation is found to this part of the change, or to a unit of rounding of W
_PRECISION = 2e-4
#: a correction is expected to leave this much more than the one before, relative to what each began with
_SAFETY = 16
_CORRECTIONS = 3
#: of the directions the last sixteenth, those of the smallest eigenvalues, are turned exactly among themselves
_PART = 16
#: what bfloat16 rounds off quantities of this many units is an eighth of a unit
_COARSE = 32
#: ``target Xᵀ`` counts as positive definite when it is by this much, relative to its diagonal
_MARGIN = 4e-3
#: norms whose fourth powers float32 can hold
_NORMS = (1e-8, 1e8)


@dataclass
class KeptBasis:
    """An orthogonal matrix whose columns were eigenvectors of ``W Wᵀ`` when it was made, and whether a new one is due."""

    vectors: Tensor | None = None
    worn: bool = False


@dataclass(frozen=True)
class _Turn:
    moved: Tensor
    reliable: bool
    corrections: int = 0


def nearest_nearby(target: Tensor, source: Tensor, kept: KeptBasis) -> Tensor | None:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``, where ``target`` is close to ``source``; else None.

    See :func:`_turn`. The eigenbasis is the expensive part, and of use for many steps of a slowly moving matrix: it is
    replaced when one correction is not enough any more.

    Args:
        target, source: ``[k, d]``, k ≤ d, in float32.
        kept: the basis of an earlier call, which may be of any quality, or none; changed in place.
    """
    difference = target - source
    size, step = (float(torch.linalg.vector_norm(x)) for x in (source, difference))
    if not (_NORMS[0] < size < _NORMS[1] and step < _LARGEST * size):
        return None
    if kept.vectors is not None and not kept.worn:
        turn = _turn(difference, source, kept.vectors, size, step)
        kept.worn = turn.corrections > 1 or not turn.reliable
        if turn.reliable:
            return turn.moved.add_(source)
    vectors: Tensor = torch.linalg.eigh(symmetric_product(source.mT, source.mT, block=128))[1]
    turn = _turn(difference, source, vectors, size, step)
    kept.vectors, kept.worn = (vectors, False) if turn.reliable else (None, False)
    return turn.moved.add_(source) if turn.reliable else None


def _turn(difference: Tensor, source: Tensor, vectors: Tensor, size: float, step: float) -> _Turn:
    """``X − source`` for the nearest X with the Gram of ``source``.

    With rows in the basis, X is nearest when ``target Xᵀ`` is symmetric and positive definite. Each correction rotates by
    ``I + K + ½K²``, which is orthogonal up to ``¼K⁴``, with ``K_ij = (target Xᵀ − X targetᵀ)_ij / (s_i + s_j)``, s the squared
    lengths of the rows: exact to first order if the basis diagonalises ``X Xᵀ``. The rows of the smallest eigenvalues, for
    which a small change may be a large rotation, are first turned among themselves by an exact polar factor. What is
    left of the rotation is measured by ``‖K X‖_F``, its effect on X.

    A source equal to the target is not moved: then K is zero.
    """
    eps = torch.finfo(source.dtype).eps
    enough = max(2 * eps * size, _PRECISION * step)
    W, change = vectors.mT @ source, vectors.mT @ difference
    s = W.square().sum(-1)
    inverse = 1 / (s.unsqueeze(-1) + s)
    allowed = 0.1 * eps * float(torch.linalg.vector_norm(s))  # for the distance between the Grams
    few = slice(max(1, len(s) // _PART))
    moved = torch.zeros_like(
        W
    )  # X − W, on its own: what is added to X may be below its rounding, and always of one sign
    moved[few] = _turned(W[few] + change[few], W[few])
    X = W + moved
    product = (change - moved) @ X.mT  # and not T Xᵀ, which is not exactly symmetric where nothing changes
    T = change.add_(W)
    coarse = _COARSE * eps * size  # up to this size a quantity may be rounded to bfloat16
    before = math.inf
    for correction in range(_CORRECTIONS + 1):
        K = (product - product.mT).mul_(inverse)
        KX = _coarse_product(K, X) if correction else K @ X
        effect = float(torch.linalg.vector_norm(KX))
        if correction and coarse < effect < before:
            torch.mm(K, X, out=KX)
        moved += KX
        lost = effect**2
        if lost > 0.01 * allowed or float(torch.linalg.vector_norm(K)) * effect > 0.5 * eps * size:
            KKX = _coarse_product(K, KX)
            second = float(torch.linalg.vector_norm(KKX))
            if second > coarse:
                torch.mm(K, KX, out=KKX)
            moved.add_(KKX, alpha=0.5)
            lost = 0.25 * second**2
        allowed -= lost
        if not (allowed > 0 and effect < 0.5 * before):
            break
        if effect <= enough or (correction and _SAFETY * effect**2 <= enough * before):
            if correction == 0:
                torch.mm(T, X.mT, out=product)
            return _Turn(vectors @ moved, _definite(product), correction)
        before = effect
        torch.add(W, moved, out=X)
        turned = _turned(T[few], X[few])
        moved[few] += turned
        X[few] += turned
        torch.mm(T, X.mT, out=product)
    return _Turn(moved, False, correction)


def _definite(product: Tensor) -> bool:
    """Whether a nearly symmetric matrix is positive definite by a margin, relative to its diagonal.

    The margin is for the last correction, which ``target Xᵀ`` is without. The distance from the diagonal shows it at once for
    nearly diagonal matrices, a Cholesky factor for all.
    """
    scale = product.diagonal().rsqrt()
    product.mul_(scale.unsqueeze(-1)).mul_(scale)
    product.diagonal().sub_(1)
    if float(torch.linalg.vector_norm(product)) < 0.9:
        return True
    product.diagonal().add_(1 - _MARGIN)
    return not int(torch.linalg.cholesky_ex(product)[1]) and bool(scale.isfinite().all())


def _coarse_product(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` to three digits, where the processor is faster at that."""
    return (A.bfloat16() @ B.bfloat16()).float() if _has_bfloat16() else A @ B


@cache
def _has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; torch tells by names that may change."""
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))


def _turned(target: Tensor, source: Tensor) -> Tensor:
    """``(polar(target sourceᵀ) − I) source`` in float64."""
    T, W = target.double(), source.double()
    U: Tensor
    Vh: Tensor
    U, _, Vh = torch.linalg.svd(T @ W.mT)
    return (U @ (Vh @ W) - W).to(source.dtype)
