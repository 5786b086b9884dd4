"""Spectral sizes: how a weight acts on its inputs, and the ratios by which widths and optimizers are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, as_matrices, as_weight, to_double, unit_scale
from gramscope.linalg.psd import eigh
from gramscope.measures.spectrum import weight_spectrum


def log_alignment_ratio(W: Array, C: Array) -> Tensor:
    """``1 + ½ log_d [tr(W C Wᵀ) / (‖W‖_F² tr C)]``: how far the inputs lie along the weight's leading directions.

    The size of the outputs is ``d^(2·ratio − 1)`` times that of a weight with independent entries. (Everett et al. 2024,
    "Scaling exponents across parameterizations and optimizers".)

    Args:
        W: weight ``[..., k, d]``; a stack counts as the diagonal blocks of one matrix of ``groups · d`` columns.
        C: ``HᵀH / n [..., d, d]`` of the inputs, up to a factor.

    Returns:
        A float64 number up to 1 (one common direction); ½ where inputs and weight are independent; −∞ where ``W C Wᵀ`` is zero.

    >>> log_alignment_ratio(torch.eye(4), torch.eye(4)).item()
    0.5
    """
    weight, inner = unit_scale(to_double(as_matrices(W, "W"))), unit_scale(to_double(as_matrices(C, "C")))
    d = weight.shape[-1]
    if inner.shape[-2:] != torch.Size((d, d)):
        raise InputError(f"C has shape {tuple(inner.shape)}; W of shape {tuple(weight.shape)} needs [..., {d}, {d}]")
    width = weight.shape[:-2].numel() * d
    if width == 1:
        raise InputError("the log-alignment ratio is undefined for one input: its logarithm has base 1")
    through = ((weight @ inner) * weight).sum()
    share = through / (weight.square().sum() * inner.diagonal(dim1=-2, dim2=-1).sum())
    return 1 + 0.5 * share.log() / math.log(width)


def spectral_ratio(W: Array) -> float:
    """``‖W‖₂ / √(k/d)``; that of weights and of their changes keeps its order as the width grows under µP.

    (Yang, Simon and Bernstein 2023, "A spectral condition for feature learning".) A convolution is taken in patch space; of a
    stack the largest block counts.

    Args:
        W: weight or change of a weight, ``[..., k, d]``.

    >>> spectral_ratio(torch.full((1, 4), 0.5))
    2.0
    """
    weight = as_weight(W)
    k, d = weight.shape[-2:]
    return float(weight_spectrum(weight).values[0]) / math.sqrt(k / d)


def nuclear_rank(G: Array) -> float:
    """``‖G‖_*² / ‖G‖_F² = (Σs)² / Σs²``, at most the rank.

    Where that of a layer's gradient exceeds the stable rank of the layer's inputs, a spectral step (Muon) promises a larger
    decrease of the loss than a gradient step (Davis and Drusvyatskiy 2025, "When do spectral gradient updates help in deep
    learning?").

    Args:
        G: matrix ``[..., k, d]``; a stack counts as diagonal blocks.

    Returns:
        Between 1 and ``min(k, d)``; NaN for a zero matrix.

    >>> round(nuclear_rank(torch.diag(torch.tensor([3.0, 1.0]))), 12)
    1.6
    """
    s = unit_scale(weight_spectrum(G).values)
    return float(s.sum().square() / s.square().sum())


def stable_rank_of_gram(C: Array) -> float:
    """``tr C / λ_max(C)``: for ``C = HᵀH`` the stable rank ``‖H‖_F² / ‖H‖₂²`` of features H.

    Args:
        C: positive semidefinite ``[..., d, d]``; a stack counts as diagonal blocks.

    Returns:
        Between 1 and d; NaN for a zero matrix.

    >>> stable_rank_of_gram(torch.diag(torch.tensor([2.0, 1.0])))
    1.5
    """
    values = eigh(unit_scale(to_double(as_matrices(C, "C"))))[0]
    return float(values.clamp(min=0.0).sum() / values.amax()) if float(values.amax()) > 0 else math.nan
