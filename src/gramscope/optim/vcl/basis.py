"""Growing an orthonormal basis of a low-dimensional subspace of R^d. Bases are stored as rows ``[…, m, d]``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: residuals up to this many rounding units of their rows are noise
_NOISE = 32
#: directions that depart from orthonormality by more than this many rounding units are computed again, by reflections
_ORTHONORMAL = 64


@dataclass(frozen=True)
class Extension:
    """``rows = coordinates @ basis + factor @ directions``, the directions orthonormal and orthogonal to the basis.

    Shapes ``[…, b, m]``, ``[…, b, r]`` and ``[…, r, d]`` with r = min(b, d − m).
    """

    coordinates: Tensor
    factor: Tensor
    directions: Tensor


def extend_basis(basis: Tensor, rows: Tensor) -> Extension:
    """Split rows into their part in the span of a basis and new orthonormal directions (block Gram–Schmidt).

    The new directions come from Cholesky factors, because products are fast on every device. A ridge of a few rounding units
    of the largest residual and of the rows lets the factorisation succeed where residuals are linearly dependent or only
    rounding. After two passes, since one leaves an overlap with the basis, all directions are checked; where they are not
    orthonormal, a Householder decomposition replaces them. Where the rows could fill the whole space the basis is completed
    instead.

    Args:
        basis: ``[…, m, d]`` with orthonormal rows.
        rows: ``[…, b, d]``.
    """
    m, d = basis.shape[-2:]
    if m + rows.shape[-2] >= d:
        completed: Tensor = torch.linalg.qr(basis.mT, mode="complete")[0].mT[..., m:, :]
        return Extension(rows @ basis.mT, rows @ completed.mT, completed)
    coordinates, factor, directions = _residual(basis, rows)
    again, refined, directions = _residual(basis, directions)
    if not bool(_departure(basis, directions) < _ORTHONORMAL * torch.finfo(rows.dtype).eps):
        return _by_reflections(basis, rows)
    return Extension(coordinates + factor @ again, factor @ refined, directions)


def _departure(basis: Tensor, directions: Tensor) -> Tensor:
    """The largest error in the directions' orthonormality, or in their orthogonality to the basis."""
    gram = directions @ directions.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram.abs().amax().maximum((directions @ basis.mT).abs().amax())


def _by_reflections(basis: Tensor, rows: Tensor) -> Extension:
    """The extension by Householder reflections: slower, and orthonormal for any rows."""
    Q, R = torch.linalg.qr(torch.cat([basis, rows], -2).mT)
    m = basis.shape[-2]
    signs = R.diagonal(dim1=-2, dim2=-1)[..., :m].sign()
    coordinates = R[..., :m, m:].mT * signs.unsqueeze(-2)
    return Extension(coordinates, R[..., m:, m:].mT, Q[..., m:].mT.contiguous())


def _residual(basis: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One Gram–Schmidt pass: coordinates, Cholesky factor of the residuals' Gram, normalised residuals."""
    coordinates = rows @ basis.mT
    residual = add_product(rows, coordinates, basis, -1)
    noise = (_NOISE * torch.finfo(rows.dtype).eps) ** 2 * rows.square().sum(-1).amax(-1)
    factor = _ridged_cholesky(residual @ residual.mT, 16, noise)
    # a product with the small inverse is several times faster than a triangular solve with many right-hand sides
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    return coordinates, factor, inverse @ residual


def add_product(C: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``C + alpha·A B`` in one pass over C, written to ``out`` where that is given."""
    if C.dim() == 2:
        return torch.addmm(C, A, B, alpha=alpha, out=out)
    if C.dim() == 3:
        return torch.baddbmm(C, A, B, alpha=alpha, out=out)
    return torch.add(C, A @ B, alpha=alpha, out=out)


def column_space(A: Tensor, rank: int) -> Tensor:
    """Orthonormal columns Q ``[…, k, rank]`` with ``A = QQᵀA`` to a few roundings of ‖A‖, for a matrix of that rank or less.

    Random combinations of the rows find the row space, and its products with A the column space: after one of the two alone
    the error would grow with the condition number of the random matrix.

    >>> A = torch.outer(torch.tensor([3.0, 0.0, 4.0]), torch.ones(5))
    >>> column_space(A, 1).abs()
    tensor([[0.6000],
            [0.0000],
            [0.8000]])
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    mixing = torch.randn(A.shape[-2], rank, generator=generator, dtype=A.dtype, device="cpu")
    row_space: Tensor = torch.linalg.qr(A.mT @ mixing.to(A.device))[0]
    result: Tensor = torch.linalg.qr(A @ row_space)[0]
    return result


def reorthonormalised(basis: Tensor) -> Tensor:
    """One Newton–Schulz step ``(3I − UUᵀ)U/2``: squares the distance of the rows from orthonormality."""
    return add_product(1.5 * basis, basis @ basis.mT, basis, -0.5)


def _ridged_cholesky(gram: Tensor, ridge: float, noise: Tensor | float = 0.0) -> Tensor:
    """The lower Cholesky factor of a Gram plus a ridge: ``ridge`` rounding units of its largest entry, and ``noise`` ``[…]``.

    The ridge is added to ``gram`` in place.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    finfo = torch.finfo(gram.dtype)
    size = ridge * finfo.eps * diagonal.amax(-1) + finfo.tiny + noise
    diagonal.add_(size.unsqueeze(-1))
    factor: Tensor = torch.linalg.cholesky_ex(gram)[0]
    return factor
