"""The polar factor of a nearly symmetric matrix as a small rotation, accurate relative to its distance from identity."""

from __future__ import annotations

import torch
from torch import Tensor

#: rotations beyond this (‖K‖_F) are left to the general method
_LARGEST = 0.05
_ITERATIONS = 4


def small_rotation(S: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """``polar(S + R) − I`` for positive definite ``S`` and small antisymmetric ``R``, and where it can be relied on.

    Every orthogonal Q near I is ``K + √(I + K²) = I + K + ½K² − ⅛K⁴ + …`` with K antisymmetric, and ``Qᵀ(S + R)`` is
    symmetric when ``½(SK + KS) = R + O(K³)``: a Lyapunov equation, which is elementwise in the eigenbasis of S. Where
    they matter the higher-order terms are iterated there. All errors are relative to R, so R = 0 gives exactly 0, which
    a polar factor in the same precision does not.

    Rounding of S by ε changes K_ij by the factor ε/(s_i + s_j). A result is not to be relied on when that or the
    iteration leaves an error in ``Q W`` (where ``S ≈ W Wᵀ``) above half a unit of rounding of W.

    Args:
        S: ``[batch, n, n]``, symmetric.
        R: ``[batch, n, n]``, antisymmetric.

    Returns:
        ``E`` ``[batch, n, n]`` with ``I + E`` orthogonal, and a boolean tensor ``[batch]`` that is False where S is
        indefinite or too ill-conditioned or R too large for E to be accurate.
    """
    eps = torch.finfo(S.dtype).eps
    if not bool((S.sum() + R.sum()).isfinite()):
        return torch.zeros_like(S), torch.zeros(S.shape[0], dtype=torch.bool, device=S.device)
    s: Tensor
    V: Tensor
    s, V = torch.linalg.eigh(S)
    least, largest = s[:, 0], s[:, -1]
    inverse = 1 / (s.unsqueeze(-1) + s.unsqueeze(-2))
    R = torch.bmm(torch.bmm(V.mT, R), V)
    first = K = 2 * R * inverse
    size = torch.linalg.vector_norm(K, dim=(-2, -1))
    effect = _effect(K, s)
    unit = 0.5 * eps * s.sum(-1).sqrt()  # half a unit of rounding of W, whose squared norm is tr S
    reliable = (least > 0) & (size < _LARGEST)
    if bool((reliable & (eps * largest * effect >= 2 * least * unit)).any()):  # a bound on what is tested next
        reliable &= eps * largest * _effect(K * inverse, s) < unit
    remaining = size**2 * effect  # what the solution to first order leaves out is of third order
    M = R + torch.diag_embed(s)
    for _ in range(_ITERATIONS):
        if not bool((reliable & (remaining >= unit)).any()):
            break
        KM = torch.bmm(K, M)
        lost = torch.baddbmm(KM, K, KM, alpha=-0.5)  # M − QᵀM
        correction = torch.addcmul(first, lost.mT - lost, inverse)
        K = K + correction
        remaining = size * _effect(correction, s)
    reliable &= remaining < unit
    KK = torch.bmm(K, K)
    E = torch.add(K, KK, alpha=0.5)
    if bool((reliable & (size**4 > eps)).any()):
        E = torch.baddbmm(E, KK, KK, alpha=-0.125)
    return torch.bmm(torch.bmm(V, E), V.mT), reliable


def _effect(K: Tensor, s: Tensor) -> Tensor:
    """``‖K W‖_F`` in the eigenbasis of ``W Wᵀ`` with eigenvalues ``s``."""
    return torch.bmm(K.square(), s.unsqueeze(-1)).sum((-2, -1)).sqrt()
