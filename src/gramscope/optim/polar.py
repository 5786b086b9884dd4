"""The orthogonal polar factor, also of rectangular and rank-deficient matrices."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError

#: how to compute it; see :func:`polar`
PolarMethod: TypeAlias = Literal["auto", "svd"]

#: the scaling assumes singular values of at least this; smaller values would gain 3 % per step and lose accuracy,
#: because the optimal polynomial for [l, 1] sends the largest singular value to about 2.6·l before it comes back
_SAFE = 0.05
#: singular values in [_DONE, 1] count as found; what is left converges quadratically
_DONE = 0.9999
#: plain steps converge quickly from ‖XᵀX − I‖_F below this
_NEAR = 0.9
#: about the least singular value that W Wᵀ has for a random W of some hundred rows that is much wider than high
_USUAL = 0.1


def polar(
    A: Tensor, method: PolarMethod = "auto", *, toward: Tensor | None = None, tolerance: float | None = None
) -> Tensor:
    """The polar factor ``U Vᵀ`` of ``A = U S Vᵀ``: the matrix with orthonormal columns (rows) nearest to ``A``.

    Where ``A`` is rank-deficient the polar factor is not unique. With ``U₀``, ``V₀`` bases of the left and right null
    spaces, ``U₀ polar(U₀ᵀ T V₀) V₀ᵀ`` is added: of all polar factors the one nearest to ``T``, the identity by default.
    Singular values below ``eps·√max(m, n)`` times the largest count as zero.

    Args:
        A: ``[…, m, n]``, real. bfloat16 and float16 are computed in float32, anything else in its own precision.
        method: ``"svd"`` is the reference, which ``"auto"`` takes on the CPU. Elsewhere ``"auto"`` takes products only
            (:func:`newton_schulz`), and for rank-deficient matrices the reference.
        toward: ``T`` above, of the shape of ``A``.
        tolerance: Newton–Schulz stops this close to orthonormal columns (‖QᵀQ − I‖); rounding when None.

    Returns:
        ``[…, m, n]`` in the dtype of ``A``; orthonormal to about ``eps·√n``.

    Raises:
        NumericalError: ``A`` has entries that are not finite.

    Example:
        >>> import torch
        >>> from gramscope.optim.polar import polar
        >>> polar(torch.tensor([[0.0, -2.0], [3.0, 0.0]]))
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    if method not in get_args(PolarMethod):
        raise InputError(f"method={method!r}; choose one of {', '.join(map(repr, get_args(PolarMethod)))}")
    if not isinstance(A, Tensor):
        raise InputError(f"polar needs a tensor, got {type(A).__name__}: torch.as_tensor makes one")
    if A.dim() < 2 or not A.is_floating_point():
        raise InputError(f"polar needs real matrices […, m, n], got {A.dtype} of shape {tuple(A.shape)}")
    if A.numel() == 0:
        return torch.zeros_like(A)
    if A.element_size() < 4:
        toward = None if toward is None else toward.float()
        return polar(A.float(), method, toward=toward, tolerance=tolerance).to(A.dtype)
    if A.shape[-2] < A.shape[-1]:
        return polar(A.mT, method, toward=None if toward is None else toward.mT, tolerance=tolerance).mT
    if method == "svd" or (method == "auto" and A.device.type == "cpu"):
        return _by_svd(A, toward)
    return by_products(A, toward, tolerance)


def by_products(A: Tensor, toward: Tensor | None = None, tolerance: float | None = None) -> Tensor:
    """The polar factor of ``A``, m ≥ n, by :func:`newton_schulz`; of rank-deficient matrices by the reference."""
    matrices = A.reshape(-1, *A.shape[-2:])
    X, deficient = newton_schulz(matrices, tolerance)
    if deficient is not None:
        rest = None if toward is None else toward.expand_as(A).reshape(matrices.shape)[deficient]
        X[deficient] = _by_svd(matrices[deficient], rest)
    return X.reshape(A.shape)


def _by_svd(A: Tensor, toward: Tensor | None) -> Tensor:
    """The polar factor of ``A``, m ≥ n, from its singular value decomposition."""
    if not bool(A.isfinite().all()):
        raise NumericalError(f"polar factor of a matrix with NaN or infinite entries, shape {tuple(A.shape)}")
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    rank = (rank_tolerance(A) * S[..., :1] < S).sum(-1)
    Q: Tensor = U @ Vh
    if not bool((rank == A.shape[-1]).all()):
        Q = _completed(A, Q, rank, toward)
    return polish(Q)


