"""The factor M of the virtual covariance shift ``v = WᵀM + MᵀW``."""

from __future__ import annotations

from torch import Tensor


def shift_factor(W: Tensor, D: Tensor, Sigma: Tensor | None, gamma: float | Tensor) -> Tensor:
    """``M = −γD + ½γ²ΣW``: with it the virtual covariance shift is ``v = WᵀM + MᵀW`` ([VCL] Theorem 2).

    Args:
        W: weight ``[…, k, p]``, in any basis. With p < d its missing columns are zero.
        D: summed gradient ``Σ_i δ_i h_iᵀ [..., k, d]`` in the same basis.
        Sigma: ``Σ_i δ_i δ_iᵀ [..., k, k]``; None leaves the γ² term out.
        gamma: virtual step size γ.
    """
    M = -gamma * D
    if Sigma is not None:
        M[..., : W.shape[-1]] += (0.5 * gamma**2) * (Sigma @ W)
    return M
