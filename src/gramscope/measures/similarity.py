"""How alike features are: linear CKA, debiased CKA and kernel–target alignment.

CKA is large by chance where there are many features and few samples. The unbiased estimate of HSIC removes that (Song et
al. 2012; for CKA Nguyen, Raghu and Kornblith 2021). For a linear kernel of features that are centred over the n samples, with
``a_i = ‖x_i‖²`` and ``b_i = ‖y_i‖²``,

    n(n − 3) HSIC₁(X, Y) = ‖XᵀY‖_F² − n/(n − 2) Σ a_i b_i + Σ a_i Σ b_i / ((n − 1)(n − 2)),
    CKA = HSIC₁(X, Y) / √(HSIC₁(X, X) HSIC₁(Y, Y)).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array, MappedRows, Rows, check_pair, to_double
from gramscope.linalg.moments import Moments, is_constant
from gramscope.measures.linearity import square_inner

#: samples that the unbiased estimate needs
FEWEST = 4


def linear_cka(X: Array, Y: Array, debiased: bool = False) -> Tensor:
    """Linear centred kernel alignment ``‖X̄ᵀȲ‖_F² / (‖X̄ᵀX̄‖_F ‖ȲᵀȲ‖_F)`` (Kornblith et al. 2019).

    Through the d×d matrices when there are more samples than features, else through the n×n ones.

    Args:
        X: features ``[n, d]``.
        Y: reference features ``[n, e]`` of the same samples.
        debiased: remove what chance adds where features are many and samples few
            (:mod:`gramscope.measures.similarity`); :func:`gramscope.cka` does so for all layers of a model.

    Returns:
        A float64 number between 0 and 1; NaN if one of them is constant. Debiased it is 0 on average for independent features
        (it may be negative), and NaN also where features are too noisy for their own HSIC to be positive.

    >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> round(linear_cka(X, 2 * X).item(), 12)
    1.0
    """
    first, second = Rows(X, "X"), Rows(Y, "Y")
    check_pair(first, second)
    n = first.n
    if debiased and n < FEWEST:
        raise InputError(f"debiased CKA needs at least {FEWEST} samples, got {n}")
    sides = []
    for rows in (first, second):
        mean = rows.mean()
        centred = MappedRows(rows, shift=mean)
        sizes = torch.cat([block.square().sum(1) for block in centred.blocks()])
        if is_constant(n, mean, sizes.sum()):
            return sizes.new_full((), float("nan"))
        sides.append((centred, sizes))

    def hsic(i: int, j: int) -> Tensor:
        (x, a), (y, b) = sides[i], sides[j]
        inner = square_inner(x, y)
        return unbiased_hsic(inner, a.sum(), b.sum(), a @ b, n) if debiased else inner

    return hsic(0, 1) / (hsic(0, 0).sqrt() * hsic(1, 1).sqrt())  # debiased, the root of a negative number is NaN


def linear_cka_from_moments(m: Moments) -> Tensor:
    """:func:`linear_cka` between h and y from merged moments, the same for any split into batches.

    >>> from gramscope.linalg.moments import moments
    >>> m = moments(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]]))
    >>> linear_cka_from_moments(m).item()
    1.0
    """
    C_hh = m.require_gram()
    if is_constant(m.n, m.mean_h, C_hh.trace()) or is_constant(m.n, m.mean_y, m.C_yy.trace()):
        return C_hh.new_full((), float("nan"))
    cka: Tensor = (m.C_hy.norm() / C_hh.norm()) * (m.C_hy.norm() / m.C_yy.norm())
    return cka


def batch_hsic(left: Tensor, right: Tensor) -> Tensor:
    """``HSIC₁`` of all pairs of kernels of one batch, ``[l, m]``.

    Args:
        left: centred linear kernels ``XXᵀ [l, n, n]``.
        right: the same of others, ``[m, n, n]``.
    """
    n = left.shape[-1]
    a, b = (kernels.diagonal(dim1=-2, dim2=-1) for kernels in (left, right))
    return unbiased_hsic(
        left.flatten(1) @ right.flatten(1).mT, a.sum(1, keepdim=True), b.sum(1, keepdim=True).mT, a @ b.mT, n
    )


def centred_kernel(rows: Tensor) -> Tensor:
    """``XXᵀ [n, n]`` of centred rows ``[n, d]``, in float64; zero for constant rows."""
    x = to_double(rows)
    centred = x - x.mean(0)
    if float(centred.abs().amax()) <= 8 * torch.finfo(rows.dtype).eps * float(x.abs().amax()):
        return x.new_zeros(x.shape[0], x.shape[0])
    return centred @ centred.mT


def unbiased_hsic(inner: Tensor, sum_a: Tensor, sum_b: Tensor, sum_ab: Tensor, n: int) -> Tensor:
    """``HSIC₁`` from ``‖XᵀY‖²``, ``Σa_i``, ``Σb_i`` and ``Σa_ib_i`` of features centred over n samples."""
    return (inner - n / (n - 2) * sum_ab + sum_a * sum_b / ((n - 1) * (n - 2))) / (n * (n - 3))


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

    >>> from gramscope.linalg.moments import moments
    >>> y = torch.tensor([[1.0], [-1.0], [-1.0]])
    >>> round(kernel_target_alignment(moments(3 * y, y), labels=False).item(), 12)
    1.0
    """
    if labels:
        m = replace(m, mean_y=m.mean_y - 1 / m.mean_y.numel())
    alignment: Tensor = m.HtY.square().sum() / (m.HtH.norm() * m.YtY.norm())
    return alignment
