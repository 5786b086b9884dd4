"""A full step of the recursion: one eigendecomposition of G in the extended basis, and a polar factor."""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.linalg.psd import eigh
from gramscope.optim.lowrank import Extension, add_product
from gramscope.optim.polar import polar
from gramscope.optim.vcl.report import Report
from gramscope.optim.vcl.rules import Rules
from gramscope.optim.vcl.state import Recursion


def full_step(
    state: Recursion, new: Extension | None, gram: Tensor, aim: Tensor | None, rules: Rules, rank: int
) -> tuple[Recursion, Report]:
    """Decompose G, truncate, take the power and the polar factor.

    Args:
        state: the state before.
        new: the directions the batch adds to the basis, if any.
        gram: G in the extended basis, ``[…, n, n]``.
        aim: the step ``aim·γ·D`` in the extended basis ``[…, k, n]`` that the nearest weights are sought along, if any.
        rules: the form of the algorithm.
        rank: directions to keep.
    """
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
    rotation = _polar(target, s)
    weights = rotation * s.unsqueeze(-2)
    shift = torch.diag_embed(values)
    if rules.anchor == "current":
        shift = shift - before.mT @ before
    leading = values[..., :p].contiguous()
    result = Recursion(
        basis=_rotated(vectors.mT.to(state.basis.dtype), state.basis, new),
        shift=shift,
        weights=weights,
        rotation=rotation,
        eigenvalues=leading,
        singular_values=s,
        response=rules.spectrum.response(leading, s),
        steps=state.steps + 1,
        since=0,
    )
    size = state.weights.square().sum((-2, -1))
    return result, Report(all_values, s, before[..., :p], weights, size, discarded)


def _rotated(frame: Tensor, basis: Tensor, new: Extension | None) -> Tensor:
    """``frame @ [basis; directions]``."""
    if new is None:
        return frame @ basis
    m = basis.shape[-2]
    return add_product(frame[..., :m] @ basis, frame[..., m:], new.directions)


def _polar(target: Tensor, s: Tensor) -> Tensor:
    """The polar factor of ``A = target diag(s)``, ``[…, k, p]`` with k ≥ p, with zero columns where s is zero.

    On the CPU it comes from the eigenvectors of AᵀA in float64, which resolve singular values down to 1e-8 of the largest.
    Where A has lower rank than diag(s) (W had lost rank, and a floor restores it), :func:`polar` completes the factor.
    """
    A = target * s.unsqueeze(-2)
    if A.device.type != "cpu":
        return polar(A)
    A64 = A.double()
    squares, vectors = eigh(A64.mT @ A64)
    finfo = torch.finfo(A64.dtype)
    found = squares > squares[..., -1:] * (finfo.eps * A.shape[-1])
    if bool((found.sum(-1) < (s > 0).sum(-1)).any()):
        return polar(A64).to(A.dtype)
    inverse = torch.where(found, squares.clamp_min(finfo.tiny).rsqrt(), 0.0)
    return (((A64 @ vectors) * inverse.unsqueeze(-2)) @ vectors.mT).to(A.dtype)
