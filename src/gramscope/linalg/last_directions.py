"""The directions in which a nearly diagonal matrix is smallest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gramscope.linalg.fused import narrow


@dataclass(frozen=True)
class Nearly:
    """A nearly diagonal matrix H ``[k, k]``, symmetric but for its leading f×f corner, whose rows and columns may be small.

    All but the corner is divided by ``√H_ii`` where rows or columns are those of the others, and zero where they are not.

    Attributes:
        corner: ``[f, f]``.
        columns: the first f columns ``[k, f]``.
        others: the others' ``[k, k]``, with a diagonal of ones; :func:`~gramscope.linalg.fused.split` unless on the CPU.
        rest: the identity minus it, coarsely.
        square: of that, or None.
        scale: ``1/√H_ii`` ``[k]``.
    """

    corner: Tensor
    columns: Tensor
    others: Tensor
    rest: Tensor
    square: Tensor | None
    scale: Tensor


def last_directions(H: Nearly) -> Tensor:
    """What the first f unit vectors become when the other directions are free to follow: ``B = [I, zᵀ/√H_ii]``.

    ``(B Hᵀ)_i = 0`` for the others, by Jacobi iterations: three coarse ones, as a polynomial, and one more.

    Returns:
        z ``[k, f]``, its first f rows zero.
    """
    first = narrow(H.rest, H.columns, plus=[(1, H.columns)])
    if H.square is None:
        third = narrow(H.rest, narrow(H.rest, first), plus=[(1, first)])
    else:
        third = narrow(H.square, first, plus=[(1, first)])
    return narrow(H.others, third, plus=[(-1, third), (-1, H.columns)])


def image_of(H: Nearly, z: Tensor) -> Tensor:
    """``H Bᵀ`` for the others ``[k, f]``, divided by ``√H_ii``: zero for the last directions."""
    return narrow(H.others, z, plus=[(1, H.columns)])
