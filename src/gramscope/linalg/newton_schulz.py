"""The polar factor by scaled Newton–Schulz iterations: matrix products only, so it suits accelerators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.errors import NumericalError

#: the scaling assumes singular values of at least this; smaller values would gain 3 % per step and lose accuracy,
#: because the optimal polynomial for [l, 1] sends the largest singular value to about 2.6·l before it comes back
_SAFE = 0.05
#: singular values in [_DONE, 1] count as found; what is left converges quadratically
_DONE = 0.99
#: plain steps converge quickly from ‖XᵀX − I‖_F below this
_NEAR = 0.9


def newton_schulz(A: Tensor) -> tuple[Tensor, Tensor | None]:
    """Orthonormalise the columns of ``A`` ``[…, m, n]``, m ≥ n, with as many iterations as it takes.

    ``X ← (α/2) X (3I − α² XᵀX)`` from ``X = A/‖A‖_F``. With ``α² = 3/(1 + l + l²)`` this is the cubic that lifts
    singular values in [l, 1] the most without overshooting (Chen & Chow 2014); as l → 1 it is the plain iteration and
    converges quadratically. The least singular value is not known, so a pass assumes one, runs without looking (no
    device synchronisation), then measures ``‖XᵀX − I‖_F`` once. When that is not small, another pass starts from where
    this one ended, until all singular values that count as non-zero (:func:`rank_tolerance`) would have been found.

    Returns:
        ``X``, and None, or a boolean tensor ``[…]`` that marks where the columns of ``A`` are linearly dependent to
        working precision and ``X`` is no polar factor.
    """
    eps = torch.finfo(A.dtype).eps
    X = A / torch.linalg.matrix_norm(A, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    limit = rank_tolerance(A)
    assumed = 0.25 / math.sqrt(A.shape[-1])
    found = 1.0  # singular values above this (relative to ‖A‖_F) have been lifted to 1
    while True:
        for alpha in _scalings(assumed):
            X = _combine(X, X.mT @ X, 1.5 * alpha, -0.5 * alpha**3)
            found /= 1.5 * alpha
        excess = _excess(X)
        residual: Tensor = torch.linalg.matrix_norm(excess)
        worst = float(residual.max())  # the only synchronisation of a pass
        if not math.isfinite(worst):
            raise NumericalError(
                f"polar factor of a matrix with NaN, infinite or overflowing entries, {tuple(A.shape)}"
            )
        assumed = max(1e-3, limit / found)
        if worst < _NEAR:
            return _finish(X, excess, worst, eps), None
        if assumed > _DONE:
            return _finish(X, excess, _NEAR, eps), residual >= _NEAR


def rank_tolerance(A: Tensor) -> float:
    """Singular values up to this times the largest count as zero: ``eps·√max(m, n)``.

    What rounding leaves of exact zeros is about a quarter of it.
    """
    return float(torch.finfo(A.dtype).eps * math.sqrt(max(A.shape[-2:])))


def polish(X: Tensor) -> Tensor:
    """One plain Newton–Schulz step, ``X − ½X(XᵀX − I)``: squares the distance of ``X`` from orthonormal columns."""
    return _combine(X, _excess(X), 1.0, -0.5)


def _finish(X: Tensor, excess: Tensor, residual: float, eps: float) -> Tensor:
    """Plain steps until ``‖XᵀX − I‖``, which follows e → ¾e² + ¼e³, is below rounding; the first excess is given."""
    while True:
        X = _combine(X, excess, 1.0, -0.5)
        residual = 0.75 * residual**2 + 0.25 * residual**3
        if residual < eps:
            return X
        excess = _excess(X)


def _excess(X: Tensor) -> Tensor:
    """``XᵀX − I``."""
    G = X.mT @ X
    G.diagonal(dim1=-2, dim2=-1).sub_(1)
    return G


def _combine(X: Tensor, G: Tensor, b: float, c: float) -> Tensor:
    """``b X + c X G``, in one kernel where there is one."""
    if X.dim() == 2:
        return torch.addmm(X, X, G, beta=b, alpha=c)
    if X.dim() == 3:
        return torch.baddbmm(X, X, G, beta=b, alpha=c)
    return b * X + c * (X @ G)


def _scalings(least: float) -> list[float]:
    """The scalings α that bring singular values in [least, 1] into [_DONE, 1]."""
    alphas = []
    while least < _DONE:
        l = max(least, _SAFE)
        alpha = math.sqrt(3 / (1 + l + l * l))
        alphas.append(alpha)
        least = min(alpha * x * (3 - alpha**2 * x**2) / 2 for x in (least, 1.0))
    return alphas
