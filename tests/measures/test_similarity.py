"""CKA and probes against scikit-learn and n×n kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression

import reference
from cases import normal, randoms, refused
from gramscope.linalg.moments import merge, moments
from gramscope.measures.similarity import linear_cka, linear_cka_from_moments, linear_probe_accuracy


@given(st.sampled_from([(30, 4, 3), (5, 9, 3), (5, 3, 9), (6, 8, 8)]), st.integers(0, 4))
def test_cka_equals_the_kernel_form(shape: tuple[int, int, int], seed: int) -> None:
    n, d, e = shape
    X, E, Q = randoms((n, d), (n, e), (d, e), seed=seed)
    Y = X @ Q + 0.5 * E + 3
    expected = reference.kernel_alignment(X, Y)
    assert torch.allclose(linear_cka(X, Y), expected, atol=1e-10)
    halves = merge(moments(X[: n // 2], Y[: n // 2]), moments(X[n // 2 :], Y[n // 2 :]))
    assert torch.allclose(linear_cka_from_moments(halves), expected, atol=1e-10)


@pytest.mark.parametrize("n", [30, 3])
def test_cka_of_constant_features_is_nan(n: int) -> None:
    X = torch.full((n, 5), 0.1, dtype=torch.float64)
    assert linear_cka(X, torch.randn(n, 2, generator=torch.Generator().manual_seed(0))).isnan()
    refused(linear_cka, X, X[:2], match="same samples")


def test_probe_accuracy_equals_least_squares(generator: torch.Generator) -> None:
    H = torch.randn(120, 4, dtype=torch.float64, generator=generator)
    labels = (H @ torch.randn(4, 3, dtype=torch.float64, generator=generator)).argmax(1)
    one_hot = torch.nn.functional.one_hot(labels).numpy()
    model = LinearRegression().fit(H[:80], one_hot[:80])
    for rows, arguments in ((slice(80), ()), (slice(80, None), (H[80:], labels[80:]))):
        expected = (model.predict(H[rows]).argmax(1) == labels[rows].numpy()).mean()
        assert float(linear_probe_accuracy(H[:80], labels[:80], *arguments)) == pytest.approx(expected)
    refused(linear_probe_accuracy, H, labels, H, match="both H_test and labels_test")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_cka_does_not_depend_on_the_scale(scale: float) -> None:
    H = normal(30, 4)
    for Y in (H[:, :2], normal(30, 40, seed=1)):
        assert float(linear_cka(scale * H, scale * Y)) == pytest.approx(float(linear_cka(H, Y)), rel=1e-9)
