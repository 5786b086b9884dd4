"""What the two solvers of virtual covariance learning share: the rules, what a batch brings, what a step reports."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

import torch
from torch import Tensor

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

    def half_shift(self, D: Tensor, sigma: Tensor | None, W: Tensor, gamma: float) -> Tensor:
        """``M = −γD + ½γ²ΣW``, so that the virtual covariance shift is ``WᵀM + MᵀW`` (any common coordinates)."""
        M = -gamma * D
        if self.second_order and sigma is not None:
            M[..., : W.shape[-1]] += (0.5 * gamma**2) * (sigma @ W)
        return M


@dataclass(frozen=True)
class Report:
    """What a step can tell, as tensors ``[…]`` on the device: nothing is copied to the host until asked.

    Attributes:
        rank: singular values of W in use.
        cut: positive eigenvalues that were cut off as rounding.
        most_negative: least eigenvalue of G.
        largest: largest eigenvalue of G.
        constraint: ``‖G − G₊‖/‖G‖``, G₊ the part of G that the weights follow: the residual of the constraint at α = ½.
        discarded: share of ``‖G‖²`` dropped by truncation in this step.
        moved: ``‖W⁺ − W‖``.
        unsettled: the larger of how far a light step's equation is from solved (see
            :func:`gramscope.linalg.lowrank.positive_slope`) and the largest relative change of a row of W since the last
            full step; 0 after a full one.
    """

    rank: Tensor
    cut: Tensor
    most_negative: Tensor
    largest: Tensor
    constraint: Tensor
    discarded: Tensor
    moved: Tensor
    unsettled: Tensor

    @classmethod
    def of(
        cls,
        eigenvalues: Tensor,
        s: Tensor,
        *,
        moved: Tensor,
        discarded: Tensor | None = None,
        unsettled: Tensor | None = None,
    ) -> Report:
        """The report of a step with these eigenvalues of G (estimates of them, if ``unsettled`` is given), W's own first."""
        squares = eigenvalues.square()
        total = squares.sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
        followed = torch.where(s > 0, squares[..., : s.shape[-1]], 0.0).sum(-1)
        return cls(
            rank=(s > 0).sum(-1),
            cut=((s == 0) & (eigenvalues[..., : s.shape[-1]] > 0) & (unsettled is None)).sum(-1),
            most_negative=eigenvalues.amin(-1),
            largest=eigenvalues.amax(-1),
            constraint=((total - followed) / total).clamp_min(0).sqrt(),
            discarded=torch.zeros_like(total) if discarded is None else discarded / total,
            moved=moved,
            unsettled=torch.zeros_like(total) if unsettled is None else unsettled,
        )

    def numbers(self) -> dict[str, float | list[float]]:
        """Everything on the host: a number each, a list for a stack of matrices."""
        return {f.name: getattr(self, f.name).tolist() for f in fields(self)}
