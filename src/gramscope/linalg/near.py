"""The nearest matrix with a given Gram when the given matrices are close: a small rotation, found in a basis that is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from gramscope.linalg.beside import Beside
from gramscope.linalg.newton_schulz import one_pass, polish
from gramscope.linalg.psd import eigh, symmetric_product
from gramscope.linalg.replay import Tensors

EPS = torch.finfo(torch.float32).eps

Step: TypeAlias = Callable[[Tensors], dict[str, Tensor]]

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
_USUAL = 2
#: so many directions, or this part of them, those of the smallest eigenvalues, are turned among themselves exactly
_FEW, _PART = 8, 64
#: iterations to find them; the least singular value expected, relative to the largest, and the distance from orthogonal that
#: the last iterations of a polar factor take to rounding
_SOLVES, _LEAST, _CONVERGED = 6, 1e-9, 0.02
#: what bfloat16 rounds off quantities of this many units is an eighth of a unit
_COARSE = 32
#: a matrix is shown to be positive definite by its distance from another, relative to that, up to this
_DISTANCE = 0.9
#: eigenvectors are told apart where their eigenvalues differ by this part of them
_GAP = 0.15
#: a basis is given up at this distance from orthonormal columns
_ORTHONORMAL = 1e-2
#: a basis that has failed more often in a row, also renewed, is given up
_TRIES = 3
#: the longest pause after bases that fail is 2 to this power
_PATIENCE = 6


@dataclass
class KeptBasis:
    """An orthogonal matrix whose columns are nearly eigenvectors of ``W Wᵀ``, and what is known of its use.

    Attributes:
        vectors: ``[k, k]`` in float32, or None.
        worn: a renewal is due.
        age: how many steps it has served since the last.
        lasts: how many it is expected to.
        failures: how many steps in a row failed in new or renewed bases.
        pause: for how many steps no other is tried.
    """

    vectors: Tensor | None = None
    worn: bool = False
    age: int = 0
    lasts: int = 64
    failures: int = 0
    pause: int = 0

    @property
    def used(self) -> bool:
        """Whether there is anything to remember."""
        return self.vectors is not None or self.failures > 0

    def fits(self, k: int) -> bool:
        """Whether it can be of use to matrices of k rows."""
        return self.vectors is None or self.vectors.shape == (k, k)

    def to(self, device: torch.device) -> KeptBasis:
        """A copy on this device."""
        return replace(self, vectors=None if self.vectors is None else self.vectors.to(device, copy=True))


def nearest_nearby(target: Tensor, source: Tensor, kept: KeptBasis, steps: Steps | None = None) -> Tensor | None:
    """``argmin ‖X − target‖_F`` subject to ``XᵀX = sourceᵀ source``, where ``target`` is close to ``source``; else None.

    See :func:`turned_in_basis`. The eigenbasis is the expensive part, and of use for many steps of a slowly moving matrix.

    Args:
        target, source: ``[k, d]``, k ≤ d, in float32.
        kept: the basis of an earlier call, which may be of any quality, or none; changed in place.
        steps: the functions below, or :class:`~gramscope.linalg.replay.Replay` of them.
    """
    if kept.pause:
        kept.pause -= 1
        return None
    steps = steps or Steps()
    for vectors in _bases(target, source, kept, steps):
        found = steps.turned({"target": target, "source": source, "vectors": vectors})
        needed = _iterations_needed(found["figures"].tolist())
        if needed is not None:
            kept.vectors, kept.age, kept.failures = vectors, kept.age + 1, 0
            kept.worn = needed > (_USUAL if _on_host(source) else 0) or kept.age >= kept.lasts
            return found["nearest"]
    return None


def _bases(target: Tensor, source: Tensor, kept: KeptBasis, steps: Steps) -> Iterator[Tensor]:
    """The kept basis, then it renewed, then a new one; when these are used up, none are tried for a while."""
    if kept.vectors is not None and not kept.worn:
        yield kept.vectors
    if not _comparable(*(float(torch.linalg.vector_norm(x)) for x in (source, target - source))):
        return
    kept.lasts, kept.age = (
        (max(1, kept.age + kept.worn) if kept.vectors is not None else kept.lasts),
        0,
    )  # what ended early lasts less the next time, what was ended more
    if kept.vectors is not None:
        better = steps.renewed({"source": source, "vectors": kept.vectors})
        kept.vectors, kept.worn = (better["vectors"] if float(better["residual"]) < _ORTHONORMAL else None), True
    if kept.vectors is not None:
        yield kept.vectors
    if kept.vectors is None or _on_host(source):  # elsewhere a decomposition takes longer than the general method
        yield new_basis(source)
    kept.failures += 1
    kept.pause = 2 ** min(max(kept.failures - _TRIES, 0), _PATIENCE) - 1
    if _on_host(source) or kept.failures > _TRIES:
        kept.vectors = None


def turned_in_basis(given: Tensors) -> dict[str, Tensor]:
    """The nearest matrix to ``target`` with the Gram of ``source`` by a rotation found in the basis ``vectors``.

    ``X = Q source`` is nearest when ``target Xᵀ`` is symmetric and positive definite. With ``Q = I + K + ½K²``, which is
    orthogonal up to ``¼K⁴``, ``M = target sourceᵀ`` and s its diagonal, the first of these says

        (sᵢ + sⱼ) Kᵢⱼ = (N − Nᵀ)ᵢⱼ,    N = M − K (M − diag s) + ½ K K M.

    Where the basis diagonalises M all but the first term are of second order; where it nearly does, the equation can be
    iterated, and what is multiplied by K may be rounded to bfloat16.

    On the CPU the rows of the smallest eigenvalues, for which a small change may be a large rotation, are first turned among
    themselves by an exact polar factor; elsewhere such changes are left to the general method.

    A source equal to the target is not moved: then K is zero.

    Args:
        given: ``target``, ``source`` ``[k, d]`` and ``vectors`` ``[k, k]``, float32.

    Returns:
        ``nearest`` ``[k, d]``, and ``figures``, by which :func:`_iterations_needed` judges it.
    """
    source, eager = given["source"], _on_host(given["source"])
    V = given["vectors"].to(torch.float32 if eager else torch.float64)
    size, step = (torch.linalg.vector_norm(x) for x in (source, given["target"] - source))
    X = _in_basis(source, V)
    if eager:
        odd = _in_basis(given["target"] - source, V) @ X.mT  # exactly zero where nothing changes
        M = symmetric_product(X.mT, X.mT, block=128).add_(odd)
    else:
        M = odd = _in_basis(given["target"], V) @ X.mT
    M32 = M.float()
    s = M32.diagonal().abs()
    inverse = (s.unsqueeze(-1) + s).reciprocal_()
    f = _few(len(s))
    inverse[:f, :f] = 0  # these are turned among themselves in another way
    first = torch.sub(odd, odd.mT, out=torch.empty_like(M32)).mul_(inverse)
    rest, low_s = _low(M, copy=True), _low(s)
    rest.diagonal().copy_(M32.diagonal() - s)
    K, effects = first, [_effect(first, s)] if eager else []
    for count in range(_ITERATIONS):
        low = _low(K)
        KM = low @ rest
        lost = torch.addmm(KM, low, torch.addcmul(KM, low, low_s), alpha=-0.5)
        previous, K = K, torch.addcmul(first, lost.mT - lost, inverse)
        if eager or count >= _ITERATIONS - 2:
            effects.append(_effect(K - previous, s))
        if eager and _needed([float(x) for x in effects], float(size), float(step)) is not None:
            break
    beside = Beside(source.device)
    with beside:
        H = (M32 - lost).addcmul_(previous, s, value=-1)
        H[:, :f] = _rotated(M32[:, :f], K, inverse=True)  # unlike the rows, these hardly depend on small errors of K
        H[:f, f:] = H[f:, :f].mT
        last = _last_directions(H, f)
        directions = _rotated(last.basis.mT, K)
        turned = last.turn @ (last.basis @ X.float())
    Q = K.to(V.dtype)
    moved, second = _second(K, Q, Q @ X, s, size)
    beside.join()
    moved += directions @ turned
    with beside:
        distance = _distance(H, last)
        norms = [torch.linalg.vector_norm(x) for x in (s, K)]
    nearest = torch.add(V @ moved, source, out=torch.empty_like(source))
    beside.join()
    figures = torch.stack([x.float() for x in (size, step, distance, second, *norms, last.bent, *effects)])
    return {"nearest": nearest, "figures": figures}


def _in_basis(A: Tensor, V: Tensor) -> Tensor:
    """``Vᵀ A``, its first rows, which may be small, to their own rounding."""
    result = V.mT @ A.to(V.dtype)
    if V.dtype != torch.float64:
        f = _few(len(V))
        result[:f] = V[:, :f].double().mT @ A.double()
    return result


def _few(k: int) -> int:
    """How many directions of the smallest eigenvalues are turned among themselves by an exact polar factor."""
    return min(k, max(_FEW, k // _PART))


def _rotated(B: Tensor, K: Tensor, inverse: bool = False) -> Tensor:
    """``(I + K + ½K²) B``, or of the inverse rotation ``(I − K + ½K²) B``."""
    KB = K @ B
    return torch.addmm(torch.add(B, KB, alpha=-1 if inverse else 1), K, KB, alpha=0.5)


@dataclass(frozen=True)
class _Last:
    """Directions in which H is small: ``F [f, k]``, the identity in its first columns, with ``(F Hᵀ)_i ≈ 0`` in the others.

    Attributes:
        free: F.
        image: ``F Hᵀ`` ``[f, k]``.
        basis: B ``[f, k]``, orthonormal rows that span the same.
        turn: ``P − I``, P the polar factor of ``B H Bᵀ``: ``H (I + Bᵀ (P − I)ᵀ B)`` is symmetric and positive among them.
        bent: by how much it is not symmetric otherwise, in its effect on the result.
    """

    free: Tensor
    image: Tensor
    basis: Tensor
    turn: Tensor
    bent: Tensor


def _last_directions(H: Tensor, f: int) -> _Last:
    """What the first f directions become when the others are free, by Jacobi iterations, and how they are turned."""
    free = torch.eye(f, len(H), dtype=H.dtype, device=H.device)
    inverse = H.diagonal().reciprocal()
    inverse[:f].fill_(0)
    image = H[:, :f].mT
    for _ in range(_SOLVES):
        free = torch.addcmul(free, image, inverse, value=-1)
        image = free @ H.mT
    basis = free
    for _ in range(2):
        basis = torch.addmm(basis, basis @ basis.mT, basis, beta=1.5, alpha=-0.5)
    block = basis @ (basis @ H.mT).mT
    P, residual = _polar(block.double())
    turn = (P - torch.eye(f, dtype=P.dtype, device=P.device)).to(H.dtype)
    uneven = torch.addmm(turn @ image[:, f:], block @ turn.mT, basis[:, f:])  # of both, as they may not cancel
    bent = torch.linalg.vector_norm(uneven * H.diagonal()[f:].rsqrt())
    return _Last(free, image, basis, turn, torch.where(residual < _CONVERGED, bent, math.inf))


def _polar(A: Tensor) -> tuple[Tensor, Tensor]:
    """The polar factor of a small float64 matrix, and how far from orthogonal it was before the last steps."""
    if not _on_host(A):
        P, residual = one_pass(A.unsqueeze(0), _LEAST)
        return P[0], residual[0]
    U: Tensor
    Vh: Tensor
    U, _, Vh = torch.linalg.svd(torch.nan_to_num(A, 0, 0, 0))
    return U @ Vh, torch.zeros(())


def new_basis(source: Tensor) -> Tensor:
    """Eigenvectors of ``source sourceᵀ`` ``[k, k]``, eigenvalues ascending; in float32 the small ones would be lost."""
    W = source.double()
    return eigh(symmetric_product(W.mT, W.mT, block=128) if _on_host(W) else W @ W.mT)[1].to(source.dtype)


def renewed_basis(given: Tensors) -> dict[str, Tensor]:
    """A basis turned towards the eigenvectors of ``source sourceᵀ`` by products alone.

    With G the matrix in the basis and q its diagonal, ``I + Z + ½Z²`` where ``Z_ij = G_ij/(q_j − q_i)`` diagonalises it to
    first order. Eigenvalues closer than ``_GAP`` of their sum are not told apart, which :func:`turned_in_basis` does not need.

    Args:
        given: ``source`` ``[k, d]`` and ``vectors`` ``[k, k]``, float32.

    Returns:
        ``vectors``, and ``residual``, their distance from orthonormal ones before the last step towards them.
    """
    source, vectors = given["source"], given["vectors"]
    V = vectors.to(torch.float32 if _on_host(source) else torch.float64)
    Y = _in_basis(source, V)
    G = (Y @ Y.mT).float()
    q = G.diagonal().clone()
    gap = q - q.unsqueeze(-1)
    f = _few(len(q))
    gap[:f, :f] = 0  # these need not be told apart either
    Z = G.mul_(gap).div_(gap.square_().add_((q + q.unsqueeze(-1)).mul_(_GAP).square_()))
    Z = _low(Z)
    VZ = _low(V) @ Z
    V = polish(V.add(VZ).add_(VZ @ Z, alpha=0.5))
    rest = V.mT @ V
    rest.diagonal().sub_(1)
    V = torch.addmm(V, V, rest, alpha=-0.5)[:, q.argsort()]
    return {"vectors": V.to(vectors.dtype), "residual": torch.linalg.vector_norm(rest)}


@dataclass(frozen=True)
class Steps:
    """What :func:`nearest_nearby` is made of."""

    turned: Step = turned_in_basis
    renewed: Step = renewed_basis


def _iterations_needed(figures: Sequence[float]) -> int | None:
    """How many iterations would have done, by the figures of :func:`turned_in_basis`; None if all were not enough."""
    size, step, distance, second, total, turn, bent, *effects = figures
    orthogonal = turn < 1 and 0.25 * second**2 < 0.1 * EPS * total
    definite = distance < _DISTANCE and bent <= _enough(size, step)
    return _needed(effects, size, step) if _comparable(size, step) and orthogonal and definite else None


def _enough(size: float, step: float) -> float:
    """How much the result may be off, in ‖·‖_F."""
    return max(2 * EPS * size, _PRECISION * step)


def _comparable(size: float, step: float) -> bool:
    """Whether a matrix of norm ``size`` and one that differs by ``step`` are close, and their products numbers."""
    return _NORMS[0] < size < _NORMS[1] and step < _LARGEST * size


def _needed(effects: Sequence[float], size: float, step: float) -> int | None:
    """After how many iterations what is left of the rotation is small enough, and stays so.

    Args:
        effects: by how much each moved the result, in ‖·‖_F; the first is that of K to first order.
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


