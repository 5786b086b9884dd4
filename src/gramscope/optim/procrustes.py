"""The matrix with a given Gram that is nearest to a given matrix (an orthogonal Procrustes problem)."""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError
from gramscope.optim.polar import PolarMethod, polar
from gramscope.optim.rotation import Figures, largest_step, precise_product, rotation


def nearest_with_gram(target: Tensor, source: Tensor, method: PolarMethod = "auto") -> Tensor:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``, of matrices ``[…, k, d]`` of one dtype and device.

    The answer is ``polar(target sourceᵀ) source``. ``"auto"`` finds a rotation to first order by conjugate gradients
    (:mod:`gramscope.optim.rotation`), which gives the Gram to rounding and the least distance to within 2 %, or more for
    singular values over several decades. Where the step is above a fifth of the weights or the rotation above half a radian,
    and for float64, it takes the polar factor, computed in float64.

    Args:
        target: the matrices to be near to.
        source: those whose Gram is kept.
        method: ``"svd"`` takes the polar factor always.

    Raises:
        NumericalError: the matrices have entries that are not finite, or the result has entries too large for its dtype.
    """
    if target.shape != source.shape or source.dim() < 2:
        raise InputError(
            f"target and source must be matrices of one shape, got {tuple(target.shape)} and {tuple(source.shape)}"
        )
    if source.numel() == 0:
        return source.clone()
    k, d = source.shape[-2:]
    T, W = target.reshape(-1, k, d), source.reshape(-1, k, d)
    if method != "auto" or source.dtype == torch.float64:
        return _by_polar(T, W, method).reshape(source.shape)
    # squares of entries near 1 neither overflow nor underflow; the answer is linear in both
    exponent = _exponents(W.float())
    X, figures = _rotated(*(torch.ldexp(A.float(), -exponent) for A in (T, W)))
    X = torch.ldexp(X, exponent).to(source.dtype)
    most = largest_step(source)
    for i, one in enumerate(figures):
        if not (one.usable(most) and one.orthogonal):
            X[i] = _by_polar(T[i], W[i], "auto")
    _check_representable(X)
    return X.reshape(source.shape)


def _rotated(target: Tensor, source: Tensor) -> tuple[Tensor, list[Figures]]:
    """The rotated source, and how well the rotation was found."""
    k, d = source.shape[-2:]
    change = target - source
    if k <= 2 * d:
        E, figures = rotation(source, change)
        return source + precise_product(E, source), figures
    # tall matrices: in an orthonormal basis of the columns of source and change, never k×k
    basis: Tensor = torch.linalg.qr(torch.cat([source, change], -1))[0]
    within, moved = (precise_product(basis.mT.contiguous(), x) for x in (source, change))
    E, figures = rotation(within, moved)
    return source + precise_product(basis, precise_product(E, within)), figures


def _by_polar(target: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    """``polar(target sourceᵀ) source`` in float64 (float32 on devices without it), in the dtype of ``source``.

    In float32 the directions of singular values below 3e-4 of the largest would be lost in rounding. For tall matrices the
    product has rank d < k; there it is ``polar(target Rᵀ) R`` with ``source = Y R``.
    """
    precise = torch.float32 if source.device.type == "mps" else torch.float64
    T, W = target.to(precise), source.to(precise)
    _check_finite(T, W)
    # the polar factor does not depend on the size of the target, and the result is linear in the source
    exponent = _exponents(W)
    T, W = torch.ldexp(T, -_exponents(T)), torch.ldexp(W, -exponent)
    tolerance, Y = None if source.dtype == torch.float64 else 1e-11, None
    if W.shape[-2] > W.shape[-1]:
        Y, W = torch.linalg.qr(W)
    found = torch.ldexp(polar(T @ W.mT, method, toward=Y, tolerance=tolerance) @ W, exponent).to(source.dtype)
    _check_representable(found)
    return found


def _exponents(A: Tensor) -> Tensor:
    """For each matrix the e for which its largest entry lies in [2^(e−1), 2^e), ``[…, 1, 1]``."""
    limit = 1022 if A.dtype == torch.float64 else 126
    return torch.frexp(A.abs().amax((-2, -1), keepdim=True)).exponent.clamp(-limit, limit)


def _check_finite(*matrices: Tensor) -> None:
    if not all(bool(A.isfinite().all()) for A in matrices):
        raise NumericalError(f"matrices of shape {tuple(matrices[0].shape)} have NaN or infinite entries")


def _check_representable(found: Tensor) -> None:
    if not bool(found.isfinite().all()):
        raise NumericalError(
            f"the nearest matrices of shape {tuple(found.shape)} with this Gram have entries too large for {found.dtype}"
        )
