"""A light step of the recursion: products and Cholesky factors, near the last full one.

The basis is turned towards the new directions by solving a small Riccati equation approximately; of the rest the largest
directions are kept, nearly; and the power of G is followed to first order around the last full step. V is carried
exactly (up to truncation) through such steps, so what is approximate is one W, and the next full step starts afresh.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gramscope.linalg.lowrank import BlockReflection, Extension, leading_directions, positive_slope
from gramscope.linalg.newton_schulz import polish
from gramscope.optim.vcl_rules import Report, Rules
from gramscope.optim.vcl_state import Recursion


def light_step(
    state: Recursion, new: Extension | None, shift: Tensor, gram: Tensor, aim: Tensor | None, rules: Rules
) -> tuple[Recursion, Report]:
    """Turn, truncate to the present size of the basis, and move the weights to first order.

    Args:
        state: the state before; its basis must have its final size and its last full step lie behind.
        new: the directions the batch adds to the basis, if any.
        shift, gram: V and G in the extended basis, ``[…, n, n]``.
        aim: the step ``aim·γ·D`` in the extended basis ``[…, k, n]`` that Procrustes goes along with, if any.
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
    """The turned basis, V in it, G on all that is not W's row space, and how much of its square is dropped."""
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
    """``polar((P diag(s) − aim) diag(s))`` to first order in ``aim``, made orthonormal."""
    f = s.square()
    tiny = torch.finfo(s.dtype).tiny
    step = -aim * s.unsqueeze(-2)
    inside = P.mT @ step
    rotation = (inside - inside.mT) / (f.unsqueeze(-1) + f.unsqueeze(-2)).clamp_min(tiny)
    outside = (step - P @ inside) / f.clamp_min(tiny).unsqueeze(-2)
    return polish(P + P @ rotation + outside)
