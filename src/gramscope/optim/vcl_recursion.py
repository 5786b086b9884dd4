"""Virtual covariance learning in a small moving basis: Algorithm 1 without a d×d matrix.

Two facts make it cheap. First, a batch of b samples adds at most b directions to the row spaces of W and V. Second, the
shift ``v = WᵀM + MᵀW`` vanishes on the orthogonal complement of W's rows; as these span the leading eigenvectors of G,
G stays negative semidefinite there, by induction. So G never has more than k positive eigenvalues: cutting at k loses
nothing, everything else is negative, and the positive eigenspace is a graph over W's row space.

State, with an orthonormal basis U ``[m, d]`` whose first p = min(k, d) rows span W's rows: ``W = T U[:p]`` and
``V = Uᵀ C U`` (``W₀ᵀW₀ + V`` with the initial anchor). A *full* step (here) takes one (m + b)-dimensional
eigendecomposition and a polar factor. A *light* step (:mod:`gramscope.optim.vcl_light`) follows it with products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.linalg.lowrank import Extension, extend_basis, reorthonormalised
from gramscope.linalg.polar import polar
from gramscope.linalg.psd import eigh
from gramscope.optim.vcl_light import Turn, light_turn
from gramscope.optim.vcl_rules import Batch, Report, Rules

#: steps after which the basis is orthonormalised again
_REORTHONORMALISE = 16


@dataclass(frozen=True)
class Recursion:
    """``W = weights @ basis[:p]``, ``V = basisᵀ @ shift @ basis``, and the last full step, around which light ones expand.

    Attributes:
        basis: U ``[…, m, d]``, orthonormal rows, those of W's row space first.
        shift: C ``[…, m, m]``.
        weights: T ``[…, k, p]``.
        rotation: P of ``T = P diag(s)`` at the last full step ``[…, k, p]``.
        eigenvalues: the leading p of G at the last full step ``[…, p]``.
        response: how T answers to a small change of G ``[…, p, p]``, see :meth:`SpectralMap.response`.
        steps, since: steps taken, and how many of them since the last full one.
    """

    basis: Tensor
    shift: Tensor
    weights: Tensor
    rotation: Tensor
    eigenvalues: Tensor
    response: Tensor
    steps: int = 0
    since: int = 0

    @property
    def matrix(self) -> Tensor:
        """W, ``[…, k, d]``."""
        return self.weights @ self.basis[..., : self.weights.shape[-1], :]


def start(W: Tensor, rules: Rules) -> Recursion:
    """The state before the first step for weights ``[…, k, d]``."""
    basis, T = _row_space(W)
    gram = T.mT @ T
    shift = gram if rules.anchor == "initial" else torch.zeros_like(gram)
    return Recursion(basis, shift, T, T, torch.zeros_like(T[..., 0, :]), torch.zeros_like(gram))


def rebased(state: Recursion, W: Tensor) -> Recursion:
    """The same V for weights that were changed from outside: W's rows lead the basis, the old basis follows."""
    k, d = W.shape[-2:]
    if k >= d:
        return replace(state, weights=W @ state.basis.mT)
    basis, T = _row_space(W)
    parts = extend_basis(basis, state.basis)
    old = torch.cat([parts.coordinates, parts.factor], -1)
    joined = torch.cat([basis, parts.directions], -2)
    return replace(state, basis=joined, shift=old.mT @ state.shift @ old, weights=T, rotation=T)


def advance(
    state: Recursion, batch: Batch, gamma: float, rules: Rules, rank: int, full: bool = True
) -> tuple[Recursion, Tensor, Report]:
    """One step.

    Args:
        state: from :func:`start` or the previous step.
        batch: what backward gave.
        gamma: step γ of the virtual update.
        rules: the form of the algorithm.
        rank: m, directions to keep, at least min(k, d).
        full: decompose G anew; otherwise a light step, possible once the basis has ``rank`` rows and a full step was made.

    Returns:
        The next state, the new weights ``[…, k, d]``, and what there is to report.
    """
    m, d = state.basis.shape[-2:]
    new: Extension | None = None
    if m < d:
        new = extend_basis(state.basis, batch.rows, passes=2 if full else 1)
        D = batch.weighted(torch.cat([new.coordinates, new.factor], -1))
    else:
        D = batch.weighted(batch.rows @ state.basis.mT)
    shift, gram = _moved_gram(state, D, batch.sigma, gamma, rules)
    aim = rules.aim * gamma * D if rules.aim else None
    if full:
        turn = _full_turn(state, shift, gram, aim, rules, rank)
    else:
        turn = light_turn(
            state.weights, state.rotation, state.eigenvalues, state.response, shift, gram, aim, rules, keep=m
        )
    basis = state.basis if turn.frame is None else _rotated(turn.frame, state.basis, new)
    steps = state.steps + 1
    if m < d and steps % _REORTHONORMALISE == 0:
        basis = reorthonormalised(basis)
    since = 0 if full else state.since + 1
    result = Recursion(
        basis, turn.shift, turn.weights, turn.rotation, turn.eigenvalues, turn.response, steps=steps, since=since
    )
    return result, result.matrix, turn.report


