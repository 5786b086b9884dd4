"""The orthogonal polar factor, also of rectangular and rank-deficient matrices."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from gramscope.errors import InputError, NumericalError, RescueWarning
from gramscope.optim.newton_schulz import newton_schulz, polish, rank_tolerance

PolarMethod: TypeAlias = Literal["auto", "svd", "newton-schulz"]


def polar(
    A: Tensor, method: PolarMethod = "auto", *, toward: Tensor | None = None, tolerance: float | None = None
) -> Tensor:
    """The polar factor ``U Vᵀ`` of ``A = U S Vᵀ``: the matrix with orthonormal columns (rows) nearest to ``A``.

    Where ``A`` is rank-deficient the polar factor is not unique. With ``U₀``, ``V₀`` bases of the left and right null
    spaces, ``U₀ polar(U₀ᵀ T V₀) V₀ᵀ`` is added: of all polar factors the one nearest to ``T``, the identity by default.
    Singular values below ``eps·√max(m, n)`` times the largest count as zero.

    Args:
        A: ``[…, m, n]``, real. bfloat16 and float16 are computed in float32, anything else in its own precision.
        method: ``"svd"`` is the reference; ``"newton-schulz"`` uses products only and falls back to the singular value
            decomposition for rank-deficient matrices, with a :class:`~gramscope.errors.RescueWarning`; ``"auto"`` is
            ``"svd"`` on the CPU and ``"newton-schulz"`` elsewhere, with the same fallback but no warning.
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
    matrices = A.reshape(-1, *A.shape[-2:])
    X, deficient = newton_schulz(matrices, tolerance)
    if deficient is not None:
        rest = None if toward is None else toward.expand_as(A).reshape(matrices.shape)[deficient]
        X[deficient] = _by_svd(matrices[deficient], rest)
        if method == "newton-schulz":
            warnings.warn(
                f"{int(deficient.sum())} of {len(matrices)} matrices of shape {tuple(A.shape[-2:])} are (nearly) "
                "rank-deficient to working precision; their polar factors come from a singular value decomposition",
                RescueWarning,
                stacklevel=2,
            )
    return X.reshape(A.shape)


def _by_svd(A: Tensor, toward: Tensor | None) -> Tensor:
    """The polar factor of ``A``, m ≥ n, from its singular value decomposition."""
    if not bool(A.isfinite().all()):
        raise NumericalError(f"polar factor of a matrix with NaN or infinite entries, shape {tuple(A.shape)}")
    Q: Tensor = _SvdPolar.apply(A, toward)  # type: ignore[no-untyped-call]
    return Q


class _SvdPolar(torch.autograd.Function):
    """Differentiable also where singular values are equal, which a singular value decomposition is not.

    ``dQ = U ((UᵀdA V − VᵀdAᵀU)_ij / (s_i + s_j)) Vᵀ + (I − UUᵀ) dA V S⁻¹ Vᵀ``, a linear map that is its own adjoint.
    """

    @staticmethod
    @override
    def forward(ctx: Any, A: Tensor, toward: Tensor | None) -> Tensor:
        U, S, Vh = torch.linalg.svd(A, full_matrices=False)
        ctx.save_for_backward(U, S, Vh)
        rank = (rank_tolerance(A) * S[..., :1] < S).sum(-1)
        Q = U @ Vh
        if not bool((rank == A.shape[-1]).all()):
            Q = _completed(A, Q, rank, toward)
        return polish(Q)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        U, S, Vh = ctx.saved_tensors
        GV = grads[0] @ Vh.mT
        inner = U.mT @ GV
        turn = (inner - inner.mT) / (S.unsqueeze(-1) + S.unsqueeze(-2))
        outside = (GV - U @ inner) / S.unsqueeze(-2)
        return (U @ turn + outside) @ Vh, None


def _completed(A: Tensor, Q: Tensor, rank: Tensor, toward: Tensor | None) -> Tensor:
    """Polar factors of which the rank-deficient ones are completed on their null spaces, one by one."""
    m, n = A.shape[-2:]
    T = torch.eye(m, n, dtype=A.dtype, device=A.device) if toward is None else toward.to(A.dtype)
    T = T.expand_as(A).reshape(-1, m, n)
    matrices, ranks = A.reshape(-1, m, n), rank.reshape(-1).tolist()
    completed = Q.reshape(-1, m, n).clone()
    for index, r in enumerate(ranks):
        if r == n:
            continue
        U, _, Vh = torch.linalg.svd(matrices[index], full_matrices=True)
        U0, V0h = U[:, r:], Vh[r:]
        P, _, Rh = torch.linalg.svd(U0.mT @ T[index] @ V0h.mT, full_matrices=False)
        completed[index] = U[:, :r] @ Vh[:r] + U0 @ P @ Rh @ V0h
    return completed.reshape(Q.shape)
