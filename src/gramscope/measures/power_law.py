"""The power-law exponent of a weight's spectrum."""

from __future__ import annotations

import torch

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_weight
from gramscope.linalg.psd import EPS
from gramscope.measures.spectrum import weight_spectrum

#: eigenvalues that a fit of a tail needs
FEWEST = 10


def weight_exponent(W: Array) -> float:
    """The exponent α of a density ``λ^(−α)`` in the tail of the eigenvalues λ of ``WᵀW`` (Martin and Mahoney 2021).

    The fit is that of Clauset, Shalizi and Newman (2009): for each eigenvalue as the start of the tail the maximum-likelihood
    ``α = 1 + m / Σ log(λ/λ_start)`` over the m eigenvalues from there on; of all starts the one whose law has the smallest
    Kolmogorov–Smirnov distance. Singular values up to the rounding of W's type are left out, and a tail has at least 10
    eigenvalues.

    Args:
        W: weight ``[..., k, d]``; a stack counts as diagonal blocks.

    Returns:
        α > 1; trained layers of large nets had 2 to 6, larger values mean a tail that is not heavy.

    >>> W = torch.diag(torch.linspace(0.01, 0.99, 99, dtype=torch.float64) ** -0.25)  # λ^(−3): P(λ > x) = x^(−2)
    >>> round(weight_exponent(W))
    3
    """
    weight = as_weight(W)
    s = weight_spectrum(weight).values
    rtol = max(max(weight.shape[-2:]) * EPS, torch.finfo(weight.dtype).eps)
    values = s[s > rtol * s[0]].square().flip(0)
    if values.numel() < FEWEST:
        raise InputError(f"a power law is fitted to at least {FEWEST} eigenvalues; this weight has {values.numel()}")
    best = (float("inf"), float("nan"))
    logs = values.log()
    for start in range(values.numel() - FEWEST + 1):
        tail = logs[start:] - logs[start]
        total = float(tail.sum())
        if total <= 0:
            continue  # all equal: no law
        m = tail.numel()
        alpha = 1 + m / total
        law = 1 - torch.exp(-(alpha - 1) * tail)
        below = torch.arange(m, dtype=tail.dtype, device=tail.device) / m
        distance = float(torch.maximum((law - below).abs(), (law - below - 1 / m).abs()).amax())
        best = min(best, (distance, alpha))
    return best[1]
