"""The polar factor of a nearly symmetric matrix as a small rotation, accurate relative to its distance from identity."""

from __future__ import annotations

import torch
from torch import Tensor

#: rotations beyond this (‖K‖_F) are left to the general method
_LARGEST = 0.1
_ITERATIONS = 4


def small_rotation(S: Tensor, R: Tensor) -> Tensor | None:
    """``polar(S + R) − I`` for positive definite ``S`` and a small antisymmetric ``R``, or None if they are not so.

    With ``Q = I + K + ½K²``, K antisymmetric, ``Qᵀ(S + R)`` is symmetric when ``½(SK + KS) = R + O(K²)``: a Lyapunov
    equation, which is elementwise in the eigenbasis of S. The second-order terms are iterated there. All errors are
    relative to R, so R = 0 gives exactly 0, which a polar factor in the same precision does not.

    Rounding of S by ε changes K_ij by the factor ε/(s_i + s_j). The result is refused, rather than returned
    inaccurate, when that or the iteration leaves an error in ``Q W`` (where ``S ≈ W Wᵀ``) above half a unit of rounding of W.

    Args:
        S: ``[batch, n, n]``, symmetric.
        R: ``[batch, n, n]``, antisymmetric.

    Returns:
        ``[batch, n, n]`` with ``I + result`` orthogonal, or None when the result would not be accurate (S indefinite or
        too ill-conditioned, R too large).
    """
    eps = torch.finfo(S.dtype).eps
    s, V = torch.linalg.eigh(S)
    if not bool((s[:, 0] > 0).all()):
        return None
    pairs = s.unsqueeze(-1) + s.unsqueeze(-2)
    M = V.mT @ R @ V
    K = 2 * M / pairs
    if not bool((K.square().sum((-2, -1)) < _LARGEST**2).all()):
        return None
    unit = 0.25 * eps**2 * s.sum(-1)  # squared: half a unit of rounding of W, whose squared norm is tr S
    rounding = eps * s[:, -1:].unsqueeze(-1) / pairs
    if not bool((_squared_effect(K * rounding, s) < unit).all()):
        return None
    M = M + torch.diag_embed(s)
    size = K.square().sum((-2, -1)).sqrt()
    change = size * _squared_effect(K, s).sqrt()
    for _ in range(_ITERATIONS):
        if bool((change.square() < unit).all()):
            break
        KM = K @ M
        residual = M - KM + 0.5 * (K @ KM)
        correction = (residual - residual.mT) / pairs
        K = K + correction
        change = size * _squared_effect(correction, s).sqrt()
    else:
        return None
    E = V @ (K + 0.5 * (K @ K)) @ V.mT
    if bool((0.25 * size**4 < 0.25 * eps).all()):  # ‖QᵀQ − I‖ = ‖K⁴‖/4
        return E
    excess = E + E.mT + E.mT @ E
    return E - 0.5 * (excess + E @ excess)


def _squared_effect(K: Tensor, s: Tensor) -> Tensor:
    """``‖K W‖_F²`` in the eigenbasis of ``W Wᵀ``."""
    return (K.square() * s.unsqueeze(-2)).sum((-2, -1))
