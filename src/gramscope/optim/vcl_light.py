"""A step of the recursion by products only, near the last full one.

The basis is turned towards the new directions by solving a small Riccati equation approximately; of the rest the most
negative directions are kept; and the power of G is followed to first order around the last full step. V is carried
exactly (up to truncation) through such steps, so what is approximate is one W, and the next full step starts afresh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.lowrank import positive_slope, tilted
from gramscope.linalg.newton_schulz import polish
from gramscope.linalg.psd import eigh
from gramscope.optim.vcl_rules import Report, Rules


@dataclass(frozen=True)
class Turn:
    """What a step makes of the small matrices; ``frame`` ``[…, m, n]`` takes the extended basis to the new one."""

    frame: Tensor | None
    shift: Tensor
    weights: Tensor
    rotation: Tensor
    eigenvalues: Tensor
    response: Tensor
    report: Report


def light_turn(
    weights: Tensor,
    rotation: Tensor,
    eigenvalues: Tensor,
    response: Tensor,
    shift: Tensor,
    gram: Tensor,
    aim: Tensor | None,
    rules: Rules,
    keep: int,
) -> Turn:
    """Turn, truncate to ``keep`` directions, and move the weights to first order; arguments as in ``Recursion``.

    Args:
        weights, rotation, eigenvalues, response: of the state.
        shift, gram: V and G in the extended basis, ``[…, n, n]``.
        aim: the step ``aim·γ·D`` in the extended basis ``[…, k, n]`` that Procrustes goes along with, if any.
        rules: the form of the algorithm.
        keep: rows of the new basis.
    """
    p, n = weights.shape[-1], gram.shape[-1]
    frame, discarded, before = None, None, weights
    unsettled = torch.zeros_like(gram[..., 0, 0])
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    if n > p:
        slope, unsettled = positive_slope(gram, p)
        leading, rest = tilted(slope)
        if n > keep:  # the most negative directions stay
            values, vectors = eigh(rest @ gram @ rest.mT)
            discarded = values[..., keep - p :].square().sum(-1)
            rest = vectors[..., : keep - p].mT @ rest
            diagonal = torch.cat([diagonal[..., :p], values], -1)
        frame = torch.cat([leading, rest], -2)
        shift = frame @ shift @ frame.mT
        before = weights @ leading[..., :p].mT
        aim = None if aim is None else aim @ leading.mT
    top = shift[..., :p, :p]
    if rules.anchor == "current":
        top = top + before.mT @ before
    s = rules.spectrum.singular_values(eigenvalues, n)
    change = response * (top - torch.diag_embed(eigenvalues))
    tiny = torch.finfo(s.dtype).tiny
    relative = change.square().sum(-1) / s.square().clamp_min(tiny)
    change = change * (1 + 4 * relative).rsqrt().unsqueeze(-1)  # no singular value doubles or vanishes
    if aim is not None:
        rotation = _turned(rotation, aim, s)
    new = rotation @ (torch.diag_embed(s) + change)
    moved = weights.square().sum((-2, -1)) + new.square().sum((-2, -1)) - 2 * (before * new).sum((-2, -1))
    report = Report.of(diagonal, s, moved=moved.clamp_min(0).sqrt(), discarded=discarded, unsettled=unsettled)
    return Turn(frame, shift, new, rotation, eigenvalues, response, report)


def _turned(P: Tensor, aim: Tensor, s: Tensor) -> Tensor:
    """``polar((P diag(s) − aim) diag(s))`` to first order in ``aim``, made orthonormal."""
    f = s.square()
    tiny = torch.finfo(s.dtype).tiny
    step = -aim * s.unsqueeze(-2)
    inside = P.mT @ step
    rotation = (inside - inside.mT) / (f.unsqueeze(-1) + f.unsqueeze(-2)).clamp_min(tiny)
    outside = (step - P @ inside) / f.clamp_min(tiny).unsqueeze(-2)
    return polish(P + P @ rotation + outside)
