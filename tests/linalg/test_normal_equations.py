"""Refined normal equations against float64 least squares of the whole arrays."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cases import randoms
from gramscope.linalg import normal_equations
from gramscope.linalg.normal_equations import fit_normal_equations
from gramscope.linalg.row_blocks import Rows
from gramscope.measures.linearity import target_linearity


def dense(H: Tensor, Y: Tensor, ridge: float, intercept: bool) -> tuple[Tensor, float]:
    """Residuals and degrees of freedom from the singular values."""
    H, Y = H.double(), Y.double()
    if intercept:
        H, Y = H - H.mean(0), Y - Y.mean(0)
    U, s, _ = torch.linalg.svd(H, full_matrices=False)
    share = s**2 / (s**2 + ridge)
    residual = Y - U @ (share[:, None] * (U.mT @ Y))
    return residual.square().sum(0), float(share.sum()) + intercept


@given(
    st.sampled_from([(40, 5), (300, 30), (12, 40), (30, 90)]),
    st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1.0, 1e-4, 1e3]),
    st.integers(0, 3),
)
def test_equals_the_fit_in_float64(
    shape: tuple[int, int], ridge: float, intercept: bool, dtype: torch.dtype, scale: float, seed: int
) -> None:
    H, Y = randoms(shape, (shape[0], 2), seed=seed)
    H, Y = (scale * (H + 0.3)).to(dtype), Y.to(dtype)
    fit = fit_normal_equations(Rows(H, "H"), Rows(Y, "Y"), ridge, intercept)
    if intercept and ridge == 0 and shape[0] < shape[1]:
        assert fit is None
        return
    if fit is None:
        assert ridge < 1e-3 * scale**2 * shape[0]  # hardly any ridge on nearly dependent features
        return
    residuals, freedom = dense(H, Y, ridge, intercept)
    assert torch.allclose(fit.residuals, residuals, rtol=1e-9, atol=1e-11 * float(Y.double().square().sum()))
    assert fit.rank == min(shape[0], shape[1] + intercept)
    if shape[0] < shape[1]:
        assert fit.freedom == pytest.approx(freedom, abs=0.1 * shape[0])


def test_refinement_removes_the_rounding_of_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    H, Y = randoms((2000, 40), (2000, 3))
    H = H.float() @ torch.linspace(1, 0.05, 40).diag() + 0.5
    expected, _ = dense(H, Y, 0.0, False)
    fit = fit_normal_equations(Rows(H, "H"), Rows(Y, "Y"), 0.0)
    assert fit is not None
    assert torch.allclose(fit.residuals, expected, rtol=1e-13)
    monkeypatch.setattr(normal_equations, "CONVERGED", 1.0)  # the first solution, corrected once
    monkeypatch.setattr(normal_equations, "single_products_are_exact", lambda device: False)
    in_double = fit_normal_equations(Rows(H, "H"), Rows(Y, "Y"), 0.0)
    assert in_double is not None
    assert torch.allclose(in_double.residuals, expected, rtol=1e-13)


@pytest.mark.parametrize("kind", ["dependent", "nearly dependent", "constant", "huge", "tiny"])
def test_no_result_where_directions_are_in_doubt(kind: str) -> None:
    H, Y = randoms((200, 6), (200, 2))
    H = H.float()
    if kind == "dependent":
        H[:, 5] = H[:, 0] + H[:, 1]
    elif kind == "nearly dependent":
        H[:, 5] = H[:, 0] + 1e-6 * H[:, 1]
    elif kind == "constant":
        H[:, 5] = 0.0
    else:
        H = H.double() * (1e200 if kind == "huge" else 1e-200)
    intercept = kind == "constant"
    assert fit_normal_equations(Rows(H, "H"), Rows(Y, "Y"), 0.0, intercept) is None
    if kind in ("dependent", "constant"):
        expected, _ = dense(H[:, :5], Y, 0.0, intercept)
        total = float((Y - Y.mean(0)).square().sum())
        found = float(target_linearity(H, Y, intercept=intercept))
        assert found == pytest.approx(1 - float(expected.sum()) / total, abs=1e-9)


def test_offsets_of_the_features_do_not_matter_with_an_intercept() -> None:
    H, Y = randoms((500, 4), (500, 2))
    for offset in (0.0, 10.0, 1e4, 1e7):
        found = float(target_linearity(H + offset, Y, intercept=True))
        assert math.isclose(
            found, float(target_linearity(H, Y, intercept=True)), abs_tol=1e-8 if offset > 1e4 else 1e-11
        )
