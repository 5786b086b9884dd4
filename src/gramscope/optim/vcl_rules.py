"""What the two solvers of virtual covariance learning share: the rules, what a batch brings, what a step reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from gramscope.linalg.virtual_shift import shift_factor
from gramscope.optim.vcl_spectrum import SpectralMap

Anchor: TypeAlias = Literal["current", "initial"]


@dataclass(frozen=True)
class Batch:
    """The summed gradient ``D = leftᵀ rows`` of one layer, ``[…, k, d]``, and ``Σ = Σ_i δ_i δ_iᵀ``.

    ``left`` ``[…, b, k]`` holds the δ and ``rows`` ``[…, b, d]`` the inputs where there are fewer of them than outputs;
    otherwise ``left`` is None and the rows are those of D itself. ``sigma`` is None where the γ² term is left out.
    """

    rows: Tensor
    left: Tensor | None = None
    sigma: Tensor | None = None

    def gradient(self) -> Tensor:
        """``D``, ``[…, k, d]``."""
        return self.weighted(self.rows)

    def weighted(self, coordinates: Tensor) -> Tensor:
        """``leftᵀ coordinates``: the coordinates of D from those of the rows."""
        return coordinates if self.left is None else self.left.mT @ coordinates


@dataclass(frozen=True)
class Rules:
    """The form of the algorithm.

    Attributes:
        spectrum: how eigenvalues become singular values.
        anchor: ``"current"``: ``G = W_tᵀW_t + V_t`` (to the letter); ``"initial"``: ``G = W₀ᵀW₀ + V_t``.
        second_order: whether the shift has its γ² term.
        aim: Procrustes steps go to the solution nearest to ``W − aim·γ·D`` (0: to W).
    """

    spectrum: SpectralMap = field(default_factory=SpectralMap)
    anchor: Anchor = "current"
    second_order: bool = True
    aim: float = 0.0

    def half_shift(self, D: Tensor, sigma: Tensor | None, W: Tensor, gamma: float | Tensor) -> Tensor:
        """``M = −γD + ½γ²ΣW``, so that the virtual covariance shift is ``WᵀM + MᵀW`` (any common coordinates)."""
        return shift_factor(W, D, sigma if self.second_order else None, gamma)


@dataclass(frozen=True)
class Report:
    """What a step can tell. It keeps small tensors and computes nothing until asked, and then waits for the device.

    Attributes:
        eigenvalues: of G ``[…, n]``, those of W's own directions first; after a light step those of the last full one.
        singular_values: of W⁺ at the last full step ``[…, p]``.
        before, after: W and W⁺ in W⁺'s own directions, ``[…, k, p]``.
        size: ``‖W‖²``, ``[…]``.
        discarded: what truncation took from ``‖G‖²``, if anything ``[…]``.
        unsettled: the larger of how far a light step's equation is from solved (see
            :func:`gramscope.linalg.lowrank.positive_slope`) and the largest relative change of a row of W since the last
            full step ``[…]``; None after a full one.
        own, rest: after a light step, which knows no eigenvalues, G on W's own directions ``[…, p, p]`` and on the others
            ``[…, q, q]``, if there are any.
    """

    eigenvalues: Tensor
    singular_values: Tensor
    before: Tensor
    after: Tensor
    size: Tensor
    discarded: Tensor | None = None
    unsettled: Tensor | None = None
    own: Tensor | None = None
    rest: Tensor | None = None

    def cut(self) -> Tensor:
        """How many positive eigenvalues were cut off as rounding, ``[…]``."""
        own = self.eigenvalues[..., : self.singular_values.shape[-1]]
        return ((self.singular_values == 0) & (own > 0)).sum(-1)

    def numbers(self) -> dict[str, float | list[float]]:
        """A number each, a list for a stack of matrices; for their meaning see :meth:`gramscope.VCL.diagnostics`."""
        eigenvalues, used = self.eigenvalues, self.singular_values > 0
        if self.own is not None:
            eigenvalues = torch.linalg.eigvalsh(self.own).flip(-1)
        if self.rest is not None:
            eigenvalues = torch.cat([eigenvalues, torch.linalg.eigvalsh(self.rest)], -1)
        squares = eigenvalues.square()
        total = squares.sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
        followed = torch.where(used, squares[..., : used.shape[-1]], 0.0).sum(-1)
        inside = (self.after - self.before).square().sum((-2, -1))
        outside = (self.size - self.before.square().sum((-2, -1))).clamp_min(0)
        nothing = torch.zeros_like(total)
        values = {
            "rank": used.sum(-1),
            "largest": eigenvalues.amax(-1),
            "most_negative": eigenvalues.amin(-1),
            "constraint": ((total - followed) / total).clamp_min(0).sqrt(),
            "discarded": nothing if self.discarded is None else self.discarded / total,
            "moved": (inside + outside).sqrt(),
            "unsettled": nothing if self.unsettled is None else self.unsettled,
        }
        return {name: value.tolist() for name, value in values.items()}
