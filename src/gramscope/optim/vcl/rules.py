"""What both solvers are given: the form of the algorithm, and the gradients of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from gramscope.optim.vcl.spectral_map import SpectralMap

Anchor: TypeAlias = Literal["current", "initial"]
Solver: TypeAlias = Literal["averaged", "recursive", "exact", "auto"]


@dataclass(frozen=True)
class Batch:
    """The summed gradient ``D = leftᵀ rows`` of one layer, ``[…, k, d]``, and ``Σ = Σ_i δ_i δ_iᵀ``.

    With fewer samples b than outputs k, ``left`` ``[…, b, k]`` holds the δ and ``rows`` ``[…, b, d]`` the inputs. Otherwise
    ``left`` is None and ``rows`` is D itself. ``sigma`` is None where the shift has no γ² term.
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
        anchor: ``"current"``: ``G = W_tᵀW_t + V_t``, as in the paper; ``"initial"``: ``G = W₀ᵀW₀ + V_t``.
        aim: of all weights with the new Gram, take the nearest to ``W − aim·γ·D``.
    """

    spectrum: SpectralMap = field(default_factory=SpectralMap)
    anchor: Anchor = "current"
    aim: float = 0.0
