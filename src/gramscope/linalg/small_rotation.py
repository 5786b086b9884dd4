"""The polar factor of a nearly symmetric matrix as a small rotation, accurate relative to its distance from identity."""

from __future__ import annotations

import torch
from torch import Tensor

#: rotations beyond this (‖K‖_F) are left to the general method
_LARGEST = 0.05
_ITERATIONS = 4
#: conjugate-gradient steps that cost about as much as an eigendecomposition
_STEPS = 10
#: eigenvalues of S are shown to be above the first of these that they are, relative to their mean; with smaller ones so few
#: steps cannot be enough
_LEAST = (0.3, 0.05)
#: smaller matrices are decomposed at once
LARGE = 128


def small_rotation(S: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """``polar(S + R) − I`` for positive definite ``S`` and small antisymmetric ``R``, and where it can be relied on.

    Every orthogonal Q near I is ``K + √(I + K²) = I + K + ½K² − ⅛K⁴ + …`` with K antisymmetric, and ``Qᵀ(S + R)`` is
    symmetric when ``½(SK + KS) = R + O(K³)``: a Lyapunov equation. Conjugate gradients solve it in a few products where S
    is well conditioned; elsewhere it is solved elementwise in the eigenbasis of S, where also the higher-order terms are
    iterated if they matter. R = 0 gives exactly 0, which a polar factor in the same precision does not.

    Rounding of S by ε changes K_ij by the factor ε/(s_i + s_j). A result is not to be relied on when that or an
    iteration leaves an error in ``Q W`` (where ``S ≈ W Wᵀ``) above half a unit of rounding of W.

    Args:
        S: ``[batch, n, n]``, symmetric.
        R: ``[batch, n, n]``, antisymmetric.

    Returns:
        ``E`` ``[batch, n, n]`` with ``I + E`` orthogonal, and a boolean tensor ``[batch]`` that is False where S is
        indefinite or too ill-conditioned or R too large for E to be accurate.
    """
    if not _finite(S, R):
        return torch.zeros_like(S), torch.zeros(S.shape[0], dtype=torch.bool, device=S.device)
    S, R, unit, representable = _normalised(S, R)
    K = _by_conjugate_gradients(S, R, unit)
    if K is not None:
        return _rotation(K, torch.linalg.vector_norm(K, dim=(-2, -1))), representable
    E, reliable = _in_eigenbasis(S, R, unit)
    return E, reliable & representable


def rotation_by_products(S: Tensor, R: Tensor) -> Tensor | None:
    """:func:`small_rotation` where a few products are enough for all matrices (large and well conditioned ones); else None."""
    if not _finite(S, R):
        return None
    S, R, unit, representable = _normalised(S, R)
    K = _by_conjugate_gradients(S, R, unit) if bool(representable.all()) else None
    return None if K is None else _rotation(K, torch.linalg.vector_norm(K, dim=(-2, -1)))


def _finite(S: Tensor, R: Tensor) -> bool:
    return bool((S.sum() + R.sum()).isfinite())


def _normalised(S: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S and R with tr S = n, half a unit of rounding of W then, and where products have lost no digits to underflow."""
    finfo = torch.finfo(S.dtype)
    mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)
    scale = 1 / mean.clamp_min(finfo.tiny).view(-1, 1, 1)
    unit = torch.full_like(mean, 0.5 * finfo.eps * S.shape[-1] ** 0.5)
    return scale * S, scale * R, unit, mean > finfo.tiny / finfo.eps


def _by_conjugate_gradients(S: Tensor, R: Tensor, unit: Tensor) -> Tensor | None:
    """K of the first order, where a few steps give it for all (large) matrices and higher orders do not matter; else None.

    The energy norm of ``K ↦ ½(SK + KS)`` is ``‖K W‖_F``, just what has to be accurate. It is at most ``‖residual‖/√s_min``,
    and rounding of S by ε adds ``ε s_max ‖K‖`` to the residual; a Cholesky factor of ``S − least·I`` shows s_min.
    """
    if S.shape[-1] < LARGE:
        return None
    least = next((bound for bound in _LEAST if not bool(_below(S, bound).any())), None)
    if least is None:
        return None
    finfo = torch.finfo(S.dtype)
    K, rest, direction = torch.zeros_like(R), R.clone(), R
    squares = _inner(R, R)
    energy = torch.zeros_like(squares)
    enough = least * unit.square()
    for _ in range(_STEPS):
        SP = torch.bmm(S, direction)
        curved = SP - SP.mT  # twice the operator
        length = 2 * squares / _inner(direction, curved).clamp_min(finfo.tiny)
        energy = energy + length * squares
        K.addcmul_(length.view(-1, 1, 1), direction)
        rest.addcmul_(length.view(-1, 1, 1), curved, value=-0.5)
        new = _inner(rest, rest)
        if bool((new < enough).all()):
            size = torch.linalg.vector_norm(K, dim=(-2, -1))
            rounding = finfo.eps * S.abs().sum(-1).amax(-1) * size
            # what the solution to first order leaves out is of third order
            small = (size.square() * energy.sqrt() < unit) & (rounding < least**0.5 * unit)
            return K if bool(small.all()) else None
        direction = rest.addcmul((new / squares.clamp_min(finfo.tiny)).view(-1, 1, 1), direction)
        squares = new
    return None


def _below(S: Tensor, bound: float) -> Tensor:
    """Which matrices have an eigenvalue below ``bound``, ``[batch]``."""
    shifted = S.clone()
    shifted.diagonal(dim1=-2, dim2=-1).sub_(bound)
    failed: Tensor = torch.linalg.cholesky_ex(shifted)[1] != 0
    return failed


def _in_eigenbasis(S: Tensor, R: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`small_rotation`."""
    eps = torch.finfo(S.dtype).eps
    s: Tensor
    V: Tensor
    s, V = torch.linalg.eigh(S)
    least, largest = s[:, 0], s[:, -1]
    inverse = 1 / (s.unsqueeze(-1) + s.unsqueeze(-2))
    R = torch.bmm(torch.bmm(V.mT, R), V)
    first = K = 2 * R * inverse
    size = torch.linalg.vector_norm(K, dim=(-2, -1))
    effect = _effect(K, s)
    reliable = (least > 0) & (size < _LARGEST)
    if bool((reliable & (eps * largest * effect >= 2 * least * unit)).any()):  # a bound on what is tested next
        reliable &= eps * largest * _effect(K * inverse, s) < unit
    remaining = size**2 * effect
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
    E = _rotation(K, torch.where(reliable, size, 0.0))
    return torch.bmm(torch.bmm(V, E), V.mT), reliable


def _rotation(K: Tensor, size: Tensor) -> Tensor:
    """``√(I + K²) + K − I`` to rounding, for ‖K‖_F = ``size`` below ``_LARGEST``."""
    KK = torch.bmm(K, K)
    E = torch.add(K, KK, alpha=0.5)
    if bool((size**4 > torch.finfo(K.dtype).eps).any()):
        E = torch.baddbmm(E, KK, KK, alpha=-0.125)
    return E


def _inner(A: Tensor, B: Tensor) -> Tensor:
    """``tr AᵀB`` of each pair, ``[batch]``."""
    product: Tensor = torch.linalg.vecdot(A.flatten(1), B.flatten(1))
    return product


def _effect(K: Tensor, s: Tensor) -> Tensor:
    """``‖K W‖_F`` in the eigenbasis of ``W Wᵀ`` with eigenvalues ``s``."""
    return torch.bmm(K.square(), s.unsqueeze(-1)).sum((-2, -1)).sqrt()
