"""CKA, debiased CKA and kernel–target alignment against n×n kernels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gramscope as gs
import reference
from cases import normal, randoms, refused
from gramscope.linalg.moments import moments
from gramscope.measures.similarity import (
    batch_hsic,
    centred_kernel,
    kernel_target_alignment,
    linear_cka,
    linear_cka_from_moments,
)


@given(st.sampled_from([(30, 4, 3), (5, 9, 3), (5, 3, 9), (6, 8, 8)]), st.integers(0, 4))
def test_cka_equals_the_kernel_form(shape: tuple[int, int, int], seed: int) -> None:
    n, d, e = shape
    X, E, Q = randoms((n, d), (n, e), (d, e), seed=seed)
    Y = X @ Q + 0.5 * E + 3
    expected = reference.kernel_alignment(X, Y)
    assert torch.allclose(linear_cka(X, Y), expected, atol=1e-10)
    halves = moments(X[: n // 2], Y[: n // 2]).merge(moments(X[n // 2 :], Y[n // 2 :]))
    assert torch.allclose(linear_cka_from_moments(halves), expected, atol=1e-10)


@pytest.mark.parametrize("n", [30, 3])
def test_cka_of_constant_features_is_nan(n: int) -> None:
    X = torch.full((n, 5), 0.1, dtype=torch.float64)
    assert linear_cka(X, torch.randn(n, 2, generator=torch.Generator().manual_seed(0))).isnan()
    refused(linear_cka, X, X[:2], match="same samples")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_cka_does_not_depend_on_the_scale(scale: float) -> None:
    H = normal(30, 4)
    for Y in (H[:, :2], normal(30, 40, seed=1)):
        assert float(linear_cka(scale * H, scale * Y)) == pytest.approx(float(linear_cka(H, Y)), rel=1e-9)


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
    for constant in (torch.full((1000, 2), 0.1, dtype=torch.float64), torch.tensor([[0.1], [0.1 + 1e-8], [0.1]])):
        assert constant.mean(0).sub(constant).any()  # by rounding alone
        assert not centred_kernel(constant).any()
    assert centred_kernel(torch.tensor([[1.0], [1.001], [1.0]])).any()
    refused(gs.linear_cka, normal(3, 2), normal(3, 2), debiased=True, match="at least 4 samples")


def dense(K: torch.Tensor, ideal: torch.Tensor) -> float:
    return float((K * ideal).sum() / (K.norm() * ideal.norm()))


def test_two_classes_as_plus_and_minus_one() -> None:
    H, labels = normal(30, 4) + 0.3, (torch.arange(30) % 3 == 0).long()  # unbalanced
    sign = 2.0 * labels.double() - 1
    one_hot = torch.nn.functional.one_hot(labels).double()
    expected = dense(H @ H.T, torch.outer(sign, sign))
    assert float(kernel_target_alignment(moments(H, one_hot), labels=True)) == pytest.approx(expected)


def test_more_classes_and_real_targets() -> None:
    H, labels, Y = normal(30, 4) + 0.3, torch.arange(30) % 3, normal(30, 2, seed=1) + 1
    same = labels[:, None] == labels
    ideal = torch.where(same, 1.0, -0.5).double()  # −1/(C − 1) for other classes
    one_hot = torch.nn.functional.one_hot(labels).double()
    assert float(kernel_target_alignment(moments(H, one_hot), True)) == pytest.approx(dense(H @ H.T, ideal))
    assert float(kernel_target_alignment(moments(H, Y), False)) == pytest.approx(dense(H @ H.T, Y @ Y.T))
