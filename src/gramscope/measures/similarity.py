"""Linear CKA against reference features, and the accuracy of a linear probe."""

from __future__ import annotations

from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import Array
from gramscope.linalg.moments import Moments, is_constant, moments
from gramscope.linalg.psd import frobenius
from gramscope.linalg.row_blocks import Rows, check_pair, unit_rows
from gramscope.measures.debiased_cka import debiased_cka
from gramscope.measures.linearity import fit_linear, probe_accuracy


def linear_cka(X: Array, Y: Array, debiased: bool = False) -> Tensor:
    """Linear centred kernel alignment ``‖X̄ᵀȲ‖_F² / (‖X̄ᵀX̄‖_F ‖ȲᵀȲ‖_F)`` (Kornblith et al. 2019).

    Through the d×d matrices when there are more samples than features, else through the n×n ones.

    Args:
        X: features ``[n, d]``.
        Y: reference features ``[n, e]`` of the same samples.
        debiased: remove what chance adds where features are many and samples few
            (:mod:`gramscope.measures.debiased_cka`); :func:`gramscope.cka` does so for all layers of a model.

    Returns:
        A float64 number between 0 and 1 (debiased it may be a little below 0); NaN if one of them is constant.

    >>> import torch
    >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> round(linear_cka(X, 2 * X).item(), 12)
    1.0
    """
    first, second = Rows(X, "X"), Rows(Y, "Y")
    check_pair(first, second)
    first, second = unit_rows(first), unit_rows(second)
    n = first.n
    if debiased:
        return debiased_cka(first, second)
    if n >= max(first.width, second.width):
        return linear_cka_from_moments(moments(first, second))
    mean_a, mean_b = first.mean(), second.mean()
    a, b = first.block(0, n) - mean_a, second.block(0, n) - mean_b
    Ka, Kb = a @ a.mT, b @ b.mT
    if is_constant(n, mean_a, Ka.trace()) or is_constant(n, mean_b, Kb.trace()):
        return Ka.new_full((), float("nan"))
    return (Ka * Kb).sum() / (frobenius(Ka) * frobenius(Kb))


def linear_cka_from_moments(m: Moments) -> Tensor:
    """:func:`linear_cka` between h and y from merged moments, the same for any split into batches.

    >>> import torch
    >>> m = moments(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]]))
    >>> linear_cka_from_moments(m).item()
    1.0
    """
    C_hh = m.require_gram()
    if is_constant(m.n, m.mean_h, C_hh.trace()) or is_constant(m.n, m.mean_y, m.C_yy.trace()):
        return C_hh.new_full((), float("nan"))
    cross = frobenius(m.C_hy)
    return (cross / frobenius(C_hh)) * (cross / frobenius(m.C_yy))


def linear_probe_accuracy(
    H: Array,
    labels: Array,
    H_test: Array | None = None,
    labels_test: Array | None = None,
    ridge: float = 0.0,
    intercept: bool = True,
) -> Tensor:
    """Accuracy of a linear (ridge) classifier on the features: on test data where given, else on its training data.

    >>> import torch
    >>> H = torch.tensor([[0.0], [1.0], [4.0], [5.0]])
    >>> linear_probe_accuracy(H, torch.tensor([0, 0, 1, 1])).item()
    1.0
    """
    if (H_test is None) != (labels_test is None):
        raise InputError("pass both H_test and labels_test, or neither")
    fit = fit_linear(H, labels, ridge, intercept)
    if H_test is None or labels_test is None:
        return probe_accuracy(fit, H, labels)
    return probe_accuracy(fit, H_test, labels_test)
