"""Growing and turning an orthonormal basis of a low-dimensional subspace of R^d. Bases are stored as rows ``[…, m, d]``."""

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


def extend_basis(basis: Tensor, rows: Tensor, passes: int = 2) -> Extension:
    """Split rows into their part in the span of a basis and new orthonormal directions (block Gram–Schmidt).

    The new directions come from Cholesky factors, because products are fast on every device. A ridge of a few rounding units
    of the largest residual and of the rows lets the factorisation succeed where residuals are linearly dependent or only
    rounding. After one pass such directions are shorter than one, down to zero. After two passes all directions are checked;
    where they are not orthonormal, a Householder decomposition replaces them. Where the rows could fill the whole space the
    basis is completed instead.

    Args:
        basis: ``[…, m, d]`` with orthonormal rows.
        rows: ``[…, b, d]``.
        passes: one projection leaves an overlap with the basis of about rounding times ‖row‖/‖residual‖; two remove it.
    """
    m, d = basis.shape[-2:]
    if m + rows.shape[-2] >= d:
        completed: Tensor = torch.linalg.qr(basis.mT, mode="complete")[0].mT[..., m:, :]
        return Extension(rows @ basis.mT, rows @ completed.mT, completed)
    coordinates, factor, directions = _residual(basis, rows)
    if passes == 1:
        return Extension(coordinates, factor, directions)
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
    mixing = torch.randn(A.shape[-2], rank, generator=torch.Generator().manual_seed(0), dtype=A.dtype)
    row_space: Tensor = torch.linalg.qr(A.mT @ mixing.to(A.device))[0]
    result: Tensor = torch.linalg.qr(A @ row_space)[0]
    return result


def reorthonormalised(basis: Tensor) -> Tensor:
    """One Newton–Schulz step ``(3I − UUᵀ)U/2``: squares the distance of the rows from orthonormality."""
    return add_product(1.5 * basis, basis @ basis.mT, basis, -0.5)


def leading_directions(A: Tensor, r: int, rounds: int = 3) -> Tensor:
    """Orthonormal columns ``[…, n, r]`` that nearly span the r directions of largest |eigenvalue| of symmetric A.

    Orthogonal iteration from a fixed dense start, with products and Cholesky factors only. The error of direction i is about
    ``(|λ_{r+1}|/|λ_i|)^rounds``. Where A has rank below r some columns are shorter than one, down to zero.

    Args:
        A: ``[…, n, n]``.
        r: how many, at most n.
        rounds: products with A.
    """
    n = A.shape[-1]
    i, j = (torch.arange(1, size + 1, dtype=A.dtype, device=A.device) for size in (n, r))
    Y = torch.cos(2.399963 * i.unsqueeze(-1) * j).expand(*A.shape[:-2], n, r)  # multiples of the golden angle
    for _ in range(rounds):
        Y = _orthonormal_columns(A @ Y, ridge=16)
    return _orthonormal_columns(Y, ridge=1)


def _orthonormal_columns(Y: Tensor, ridge: float) -> Tensor:
    factor = _ridged_cholesky(Y.mT @ Y, ridge)
    result: Tensor = torch.linalg.solve_triangular(factor.mT, Y, upper=True, left=False)
    return result


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


def positive_slope(gram: Tensor, p: int, corrections: int = 2) -> tuple[Tensor, Tensor]:
    """The positive eigenspace of ``[[A, B], [Bᵀ, −N]]`` as a graph over the first p axes, approximately.

    With p positive eigenvalues their space is ``{(u, Xᵀu)}`` where X ``[…, p, q]`` solves the Riccati equation
    ``AX + XN + XBᵀX = B``. The start is first-order perturbation theory, ``B_ij/(a_i + n_j)`` from the diagonals, with each
    row damped as in the exact solution of a 2×2 block. The corrections are fixed-point steps on the residual, damped by the
    off-diagonal part of A; each costs three small products.

    Args:
        gram: ``[…, p + q, p + q]``, symmetric.
        p: size of A.
        corrections: fixed-point steps; after two the error is a few per cent of X where A is nearly diagonal.

    Returns:
        X, and the length of the longest row of the last correction ``[…]``: above about 0.2 the iteration does not converge
        (A is far from diagonal, or not positive) and X should not be used.
    """
    A, B, N = gram[..., :p, :p], gram[..., :p, p:], -gram[..., p:, p:]
    a, n = (block.diagonal(dim1=-2, dim2=-1) for block in (A, N))
    sums = a.clamp_min(0).unsqueeze(-1) + n.clamp_min(0).unsqueeze(-2)
    held = 0.5 * (sums + (sums.square() + 4 * B.square().sum(-1, keepdim=True)).sqrt())
    off_diagonal = (A.square().sum(-1) - a.square()).clamp_min(0).sqrt().unsqueeze(-1)
    held = (held + 0.3 * off_diagonal).clamp_min(torch.finfo(gram.dtype).tiny)
    X = change = B / held
    for _ in range(corrections):
        change = add_product(add_product(B, A, X, -1), X, add_product(N, B.mT, X), -1) / held
        X = X + change
    return X, change.square().sum(-1).amax(-1).sqrt()


