"""[VCL] Algorithm 1 to the letter, on dense d×d matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramscope.linalg.psd import eigh
from gramscope.linalg.virtual_shift import shift_factor
from gramscope.optim.polar import polar
from gramscope.optim.vcl.report import Report
from gramscope.optim.vcl.rules import Batch, Rules


@dataclass(frozen=True)
class Dense:
    """``V_t``, the shifts summed so far, or ``W₀ᵀW₀ + V_t`` with the initial anchor: ``[…, d, d]``."""

    matrix: Tensor


def start(W: Tensor, rules: Rules) -> Dense:
    """The state before the first step for weights ``[…, k, d]``."""
    d = W.shape[-1]
    if rules.anchor == "initial":
        return Dense(W.mT @ W)
    return Dense(torch.zeros(*W.shape[:-2], d, d, dtype=W.dtype, device=W.device))


def advance(state: Dense, W: Tensor, batch: Batch, gamma: float | Tensor, rules: Rules) -> tuple[Dense, Tensor, Report]:
    """One step: ``V += v``; ``QΛQᵀ = WᵀW + V``; ``W⁺ = polar(W W~ᵀ) W~`` with ``W~ = Λ^α Qᵀ`` of the top min(k, d).

    Args:
        state: from :func:`start` or the previous step.
        W: the weights ``[…, k, d]`` in the precision to work in.
        batch: the gradients of this step.
        gamma: step γ of the virtual update.
        rules: the form of the algorithm.

    Returns:
        The next state, the new weights, and a report.
    """
    k, d = W.shape[-2:]
    p = min(k, d)
    D = batch.gradient()
    half = W.mT @ shift_factor(W, D, batch.sigma, gamma)
    V = state.matrix + half + half.mT
    G = V if rules.anchor == "initial" else V + W.mT @ W
    eigenvalues, vectors = eigh(0.5 * (G + G.mT))
    eigenvalues, vectors = eigenvalues.flip(-1), vectors.flip(-1)
    s = rules.spectrum.singular_values(eigenvalues[..., :p], d)
    wanted = s.unsqueeze(-1) * vectors[..., :p].mT
    target = W if not rules.aim else W - rules.aim * gamma * D
    rotation = polar(target @ wanted.mT, "svd")
    before, after = W @ vectors[..., :p], rotation * s.unsqueeze(-2)
    return Dense(V), rotation @ wanted, Report(eigenvalues, s, before, after, W.square().sum((-2, -1)))
