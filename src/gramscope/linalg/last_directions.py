"""The directions in which a nearly diagonal matrix is smallest, their exact rotation, and a proof of definiteness."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.newton_schulz import CONVERGED, one_pass
from gramscope.linalg.polar import polar

#: Jacobi iterations for the directions
_SOLVES = 6
#: changes below this end them early
_SOLVED = 1e-5
#: of the block of these directions the least singular value that a pass of Newton–Schulz finds, relative to the largest
_LEAST = 1e-9
#: matrices count as positive definite up to this distance, and smaller ones need no sharper bound
DEFINITE = 0.9


@dataclass(frozen=True)
class LastDirections:
    """Directions in which H is small, and the rotation among them that makes it positive there.

    Attributes:
        basis: B ``[f, k]``, orthonormal rows.
        image: ``B Hᵀ`` ``[f, k]``.
        block: ``B H Bᵀ`` ``[f, f]``.
        turn: ``P − I`` ``[f, f]``, P the polar factor of the block: ``H' = H (I + Bᵀ (P − I)ᵀ B)`` is symmetric and positive
            among the directions.
        bent: by how much H' is not symmetric between them and the others, in its effect on a product with H as its Gram.
    """

    basis: Tensor
    image: Tensor
    block: Tensor
    turn: Tensor
    bent: Tensor


def last_directions(H: Tensor, f: int) -> LastDirections:
    """What the first f unit vectors become when the other directions are free to follow.

    ``(B Hᵀ)_i = 0`` for the others, by Jacobi iterations.

    Args:
        H: ``[k, k]``, nearly diagonal, symmetric but for its leading f×f block, whose rows and columns may be small.
        f: how many directions.
    """
    basis = torch.eye(f, len(H), dtype=H.dtype, device=H.device)
    inverse = H.diagonal().reciprocal()
    inverse[:f].fill_(0)
    image = H[:, :f].mT
    for _ in range(_SOLVES):
        change = image * inverse
        basis = basis - change
        image = basis @ H.mT
        if processor.on_host(H) and float(torch.linalg.vector_norm(change)) < _SOLVED:
            break
    for _ in range(2):
        basis = torch.addmm(basis, basis @ basis.mT, basis, beta=1.5, alpha=-0.5)
    image = basis @ H.mT
    block = basis @ image.mT
    P, residual = _polar(block.double())
    turn = (P - torch.eye(f, dtype=P.dtype, device=P.device)).to(H.dtype)
    uneven = torch.addmm(turn @ image[:, f:], block @ turn.mT, basis[:, f:], alpha=-1)
    bent = torch.linalg.vector_norm(uneven * H.diagonal()[f:].rsqrt())
    return LastDirections(basis, image, block, turn, torch.where(residual < CONVERGED, bent, math.inf))


def distance_from_definite(H: Tensor, last: LastDirections) -> Tensor:
    """A bound on ``‖D^(-½) S D^(-½) − I‖₂``; below 1 S is positive definite.

    S is the symmetric part of H' in a basis of the last directions and of the other unit vectors, and D its diagonal and the
    block of the last directions.

    Args:
        H: ``[k, k]``, changed.
        last: its last directions.
    """
    f = len(last.basis)
    block = torch.addmm(last.block, last.block, last.turn.mT)
    L, failed = torch.linalg.cholesky_ex(0.5 * (block + block.mT))
    scale = H.diagonal().rsqrt()
    E = H.mul_(scale.unsqueeze(-1)).mul_(scale)
    rows: Tensor = torch.linalg.solve_triangular(L, last.image * scale, upper=False)
    E[:f], E[:, :f] = rows, rows.mT
    E[:f, :f] = 0
    E.diagonal().zero_()
    norm: Tensor = torch.linalg.vector_norm(E)
    if not processor.on_host(E) or float(norm) >= DEFINITE:
        E = processor.low(E)
        norm = torch.linalg.vector_norm((E @ E.mT).float()).sqrt()
    return torch.where(failed == 0, norm, math.inf)


def _polar(A: Tensor) -> tuple[Tensor, Tensor]:
    """The polar factor of a small float64 matrix, and how far from orthogonal it was before the last steps."""
    if not processor.on_host(A):
        P, residual = one_pass(A.unsqueeze(0), _LEAST)
        return P[0], residual[0]
    return polar(torch.nan_to_num(A, 0, 0, 0), "svd"), torch.zeros(())