def _row_space(W: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of W's rows ``[…, p, d]`` and W's coordinates in it ``[…, k, p]``."""
    k, d = W.shape[-2:]
    if k >= d:
        return torch.eye(d, dtype=W.dtype, device=W.device).expand(*W.shape[:-2], d, d).contiguous(), W.clone()
    Q, R = torch.linalg.qr(W.mT)
    return Q.mT.contiguous(), R.mT.contiguous()


def _moved_gram(state: Recursion, D: Tensor, sigma: Tensor | None, gamma: float, rules: Rules) -> tuple[Tensor, Tensor]:
    """``V + v`` and ``G`` in the extended basis, ``[…, n, n]``."""
    T = state.weights
    p = T.shape[-1]
    added = D.shape[-1] - state.shift.shape[-1]
    strip = T.mT @ rules.half_shift(D, sigma, T, gamma)
    shift = F.pad(state.shift, (0, added, 0, added))
    shift[..., :p, :] += strip
    shift[..., :, :p] += strip.mT
    if rules.anchor == "initial":
        return shift, shift
    gram = shift.clone()
    gram[..., :p, :p] += T.mT @ T
    return shift, gram


def _full_turn(state: Recursion, shift: Tensor, gram: Tensor, aim: Tensor | None, rules: Rules, rank: int) -> Turn:
    """Decompose G, truncate, take the power and the polar factor."""
    p, n = state.weights.shape[-1], gram.shape[-1]
    values, vectors = eigh(gram)
    values, vectors = values.flip(-1), vectors.flip(-1)
    s = rules.spectrum.singular_values(values[..., :p], n)
    all_values, discarded = values, None
    if n > rank:  # W's own directions stay, the others by |λ|
        order = p + values[..., p:].abs().argsort(-1, descending=True)
        discarded = values.gather(-1, order[..., rank - p :]).square().sum(-1)
        own = torch.arange(p, device=values.device).expand_as(s)
        kept = torch.cat([own, order[..., : rank - p]], -1)
        values = values.gather(-1, kept)
        vectors = vectors.gather(-1, kept.unsqueeze(-2).expand(*vectors.shape[:-1], -1))
    before = state.weights @ vectors[..., :p, :]  # W in the new basis
    target = before[..., :p] if aim is None else before[..., :p] - aim @ vectors[..., :p]
    rotation = _polar(target * s.unsqueeze(-2))
    weights = rotation * s.unsqueeze(-2)
    moved = (weights - before[..., :p]).square().sum((-2, -1)) + before[..., p:].square().sum((-2, -1))
    C = torch.diag_embed(values)
    if rules.anchor == "current":
        C = C - before.mT @ before
    leading = values[..., :p].contiguous()
    return Turn(
        frame=vectors.mT,
        shift=C,
        weights=weights,
        rotation=rotation,
        eigenvalues=leading,
        response=rules.spectrum.response(leading, s),
        report=Report.of(all_values, s, moved=moved.sqrt(), discarded=discarded),
    )


def _rotated(frame: Tensor, basis: Tensor, new: Extension | None) -> Tensor:
    """``frame @ [basis; directions]``."""
    if new is None:
        return frame @ basis
    m = basis.shape[-2]
    old, fresh = frame[..., :m], frame[..., m:]
    if basis.dim() == 2:
        return torch.addmm(fresh @ new.directions, old, basis)
    return old @ basis + fresh @ new.directions


def _polar(A: Tensor) -> Tensor:
    """The polar factor of ``A [k, p]``, k ≥ p; on the CPU through its float64 Gram, zero where A is."""
    if A.device.type != "cpu":
        return polar(A)
    A64 = A.double()
    squares, vectors = eigh(A64.mT @ A64)
    finfo = torch.finfo(torch.float64)
    inverse = torch.where(
        squares > squares[..., -1:] * (finfo.eps * A.shape[-1]), squares.clamp_min(finfo.tiny).rsqrt(), 0.0
    )
    return ((A64 @ vectors) * inverse.unsqueeze(-2) @ vectors.mT).to(A.dtype)
