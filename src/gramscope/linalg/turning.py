"""The rotation that brings a matrix nearest to another one close by, found in a basis that is nearly right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg import processor
from gramscope.linalg.beside import Beside
from gramscope.linalg.kept_basis import few, in_basis, working
from gramscope.linalg.last_directions import DEFINITE, distance_from_definite, last_directions
from gramscope.linalg.psd import symmetric_product
from gramscope.linalg.replay import Tensors

EPS = torch.finfo(torch.float32).eps

#: changes beyond this part of ‖W‖ are left to the general method
_LARGEST = 0.03
#: norms whose fourth powers float32 can hold
_NORMS = (1e-8, 1e8)
#: the rotation is found to this part of the change, or to a unit of rounding of W
_PRECISION = 2e-4
#: an iteration is expected to leave this much more than the one before, relative to what each began with
_SAFETY = 16
_ITERATIONS = 4
#: a basis in which more iterations than this are needed is due to be renewed
_USUAL = 1
#: what bfloat16 rounds off quantities of this many units is an eighth of a unit
_COARSE = 32


def turned_in_basis(given: Tensors) -> dict[str, Tensor]:
    """The nearest matrix to ``target`` with the Gram of ``source`` by a rotation found in the basis ``vectors``.

    ``X = Q source`` is nearest when ``target Xᵀ`` is symmetric and positive definite, or ``H = QᵀM`` is, where
    ``M = target sourceᵀ``. With ``Q = I + K + ½K²``, which is orthogonal up to ``¼K⁴``, and s the diagonal of M, the first of
    these says

        (sᵢ + sⱼ) Kᵢⱼ = (N − Nᵀ)ᵢⱼ,    N = M − K (M − diag s) + ½ K K M.

    Where the basis diagonalises M all but the first term are of second order; where it nearly does, the equation can be
    iterated, and what is multiplied by K may be rounded to bfloat16. The directions of the smallest eigenvalues, for which a
    small change may be a large rotation or a reflection, are left out of K and turned among themselves by the polar factor of
    what H is for them when the others follow (:mod:`~gramscope.linalg.last_directions`). That H is positive definite then is
    shown for the K of the iteration before; it stays so, as the last iteration turns nothing by 90°.

    A source equal to the target is not moved: then K is zero.

    Args:
        given: ``target``, ``source`` ``[k, d]`` and ``vectors`` ``[k, k]``, float32.

    Returns:
        ``nearest`` ``[k, d]``, and ``figures``, by which :func:`judged` judges it.
    """
    source, eager = given["source"], processor.on_host(given["source"])
    V = working(given["vectors"])
    difference = given["target"] - source
    size, step = (torch.linalg.vector_norm(x) for x in (source, difference))
    X = in_basis(source, V)
    if eager:
        odd = in_basis(difference, V) @ X.mT  # exactly zero where nothing changes
        M = symmetric_product(X.mT, X.mT, block=128).add_(odd)
    else:
        M = odd = in_basis(given["target"], V) @ X.mT
    M32 = M.float()
    s, f = M32.diagonal().abs(), few(len(M))
    inverse = (s.unsqueeze(-1) + s).reciprocal_()
    inverse[:f, :f] = 0
    first = (odd - odd.mT).float().mul_(inverse)
    rest, low_s = processor.low(M, copy=True), processor.low(s)
    rest.diagonal().copy_(M32.diagonal() - s)
    K, effects = first, [_effect(first.clone(), s)] if eager else []
    for count in range(_ITERATIONS):
        low = processor.low(K)
        KM = low @ rest
        lost = torch.addmm(KM, low, torch.addcmul(KM, low, low_s), alpha=-0.5)
        previous, K = K, (lost.mT - lost).float().mul_(inverse).add_(first)
        if eager or count >= _ITERATIONS - 2:
            effects.append(_effect(K - previous, s))
        if eager and _needed([float(x) for x in effects], float(size), float(step)) is not None:
            break
    beside = Beside(source.device)
    with beside:
        H = lost.float()
        torch.sub(M32, H, out=H).addcmul_(previous, s, value=-1)
        H[:, :f] = _rotated(M32[:, :f], K, inverse=True)  # unlike the rows, these hardly depend on small errors of K
        H[:f, f:] = H[f:, :f].mT
        last = last_directions(H, f)
        directions = _rotated(last.basis.mT, K)
        turned = last.turn @ (last.basis @ X.float())
    moved, second = _applied(K, X, s, size)
    beside.join()
    moved += directions @ turned
    with beside:
        distance = distance_from_definite(H, last)
        norms = [torch.linalg.vector_norm(x) for x in (s, K)]
    nearest = (V @ moved).add_(source).to(source.dtype)
    beside.join()
    figures = torch.stack([x.float() for x in (size, step, distance, second, *norms, last.bent, *effects)])
    return {"nearest": nearest, "figures": figures}


@dataclass(frozen=True)
class Judgement:
    """What to think of a result of :func:`turned_in_basis`.

    Attributes:
        reliable: it is the nearest matrix, to the precision wanted.
        worn: a better basis is due.
    """

    reliable: bool
    worn: bool


def judged(found: dict[str, Tensor]) -> Judgement:
    """Whether a result of :func:`turned_in_basis` can be relied on."""
    size, step, distance, second, total, turn, bent, *effects = found["figures"].tolist()
    orthogonal = turn < 1 and 0.25 * second**2 < 0.1 * EPS * total
    definite = distance < DEFINITE and bent <= _enough(size, step)
    needed = _needed(effects, size, step) if comparable(size, step) and orthogonal and definite else None
    usual = _USUAL if processor.on_host(found["nearest"]) else 0  # only the last two effects are known elsewhere
    return Judgement(needed is not None, needed is None or needed > usual)


def comparable(size: float, step: float) -> bool:
    """Whether a matrix of norm ``size`` and one that differs by ``step`` are close, and their products numbers."""
    return _NORMS[0] < size < _NORMS[1] and step < _LARGEST * size


def _enough(size: float, step: float) -> float:
    """How much the result may be off, in ‖·‖_F."""
    return max(2 * EPS * size, _PRECISION * step)


def _needed(effects: Sequence[float], size: float, step: float) -> int | None:
    """After how many iterations what is left of the rotation is small enough, and stays so; None: not after all of them.

    Args:
        effects: by how much each moved the result, in ‖·‖_F; the first may be that of K to first order.
        size, step: of the source and of its difference from the target.
    """
    enough = _enough(size, step)
    for count, effect in enumerate(effects):
        before = effects[count - 1] if count else math.inf
        if not effect < 0.5 * before:
            return None
        small = effect <= enough or (count and _SAFETY * effect**2 <= enough * before)
        if small and all(later <= enough for later in effects[count + 1 :]):
            return count
    return None


def _applied(K: Tensor, X: Tensor, s: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """``K X + ½ K K X`` and ``‖K K X‖_F``; on the CPU the second term to three digits where more do not matter."""
    low, Q = processor.low(K), K.to(X.dtype)
    KX = Q @ X
    if not processor.on_host(X):
        return torch.addmm(KX, Q, KX, alpha=0.5), _effect((low @ low).float(), s)
    KKX = (low @ processor.low(KX)).float()
    second: Tensor = torch.linalg.vector_norm(KKX)
    if float(second) < _COARSE * EPS * float(size):
        return KX.add_(KKX, alpha=0.5), second
    return torch.addmm(KX, Q, KX, alpha=0.5), second


def _rotated(B: Tensor, K: Tensor, inverse: bool = False) -> Tensor:
    """``(I + K + ½K²) B``, or of the inverse rotation ``(I − K + ½K²) B``."""
    KB = K @ B
    return torch.addmm(torch.add(B, KB, alpha=-1 if inverse else 1), K, KB, alpha=0.5)


def _effect(K: Tensor, s: Tensor) -> Tensor:
    """``‖K W‖_F`` where ``W Wᵀ`` is nearly diagonal, with s the diagonal; changes K."""
    norm: Tensor = torch.linalg.vector_norm(K.mul_(s.sqrt()))
    return norm
