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


def newton_schulz(A: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormalise the columns of ``A`` ``[…, m, n]``, m ≥ n, with as many iterations as it takes.

    ``X ← (α/2) X (3I − α² XᵀX)`` from ``X = A/‖A‖_F``. With ``α² = 3/(1 + l + l²)`` this is the cubic that lifts
    singular values in [l, 1] the most without overshooting (Chen & Chow 2014); as l → 1 it is the plain iteration and
    converges quadratically. The least singular value is not known, so a pass assumes one, runs without looking (no
    device synchronisation), then measures ``‖I − XᵀX‖_F`` once. When that is not small, another pass starts from where
    this one ended, until all singular values that count as non-zero (:func:`rank_tolerance`) would have been found.

    Returns:
        ``X``, and a boolean tensor ``[…]`` that is False where the columns of ``A`` are linearly dependent to working
        precision: ``X`` is then no polar factor.
    """
    eps = torch.finfo(A.dtype).eps
    X = A / torch.linalg.matrix_norm(A, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    limit = rank_tolerance(A)
    assumed = 0.25 / math.sqrt(A.shape[-1])
    found = 1.0  # singular values above this (relative to ‖A‖_F) have been lifted to 1
    while True:
        gain = 1.0
        for alpha in _scalings(assumed):
            X = _step(X, X.mT @ X, alpha)
            gain *= 1.5 * alpha
        found /= gain
        G = X.mT @ X
        residual = _distance_to_identity(G)
        worst = float(residual.max())  # the only synchronisation of a pass
        if not math.isfinite(worst):
            raise NumericalError(
                f"polar factor of a matrix with NaN, infinite or overflowing entries, {tuple(A.shape)}"
            )
        if worst < 0.9:
            return _finish(X, G, worst, eps), torch.ones_like(residual, dtype=torch.bool)
        assumed = max(1e-3, limit / found)
        if assumed > _DONE:
            return _finish(X, G, 0.9, eps), residual < 0.9


def rank_tolerance(A: Tensor) -> float:
    """Singular values up to this times the largest count as zero: ``eps·√max(m, n)``.

    What rounding leaves of exact zeros is about a quarter of it.
    """
    return float(torch.finfo(A.dtype).eps * math.sqrt(max(A.shape[-2:])))


def polish(X: Tensor) -> Tensor:
    """One plain Newton–Schulz step, ``X (3I − XᵀX)/2``: squares the distance of ``X`` from orthonormal columns."""
    return _step(X, X.mT @ X, 1.0)


def _finish(X: Tensor, G: Tensor, residual: float, eps: float) -> Tensor:
    """Plain steps until ``‖I − XᵀX‖``, which follows e → ¾e² + ¼e³, is below rounding; ``G = XᵀX`` is given."""
    while residual > eps:
        X = _step(X, G, 1.0)
        residual = 0.75 * residual**2 + 0.25 * residual**3
        if residual > eps:
            G = X.mT @ X
    return X


def _step(X: Tensor, G: Tensor, alpha: float) -> Tensor:
    """``(α/2) X (3I − α² G)``."""
    if X.dim() == 2:
        return torch.addmm(X, X, G, beta=1.5 * alpha, alpha=-0.5 * alpha**3)
    if X.dim() == 3:
        return torch.baddbmm(X, X, G, beta=1.5 * alpha, alpha=-0.5 * alpha**3)
    return 1.5 * alpha * X - 0.5 * alpha**3 * (X @ G)


def _scalings(least: float) -> list[float]:
    """The scalings α that bring singular values in [least, 1] into [_DONE, 1]."""
    alphas = []
    while least < _DONE:
        l = max(least, _SAFE)
        alpha = math.sqrt(3 / (1 + l + l * l))
        alphas.append(alpha)
        least = min(alpha * x * (3 - alpha**2 * x**2) / 2 for x in (least, 1.0))
    return alphas


def _distance_to_identity(G: Tensor) -> Tensor:
    """``‖G − I‖_F`` of symmetric ``[…, n, n]`` matrices."""
    identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    distance: Tensor = torch.linalg.matrix_norm(G - identity)
    return distance
