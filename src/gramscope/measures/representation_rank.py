"""How many directions features use and how their spectrum decays: RankMe and α-ReQ, from the eigenvalues of a Gram."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_matrices, to_double, unit_scale
from gramscope.linalg.psd import EPS, eigh


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
