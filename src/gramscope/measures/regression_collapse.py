"""Neural collapse for regression targets, NRC1 to NRC3 (Andriopoulos, Dong, Guo, Zhao and Ross 2024).

With c targets the features collapse to c principal directions, which the readout's rows span, and the readout's Gram
follows the targets' covariance. The paper scales every centred feature to length one; these are shares of the total
variance instead, which sums over the data give. Deep layers are measured the same way (Rangamani and Unal 2026).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_matrices, to_double, unit_scale
from gramscope.linalg.psd import EPS, eigh, frobenius, psd_power, svd


def nrc1(C_hh: Array, targets: int) -> Tensor:
    """``1 − Σ_{i≤c} λ_i / Σ λ_i``: share of the features' variance outside their c leading principal directions.

    Args:
        C_hh: covariance of the features ``[d, d]``, up to a factor.
        targets: c, the width of the targets.

    Returns:
        A float64 number from 0 (collapse) to 1; ``1 − c/d`` for isotropic features. NaN for constant features.

    >>> nrc1(torch.diag(torch.tensor([3.0, 1.0])), targets=1).item()
    0.25
    """
    values = eigh(unit_scale(to_double(as_matrices(C_hh, "C_hh"))))[0].clamp(min=0.0)
    return values[..., : max(values.shape[-1] - targets, 0)].sum() / values.sum()


def nrc2(C_hh: Array, W: Array) -> Tensor:
    """``1 − tr(P C_hh) / tr(C_hh)``, P the projector on the row space of W: share of the features' variance that W ignores.

    Args:
        C_hh: covariance of the features ``[d, d]``, up to a factor.
        W: weight of the layer that reads them ``[k, d]``.

    Returns:
        A float64 number from 0 (collapse) to 1; ``1 − rank(W)/d`` for isotropic features. NaN for constant features.

    >>> nrc2(torch.eye(4), torch.eye(4)[:1]).item()
    0.75
    """
    scatter, weight = unit_scale(to_double(as_matrices(C_hh, "C_hh"))), to_double(as_matrices(W, "W"))
    _, s, Vt = svd(weight)
    rows = Vt[s > max(weight.shape) * EPS * s[0]]
    return (1 - ((rows @ scatter) * rows).sum() / scatter.trace()).clamp(min=0.0)


def nrc3(W: Array, C_yy: Array) -> Tensor:
    """``min_γ ‖WWᵀ/‖WWᵀ‖ − A_γ/‖A_γ‖‖_F²`` with ``A_γ = Σ_Y^½ − γ^½ I``, γ from 0 to the smallest eigenvalue of ``Σ_Y``.

    Args:
        W: weight of the readout ``[c, d]``.
        C_yy: covariance of the targets ``[c, c]``, up to a factor.

    Returns:
        A float64 number from 0 (collapse) to 4.

    >>> round(nrc3(torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([16.0, 1.0]))).item(), 9)
    0.0
    """
    weight, covariance = unit_scale(to_double(as_matrices(W, "W"))), unit_scale(to_double(as_matrices(C_yy, "C_yy")))
    c = covariance.shape[-1]
    if weight.shape[-2] != c:
        raise InputError(
            f"NRC3 is defined at a readout with one row for each of the {c} targets, not {weight.shape[-2]}"
        )
    if c == 1:
        raise InputError("NRC3 is 0 for any readout of one target")
    gram, root = weight @ weight.mT, psd_power(covariance, 0.5)
    smallest = eigh(root)[0][0].clamp(min=0.0)
    # ⟨WWᵀ, S − tI⟩ / ‖S − tI‖ has one stationary point t; the minimum is there or at an end.
    a, b, p, q = (gram * root).sum(), gram.trace(), root.square().sum(), root.trace()
    turning = (b * p - a * q) / (b * q - a * c)
    best = torch.full_like(a, float("inf"))
    for t in (torch.zeros_like(a), smallest, turning):
        moved = root - t * torch.eye(c, dtype=root.dtype, device=root.device)
        if 0 <= float(t) <= float(smallest) and float(frobenius(moved)) > c * EPS * float(frobenius(root)):
            best = torch.minimum(best, (gram / frobenius(gram) - moved / frobenius(moved)).square().sum())
    return best
