"""The polar factor by scaled Newton–Schulz iterations: matrix products only, so it suits accelerators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: the scaling assumes singular values of at least this; smaller values would gain 3 % per step and lose accuracy,
#: because the optimal polynomial for [l, 1] sends the largest singular value to about 2.6·l before it comes back
_SAFE = 0.05
#: singular values in [_DONE, 1] count as found; what is left converges quadratically
_DONE = 0.9999
#: plain steps converge quickly from ‖XᵀX − I‖_F below this
_NEAR = 0.9
#: about the least singular value that W Wᵀ has for a random W of some hundred rows that is much wider than high
_USUAL = 0.1


def newton_schulz(A: Tensor, tolerance: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Orthonormalise the columns of ``A`` ``[batch, m, n]``, m ≥ n, with as many iterations as it takes.

    ``X ← (α/2) X (3I − α² XᵀX)`` from ``X = A/√‖AᵀA‖_F``. With ``α² = 3/(1 + l + l²)`` this is the cubic that lifts
    singular values in [l, 1] the most without overshooting (Chen & Chow 2014); as l → 1 it is the plain iteration and
    converges quadratically. The least singular value is not known, so a pass assumes one, runs without looking (no
    device synchronisation), then measures ``‖XᵀX − I‖_F`` once. When that is not small, another pass starts from where
    this one ended, unless that would lift rounding errors to 1 as well (:func:`rank_tolerance`).

    Args:
        A: the matrices.
        tolerance: distance of ``XᵀX`` from the identity to stop at; rounding when None.

    Returns:
        ``X``, and None, or a boolean tensor ``[batch]`` that marks where the columns of ``A`` are linearly dependent to
        working precision, or nearly so, and ``X`` is not a polar factor.
    """
    tolerance = torch.finfo(A.dtype).eps if tolerance is None else tolerance
    limit = rank_tolerance(A)
    X, G = _scaled(A)
    assumed = _USUAL
    found = 1.0  # singular values above this, in units of √‖AᵀA‖_F, have been lifted to 1
    while True:
        for alpha in _scalings(assumed):
            X = torch.baddbmm(X, X, G, beta=1.5 * alpha, alpha=-0.5 * alpha**3)
            G = torch.bmm(X.mT, X)
            found /= 1.5 * alpha
        G.diagonal(dim1=-2, dim2=-1).sub_(1)
        residual = float(
            torch.linalg.vector_norm(G.detach())
        )  # of all matrices together; the only synchronisation of a pass
        if residual < _NEAR:
            return _finish(X, G, residual, tolerance), None
        assumed = max(0.1 if found > 0.01 else 1e-3, 4 * limit / found)  # a pass overshoots by at most 4
        if assumed > 0.1 or not math.isfinite(residual):
            deficient: Tensor = ~(torch.linalg.matrix_norm(G) < _NEAR)
            return _finish(X, G, _NEAR, tolerance), deficient
        G.diagonal(dim1=-2, dim2=-1).add_(1)


def rank_tolerance(A: Tensor) -> float:
    """Singular values up to this times the largest count as zero: ``eps·√max(m, n)``.

    What rounding leaves of exact zeros is about a quarter of it.
    """
    return float(torch.finfo(A.dtype).eps * math.sqrt(max(A.shape[-2:])))


def polish(X: Tensor) -> Tensor:
    """One plain Newton–Schulz step, ``X(3I − XᵀX)/2``: squares the distance of ``X`` from orthonormal columns."""
    return 1.5 * X - 0.5 * X @ (X.mT @ X)


def _scaled(A: Tensor) -> tuple[Tensor, Tensor]:
    """``X = A/√‖AᵀA‖_F`` and ``XᵀX``."""
    A = A / A.detach().abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)  # safe to square
    G = torch.bmm(A.mT, A)
    squared = torch.linalg.matrix_norm(G, keepdim=True)
    return A * squared.rsqrt(), G / squared


def _finish(X: Tensor, excess: Tensor, residual: float, tolerance: float) -> Tensor:
    """Plain steps until ``‖XᵀX − I‖``, which follows e → ¾e² + ¼e³, is below ``tolerance``; the first is given."""
    X = torch.baddbmm(X, X, excess, alpha=-0.5)
    while (residual := 0.75 * residual**2 + 0.25 * residual**3) > tolerance:
        X = torch.baddbmm(X, X, torch.bmm(X.mT, X), beta=1.5, alpha=-0.5)
    return X


def _scalings(least: float) -> list[float]:
    """The scalings α that bring singular values in [least, 1] into [_DONE, 1]."""
    alphas = []
    while least < _DONE:
        l = max(least, _SAFE)
        alpha = math.sqrt(3 / (1 + l + l * l))
        alphas.append(alpha)
        least = min(alpha * x * (3 - alpha**2 * x**2) / 2 for x in (least, 1.0))
    return alphas
