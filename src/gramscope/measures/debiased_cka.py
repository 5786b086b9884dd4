"""Linear CKA without its bias: from whole arrays, or averaged over batches in memory that does not grow with the data.

CKA is large by chance where there are many features and few samples. The unbiased estimate of HSIC removes that (Song et
al. 2012; for CKA Nguyen, Raghu and Kornblith 2021). For a linear kernel of features that are centred over the n samples, with
``a_i = ‖x_i‖²`` and ``b_i = ‖y_i‖²``,

    n(n − 3) HSIC₁(X, Y) = ‖XᵀY‖_F² − n/(n − 2) Σ a_i b_i + Σ a_i Σ b_i / ((n − 1)(n − 2)),
    CKA = HSIC₁(X, Y) / √(HSIC₁(X, X) HSIC₁(Y, Y)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import to_double
from gramscope.linalg.row_blocks import Rows, spans

#: samples that the unbiased estimate needs
FEWEST = 4


def debiased_cka(first: Rows, second: Rows) -> Tensor:
    """Debiased linear CKA of features of the same n samples, through d×e or, for n < d, n×n matrices.

    Args:
        first: ``[n, d]``.
        second: ``[n, e]``.

    Returns:
        A float64 number up to about 1, 0 on average for independent features (it may be negative); NaN where one of them
        is constant or too noisy for its own HSIC to be positive.

    >>> generator = torch.Generator().manual_seed(0)
    >>> X = Rows(torch.randn(20, 50, generator=generator), "X")
    >>> round(debiased_cka(X, X).item(), 12)
    1.0
    """
    n = first.n
    if n < FEWEST:
        raise InputError(f"debiased CKA needs at least {FEWEST} samples, got {n}")
    a, b = _square_norms(first), _square_norms(second)
    pairs = ((first, second, a, b), (first, first, a, a), (second, second, b, b))
    return _ratio(*(unbiased_hsic(_square_inner(x, y), s.sum(), t.sum(), s @ t, n) for x, y, s, t in pairs))


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


def _ratio(cross: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return cross / (first.sqrt() * second.sqrt())  # the root of a negative number is NaN


def _square_norms(rows: Rows) -> Tensor:
    mean = rows.mean()
    return torch.cat([(rows.block(i, j) - mean).square().sum(1) for i, j in spans(rows.n, rows.width)])


def _square_inner(first: Rows, second: Rows) -> Tensor:
    """``‖XᵀY‖_F²`` of centred rows."""
    n, mean_a, mean_b = first.n, first.mean(), second.mean()
    if n >= max(first.width, second.width):
        blocks = spans(n, first.width + second.width)
        total = sum((first.block(i, j) - mean_a).mT @ (second.block(i, j) - mean_b) for i, j in blocks)
        assert isinstance(total, Tensor)
        return total.square().sum()
    x, y = first.block(0, n) - mean_a, second.block(0, n) - mean_b
    return ((x @ x.mT) * (y @ y.mT)).sum()
