"""Symmetric d×d matrices kept as two thin factors, ``AᵀB + BᵀA``: norms, cosines and diagonals without d² numbers.

Weight Grams, AGOPs, virtual covariance shifts and their sums all have this form, with as many rows as the layer has
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.errors import InputError


@dataclass(frozen=True)
class FactoredGram:
    """``left ᵀ right + right ᵀ left`` for factors ``[..., r, d]``; leading axes are blocks of a block-diagonal matrix.

    >>> G = FactoredGram.gram(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    >>> G.diagonal(), G.trace().item(), G.norm().item()
    (tensor([1., 4.], dtype=torch.float64), 5.0, 5.0)
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.shape != self.right.shape or self.left.dim() < 2:
            raise InputError(
                f"the two factors must be matrices of one shape, got {tuple(self.left.shape)} and "
                f"{tuple(self.right.shape)}"
            )

    @classmethod
    def gram(cls, W: Tensor, K: Tensor | None = None) -> FactoredGram:
        """``WᵀKW`` for symmetric K, ``WᵀW`` without."""
        return cls(W, (W if K is None else K @ W) / 2)

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense form, ``[..., d, d]``."""
        return torch.Size((*self.left.shape[:-2], self.left.shape[-1], self.left.shape[-1]))

    def dense(self) -> Tensor:
        """The matrix itself, ``[..., d, d]``."""
        half = self.left.mT @ self.right
        return half + half.mT

    def diagonal(self) -> Tensor:
        """Its diagonal, ``[..., d]``."""
        return 2 * (self.left * self.right).sum(-2)

    def trace(self) -> Tensor:
        """Its trace, over all blocks."""
        return 2 * (self.left * self.right).sum()

    def total(self) -> Tensor:
        """The sum of all its entries."""
        return 2 * (self.left.sum(-1) * self.right.sum(-1)).sum()

    def inner(self, other: FactoredGram | Tensor) -> Tensor:
        """``tr(Sᵀ T)`` with another factored matrix or a dense one.

        Two factored ones meet in r×r matrices (8 r² d operations), or in d×d ones (4 r d²) where those take fewer.
        """
        if isinstance(other, Tensor):
            return ((self.left @ other) * self.right).sum() + ((self.right @ other) * self.left).sum()
        (r, d), s = self.left.shape[-2:], other.left.shape[-2]
        if 4 * r * s > d * (r if other is self else r + s):
            mine = self.dense()
            return (mine * (mine if other is self else other.dense())).sum()
        mixed = (self.right @ other.left.mT) * (self.left @ other.right.mT)
        straight = (self.right @ other.right.mT) * (self.left @ other.left.mT)
        return 2 * (mixed + straight).sum()

    def norm(self) -> Tensor:
        """Its Frobenius norm."""
        return self.inner(self).clamp(min=0.0).sqrt()

    def __add__(self, other: FactoredGram) -> FactoredGram:
        return FactoredGram(torch.cat([self.left, other.left], -2), torch.cat([self.right, other.right], -2))
