"""Virtual covariance learning in a small moving basis: Algorithm 1 without a d×d matrix.

Two facts make it cheap. First, a batch of b samples adds at most b directions to the row spaces of W and V. Second, the
shift ``v = WᵀM + MᵀW`` vanishes on the orthogonal complement of W's rows. These rows span the leading eigenvectors of G, so
by induction G stays negative semidefinite on the complement and never has more than k positive eigenvalues: cutting at k
loses nothing.

The state is an orthonormal basis U ``[m, d]`` whose first p = min(k, d) rows span W's rows, with ``W = T U[:p]`` and
``V = Uᵀ C U``. A step adds the directions of the batch to the basis, takes one (m + b)-dimensional eigendecomposition and a
polar factor, and truncates back to m directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.linalg.gram import shift_factor
from gramscope.linalg.psd import eigh
from gramscope.optim.polar import polar
from gramscope.optim.vcl.basis import Extension, add_product, column_space, extend_basis, reorthonormalised
from gramscope.optim.vcl.exact import diagnostics, singular_values

#: the basis is orthonormalised again after this many steps
_REORTHONORMALISE = 16


@dataclass(frozen=True)
class Recursion:
    """``W = weights @ basis[:p]`` and ``V = basisᵀ @ shift @ basis``.

    Attributes:
        basis: U ``[…, m, d]``, orthonormal rows, those of W's row space first.
        shift: C ``[…, m, m]``.
        weights: T ``[…, k, p]``.
        steps: steps taken.
    """

    basis: Tensor
    shift: Tensor
    weights: Tensor
    steps: int = 0

    @property
    def matrix(self) -> Tensor:
        """W, ``[…, k, d]``."""
        return self.weights.to(self.basis.dtype) @ self.basis[..., : self.weights.shape[-1], :]


def start(W: Tensor) -> Recursion:
    """The state before the first step for weights ``[…, k, d]``."""
    basis, T = _row_space(W)
    return Recursion(basis, torch.zeros_like(T.mT @ T), T)


def rebased(state: Recursion, W: Tensor) -> Recursion:
    """The state with the same V for weights that were changed from outside.

    W's rows come first in the new basis, followed by the old basis.
    """
    k, d = W.shape[-2:]
    if k >= d:
        return replace(state, weights=W @ state.basis.mT)
    basis, T = _row_space(W)
    parts = extend_basis(basis, state.basis)
    old = torch.cat([parts.coordinates, parts.factor], -1).to(state.shift.dtype)
    joined = torch.cat([basis, parts.directions], -2)
    return replace(state, basis=joined, shift=old.mT @ state.shift @ old, weights=T)


def factors(D: Tensor, count: int, tolerance: float) -> tuple[Tensor | None, Tensor]:
    """``left [..., b, k]`` and ``rows [..., b, d]`` with ``D = leftᵀ rows``, for a gradient summed over ``count`` rows.

    ``left`` is None and ``rows`` is D where that is not fewer than k, or where D is no such sum any more, because it was
    clipped element by element or a penalty was added.
    """
    if not 0 < count < D.shape[-2]:
        return None, D
    Q = column_space(D, count)
    rows = Q.mT @ D
    apart, size = torch.stack([torch.linalg.vector_norm(x) for x in (add_product(D, Q, rows, -1), D)]).tolist()
    return (Q.mT, rows) if apart <= tolerance * size else (None, D)


def recursive_step(
    state: Recursion,
    factored: tuple[Tensor | None, Tensor],
    sigma: Tensor,
    gamma: float,
    alpha: float,
    rank: int,
) -> tuple[Recursion, Tensor, dict[str, Tensor]]:
    """One step.

    Args:
        state: from :func:`start` or the previous step.
        factored: the summed gradient, from :func:`factors`.
        sigma: ``Σ_i δ_i δ_iᵀ``, ``[…, k, k]``.
        gamma, alpha: step of the virtual update, and power of the eigenvalues.
        rank: m, directions to keep, at least min(k, d).

    Returns:
        The next state, the new weights ``[…, k, d]``, and diagnostics.
    """
    left, rows = factored
    m, d = state.basis.shape[-2:]
    new: Extension | None = None
    if m < d:
        new = extend_basis(state.basis, rows)
        coordinates = torch.cat([new.coordinates, new.factor], -1)
    else:
        coordinates = rows @ state.basis.mT
    D = coordinates if left is None else left.mT @ coordinates
    # every step decomposes V and puts it together again; in float32 the rounding of many steps would add up
    small = D.dtype if D.device.type == "mps" else torch.float64
    T = state.weights.to(small)
    G = _moved_gram(T, state.shift.to(small), D.to(small), sigma.to(small), gamma)
    p, n = T.shape[-1], G.shape[-1]
    values, vectors = eigh(G)
    values, vectors = values.flip(-1), vectors.flip(-1)
    s = singular_values(values[..., :p], alpha, n)
    every, discarded = values, None
    if n > rank:  # W's own directions stay, the others by |λ|
        order = p + values[..., p:].abs().argsort(-1, descending=True)
        discarded = values.gather(-1, order[..., rank - p :]).square().sum(-1)
        own = torch.arange(p, dtype=torch.int64, device=values.device).expand_as(s)
        kept = torch.cat([own, order[..., : rank - p]], -1)
        values = values.gather(-1, kept)
        vectors = vectors.gather(-1, kept.unsqueeze(-2).expand(*vectors.shape[:-1], -1))
    weights = _polar(T @ vectors[..., :p, :p], s) * s.unsqueeze(-2)
    numbers = diagnostics(every, s, discarded)
    basis = _rotated(vectors.mT.to(state.basis.dtype), state.basis, new)
    if (state.steps + 1) % _REORTHONORMALISE == 0:
        basis = reorthonormalised(basis)
    before = T @ vectors[..., :p, :]  # W in the new basis
    numbers["moved"] = _moved(T, before[..., :p], weights)
    result = Recursion(basis, torch.diag_embed(values) - before.mT @ before, weights, state.steps + 1)
    return result, result.matrix, numbers


def _moved(T: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """``‖W⁺ − W‖`` from T, and W and W⁺ in W⁺'s own directions."""
    inside = (after - before).square().sum((-2, -1))
    outside = (T.to(before.dtype).square().sum((-2, -1)) - before.square().sum((-2, -1))).clamp_min(0)
    return (inside + outside).sqrt()


