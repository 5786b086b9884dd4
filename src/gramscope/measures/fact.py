"""The Features At Convergence Theorem: what the weight Gram is where training with weight decay has converged.

With ``D = ∇_W`` of the mean loss and the penalty ``½λ‖W‖²``, a stationary point has ``D = −λW`` and therefore
``WᵀW = −WᵀD/λ`` (Boix-Adsera, Mallinar, Simon and Belkin 2025). ``λ`` is the ``weight_decay`` of ``torch.optim.SGD``,
which adds ``λW`` to the gradient; decoupled weight decay (AdamW) has other stationary points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, unit_scale
from gramscope.linalg.psd import frobenius
from gramscope.measures.gram import matrices


def fact_alignment(W: Array, D: Array) -> Tensor:
    """``ρ(WᵀW, −WᵀD)``, the cosine of both sides of the theorem, which does not depend on λ.

    Args:
        W: weight ``[..., k, d]``.
        D: gradient of the mean (or summed) loss ``[..., k, d]``.

    Returns:
        A float64 number from −1 to 1: 1 at convergence, 0 on average for a gradient that is independent of W. NaN where a
        side is zero.

    >>> W = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> round(fact_alignment(W, -0.1 * W).item(), 12)
    1.0
    """
    (weight, gradient), _ = matrices(W=W, D=D)
    weight, gradient = unit_scale(weight), unit_scale(gradient)
    return -_inner(weight, gradient) / (_norm(weight, weight) * _norm(weight, gradient))


def fact_residual(W: Array, D: Array, weight_decay: float) -> Tensor:
    """``‖WᵀW + WᵀD/λ‖ / ‖WᵀW‖``, how far the theorem's equation is from holding.

    Args:
        W: weight ``[..., k, d]``.
        D: gradient of the **mean** loss ``[..., k, d]``.
        weight_decay: λ, positive.

    Returns:
        A float64 number: 0 at convergence, 1 for a zero gradient, and large where the gradient outweighs the decay.

    >>> W = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> fact_residual(W, torch.zeros(2, 2), weight_decay=0.1).item()
    1.0
    """
    if not (math.isfinite(weight_decay) and weight_decay > 0):
        raise InputError(f"weight_decay={weight_decay!r}: give the positive λ that training used")
    (weight, gradient), _ = matrices(W=W, D=D)
    return _norm(weight, weight + gradient / weight_decay) / _norm(weight, weight)


def _inner(W: Tensor, E: Tensor) -> Tensor:
    """``tr((WᵀW)ᵀ WᵀE)``, through the smaller of k×k and d×d."""
    if W.shape[-2] > W.shape[-1]:
        return ((W.mT @ W) * (W.mT @ E)).sum()
    return ((W @ W.mT) * (E @ W.mT)).sum()


def _norm(W: Tensor, E: Tensor) -> Tensor:
    """``‖WᵀE‖_F``, through the smaller of k×k and d×d."""
    if W.shape[-2] > W.shape[-1]:
        return frobenius(W.mT @ E)
    # With E = LQ, Q orthonormal, ‖WᵀE‖ = ‖WᵀL‖; through EEᵀ half the digits would be lost where WᵀE is nearly zero.
    L = torch.linalg.qr(E.mT, mode="r").R.mT
    return frobenius(W.mT @ L)