def _distance(H: Tensor, last: _Last) -> Tensor:
    """A bound on ``‖D^(-½) S D^(-½) − I‖₂``, D the diagonal of S but for the block of its last directions.

    S is the symmetric part of H with these turned, in a basis of them and of the unit vectors; below 1 it is positive definite.

    Args:
        H: ``[k, k]``, changed.
        last: its last directions.
    """
    f = len(last.free)
    block = last.free @ last.image.mT
    block = torch.addmm(block, block, last.turn.mT)
    L, failed = torch.linalg.cholesky_ex(0.5 * (block + block.mT))
    scale = H.diagonal().rsqrt()
    E = H.mul_(scale.unsqueeze(-1)).mul_(scale)
    rows: Tensor = torch.linalg.solve_triangular(L, last.image * scale, upper=False)
    E[:f], E[:, :f] = rows, rows.mT
    E[:f, :f] = 0
    E.diagonal().zero_()
    norm: Tensor = torch.linalg.vector_norm(E)
    if not _on_host(E) or float(norm) >= _DISTANCE:
        E = _low(E)
        norm = torch.linalg.vector_norm((E @ E.mT).float()).sqrt()
    return torch.where(failed == 0, norm, math.inf)


def _second(K: Tensor, Q: Tensor, KX: Tensor, s: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """``K X + ½ K K X`` and ``‖K K X‖_F``; on the CPU the second term to three digits where more do not matter."""
    if not _on_host(KX):
        low = _low(K)
        return torch.addmm(KX, Q, KX, alpha=0.5), _effect((low @ low).float(), s)
    KKX = (_low(K) @ _low(KX)).float()
    second: Tensor = torch.linalg.vector_norm(KKX)
    if float(second) < _COARSE * EPS * float(size):
        return KX.add_(KKX, alpha=0.5), second
    return torch.addmm(KX, Q, KX, alpha=0.5), second


def _effect(K: Tensor, s: Tensor) -> Tensor:
    """``‖K W‖_F`` where ``W Wᵀ`` is nearly diagonal, with s the diagonal."""
    norm: Tensor = torch.linalg.vector_norm(K * s.sqrt())
    return norm


def _low(A: Tensor, copy: bool = False) -> Tensor:
    """``A`` to three digits where the processor is faster at products of such matrices, or in float32."""
    return A.to(torch.bfloat16 if not _on_host(A) or _has_bfloat16() else torch.float32, copy=copy)


def _on_host(x: Tensor) -> bool:
    """Whether numbers can be looked at on the way, and small decompositions are cheap."""
    return x.device.type == "cpu"


@cache
def _has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware; of CPUs torch tells by names that may change."""
    return any(getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))
