"""Growing and turning an orthonormal basis of a low-dimensional subspace of R^d. Bases are stored as rows ``[…, m, d]``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Extension:
    """``rows = coordinates @ basis + factor @ directions``, the directions orthonormal and orthogonal to the basis."""

    coordinates: Tensor
    factor: Tensor
    directions: Tensor


def extend_basis(basis: Tensor, rows: Tensor, passes: int = 2) -> Extension:
    """Split rows into their part in the span of a basis and new orthonormal directions (block Gram–Schmidt).

    The new directions come from Cholesky factors, as products are fast everywhere. A small ridge (16 rounding units of
    the largest residual) keeps the factorisation alive where residuals are linearly dependent or zero: directions
    without energy come out shorter than one, down to zero, never as amplified rounding noise.

    Args:
        basis: ``[…, m, d]`` with orthonormal rows.
        rows: ``[…, b, d]``.
        passes: one projection leaves an overlap with the basis of about rounding times ‖row‖/‖residual‖; two remove it.

    Returns:
        coordinates ``[…, b, m]``, factor ``[…, b, b]`` (lower triangular), directions ``[…, b, d]``.
    """
    coordinates, factor, directions = _residual(basis, rows)
    for _ in range(passes - 1):
        again, refined, directions = _residual(basis, directions)
        coordinates = coordinates + factor @ again
        factor = factor @ refined
    return Extension(coordinates, factor, directions)


def _residual(basis: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One Gram–Schmidt pass: coordinates, Cholesky factor of the residuals' Gram, normalised residuals."""
    coordinates = rows @ basis.mT
    residual = rows - coordinates @ basis
    gram = residual @ residual.mT
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    finfo = torch.finfo(rows.dtype)
    diagonal.add_(16 * finfo.eps * diagonal.amax(-1, keepdim=True) + finfo.tiny)
    factor, _ = torch.linalg.cholesky_ex(gram)
    return coordinates, factor, torch.linalg.solve_triangular(factor, residual, upper=False)


def reorthonormalised(basis: Tensor) -> Tensor:
    """One Newton–Schulz step ``(3I − UUᵀ)U/2``: squares the distance of the rows from orthonormality."""
    return 1.5 * basis - 0.5 * (basis @ basis.mT) @ basis


def positive_slope(gram: Tensor, p: int, corrections: int = 2) -> tuple[Tensor, Tensor]:
    """The positive eigenspace of ``[[A, B], [Bᵀ, −N]]`` as a graph over the first p axes, approximately.

    With p positive eigenvalues their space is ``{(u, Xᵀu)}`` where X ``[…, p, q]`` solves the Riccati equation
    ``AX + XN + XBᵀX = B``. The start is first-order perturbation theory, ``B_ij/(a_i + n_j)`` from the diagonals, each row
    held back as the exact solution of a 2×2 block would be; the corrections are fixed-point steps on the residual, damped
    by the off-diagonal part of A. They cost three small products each.

    Args:
        gram: ``[…, p + q, p + q]``, symmetric.
        p: size of A.
        corrections: fixed-point steps; two leave a few per cent of X where A is nearly diagonal.

    Returns:
        X, and the length of the longest row of the last correction ``[…]``: above about 0.2 the iteration is not settling
        (A is far from diagonal, or not positive) and X should not be used.
    """
    A, B, N = gram[..., :p, :p], gram[..., :p, p:], -gram[..., p:, p:]
    a, n = (block.diagonal(dim1=-2, dim2=-1) for block in (A, N))
    sums = a.clamp_min(0).unsqueeze(-1) + n.clamp_min(0).unsqueeze(-2)
    held = 0.5 * (sums + (sums.square() + 4 * B.square().sum(-1, keepdim=True)).sqrt())
    off_diagonal = (A.square().sum(-1) - a.square()).clamp_min(0).sqrt().unsqueeze(-1)
    held = (held + 0.3 * off_diagonal).clamp_min(torch.finfo(gram.dtype).tiny)
    X = change = B / held
    for _ in range(corrections):
        change = (B - A @ X - X @ N - X @ (B.mT @ X)) / held
        X = X + change
    return X, change.square().sum(-1).amax(-1).sqrt()


def tilted(slope: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the first p of p + q axes towards the others: orthonormal bases of ``{(u, Xᵀu)}`` and of its complement.

    With ``H = tan(θ/2)`` for slopes ``X = tan θ``, the orthogonal matrix nearest to the identity that does this is rational,
    ``I − 2[H; ·](I + HᵀH)^{-1}[Hᵀ, ·]`` and so on: two q×q solves, no decomposition. ``H = (X/2)(I + XᵀX/4)^{-1}`` is within
    3 % of the true half angle up to 45°; steeper slopes are turned less. Whatever the slope, the result is orthogonal.

    Args:
        slope: X, ``[…, p, q]``.

    Returns:
        ``[…, p, p + q]`` and ``[…, q, p + q]``, together an orthogonal matrix.
    """
    p, q = slope.shape[-2:]
    identity = torch.eye(q, dtype=slope.dtype, device=slope.device)
    H = 0.5 * slope @ _inverse(identity + 0.25 * slope.mT @ slope)
    inverse = _inverse(identity + H.mT @ H)
    turned = 2 * H @ inverse
    kept = torch.eye(p, dtype=slope.dtype, device=slope.device) - turned @ H.mT
    return torch.cat([kept, turned], -1), torch.cat([-turned.mT, 2 * inverse - identity], -1)


def _inverse(A: Tensor) -> Tensor:
    """Inverse of a well-conditioned positive definite matrix, without waiting for the device."""
    factor, _ = torch.linalg.cholesky_ex(A)
    return torch.cholesky_inverse(factor)
