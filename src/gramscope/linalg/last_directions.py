"""The directions in which a nearly diagonal matrix is smallest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.factors import Factor, product


@dataclass(frozen=True)
class Nearly:
    """A nearly diagonal matrix H ``[k, k]``, symmetric but for its leading f×f corner, whose rows and columns may be small.

    All but the corner is divided by ``√H_ii`` where rows or columns are those of the others, and zero where they are not.

    Attributes:
        corner: ``[f, f]``.
        columns: the first f columns ``[k, f]``.
        others: the others' ``[k, k]``, with a diagonal of ones.
        rest: the identity minus it, coarsely.
        square: of that, or None.
        scale: ``1/√H_ii`` ``[k]``.
    """

    corner: Tensor
    columns: Tensor
    others: Factor
    rest: Tensor
    square: Tensor | None
    scale: Tensor


def last_directions(H: Nearly) -> Tensor:
    """What the first f unit vectors become when the other directions are free to follow: ``B = [I, zᵀ/√H_ii]``.

    ``(B Hᵀ)_i = 0`` for the others, by Jacobi iterations: three coarse ones, as a polynomial, and one more.

    Returns:
        z ``[k, f]``, its first f rows zero.
    """
    start = processor.low(H.columns)
    first = torch.addmm(start, H.rest, start)
    second = H.rest @ (H.rest @ first) if H.square is None else H.square @ first
    third = torch.add(first, second).float()
    return product(H.others, Factor.of(third, 0)).sub_(third).sub_(H.columns)


def image_of(H: Nearly, z: Tensor) -> Tensor:
    """``H Bᵀ`` for the others ``[k, f]``, divided by ``√H_ii``: zero for the last directions."""
    return H.columns + product(H.others, Factor.of(z, 0))
