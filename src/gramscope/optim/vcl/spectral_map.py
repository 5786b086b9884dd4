"""How the eigenvalues of G become the singular values of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError


@dataclass(frozen=True)
class SpectralMap:
    """``s = φ(λ)^α`` with ``φ(λ) = max(λ, 0)`` ([VCL] Algorithm 1) or a smooth floor ``φ(λ) = (λ + √(λ² + 4τ²))/2``.

    ``λ^α`` is steep at zero: with α = 0.1 an eigenvalue of 1e-10 becomes a direction of weight 0.1. Without a floor,
    eigenvalues up to ``cutoff`` times the largest are therefore zero; the default is ``2·eps·√n`` for an n×n matrix.
    """

    alpha: float = 0.1
    floor: float = 0.0
    cutoff: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.alpha, int | float) and 0 < self.alpha <= 1):
            raise InputError(
                f"alpha={self.alpha!r}: the power of the eigenvalues must lie in (0, 1]; the paper uses 0.1"
            )
        if not (isinstance(self.floor, int | float) and self.floor >= 0 and math.isfinite(self.floor)):
            raise InputError(f"floor={self.floor!r}: the eigenvalue floor must be a number of at least 0")
        if self.cutoff is not None and not (isinstance(self.cutoff, int | float) and 0 <= self.cutoff < 1):
            raise InputError(f"cutoff={self.cutoff!r}: eigenvalues are cut off relative to the largest, in [0, 1)")

    def singular_values(self, eigenvalues: Tensor, size: int) -> Tensor:
        """``s`` for eigenvalues ``[…, p]`` in descending order, of a matrix of ``size`` rows."""
        if self.floor:
            return self._lifted(eigenvalues).pow(self.alpha)
        positive = eigenvalues > self.relative_cutoff(eigenvalues.dtype, size) * eigenvalues[..., :1].clamp_min(0)
        return torch.where(positive, torch.where(positive, eigenvalues, 1.0).pow(self.alpha), 0.0)

    def relative_cutoff(self, dtype: torch.dtype, size: int) -> float:
        """Eigenvalues of a matrix of ``size`` rows up to this times the largest count as zero."""
        if self.floor:
            return 0.0
        return 2 * torch.finfo(dtype).eps * math.sqrt(size) if self.cutoff is None else self.cutoff

    def response(self, eigenvalues: Tensor, s: Tensor) -> Tensor:
        """The derivative ``[…, p, p]`` of the weights: G + E changes ``PᵀT``, T = P diag(s), by ``response ∘ E``.

        E is given in the eigenbasis of G. It changes the Gram s² by the divided differences ``(s_i² − s_j²)/(λ_i − λ_j)
        E_ij`` (Daleckii–Krein). The nearest matrix to T with that Gram changes by ``s_i/(s_i² + s_j²)`` times as much.
        """
        f = s.square()
        gap = eigenvalues.unsqueeze(-1) - eigenvalues.unsqueeze(-2)
        close = gap.abs() <= 1e-3 * eigenvalues.abs().unsqueeze(-1).maximum(eigenvalues.abs().unsqueeze(-2))
        slope = self._derivative(eigenvalues, f)
        mean = 0.5 * (slope.unsqueeze(-1) + slope.unsqueeze(-2))
        secants = torch.where(close, mean, (f.unsqueeze(-1) - f.unsqueeze(-2)) / torch.where(close, 1.0, gap))
        sums = (f.unsqueeze(-1) + f.unsqueeze(-2)).clamp_min(torch.finfo(f.dtype).tiny)
        return s.unsqueeze(-1) * secants / sums

    def _lifted(self, eigenvalues: Tensor) -> Tensor:
        root = (eigenvalues.square() + 4 * self.floor**2).sqrt()
        # for negative λ the sum cancels; the product of the two roots of x² − λx − τ² is −τ²
        return torch.where(eigenvalues >= 0, 0.5 * (eigenvalues + root), 2 * self.floor**2 / (root - eigenvalues))

    def _derivative(self, eigenvalues: Tensor, f: Tensor) -> Tensor:
        """``d s²/dλ``."""
        if self.floor:
            return 2 * self.alpha * f / (eigenvalues.square() + 4 * self.floor**2).sqrt()
        return torch.where(f > 0, 2 * self.alpha * f / torch.where(f > 0, eigenvalues, 1.0), 0.0)
