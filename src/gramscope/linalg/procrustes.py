"""The matrix with a given Gram that is nearest to a given matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gramscope.linalg.near import KeptBasis, nearest_nearby
from gramscope.linalg.newton_schulz import one_pass
from gramscope.linalg.polar import PolarMethod, polar
from gramscope.linalg.psd import symmetric_product
from gramscope.linalg.replay import Replay, Tensors
from gramscope.linalg.small_rotation import LARGE, rotation_by_products, small_rotation

#: Cholesky factors are trusted while their diagonals span less than this
_SPAN = 1e-3
#: one pass of Newton–Schulz from within this of orthonormal columns has converged
_CONVERGED = 0.02


def nearest_with_gram(
    target: Tensor,
    source: Tensor,
    method: PolarMethod = "auto",
    replay: Replay | None = None,
    kept: Sequence[KeptBasis] | None = None,
) -> Tensor:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``: ``polar(target sourceᵀ) source``.

    The product is formed, and its polar factor taken, in float64 (float32 on devices without it): in float32 the
    directions of singular values below 3e-4 of the largest would be lost in rounding, and a source equal to the target
    would not come back unchanged. On the CPU ``"auto"`` first tries :func:`~gramscope.linalg.small_rotation.small_rotation`
    and, for large matrices, :func:`~gramscope.linalg.near.nearest_nearby`, which are as exact in float32 when source and
    target are close.

    Wide and square matrices use the k×k factor above. For tall ones that product has rank d < k; there
    ``X = target L₁⁻ᵀ polar(L₁ᵀL₂) L₂ᵀ`` with the Cholesky factors of both Grams, all d×d, or, where these are too
    ill-conditioned, ``X = polar(target Rᵀ) R`` with ``source = Y R``.

    Args:
        target, source: ``[…, k, d]`` of one shape, dtype and device.
        method: see :func:`~gramscope.linalg.polar.polar`.
        replay: a :class:`~gramscope.linalg.replay.Replay` of :func:`by_one_pass`, for callers that come again with the same
            shapes: ``"auto"`` tries it first on CUDA for matrices twice as wide as high, which are rarely ill-conditioned.
        kept: a basis for each matrix, for callers that come again with matrices that have moved a little: saves ``"auto"``
            most decompositions of large ones on the CPU.

    Returns:
        ``[…, k, d]`` in the dtype of ``source``.
    """
    k, d = source.shape[-2:]
    if source.numel() == 0:
        return source.clone()
    T, W = target.reshape(-1, k, d), source.reshape(-1, k, d)
    if replay is not None and method == "auto" and 2 * k <= d and source.device.type == "cuda":
        found = replay({"target": T, "source": W})
        if bool((found["residual"] < _CONVERGED).all()):
            return found["nearest"].reshape(source.shape)
    result = _tall(T, W, method) if k > d else _wide(T, W, method, kept)
    return result.to(source.dtype).reshape(source.shape)


def by_one_pass(given: Tensors) -> dict[str, Tensor]:
    """:func:`nearest_with_gram` of wide ``target`` and ``source`` ``[batch, k, d]``, right where ``residual`` is small."""
    W = _precise(given["source"])
    rotation, residual = one_pass(torch.bmm(_precise(given["target"]), W.mT))
    return {"nearest": torch.bmm(rotation, W).to(given["source"].dtype), "residual": residual}


def _wide(target: Tensor, source: Tensor, method: PolarMethod, kept: Sequence[KeptBasis] | None) -> Tensor:
    """``polar(target sourceᵀ) source`` of ``[batch, k, d]``, k ≤ d."""
    if method != "auto" or not _float32_is_exact(source):
        return _by_product(target, source, method)
    T, W = target.float(), source.float()
    if W.shape[-2] < LARGE:
        change, S, R = _parts(T, W)
        rotation, reliable = small_rotation(S, R)
        X = torch.baddbmm(W, rotation, W, out=change)
    else:
        X, reliable = _large(T, W, [KeptBasis() for _ in W] if kept is None else kept)
    if not bool(reliable.all()):
        X[~reliable] = _by_product(target[~reliable], source[~reliable], method).to(X.dtype)
    return X


def _large(target: Tensor, source: Tensor, kept: Sequence[KeptBasis]) -> tuple[Tensor, Tensor]:
    """The same of large float32 matrices, and where it can be relied on ``[batch]``: by products alone, or in a kept basis."""
    if all(basis.vectors is None for basis in kept):
        change, S, R = _parts(target, source)
        rotation = rotation_by_products(S, R)
        if rotation is not None:
            return torch.baddbmm(source, rotation, source, out=change), torch.ones(len(kept), dtype=torch.bool)
    found = [nearest_nearby(T, W, basis) for T, W, basis in zip(target, source, kept, strict=True)]
    rows = [W if near is None else near for W, near in zip(source, found, strict=True)]
    return rows[0][None] if len(rows) == 1 else torch.stack(rows), torch.tensor([near is not None for near in found])


def _parts(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``target − source``, whose memory is warm and may be used again, and the parts of ``target sourceᵀ``: S + R."""
    change = target - source
    gram = symmetric_product(source.mT, source.mT, block=128)
    cross = torch.bmm(change, source.mT)  # exactly zero where nothing changed
    return change, gram.add_(_symmetric(cross)), _antisymmetric(cross)


def _by_product(target: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    T, W = _precise(target), _precise(source)
    return torch.bmm(polar(torch.bmm(T, W.mT), method, tolerance=_tolerance(source)), W)


def _tall(target: Tensor, source: Tensor, method: PolarMethod) -> Tensor:
    """The same for k > d without the k×k product."""
    T, W = _precise(target), _precise(source)
    if method != "svd":
        L, failed = torch.linalg.cholesky_ex(torch.stack([T.mT @ T, W.mT @ W]))
        diagonal = L.diagonal(dim1=-2, dim2=-1)
        if bool(((failed == 0) & (diagonal.amin(-1) > _SPAN * diagonal.amax(-1))).all()):
            L1, L2 = L.unbind()
            transport: Tensor = torch.linalg.solve_triangular(
                L1.mT, _square(L1.mT @ L2, source, method) @ L2.mT, upper=True
            )
            return T @ transport
    Y: Tensor
    R: Tensor
    Y, R = torch.linalg.qr(W)
    return polar(T @ R.mT, method, toward=Y, tolerance=_tolerance(source)) @ R


def _square(A: Tensor, like: Tensor, method: PolarMethod) -> Tensor:
    """``polar(A)`` of float64 matrices that are nearly symmetric when source and target are close."""
    if method == "auto" and _float32_is_exact(like):
        rotation, reliable = small_rotation(_symmetric(A).float(), _antisymmetric(A).float())
        if bool(reliable.all()):
            return rotation.to(A.dtype) + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return polar(A, method, tolerance=_tolerance(like))


def _precise(W: Tensor) -> Tensor:
    return W.float() if W.device.type == "mps" else W.double()


def _float32_is_exact(W: Tensor) -> bool:
    """Whether float32 products are true float32 products and enough for the dtype of ``W``."""
    reduced = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "none") not in ("none", "ieee")
    return W.device.type == "cpu" and W.dtype != torch.float64 and not reduced


def _tolerance(W: Tensor) -> float | None:
    """How orthogonal a rotation of ``W`` needs to be for a thousand of them to stay below the rounding of ``W``."""
    return None if W.dtype == torch.float64 else 1e-11


def _symmetric(A: Tensor) -> Tensor:
    return 0.5 * (A + A.mT)


def _antisymmetric(A: Tensor) -> Tensor:
    return 0.5 * (A - A.mT)
