"""The matrix with a given Gram that is nearest to a given matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gramscope.linalg.kept_basis import KeptBasis, renewed_basis
from gramscope.linalg.near import Steps, nearest_nearby
from gramscope.linalg.newton_schulz import CONVERGED, one_pass
from gramscope.linalg.polar import PolarMethod, polar
from gramscope.linalg.processor import has_bfloat16_products
from gramscope.linalg.psd import symmetric_product
from gramscope.linalg.replay import Replay, Tensors
from gramscope.linalg.small_rotation import LARGE, rotation_by_products, small_rotation
from gramscope.linalg.turning import turned_in_basis

#: Cholesky factors are trusted while their diagonals span less than this
_SPAN = 1e-3


@dataclass
class Replays:
    """What is recorded as CUDA graphs for callers that come again with the same shapes."""

    one_pass: Replay = field(default_factory=lambda: Replay(by_one_pass))
    near: Steps = field(
        default_factory=lambda: Steps(Replay(turned_in_basis, ("vectors",), lent=True), Replay(renewed_basis))
    )


def nearest_with_gram(
    target: Tensor,
    source: Tensor,
    method: PolarMethod = "auto",
    replays: Replays | None = None,
    kept: Sequence[KeptBasis] | None = None,
) -> Tensor:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``: ``polar(target sourceᵀ) source``.

    The product is formed, and its polar factor taken, in float64 (float32 on devices without it): in float32 the
    directions of singular values below 3e-4 of the largest would be lost in rounding, and a source equal to the target
    would not come back unchanged. On the CPU ``"auto"`` first tries :func:`~gramscope.linalg.small_rotation.small_rotation`,
    and for large matrices :func:`~gramscope.linalg.near.nearest_nearby`, also on CUDA: they are as exact and faster when source
    and target are close.

    Wide and square matrices use the k×k factor above. For tall ones that product has rank d < k; there
    ``X = target L₁⁻ᵀ polar(L₁ᵀL₂) L₂ᵀ`` with the Cholesky factors of both Grams, all d×d, or, where these are too
    ill-conditioned, ``X = polar(target Rᵀ) R`` with ``source = Y R``.

    Args:
        target, source: ``[…, k, d]`` of one shape, dtype and device.
        method: see :func:`~gramscope.linalg.polar.polar`.
        replays: for callers that come again with the same shapes; ``"auto"`` uses them on CUDA. The next call with them may
            overwrite the result.
        kept: a basis for each matrix, for callers that come again with matrices that have moved a little: saves ``"auto"``
            most decompositions of large ones.

    Returns:
        ``[…, k, d]`` in the dtype of ``source``.
    """
    k, d = source.shape[-2:]
    if source.numel() == 0:
        return source.clone()
    T, W = (x if x.ndim == 3 else x.reshape(-1, k, d) for x in (target, source))
    result = (_tall(T, W, method) if k > d else _wide(T, W, method, replays, kept)).to(source.dtype)
    return result if source.ndim == 3 else result.reshape(source.shape)


def by_one_pass(given: Tensors) -> dict[str, Tensor]:
    """:func:`nearest_with_gram` of wide ``target`` and ``source`` ``[batch, k, d]``, right where ``residual`` is small."""
    W = _precise(given["source"])
    rotation, residual = one_pass(torch.bmm(_precise(given["target"]), W.mT))
    return {"nearest": torch.bmm(rotation, W).to(given["source"].dtype), "residual": residual}


def _wide(
    target: Tensor, source: Tensor, method: PolarMethod, replays: Replays | None, kept: Sequence[KeptBasis] | None
) -> Tensor:
    """``polar(target sourceᵀ) source`` of ``[batch, k, d]``, k ≤ d."""
    found = _quickly(target, source, replays, kept) if method == "auto" else None
    if found is None:
        return _by_product(target, source, method)
    X, left = found
    if left:
        X[left] = _by_product(target[left], source[left], method).to(X.dtype)
    return X


def _quickly(
    target: Tensor, source: Tensor, replays: Replays | None, kept: Sequence[KeptBasis] | None
) -> tuple[Tensor, list[int]] | None:
    """The same where matrices are close or well conditioned, and which ones are not; None: no such way."""
    if source.device.type == "cuda" and replays is not None:
        return _on_device(target, source, replays, kept or ())
    if not _float32_is_exact(source):
        return None
    k = source.shape[-2]
    T, W = target.float(), source.float()
    kept = [KeptBasis() for _ in W] if kept is None else kept
    if k < LARGE:
        change, S, R = _parts(T, W)
        rotation, reliable = small_rotation(S, R)
        return torch.baddbmm(W, rotation, W, out=change), _left(reliable)
    if all(basis.vectors is None for basis in kept):
        change, S, R = _parts(T, W)
        found = rotation_by_products(S, R)
        if found is not None:
            return torch.baddbmm(W, found, W, out=change), []
    return _one_by_one(T, W, kept, Steps())


def _on_device(
    target: Tensor, source: Tensor, replays: Replays, kept: Sequence[KeptBasis]
) -> tuple[Tensor, list[int]] | None:
    """The same by CUDA graphs: in one pass where matrices are well conditioned, in kept bases where they are close.

    Matrices that were too ill-conditioned for one pass have bases, which are tried first while they are fresh.
    """
    k, d = source.shape[-2:]

    def in_one_pass(target: Tensor, source: Tensor, kept: Sequence[KeptBasis]) -> tuple[Tensor, list[int]]:
        result = replays.one_pass({"target": target, "source": source})
        return result["nearest"], _left(result["residual"] < CONVERGED)

    def in_bases(target: Tensor, source: Tensor, kept: Sequence[KeptBasis]) -> tuple[Tensor, list[int]]:
        return _one_by_one(target.float(), source.float(), kept, replays.near)

    ways = [in_one_pass] if 2 * k <= d else []
    if kept and k >= LARGE and source.dtype != torch.float64 and has_bfloat16_products(source.device):
        ways.insert(0 if all(basis.fresh for basis in kept) else len(ways), in_bases)
    if not ways:
        return None
    X, left = ways[0](target, source, kept)
    for way in ways[1:] if left else ():
        found, failed = way(target[left], source[left], [kept[i] for i in left])
        X[left], left = found.to(X.dtype), [left[i] for i in failed]
    return X, left


def _left(reliable: Tensor) -> list[int]:
    """Where it is not so."""
    return [] if bool(reliable.all()) else (~reliable).nonzero().flatten().tolist()


def _one_by_one(target: Tensor, source: Tensor, kept: Sequence[KeptBasis], steps: Steps) -> tuple[Tensor, list[int]]:
    """:func:`~gramscope.linalg.near.nearest_nearby` of each matrix, and where there is none."""
    if len(source) == 1:
        near = nearest_nearby(target[0], source[0], kept[0], steps)
        return (source.clone(), [0]) if near is None else (near.unsqueeze(0), [])
    result, left = source.clone(), []
    for i, basis in enumerate(kept):
        near = nearest_nearby(target[i], source[i], basis, steps)
        if near is None:
            left.append(i)
        else:
            result[i] = near
    return result, left


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
