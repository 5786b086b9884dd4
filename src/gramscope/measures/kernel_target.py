"""Kernel–target alignment: how much the features' kernel looks like the ideal kernel of the targets."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gramscope.linalg.moments import Moments
from gramscope.linalg.psd import frobenius


def kernel_target_alignment(m: Moments, labels: bool) -> Tensor:
    """``⟨K, YYᵀ⟩ / (‖K‖_F ‖YYᵀ‖_F)`` with ``K = HHᵀ``, uncentred (Cristianini, Shawe-Taylor, Elisseeff and Kandola 2001).

    For C classes Y is one-hot less 1/C, so that ``YYᵀ`` is 1 − 1/C for two samples of one class and −1/C for others: up to a
    factor the ±1 of two classes. The alignment of centred kernels (Cortes, Mohri and Rostamizadeh 2012) is the column
    ``surrogate_normalized``.

    Args:
        m: moments of features and targets, with ``C_hh``.
        labels: whether the targets are one-hot rows of classes.

    Returns:
        A float64 number from 0 to 1, 1 where the kernel is the ideal one; NaN where a side is zero.

    >>> import torch
    >>> from gramscope.linalg.moments import moments
    >>> y = torch.tensor([[1.0], [-1.0], [-1.0]])
    >>> round(kernel_target_alignment(moments(3 * y, y), labels=False).item(), 12)
    1.0
    """
    if labels:
        m = replace(m, mean_y=m.mean_y - 1 / m.mean_y.numel())
    return m.HtY.square().sum() / (frobenius(m.HtH) * frobenius(m.YtY))