def _completed(A: Tensor, Q: Tensor, rank: Tensor, toward: Tensor | None) -> Tensor:
    """Polar factors of which the rank-deficient ones are completed on their null spaces, one by one."""
    m, n = A.shape[-2:]
    T = torch.eye(m, n, dtype=A.dtype, device=A.device) if toward is None else toward.to(A.dtype)
    T = T.expand_as(A).reshape(-1, m, n)
    matrices, ranks = A.reshape(-1, m, n), rank.reshape(-1).tolist()
    completed = Q.reshape(-1, m, n)
    for index, r in enumerate(ranks):
        if r == n:
            continue
        U, _, Vh = torch.linalg.svd(matrices[index], full_matrices=True)
        U0, V0h = U[:, r:], Vh[r:]
        P, _, Rh = torch.linalg.svd(U0.mT @ T[index] @ V0h.mT, full_matrices=False)
        completed[index] = U[:, :r] @ Vh[:r] + U0 @ P @ Rh @ V0h
    return completed.reshape(Q.shape)


# --- matrix products alone, for accelerators ---------------------------------------------------------------------------


def newton_schulz(A: Tensor, tolerance: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Orthonormalise the columns of ``A`` ``[batch, m, n]``, m ≥ n, with as many iterations as it takes.

    ``X ← (α/2) X (3I − α² XᵀX)`` from ``X = A/√‖AᵀA‖_F``. With ``α² = 3/(1 + l + l²)`` this is the cubic that lifts
    singular values in [l, 1] the most without overshooting (Chen & Chow 2014); as l → 1 it is the plain iteration and
    converges quadratically. The least singular value is not known, so a pass assumes one, runs without looking (no
    device synchronisation), then measures ``‖XᵀX − I‖_F`` once. When that is not small, another pass starts from where
    this one ended, unless that would lift rounding errors to 1 as well (:func:`rank_tolerance`).

    Args:
        A: the matrices.
        tolerance: distance of ``XᵀX`` from the identity to stop at; rounding when None.

    Returns:
        ``X``, and None, or a boolean tensor ``[batch]`` that marks where the columns of ``A`` are linearly dependent to
        working precision, or nearly so, and ``X`` is not a polar factor.
    """
    tolerance = torch.finfo(A.dtype).eps if tolerance is None else tolerance
    limit = rank_tolerance(A)
    X, G = _scaled(A)
    assumed = _USUAL
    found = 1.0  # singular values above this, in units of √‖AᵀA‖_F, have been lifted to 1
    while True:
        for alpha in _scalings(assumed):
            X = torch.baddbmm(X, X, G, beta=1.5 * alpha, alpha=-0.5 * alpha**3)
            G = torch.bmm(X.mT, X)
            found /= 1.5 * alpha
        G.diagonal(dim1=-2, dim2=-1).sub_(1)
        residual = float(
            torch.linalg.vector_norm(G.detach())
        )  # of all matrices together; the only synchronisation of a pass
        if residual < _NEAR:
            return _finish(X, G, residual, tolerance), None
        assumed = max(0.1 if found > 0.01 else 1e-3, 4 * limit / found)  # a pass overshoots by at most 4
        if assumed > 0.1 or not math.isfinite(residual):
            deficient: Tensor = ~(torch.linalg.matrix_norm(G) < _NEAR)
            return _finish(X, G, _NEAR, tolerance), deficient
        G.diagonal(dim1=-2, dim2=-1).add_(1)


def rank_tolerance(A: Tensor) -> float:
    """Singular values up to this times the largest count as zero: ``eps·√max(m, n)``.

    What rounding leaves of exact zeros is about a quarter of it.
    """
    return float(torch.finfo(A.dtype).eps * math.sqrt(max(A.shape[-2:])))


def polish(X: Tensor) -> Tensor:
    """One plain Newton–Schulz step, ``X(3I − XᵀX)/2``: squares the distance of ``X`` from orthonormal columns."""
    return 1.5 * X - 0.5 * X @ (X.mT @ X)


def _scaled(A: Tensor) -> tuple[Tensor, Tensor]:
    """``X = A/√‖AᵀA‖_F`` and ``XᵀX``."""
    A = A / A.detach().abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)  # safe to square
    G = torch.bmm(A.mT, A)
    squared = torch.linalg.matrix_norm(G, keepdim=True)
    return A * squared.rsqrt(), G / squared


def _finish(X: Tensor, excess: Tensor, residual: float, tolerance: float) -> Tensor:
    """Plain steps until ``‖XᵀX − I‖``, which follows e → ¾e² + ¼e³, is below ``tolerance``; the first is given."""
    X = torch.baddbmm(X, X, excess, alpha=-0.5)
    while (residual := 0.75 * residual**2 + 0.25 * residual**3) > tolerance:
        X = torch.baddbmm(X, X, torch.bmm(X.mT, X), beta=1.5, alpha=-0.5)
    return X


def _scalings(least: float) -> list[float]:
    """The scalings α that bring singular values in [least, 1] into [_DONE, 1]."""
    alphas = []
    while least < _DONE:
        l = max(least, _SAFE)
        alpha = math.sqrt(3 / (1 + l + l * l))
        alphas.append(alpha)
        least = min(alpha * x * (3 - alpha**2 * x**2) / 2 for x in (least, 1.0))
    return alphas
