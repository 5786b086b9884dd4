"""The ridge core against scikit-learn and NumPy: many shapes, conditions and splits into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge

from cases import randoms, refused
from gramscope.linalg import arrays as rows_module
from gramscope.linalg.arrays import MappedRows, Rows
from gramscope.linalg.moments import moments
from gramscope.linalg.ridge import check_ridge, fit_moments, fit_rows


def problem(n: int, d: int, c: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    H = rng.normal(size=(n, d)) + 0.3
    Y = H[:, : min(d, 3)] @ rng.normal(size=(min(d, 3), c)) + rng.normal(size=(n, c)) + 2
    if d > 2:
        H[:, 1] = H[:, 0]
    return H, Y


@pytest.mark.parametrize(("n", "d", "c"), [(120, 7, 3), (30, 90, 4), (20, 20, 2), (20, 19, 2), (21, 20, 1), (50, 1, 1)])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 10.0])
def test_fit_equals_scikit_learn(n: int, d: int, c: int, intercept: bool, ridge: float) -> None:
    H, Y = problem(n, d, c)
    if ridge:
        model = Ridge(ridge, fit_intercept=intercept, solver="svd").fit(H, Y)
    else:
        model = LinearRegression(fit_intercept=intercept).fit(H, Y)
    expected = ((Y - model.predict(H).reshape(Y.shape)) ** 2).sum()
    total = ((Y - Y.mean(0)) ** 2).sum()
    centred = H - H.mean(0) if intercept else H
    values = np.linalg.svd(centred, compute_uv=False)
    values = values[values > 1e-10 * values[0]]
    beta = model.coef_.reshape(c, d).T
    for fit in (fit_rows(Rows(H, "H"), Rows(Y, "Y"), ridge, intercept), fit_moments(moments(H, Y), ridge, intercept)):
        assert float(fit.totals.sum()) == pytest.approx(total, rel=1e-13)
        assert float(fit.residuals.sum()) == pytest.approx(expected, abs=1e-11 * total)
        assert float(fit.explained()) == pytest.approx(1 - expected / total, abs=1e-11)
        assert fit.hat_trace == pytest.approx((values**2 / (values**2 + ridge)).sum() + intercept, abs=1e-9)
        assert fit.rank == len(values) + intercept or ridge
        assert np.abs(fit.beta.numpy() - beta).max() < 1e-9 * max(1, np.abs(beta).max())


@given(
    st.sampled_from([(40, 5), (300, 80), (12, 40), (70, 90)]),
    st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    st.booleans(),
    st.sampled_from([1.0, 1e-4, 1e3]),
    st.integers(0, 3),
)
def test_float32_features_are_fitted_as_in_float64(
    shape: tuple[int, int], ridge: float, intercept: bool, scale: float, seed: int
) -> None:
    H, Y = randoms(shape, (shape[0], 2), seed=seed)
    H = (scale * (H + 0.3)).float()
    fit = fit_rows(Rows(H, "H"), Rows(Y, "Y"), ridge, intercept)
    exact = fit_rows(Rows(H.double(), "H"), Rows(Y, "Y"), ridge, intercept)
    assert torch.allclose(fit.residuals, exact.residuals, rtol=1e-9, atol=1e-11 * float(Y.square().sum()))
    assert fit.rank == exact.rank or ridge
    assert fit.hat_trace == pytest.approx(exact.hat_trace, rel=1e-9)


@pytest.mark.parametrize("digits", [3, 6, 9, 11])
def test_ill_conditioned_features_keep_their_digits(digits: int) -> None:
    # Condition number 10^digits, targets that need the weakest directions: normal equations lose them from 10^7 on.
    rng = np.random.default_rng(digits)
    n, d = 400, 12
    U, V = np.linalg.qr(rng.normal(size=(n, d)))[0], np.linalg.qr(rng.normal(size=(d, d)))[0]
    H = U @ np.diag(np.logspace(0, -digits, d)) @ V.T
    Y = U @ rng.normal(size=(d, 3)) + 0.01 * rng.normal(size=(n, 3))
    beta, residual, rank, _ = np.linalg.lstsq(H, Y, rcond=None)
    fit = fit_rows(Rows(H, "H"), Rows(Y, "Y"))
    assert fit.rank == rank == d
    # Rounding H alone moves its column space by eps times the condition number.
    assert float(fit.residuals.sum()) == pytest.approx(residual.sum(), abs=2.3e-16 * 10**digits * (Y**2).sum())
    assert np.abs(fit.beta.numpy() - beta).max() < 1e-5 * np.abs(beta).max()


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 1e-9])
def test_moments_see_features_of_mixed_scales_and_large_offsets(intercept: bool, ridge: float) -> None:
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(300, 4))
    H = basis * [1.0, 1e-6, 1e3, 1e-2] + [0.0, 3.0, 1e4, 1e2]
    H = np.concatenate([H, np.full((300, 1), 0.1), np.zeros((300, 1))], 1)  # constants, one of them not a binary number
    Y = basis @ rng.normal(size=(4, 2)) + 0.1 * rng.normal(size=(300, 2)) + 5
    exact = fit_rows(Rows(H, "H"), Rows(Y, "Y"), ridge, intercept)
    for merged in (moments(H, Y), moments(H[:90], Y[:90]).merge(moments(H[90:], Y[90:]))):
        fit = fit_moments(merged, ridge, intercept)
        assert fit.rank == 5 or ridge
        assert float(fit.residuals.sum()) == pytest.approx(float(exact.residuals.sum()), rel=1e-8)


def test_moments_count_directions_they_cannot_see_as_uncertain() -> None:
    rng = np.random.default_rng(0)
    H = rng.normal(size=(100, 2)) @ np.array([[1.0, 1.0], [0.0, 1e-9]])  # two features that differ by 1e-9
    Y = (H[:, 1:] - H[:, :1]) * 1e9 + rng.normal(size=(100, 1))
    exact, fit = fit_rows(Rows(H, "H"), Rows(Y, "Y")), fit_moments(moments(H, Y))
    assert (exact.rank, fit.rank) == (2, 1)
    assert fit.uncertain >= float(fit.residuals.sum() - exact.residuals.sum())
    # A feature that is there twice has nothing to lose.
    twice = fit_moments(moments(H[:, [0, 0]], Y))
    assert twice.rank == 1
    assert twice.uncertain < 1e-9


@given(st.integers(2, 40), st.integers(1, 9), st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_any_block_size_gives_the_same(n: int, d: int, rows: int, intercept: bool, seed: int) -> None:
    H, Y = randoms((n, d), (n, 2), seed=seed)
    for ridge in (0.0, 0.5):
        whole = fit_rows(Rows(H, "H"), Rows(Y, "Y"), ridge, intercept)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows_module, "BLOCK_ENTRIES", rows * (d + 2))
            split = fit_rows(Rows(H, "H"), Rows(Y, "Y"), ridge, intercept)
        assert float(split.residuals.sum()) == pytest.approx(float(whole.residuals.sum()), abs=1e-10)
        assert torch.allclose(split.beta, whole.beta, rtol=1e-7, atol=1e-9)
        assert split.rank == whole.rank


def test_targets_far_from_zero_keep_their_digits() -> None:
    H, Y = randoms((200, 80), (200, 2))
    H, Y = torch.cat([torch.ones(200, 1, dtype=torch.float64), H], 1), Y + 1e6
    exact, fit = fit_rows(Rows(H, "H"), Rows(Y, "Y")), fit_moments(moments(H, Y))
    assert torch.allclose(fit.residuals, exact.residuals, rtol=1e-7)


def test_directions_little_longer_than_the_rounding_of_features_are_uncertain() -> None:
    H, y, noise = randoms((300, 2), (300, 1), (300, 1))
    H = torch.stack([H[:, 0], H[:, 0] + 4e-6 * y[:, 0]], 1)
    for eps, expected in ((2.2e-16, False), (1.2e-7, True)):
        fit = fit_moments(moments(H, y + 0.3 * noise), eps=eps)
        assert (fit.uncertain > 1e-3 * float(fit.totals.sum())) == expected


@pytest.mark.parametrize("intercept", [False, True])
def test_many_features_that_are_nearly_dependent_are_right_or_announced(intercept: bool) -> None:
    H, y, noise = randoms((300, 80), (300, 1), (300, 1))
    H[:, 1] = H[:, 0] + 1e-6 * y[:, 0]
    exact = fit_rows(Rows(H, "H"), Rows(y + noise, "Y"), 0.0, intercept)
    fit = fit_moments(moments(H, y + noise), 0.0, intercept)
    difference = abs(float(fit.residuals.sum() - exact.residuals.sum()))
    assert difference <= fit.uncertain + 1e-9 * float(fit.totals.sum())
    rounded = torch.cat([H[:, :1], H[:, :1] + 0.05 * y, H[:, 2:]], 1).bfloat16()
    fit = fit_rows(Rows(rounded, "H"), Rows(y + noise, "Y"), 0.0, intercept)
    assert fit.uncertain > fit.limit * float(fit.totals.sum())


def test_samples_that_differ_by_the_rounding_of_features_count_once() -> None:
    H, Y = randoms((20, 90), (20, 1))
    H = H.float()
    H[1] = torch.nextafter(H[0], H[2])
    assert fit_rows(Rows(H, "H"), Rows(Y, "Y")).rank == 19
    assert fit_rows(Rows(H.double(), "H"), Rows(Y, "Y")).rank == 20


def test_features_of_zeros_explain_nothing() -> None:
    Y = torch.tensor([[1.0], [-1.0], [2.0]])
    fit = fit_rows(Rows(torch.zeros(3, 2), "H"), Rows(Y, "Y"))
    assert fit.rank == 0
    assert float(fit.residuals.sum()) == pytest.approx(float(Y.square().sum()))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_ridges_are_refused(value: float) -> None:
    refused(check_ridge, value, match="ridge must be")


def test_mapped_rows_are_the_product() -> None:
    H, W = randoms((9, 4), (3, 4))
    mapped = MappedRows(Rows(H, "H"), W, H.mean(0))
    expected = (H - H.mean(0)) @ W.T
    assert torch.allclose(torch.cat(list(mapped.blocks())), expected)
    assert torch.allclose(mapped.columns(1, 3), expected[:, 1:3])
    assert torch.allclose(mapped.mean(), torch.zeros(3, dtype=torch.float64), atol=1e-15)


@given(
    st.integers(2, 12), st.integers(1, 8), st.sampled_from(["plain", "centred", "constant", "dead"]), st.integers(0, 5)
)
def test_fits_from_moments_equal_those_from_rows(n: int, d: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    H, Y = rng.normal(size=(n, d)) + 0.7, rng.normal(size=(n, 2)) + 1.5
    if kind == "centred":
        H -= H.mean(0)
    elif kind == "constant":
        H[:, 0] = 0.1
    elif kind == "dead":
        H[:, 0] = 0.0
    for intercept in (False, True):
        exact = fit_rows(Rows(H, "H"), Rows(Y, "Y"), 0.0, intercept)
        fit = fit_moments(moments(H, Y), 0.0, intercept)
        assert float(fit.residuals.sum()) == pytest.approx(float(exact.residuals.sum()), abs=1e-8 * (Y**2).sum())
        assert fit.rank == exact.rank
