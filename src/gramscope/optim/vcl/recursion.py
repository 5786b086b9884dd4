"""Virtual covariance learning in a small moving basis: Algorithm 1 without a d×d matrix.

Two facts make it cheap. First, a batch of b samples adds at most b directions to the row spaces of W and V. Second, the
shift ``v = WᵀM + MᵀW`` vanishes on the orthogonal complement of W's rows. These rows span the leading eigenvectors of G, so
by induction G stays negative semidefinite on the complement and never has more than k positive eigenvalues: cutting at k
loses nothing, and the positive eigenspace is a graph over W's row space.

The state is an orthonormal basis U ``[m, d]`` whose first p = min(k, d) rows span W's rows, with ``W = T U[:p]`` and
``V = Uᵀ C U`` (``W₀ᵀW₀ + V`` with the initial anchor). A *full* step (:mod:`gramscope.optim.vcl.full_step`) takes one
(m + b)-dimensional eigendecomposition and a polar factor; a *light* step (:mod:`gramscope.optim.vcl.light_step`) updates the
last full step with products.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gramscope.linalg.virtual_shift import shift_factor
from gramscope.optim.lowrank import Extension, extend_basis, reorthonormalised
from gramscope.optim.vcl.full_step import full_step
from gramscope.optim.vcl.light_step import light_step
from gramscope.optim.vcl.report import Report
from gramscope.optim.vcl.rules import Batch, Rules
from gramscope.optim.vcl.state import Recursion

#: the basis is orthonormalised again after this many steps, and at the first full step after light ones
_REORTHONORMALISE = 16


def advance(
    state: Recursion,
    batch: Batch,
    gamma: float | Tensor,
    rules: Rules,
    rank: int,
    full: bool = True,
) -> tuple[Recursion, Tensor, Report]:
    """One step.

    Args:
        state: from :func:`~gramscope.optim.vcl.state.start` or the previous step.
        batch: the gradients of this step.
        gamma: step γ of the virtual update.
        rules: the form of the algorithm.
        rank: m, directions to keep, at least min(k, d).
        full: whether to decompose G anew. A light step needs a basis of ``rank`` rows and an earlier full step.

    Returns:
        The next state, the new weights ``[…, k, d]``, and a report.
    """
    m, d = state.basis.shape[-2:]
    tidy = full and (state.since > 0 or (state.steps + 1) % _REORTHONORMALISE == 0)
    new: Extension | None = None
    if m < d:
        new = extend_basis(state.basis, batch.rows, passes=2 if full else 1)
        D = batch.weighted(torch.cat([new.coordinates, new.factor], -1))
    else:
        D = batch.weighted(batch.rows @ state.basis.mT)
    # every full step decomposes V and puts it together again; in float32 the rounding of full steps in a row would add up
    small = torch.float64 if full and state.since == 0 and D.device.type != "mps" else D.dtype
    state, D = state.small_as(small), D.to(small)
    gamma = gamma.to(small) if isinstance(gamma, Tensor) else gamma
    shift, gram = _moved_gram(state, D, batch.sigma, gamma, rules)
    aim = rules.aim * gamma * D if rules.aim else None
    if full:
        state, report = full_step(state, new, gram, aim, rules, rank)
    else:
        state, report = light_step(state, new, shift, gram, aim, rules)
    if tidy:
        state = replace(state, basis=reorthonormalised(state.basis))
    return state, state.matrix, report


def _moved_gram(
    state: Recursion, D: Tensor, sigma: Tensor | None, gamma: float | Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """``V + v`` and ``G`` in the extended basis, ``[…, n, n]``."""
    T = state.weights
    p = T.shape[-1]
    added = D.shape[-1] - state.shift.shape[-1]
    strip = T.mT @ shift_factor(T, D, None if sigma is None else sigma.to(D.dtype), gamma)
    shift = F.pad(state.shift, (0, added, 0, added))
    shift[..., :p, :] += strip
    shift[..., :, :p] += strip.mT
    if rules.anchor == "initial":
        return shift, shift
    gram = shift.clone()
    gram[..., :p, :p] += T.mT @ T
    return shift, gram
