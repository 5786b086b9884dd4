from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gramscope as gs
from cases import normal, refused
from gramscope.measures.debiased_cka import batch_hsic, centred_kernel


def song(X: Tensor, Y: Tensor) -> float:
    """HSIC₁ of Song et al. (2012) with the kernels of uncentred features, their diagonals zero."""
    n, K, L = len(X), X @ X.T, Y @ Y.T
    K, L = K - K.diag().diag(), L - L.diag().diag()
    one = torch.ones(n, dtype=X.dtype)
    middle = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    return float(((K @ L).trace() + middle - 2 / (n - 2) * (one @ K @ L @ one)) / (n * (n - 3)))


def song_cka(X: Tensor, Y: Tensor) -> float:
    return song(X, Y) / math.sqrt(song(X, X) * song(Y, Y))


@pytest.mark.parametrize(("n", "d"), [(40, 6), (12, 30), (4, 3)])
def test_the_formula_of_zero_diagonals(n: int, d: int) -> None:
    X = normal(n, d) + 3
    Y = X[:, :3] + 0.1 * normal(n, 3, seed=1)
    assert float(gs.linear_cka(X, Y, debiased=True)) == pytest.approx(song_cka(X, Y), rel=1e-8)
    assert float(batch_hsic(centred_kernel(X)[None], centred_kernel(Y)[None])) == pytest.approx(song(X, Y), rel=1e-8)


def test_many_independent_features_are_not_alike() -> None:
    X, Y = normal(50, 400), normal(50, 400, seed=1)
    assert float(gs.linear_cka(X, Y)) > 0.8
    assert abs(float(gs.linear_cka(X, Y, debiased=True))) < 0.15


def test_constant_features_and_few_samples() -> None:
    assert gs.linear_cka(torch.full((9, 2), 0.1), normal(9, 2), debiased=True).isnan()
    assert not centred_kernel(torch.full((9, 2), 0.1)).any()
    refused(gs.linear_cka, normal(3, 2), normal(3, 2), debiased=True, match="at least 4 samples")
