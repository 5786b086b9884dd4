"""The ridge core against scikit-learn and NumPy: many shapes, conditions and splits into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, Ridge

from cases import randoms, refused
from gramscope.errors import RescueWarning
from gramscope.linalg import row_blocks as rows_module
from gramscope.linalg.moments import moments
from gramscope.linalg.ridge import check_ridge, reduce_rows
from gramscope.linalg.ridge_moments import least_squares_from_moments, reduce_moments
from gramscope.linalg.row_blocks import MappedRows, Rows


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
    features = Rows(H, "H")
    reduced = reduce_rows(features, Rows(Y, "Y"), intercept)
    total = ((Y - Y.mean(0)) ** 2).sum()
    assert float(reduced.total) == pytest.approx(total, rel=1e-13)
    assert float(reduced.residual(ridge)) == pytest.approx(expected, abs=1e-12 * total)
    beta = reduced.coefficients(features, ridge).numpy()
    assert np.abs(beta - model.coef_.reshape(c, d).T).max() < 1e-9
    by_moments = reduce_moments(moments(H, Y), intercept)
    assert float(by_moments.residual(ridge)) == pytest.approx(expected, abs=1e-11 * total)
    if not ridge:
        residual, rank, _ = least_squares_from_moments(moments(H, Y), intercept)
        assert float(residual.sum()) == pytest.approx(expected, abs=1e-11 * total)
        assert rank == by_moments.rank == reduced.rank


@pytest.mark.parametrize("digits", [3, 6, 9, 11])
def test_ill_conditioned_features_keep_their_digits(digits: int) -> None:
    # Condition number 10^digits, targets that need the weakest directions: normal equations lose them from 10^7 on.
    rng = np.random.default_rng(digits)
    n, d = 400, 12
    U, V = np.linalg.qr(rng.normal(size=(n, d)))[0], np.linalg.qr(rng.normal(size=(d, d)))[0]
    H = U @ np.diag(np.logspace(0, -digits, d)) @ V.T
    Y = U @ rng.normal(size=(d, 3)) + 0.01 * rng.normal(size=(n, 3))
    beta, residual, rank, _ = np.linalg.lstsq(H, Y, rcond=None)
    reduced = reduce_rows(Rows(H, "H"), Rows(Y, "Y"))
    assert reduced.rank == rank == d
    # Rounding H alone moves its column space by eps times the condition number.
    assert float(reduced.residual(0.0)) == pytest.approx(residual.sum(), abs=2.3e-16 * 10**digits * (Y**2).sum())
    assert np.abs(reduced.coefficients(Rows(H, "H"), 0.0).numpy() - beta).max() < 1e-5 * np.abs(beta).max()


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 1e-9])
def test_moments_see_features_of_mixed_scales_and_large_offsets(intercept: bool, ridge: float) -> None:
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(300, 4))
    H = basis * [1.0, 1e-6, 1e3, 1e-2] + [0.0, 3.0, 1e4, 1e2]
    H = np.concatenate([H, np.full((300, 1), 0.1), np.zeros((300, 1))], 1)  # constants, one of them not a binary number
    Y = basis @ rng.normal(size=(4, 2)) + 0.1 * rng.normal(size=(300, 2)) + 5
    exact = reduce_rows(Rows(H, "H"), Rows(Y, "Y"), intercept)
    for merged in (moments(H, Y), moments(H[:90], Y[:90]).merge(moments(H[90:], Y[90:]))):
        reduced = reduce_moments(merged, intercept)
        assert reduced.rank == exact.rank == 5
        assert float(reduced.residual(ridge)) == pytest.approx(float(exact.residual(ridge)), rel=1e-8)
        residual, rank, _ = least_squares_from_moments(merged, intercept)
        assert rank == 5
        assert float(residual.sum()) == pytest.approx(float(exact.residual(0.0)), rel=1e-8)


def test_moments_announce_directions_they_cannot_see() -> None:
    rng = np.random.default_rng(0)
    H = rng.normal(size=(100, 2)) @ np.array([[1.0, 1.0], [0.0, 1e-9]])  # two features that differ by 1e-9
    Y = (H[:, 1:] - H[:, :1]) * 1e9 + rng.normal(size=(100, 1))
    assert reduce_rows(Rows(H, "H"), Rows(Y, "Y")).rank == 2
    with pytest.warns(RescueWarning, match=r"1 of 2 directions of the features are shorter than 3.0e-08 .* left out"):
        assert reduce_moments(moments(H, Y)).rank == 1
    with pytest.warns(RescueWarning):
        assert least_squares_from_moments(moments(H, Y))[1] == 1
    # A feature that is there twice has nothing to lose.
    assert reduce_moments(moments(H[:, [0, 0]], Y)).rank == 1


@pytest.mark.parametrize("intercept", [False, True])
def test_large_means_do_not_cost_digits(intercept: bool) -> None:
    rng = np.random.default_rng(0)
    H, Y = rng.normal(size=(200, 4)) + 1e5, rng.normal(size=(200, 2)) + 1e6
    model = LinearRegression(fit_intercept=intercept).fit(H, Y)
    expected = ((Y - model.predict(H)) ** 2).sum()
    assert float(reduce_rows(Rows(H, "H"), Rows(Y, "Y"), intercept).residual(0.0)) == pytest.approx(expected, rel=1e-8)


@given(st.integers(2, 40), st.integers(1, 9), st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_any_block_size_gives_the_same(n: int, d: int, rows: int, intercept: bool, seed: int) -> None:
    H, Y = randoms((n, d), (n, 2), seed=seed)
    whole = reduce_rows(Rows(H, "H"), Rows(Y, "Y"), intercept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "BLOCK_ENTRIES", rows * (d + 2))
        split = reduce_rows(Rows(H, "H"), Rows(Y, "Y"), intercept)
    for ridge in (0.0, 0.5):
        assert float(split.residual(ridge)) == pytest.approx(float(whole.residual(ridge)), abs=1e-10)
        assert torch.allclose(
            split.coefficients(Rows(H, "H"), ridge), whole.coefficients(Rows(H, "H"), ridge), rtol=1e-7, atol=1e-9
        )
    assert split.rank == whole.rank


def test_features_of_zeros_explain_nothing() -> None:
    Y = torch.tensor([[1.0], [-1.0], [2.0]])
    reduced = reduce_rows(Rows(torch.zeros(3, 2), "H"), Rows(Y, "Y"))
    assert reduced.rank == 0
    assert float(reduced.residual(0.0)) == pytest.approx(float(Y.square().sum()))


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
def test_least_squares_from_moments_equal_those_from_rows(n: int, d: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    H, Y = rng.normal(size=(n, d)) + 0.7, rng.normal(size=(n, 2)) + 1.5
    if kind == "centred":
        H -= H.mean(0)
    elif kind == "constant":
        H[:, 0] = 0.1
    elif kind == "dead":
        H[:, 0] = 0.0
    for intercept in (False, True):
        exact = reduce_rows(Rows(H, "H"), Rows(Y, "Y"), intercept)
        residual, rank, _ = least_squares_from_moments(moments(H, Y), intercept)
        assert float(residual.sum()) == pytest.approx(float(exact.residual(0.0)), abs=1e-8 * (Y**2).sum())
        assert rank == exact.rank
