"""The weight-Gram paper's statements on networks small enough to differentiate by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gramscope as gs
from cases import randoms, refused
from gramscope.measures.linearity import target_rows
from gramscope.measures.surrogate_theory import linearity_bound, moving_target


@pytest.mark.filterwarnings("ignore::gramscope.errors.ResultWarning")
@given(st.integers(2, 9), st.integers(1, 9), st.integers(1, 3), st.sampled_from([0.01, 1.0, 50.0]), st.integers(0, 5))
def test_theorem_2_bounds_target_linearity(n: int, d: int, c: int, ridge: float, seed: int) -> None:
    H, Y = randoms((n, d), (n, c), seed=seed)
    result = linearity_bound(H, Y, ridge)
    G = H @ H.T
    values = torch.linalg.eigvalsh(G + ridge * torch.eye(n, dtype=torch.float64))
    m, M = float(values[0]), float(values[-1])
    S, square = float(torch.trace(Y.T @ G @ Y)), float(Y.square().sum())
    total = float((Y - Y.mean(0)).square().sum())
    expected = 1 - ridge**2 * (M + m) ** 2 * square**2 / (4 * M * m**2 * (S + ridge * square) * total)
    assert result.bound == pytest.approx(expected, rel=1e-8)
    assert result.target_linearity == pytest.approx(float(gs.target_linearity(H, Y, ridge)), abs=1e-12)
    assert result.surrogate == pytest.approx(S, rel=1e-9)
    assert result.slack >= -1e-9 * abs(expected)


def test_the_bound_is_tight_where_kantorovich_is() -> None:
    # G = I and any y: both eigenvalues coincide.
    result = linearity_bound(torch.eye(4), torch.tensor([1.0, 2.0, -1.0, -2.0]), 0.5)
    assert result.slack == pytest.approx(0.0, abs=1e-12)
    refused(linearity_bound, torch.eye(4), torch.arange(4.0), 0.0, match="ridge > 0")


@pytest.mark.parametrize("ridge", [0.0, 0.01])
def test_moving_target_is_a_triangle(ridge: float) -> None:
    H, Y, F = randoms((20, 4), (20, 2), (20, 2))
    beta = torch.linalg.solve(H.T @ H + ridge * torch.eye(4, dtype=torch.float64), H.T @ Y)
    result = moving_target(H, Y, F, ridge)
    assert result.error == pytest.approx(float((Y - F).norm()))
    assert result.features == pytest.approx(float((Y - H @ beta).norm()))
    assert result.chase == pytest.approx(float((H @ beta - F).norm()))
    assert result.slack >= 0
    refused(moving_target, H, Y, F[:, :1], match="columns")
    labels = torch.arange(20) % 2
    assert moving_target(H, labels, F).error == pytest.approx(float((target_rows(labels).block(0, 20) - F).norm()))
