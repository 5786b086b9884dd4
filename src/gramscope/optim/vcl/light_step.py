"""A light step of the recursion: the last decomposition followed to first order, by products and two small decompositions.

In the eigenbasis of the last full step G is ``[[A, B], [Bᵀ, −N]]`` with A nearly diagonal. The basis is turned towards the
positive eigenspace, and the power of G is followed to first order. V is exact up to truncation, so the error is in this
step's W alone and the next full step removes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.optim.vcl.basis import add_product

#: a light step with a larger error estimate is replaced by a full one
SETTLED = 0.2


def response(eigenvalues: Tensor, s: Tensor, alpha: float) -> Tensor:
    """The derivative ``[…, p, p]`` of the weights: G + E changes ``PᵀT``, T = P diag(s), by ``response ∘ E``.

    E is given in the eigenbasis of G. It changes the Gram s² by the divided differences ``(s_i² − s_j²)/(λ_i − λ_j) E_ij``
    (Daleckii–Krein). The nearest matrix to T with that Gram changes by ``s_i/(s_i² + s_j²)`` times as much.
    """
    f = s.square()
    size = eigenvalues.abs()
    gap = eigenvalues.unsqueeze(-1) - eigenvalues.unsqueeze(-2)
    close = gap.abs() <= 1e-3 * size.unsqueeze(-1).maximum(size.unsqueeze(-2))
    slope = torch.where(f > 0, 2 * alpha * f / torch.where(f > 0, eigenvalues, 1.0), 0.0)
    mean = 0.5 * (slope.unsqueeze(-1) + slope.unsqueeze(-2))
    secants = torch.where(close, mean, (f.unsqueeze(-1) - f.unsqueeze(-2)) / torch.where(close, 1.0, gap))
    return s.unsqueeze(-1) * secants / (f.unsqueeze(-1) + f.unsqueeze(-2)).clamp_min(torch.finfo(f.dtype).tiny)


def turned_frame(G: Tensor, p: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """New basis vectors ``[…, rank, n]``: the first p nearly span the positive eigenspace of G, others its largest |λ|.

    Returns:
        The vectors, the eigenvalues of the block that is not W's ``[…, n − p]``, and an error estimate ``[…]``.
    """
    X, unsettled = positive_slope(G, p)
    squares, B = torch.linalg.eigh(X.mT @ X)
    squares = squares.clamp_min(0)
    cosines = (1 + squares).rsqrt().unsqueeze(-2)
    # (I + XXᵀ)^(−1/2) [I, X] and (I + XᵀX)^(−1/2) [−Xᵀ, I], from X = A diag(x) Bᵀ
    XB = X @ B
    shrink = -(cosines**2) / (1 + cosines)  # (cos − 1)/x²
    identity = torch.eye(p, dtype=G.dtype, device=G.device)
    own = torch.cat([identity + (XB * shrink) @ XB.mT, (XB * cosines) @ B.mT], -1)
    rest = torch.cat([-(B * cosines) @ XB.mT, (B * cosines) @ B.mT], -1)
    values, vectors = torch.linalg.eigh(rest @ G @ rest.mT)
    kept = values.abs().argsort(-1, descending=True)[..., : rank - p]
    chosen = vectors.gather(-1, kept.unsqueeze(-2).expand(*vectors.shape[:-1], -1))
    return torch.cat([own, chosen.mT @ rest], -2), values, unsettled


def positive_slope(gram: Tensor, p: int, corrections: int = 2) -> tuple[Tensor, Tensor]:
    """The positive eigenspace of ``[[A, B], [Bᵀ, −N]]`` as a graph over the first p axes, approximately.

    With p positive eigenvalues their space is ``{(u, Xᵀu)}`` where X ``[…, p, q]`` solves the Riccati equation
    ``AX + XN + XBᵀX = B``. The start is first-order perturbation theory, ``B_ij/(a_i + n_j)`` from the diagonals, with each
    row damped as in the exact solution of a 2×2 block. The corrections are fixed-point steps on the residual, damped by the
    off-diagonal part of A.

    Returns:
        X, and the length of the longest row of the last correction ``[…]``: above about 0.2 X should not be used.
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


def followed(top: Tensor, eigenvalues: Tensor, s: Tensor, derivative: Tensor) -> tuple[Tensor, Tensor]:
    """The weights in their own directions, ``PᵀT``, and the largest relative change of a row since the last full step.

    Args:
        top: G in W's own directions now ``[…, p, p]``.
        eigenvalues, s: of G and of W at the last full step ``[…, p]``.
        derivative: from :func:`response`.
    """
    change = (top - torch.diag_embed(eigenvalues)) * derivative
    relative = change.square().sum(-1) / s.square().clamp_min(torch.finfo(s.dtype).tiny)
    change = change * (1 + 4 * relative).rsqrt().unsqueeze(-1)  # no singular value doubles or vanishes
    return torch.diag_embed(s) + change, relative.amax(-1).sqrt()