def _moved_gram(T: Tensor, C: Tensor, D: Tensor, sigma: Tensor, gamma: float) -> Tensor:
    """``G = WᵀW + V + v`` in the extended basis, ``[…, n, n]``."""
    p, added = T.shape[-1], D.shape[-1] - C.shape[-1]
    strip = T.mT @ shift_factor(T, D, sigma, gamma)
    gram = F.pad(C, (0, added, 0, added))
    gram[..., :p, :] += strip
    gram[..., :, :p] += strip.mT
    gram[..., :p, :p] += T.mT @ T
    return gram


def _rotated(frame: Tensor, basis: Tensor, new: Extension | None) -> Tensor:
    """``frame @ [basis; directions]``."""
    if new is None:
        return frame @ basis
    m = basis.shape[-2]
    return add_product(frame[..., :m] @ basis, frame[..., m:], new.directions)


def _polar(target: Tensor, s: Tensor) -> Tensor:
    """The polar factor of ``A = target diag(s)``, ``[…, k, p]`` with k ≥ p, with zero columns where s is zero.

    On the CPU it comes from the eigenvectors of AᵀA, which in float64 resolve singular values down to 1e-8 of the largest.
    Where A has lower rank than diag(s), :func:`polar` completes the factor.
    """
    A = target * s.unsqueeze(-2)
    if A.device.type != "cpu":
        return polar(A)
    squares, vectors = eigh(A.mT @ A)
    finfo = torch.finfo(A.dtype)
    found = squares > squares[..., -1:] * (finfo.eps * A.shape[-1])
    if bool((found.sum(-1) < (s > 0).sum(-1)).any()):
        return polar(A)
    inverse = torch.where(found, squares.clamp_min(finfo.tiny).rsqrt(), 0.0)
    return ((A @ vectors) * inverse.unsqueeze(-2)) @ vectors.mT


def _row_space(W: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of W's rows ``[…, p, d]`` and W's coordinates in it ``[…, k, p]``."""
    k, d = W.shape[-2:]
    if k >= d:
        return torch.eye(d, dtype=W.dtype, device=W.device).expand(*W.shape[:-2], d, d).contiguous(), W.clone()
    Q, R = torch.linalg.qr(W.mT)
    return Q.mT.contiguous(), R.mT.contiguous()
