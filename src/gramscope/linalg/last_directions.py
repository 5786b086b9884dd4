"""The directions in which a nearly diagonal matrix is smallest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.factors import Factor, product

#: Jacobi iterations for the directions
_SOLVES = 4


@dataclass(frozen=True)
class Nearly:
    """A nearly diagonal matrix H ``[k, k]``, symmetric but for its leading f×f corner, whose rows and columns may be small.

    All but the corner is divided by ``√H_ii`` where rows or columns are those of the others, and zero where they are not.

    Attributes:
        corner: ``[f, f]``.
        columns: the first f columns ``[k, f]``.
        others: the others' ``[k, k]``, with a diagonal of ones.
        rest: the identity minus it, coarsely.
        scale: ``1/√H_ii`` ``[k]``.
    """

    corner: Tensor
    columns: Tensor
    others: Factor
    rest: Tensor
    scale: Tensor


def last_directions(H: Nearly) -> Tensor:
    """What the first f unit vectors become when the other directions are free to follow: ``B = [I, zᵀ/√H_ii]``.

    ``(B Hᵀ)_i = 0`` for the others, by Jacobi iterations, all but the last of them coarse.

    Returns:
        z ``[k, f]``, its first f rows zero.
    """
    changes = [processor.low(H.columns)]
    for _ in range(_SOLVES):
        changes.append(H.rest @ changes[-1])
    z = torch.stack(changes).sum(0, dtype=torch.float32)
    return product(H.others, Factor.of(z, 0)).sub_(z).sub_(H.columns)


def image_of(H: Nearly, z: Tensor) -> Tensor:
    """``H Bᵀ`` for the others ``[k, f]``, divided by ``√H_ii``: zero for the last directions."""
    return H.columns + product(H.others, Factor.of(z, 0))
