"""The matrix with a given Gram that is nearest to a given matrix (an orthogonal Procrustes problem)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError
from gramscope.optim.polar import PolarMethod, polar
from gramscope.optim.rotation import MOST_ITERATIONS, Figures, largest_step, precise_product, rotation

#: rotations of first order are not tried on targets this many times larger than the source, whose squares may overflow
_FARTHEST = 2.0**30
#: Cholesky factors are trusted while their diagonals span less than this
_SPAN = 1e-3


class Nearest(NamedTuple):
    """Matrices of given Grams.

    Attributes:
        matrix: ``[…, k, d]``.
        excess: for each matrix how much farther it is from the target than the nearest one, as a part of that distance; an
            estimate, and zero where the nearest one was found to rounding.
    """

    matrix: Tensor
    excess: list[float]


def nearest(target: Tensor, source: Tensor, method: PolarMethod = "auto", tolerance: float = 0.02) -> Nearest:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``, of stacks ``[batch, k, d]`` of one dtype and device.

    The answer is ``polar(target sourceᵀ) source``. ``"auto"`` finds a rotation to first order by conjugate gradients
    (:mod:`gramscope.optim.rotation`), which gives the Gram to rounding and the least distance to within ``tolerance``. Where
    the step is above a fifth of the weights or the rotation above half a radian, and for float64, it takes the polar factor,
    computed in float64.

    Args:
        target: the matrices to be near to.
        source: those whose Gram is kept.
        method: ``"auto"``, or how to compute the polar factor, see :func:`~gramscope.optim.polar.polar`.
        tolerance: how much farther than the least distance the result of ``"auto"`` may be from the target.

    Raises:
        NumericalError: the matrices have entries that are not finite, or the result has entries too large for its dtype.
    """
    if source.numel() == 0:
        return Nearest(source.clone(), [0.0] * len(source))
    if method != "auto" or source.dtype == torch.float64:
        return Nearest(_by_polar(target, source, method), [0.0] * len(source))
    X, figures = _rotated(target.float(), source.float(), tolerance)
    excess = [one.excess() for one in figures]
    most = largest_step(source)
    for i, one in enumerate(figures):
        if one.usable(most) and one.orthogonal:
            continue
        pair = target[i : i + 1], source[i : i + 1]
        excess[i] = 0.0
        if one.scaled:  # a large step
            X[i] = _by_polar(*pair, "auto")[0]
        elif not bool(source[i].any()):
            _check_finite(target[i])
            X[i] = 0.0
        else:
            X[i], excess[i] = _rescaled(pair[0].float(), pair[1].float(), tolerance)
    X = X.to(source.dtype)
    if source.dtype == torch.float16:
        _check_representable(X)
    return Nearest(X, excess)


def check_tolerance(tolerance: float) -> None:
    """Raise an InputError unless a tolerance is between 0 and 1."""
    if not 0 < tolerance < 1:
        raise InputError(
            f"tolerance={tolerance!r} must be between 0 and 1, such as 0.02; method='svd' finds the nearest matrix itself"
        )


def nearest_with_gram(target: Tensor, source: Tensor, method: PolarMethod = "auto", tolerance: float = 0.02) -> Tensor:
    """:func:`nearest` of matrices ``[…, k, d]``."""
    if target.shape != source.shape or source.dim() < 2:
        raise InputError(
            f"target and source must be matrices of one shape, got {tuple(target.shape)} and {tuple(source.shape)}"
        )
    check_tolerance(tolerance)
    if source.numel() == 0:
        return source.clone()
    k, d = source.shape[-2:]
    found = nearest(target.reshape(-1, k, d), source.reshape(-1, k, d), method, tolerance)
    return found.matrix.reshape(source.shape)