@dataclass(frozen=True)
class BlockReflection:
    """The symmetric orthogonal matrix ``F = I − 2Y(YᵀY)^{-1}Yᵀ`` with ``Y = [H; −I]``, for p + q coordinates.

    With ``H = tan(θ/2)`` its first p rows span ``{(u, Xᵀu)}`` for slopes ``X = tan θ``, and of all such bases they are the
    nearest to the first p axes; the other rows span the complement. Only q×q matrices are inverted, and a product with F costs
    2q, not p + q, a row.

    Attributes:
        half: H, ``[…, p, q]``.
        turned: ``2H(I + HᵀH)^{-1}``, the upper right block of F.
        inverse: ``(I + HᵀH)^{-1}``.
    """

    half: Tensor
    turned: Tensor
    inverse: Tensor

    @classmethod
    def towards(cls, slope: Tensor) -> BlockReflection:
        """For slopes X ``[…, p, q]``.

        ``H = (X/2)(I + XᵀX/4)^{-1}`` is within 4 % of the half angle's tangent up to 45° and smaller for steeper slopes. F is
        orthogonal for any slope.
        """
        identity = torch.eye(slope.shape[-1], dtype=slope.dtype, device=slope.device)
        half = 0.5 * slope @ _inverse(identity + 0.25 * slope.mT @ slope)
        inverse = _inverse(identity + half.mT @ half)
        return cls(half, 2 * half @ inverse, inverse)

    def apply(self, leading: Tensor, rest: Tensor, kept: Tensor | None = None) -> Tensor:
        """``F @ [leading; rest]`` for ``[…, p, d]`` and ``[…, q, d]``; the lower part times ``kept [..., r, q]`` if given."""
        difference = add_product(rest, self.half.mT, leading, -1)
        pulled = self.inverse
        if kept is not None:
            rest, pulled = kept @ rest, kept @ pulled
        p, d = leading.shape[-2:]
        result = leading.new_empty(*leading.shape[:-2], p + rest.shape[-2], d)
        add_product(leading, self.turned, difference, out=result[..., :p, :])
        add_product(rest, pulled, difference, -2, out=result[..., p:, :])
        return result

    def leading_part(self, matrix: Tensor) -> Tensor:
        """The first p columns of ``matrix @ F`` for ``[…, k, p + q]``; for ``[…, k, p]`` the missing columns are zero."""
        p = self.half.shape[-2]
        own = matrix[..., :p]
        difference = -(own @ self.half)
        if matrix.shape[-1] > p:
            difference = difference + matrix[..., p:]
        return own + difference @ self.turned.mT

    def congruence(self, C: Tensor) -> Tensor:
        """``F C F`` for symmetric C ``[…, p + q, p + q]``."""
        identity = torch.eye(self.half.shape[-1], dtype=C.dtype, device=C.device)
        Y = torch.cat([self.half, -identity.expand(*self.half.shape[:-2], -1, -1)], -2)
        Z = 2 * Y @ self.inverse
        CZ = C @ Z
        K = CZ - 0.5 * Z @ (Y.mT @ CZ)
        half = K @ Y.mT
        return C - half - half.mT


def _inverse(A: Tensor) -> Tensor:
    """Inverse of a well-conditioned positive definite matrix, without waiting for the device."""
    factor, _ = torch.linalg.cholesky_ex(A)
    return torch.cholesky_inverse(factor)
