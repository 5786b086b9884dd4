"""[VCL] Algorithm 1 to the letter, on dense d×d matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.linalg.gram import shift_factor
from gramscope.linalg.psd import eigh
from gramscope.optim.polar import polar


def exact_step(
    V: Tensor | None, W: Tensor, D: Tensor, sigma: Tensor, gamma: float, alpha: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One step: ``V += v``; ``QΛQᵀ = WᵀW + V``; ``W⁺ = polar(W W~ᵀ) W~`` with ``W~ = Λ^α Qᵀ`` of the top min(k, d).

    Args:
        V: the shifts summed so far ``[…, d, d]``; None before the first step.
        W: the weights ``[…, k, d]``.
        D: their summed gradient ``Σ_i δ_i h_iᵀ``, ``[…, k, d]``.
        sigma: ``Σ_i δ_i δ_iᵀ``, ``[…, k, k]``.
        gamma, alpha: step of the virtual update, and power of the eigenvalues.

    Returns:
        The new V, the new weights, and :func:`diagnostics`.
    """
    k, d = W.shape[-2:]
    p = min(k, d)
    half = W.mT @ shift_factor(W, D, sigma, gamma)
    V = half + half.mT if V is None else V + half + half.mT
    G = V + W.mT @ W
    values, vectors = eigh(0.5 * (G + G.mT))
    values, vectors = values.flip(-1), vectors.flip(-1)
    s = singular_values(values[..., :p], alpha, d)
    wanted = s.unsqueeze(-1) * vectors[..., :p].mT
    new = polar(W @ wanted.mT, "svd") @ wanted
    return V, new, {**diagnostics(values, s), "moved": torch.linalg.matrix_norm(new - W)}


def singular_values(eigenvalues: Tensor, alpha: float, size: int) -> Tensor:
    """``λ₊^α`` of eigenvalues ``[…, p]`` in descending order, of a matrix of ``size`` rows.

    ``λ^α`` is steep at zero: with α = 0.1 an eigenvalue of 1e-10 becomes a direction of weight 0.1. Eigenvalues up to
    ``2·eps·√size`` times the largest are rounding and count as zero.
    """
    positive = eigenvalues > cutoff(eigenvalues.dtype, size) * eigenvalues[..., :1].clamp_min(0)
    return torch.where(positive, eigenvalues.pow(alpha), 0.0)


def cutoff(dtype: torch.dtype, size: int) -> float:
    """Eigenvalues of a matrix of ``size`` rows up to this times the largest count as zero."""
    return 2 * torch.finfo(dtype).eps * math.sqrt(size)


def diagnostics(eigenvalues: Tensor, s: Tensor, discarded: Tensor | None = None) -> dict[str, Tensor]:
    """What :meth:`gramscope.VCL.diagnostics` tells of a step, one number for each matrix of a stack.

    Args:
        eigenvalues: of G, descending for the first p.
        s: singular values of the new weights, ``[…, p]``.
        discarded: the part of ``‖G‖²`` that truncation dropped.
    """
    squares = eigenvalues.square()
    total = squares.sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
    leading = eigenvalues[..., : s.shape[-1]]
    followed = torch.where(s > 0, leading.square(), 0.0).sum(-1)
    return {
        "rank": (s > 0).sum(-1),
        "cut": ((s == 0) & (leading > 0)).sum(-1),
        "largest": eigenvalues.amax(-1),
        "most_negative": eigenvalues.amin(-1),
        "constraint": ((total - followed) / total).clamp_min(0).sqrt(),
        "discarded": torch.zeros_like(total) if discarded is None else discarded / total,
    }
