"""A light step of the recursion: products and Cholesky factors, to first order around the last full step.

It turns the basis towards the new directions by an approximate solution of a small Riccati equation, keeps approximately the
largest of the remaining directions, and follows the power of G to first order. V is exact up to truncation, so the error is
in this step's W alone and the next full step removes it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gramscope.optim.lowrank import BlockReflection, Extension, leading_directions, positive_slope
from gramscope.optim.newton_schulz import polish
from gramscope.optim.vcl.report import Report
from gramscope.optim.vcl.rules import Rules
from gramscope.optim.vcl.state import Recursion


def light_step(
    state: Recursion, new: Extension | None, shift: Tensor, gram: Tensor, aim: Tensor | None, rules: Rules
) -> tuple[Recursion, Report]:
    """Turn the basis, truncate it to its present size, and move the weights to first order.

    Args:
        state: the state before; its basis must have its final size and a full step must have been taken.
        new: the directions the batch adds to the basis, if any.
        shift, gram: V and G in the extended basis, ``[…, n, n]``.
        aim: the step ``aim·γ·D`` in the extended basis ``[…, k, n]`` that the nearest weights are sought along, if any.
        rules: the form of the algorithm.
    """
    p, n = state.weights.shape[-1], gram.shape[-1]
    basis, before = state.basis, state.weights
    rest = discarded = unsettled = None
    if n > p:
        slope, unsettled = positive_slope(gram, p)
        turn = BlockReflection.towards(slope)
        basis, shift, rest, discarded = _turned_basis(state, new, shift, turn, rules)
        before = turn.leading_part(state.weights)
        aim = None if aim is None else turn.leading_part(aim)
    top = shift[..., :p, :p]
    if rules.anchor == "current":
        top = top + before.mT @ before
    s = state.singular_values
    change = top.clone()
    change.diagonal(dim1=-2, dim2=-1).sub_(state.eigenvalues)
    change.mul_(state.response)
    relative = change.square().sum(-1) / s.square().clamp_min(torch.finfo(s.dtype).tiny)
    change = change * (1 + 4 * relative).rsqrt().unsqueeze(-1)  # no singular value doubles or vanishes
    far = relative.amax(-1).sqrt()
    rotation = state.rotation if aim is None else _along(state.rotation, aim, s)
    change.diagonal(dim1=-2, dim2=-1).add_(s)
    weights = rotation @ change
    report = Report(
        state.eigenvalues,
        s,
        before,
        weights,
        state.weights.square().sum((-2, -1)),
        discarded,
        far if unsettled is None else unsettled.maximum(far),
        top,
        rest,
    )
    result = replace(
        state,
        basis=basis,
        shift=shift,
        weights=weights,
        rotation=rotation,
        steps=state.steps + 1,
        since=state.since + 1,
    )
    return result, report


def _turned_basis(
    state: Recursion, new: Extension | None, shift: Tensor, turn: BlockReflection, rules: Rules
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The turned basis, V in it, G on the complement of W's rows, and the part of its squared norm that is dropped."""
    p, m = state.weights.shape[-1], state.basis.shape[-2]
    rest = state.basis[..., p:, :]
    shift = turn.congruence(shift)
    block = shift[..., p:, p:]
    if rules.anchor == "current":
        outside = state.weights @ turn.turned
        block = block + outside.mT @ outside
    if new is None:
        return turn.apply(state.basis[..., :p, :], rest), shift, block, None
    kept = leading_directions(block, m - p)
    strip = shift[..., :p, p:] @ kept
    upper = torch.cat([shift[..., :p, :p], strip], -1)
    lower = torch.cat([strip.mT, kept.mT @ shift[..., p:, p:] @ kept], -1)
    basis = turn.apply(state.basis[..., :p, :], torch.cat([rest, new.directions], -2), kept.mT)
    dropped = block.square().sum((-2, -1)) - (kept.mT @ block @ kept).square().sum((-2, -1))
    return basis, torch.cat([upper, lower], -2), block, dropped.clamp_min(0)


def _along(P: Tensor, aim: Tensor, s: Tensor) -> Tensor:
    """``polar((P diag(s) − aim) diag(s))`` to first order in ``aim``, orthonormalised."""
    f = s.square()
    tiny = torch.finfo(s.dtype).tiny
    step = -aim * s.unsqueeze(-2)
    inside = P.mT @ step
    rotation = (inside - inside.mT) / (f.unsqueeze(-1) + f.unsqueeze(-2)).clamp_min(tiny)
    outside = (step - P @ inside) / f.clamp_min(tiny).unsqueeze(-2)
    return polish(P + P @ rotation + outside)
