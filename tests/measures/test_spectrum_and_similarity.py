"""Ranks, CKA and probes against NumPy, scikit-learn and n×n kernels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from torch import Tensor

import reference
from gramscope.errors import InputError
from gramscope.linalg.moments import merge, moments
from gramscope.measures.similarity import linear_cka, linear_cka_from_moments, linear_probe_accuracy
from gramscope.measures.spectrum import feature_spectrum, feature_spectrum_from_moments, weight_spectrum


def randoms(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 3))
def test_weight_spectrum_equals_numpy(k: int, d: int, seed: int) -> None:
    (W,) = randoms((k, d), seed=seed)
    s = np.linalg.svd(W.numpy(), compute_uv=False)
    p = s / s.sum()
    result = weight_spectrum(W)
    assert np.allclose(result.values.numpy(), s)
    assert result.rank == min(k, d)
    assert result.effective_rank == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-10)
    assert result.stable_rank == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-10)
    assert result.participation_ratio == pytest.approx((s**2).sum() ** 2 / (s**4).sum(), rel=1e-10)


def test_stacked_weights_are_diagonal_blocks() -> None:
    (W,) = randoms((3, 2, 4))
    assert torch.allclose(weight_spectrum(W).values, weight_spectrum(torch.block_diag(*W)).values)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("n", [40, 4])
def test_feature_spectrum(n: int, center: bool) -> None:
    (H,) = randoms((n, 6))
    H = H + 2
    h = H - H.mean(0) if center else H
    expected = torch.linalg.svdvals(h)
    result = feature_spectrum(H, center)
    assert torch.allclose(result.values, expected, atol=1e-12)
    assert result.rank == min(6, n - center)
    by_moments = feature_spectrum_from_moments(moments(H, H[:, :1]), center)
    assert torch.allclose(by_moments.values[: min(n, 6)], expected, atol=1e-6)
    assert by_moments.participation_ratio == pytest.approx(result.participation_ratio, rel=1e-9)
    assert by_moments.rank == result.rank


def test_nothing_has_no_rank() -> None:
    result = weight_spectrum(torch.zeros(3, 2))
    assert result.rank == 0
    assert math.isnan(result.effective_rank)


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
    with pytest.raises(InputError, match="same samples"):
        linear_cka(X, X[:2])


def test_probe_accuracy_equals_least_squares(generator: torch.Generator) -> None:
    H = torch.randn(120, 4, dtype=torch.float64, generator=generator)
    labels = (H @ torch.randn(4, 3, dtype=torch.float64, generator=generator)).argmax(1)
    one_hot = torch.nn.functional.one_hot(labels).numpy()
    model = LinearRegression().fit(H[:80], one_hot[:80])
    for rows, arguments in ((slice(80), ()), (slice(80, None), (H[80:], labels[80:]))):
        expected = (model.predict(H[rows]).argmax(1) == labels[rows].numpy()).mean()
        assert float(linear_probe_accuracy(H[:80], labels[:80], *arguments)) == pytest.approx(expected)
    with pytest.raises(InputError, match="both H_test and labels_test"):
        linear_probe_accuracy(H, labels, H)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_ranks_and_cka_do_not_depend_on_the_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    for spectrum in (weight_spectrum, feature_spectrum):
        plain, scaled = spectrum(H), spectrum(scale * H)
        assert scaled.effective_rank == pytest.approx(plain.effective_rank, rel=1e-9)
        assert scaled.stable_rank == pytest.approx(plain.stable_rank, rel=1e-9)
        assert scaled.participation_ratio == pytest.approx(plain.participation_ratio, rel=1e-9)
        assert scaled.rank == plain.rank
    assert weight_spectrum(1e-140 * H).participation_ratio == pytest.approx(weight_spectrum(H).participation_ratio)
    for Y in (H[:, :2], torch.randn(30, 40, generator=generator, dtype=torch.float64)):
        assert float(linear_cka(scale * H, scale * Y)) == pytest.approx(float(linear_cka(H, Y)), rel=1e-9)