def _rotated(target: Tensor, source: Tensor, tolerance: float) -> tuple[Tensor, list[Figures]]:
    """The rotated source, and how well the rotation was found."""
    k, d = source.shape[-2:]
    change = target - source
    if k <= 2 * d:
        E, figures = rotation(source, change, MOST_ITERATIONS, tolerance)
        return source + precise_product(E, source), Figures.read(figures)
    # tall matrices: in an orthonormal basis of the columns of source and change, never k×k
    basis: Tensor = torch.linalg.qr(torch.cat([source, change], -1))[0]
    within, moved = (precise_product(basis.mT.contiguous(), x) for x in (source, change))
    E, figures = rotation(within, moved, MOST_ITERATIONS, tolerance)
    return source + precise_product(basis, precise_product(E, within)), Figures.read(figures)


def _rescaled(target: Tensor, source: Tensor, tolerance: float) -> tuple[Tensor, float]:
    """One matrix ``[1, k, d]`` so large or small that its squares are not: scaled by a power of two, which is exact."""
    _check_finite(target, source)
    exponent = torch.frexp(source.abs().amax()).exponent
    aim = torch.ldexp(target, -exponent)
    if not bool((aim.abs() < _FARTHEST).all()):  # of another order of magnitude: no rotation of first order
        return _by_polar(target, source, "auto")[0], 0.0
    X, (excess,) = nearest(aim, torch.ldexp(source, -exponent), "auto", tolerance)
    X = torch.ldexp(X, exponent)
    _check_representable(X)
    return X[0], excess


def _by_polar(target: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    """``polar(target sourceᵀ) source`` in float64 (float32 on devices without it), in the dtype of ``source``.

    In float32 the directions of singular values below 3e-4 of the largest would be lost in rounding. For tall matrices the
    product has rank d < k. There the result is ``target L₁⁻ᵀ polar(L₁ᵀL₂) L₂ᵀ`` with the Cholesky factors of both Grams, all
    d×d, or, where these are too ill-conditioned, ``polar(target Rᵀ) R`` with ``source = Y R``.
    """
    precise = torch.float32 if source.device.type == "mps" else torch.float64
    T, W = target.to(precise), source.to(precise)
    _check_finite(T, W)
    # the polar factor does not depend on the size of the target, and the result is linear in the source
    exponent = _exponents(W)
    T, W = torch.ldexp(T, -_exponents(T)), torch.ldexp(W, -exponent)
    found = torch.ldexp(_scaled_polar(T, W, source, method), exponent).to(source.dtype)
    _check_representable(found)
    return found


def _scaled_polar(T: Tensor, W: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    """:func:`_by_polar` of matrices whose largest entries are near 1."""
    tolerance = None if source.dtype == torch.float64 else 1e-11
    if source.shape[-2] <= source.shape[-1]:
        return polar(T @ W.mT, method, tolerance=tolerance) @ W
    if method != "svd":
        L, failed = torch.linalg.cholesky_ex(torch.stack([T.mT @ T, W.mT @ W]))
        diagonal = L.diagonal(dim1=-2, dim2=-1)
        if bool(((failed == 0) & (diagonal.amin(-1) > _SPAN * diagonal.amax(-1))).all()):
            L1, L2 = L.unbind()
            turned = polar(L1.mT @ L2, method, tolerance=tolerance) @ L2.mT
            found: Tensor = T @ torch.linalg.solve_triangular(L1.mT, turned, upper=True)
            return found
    Y: Tensor
    R: Tensor
    Y, R = torch.linalg.qr(W)
    return polar(T @ R.mT, method, toward=Y, tolerance=tolerance) @ R


def _exponents(A: Tensor) -> Tensor:
    """For each matrix the e for which its largest entry lies in [2^(e−1), 2^e), ``[…, 1, 1]``."""
    limit = 126 if A.dtype == torch.float32 else 1022
    return torch.frexp(A.abs().amax((-2, -1), keepdim=True)).exponent.clamp(-limit, limit)


def _check_finite(*matrices: Tensor) -> None:
    if not all(bool(A.isfinite().all()) for A in matrices):
        raise NumericalError(f"matrices of shape {tuple(matrices[0].shape)} have NaN or infinite entries")


def _check_representable(found: Tensor) -> None:
    if not bool(found.isfinite().all()):
        raise NumericalError(
            f"the nearest matrices of shape {tuple(found.shape)} with this Gram have entries too large for {found.dtype}"
        )
