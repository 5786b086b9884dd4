"""How spectra decay: RankMe and α-ReQ of features, and the power-law exponent of a weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_matrices, as_weight, to_double, unit_scale
from gramscope.linalg.psd import EPS, eigh
from gramscope.measures.spectrum import weight_spectrum


def rankme(HtH: Array, n: int) -> float:
    """RankMe ``exp(−Σ p log p)``, ``p = s/Σs + 1e-7`` over the min(n, d) singular values s of features H, uncentred.

    (Garrido, Balestriero, Najman and LeCun 2023.) Singular values below ``√(d·2.2e-16)`` of the largest, which a Gram cannot
    show, count as zero.

    Args:
        HtH: ``HᵀH [d, d]``.
        n: number of rows of H.

    Returns:
        Between 1 and min(n, d); NaN for features that are all zero.

    >>> round(rankme(torch.eye(3), 10), 4)
    3.0
    """
    s = _eigenvalues(HtH)[: max(n, 1)].sqrt()
    if not float(s[0]) > 0:
        return math.nan
    p = s / s.sum() + 1e-7
    return math.exp(float(-(p * p.log()).sum()))


def alpha_req(covariance: Array, eps: float = EPS) -> float:
    """α-ReQ: the exponent α of a power law ``λ_i ∝ i^(−α)`` of the eigenvalues of the centred features' covariance.

    (Agrawal, Mondal, Ghosh and Richards 2022.) The fit is ordinary least squares of log λ_i on log i over all eigenvalues above
    ``max(d·2.2e-16, eps²)`` of the largest; a window would be a free choice. α near 1 went with good features there; 0
    means that all directions are equal.

    Args:
        covariance: ``[d, d]``, up to a factor.
        eps: relative rounding of the features (1.2e-7 for float32), whose directions are not fitted.

    >>> round(alpha_req(torch.diag(1 / torch.arange(1.0, 9.0) ** 2)), 5)
    2.0
    """
    values = _eigenvalues(covariance)
    values = values[values > eps**2 * values[0]]
    if values.numel() < 3:
        raise InputError(f"α-ReQ fits a line through at least 3 eigenvalues; these features have {values.numel()}")
    x = torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device).log()
    x = x - x.mean()
    return -float((x @ values.log()) / (x @ x))


def _eigenvalues(A: Array) -> Tensor:
    """Descending eigenvalues at unit scale; those that are rounding are zero."""
    values = eigh(unit_scale(to_double(as_matrices(A, "the Gram"))))[0].reshape(-1).flip(-1)
    return torch.where(values > values.numel() * EPS * values[0], values, 0.0)


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
