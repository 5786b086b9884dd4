"""Virtual covariance and what a gradient step does to the Gram, against sums over samples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gramscope as gs
import reference
from cases import randoms, refused
from gramscope.errors import InputError
from gramscope.measures.gram import fle_residual, gram_shift, gram_shift_residual
from gramscope.measures.virtual import AccumulatedShift, virtual_covariance_factors, virtual_trajectory, virtual_update


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.floats(0.01, 3.0), st.integers(0, 3))
def test_shift_equals_the_sum_over_samples(n: int, k: int, d: int, gamma: float, seed: int) -> None:
    W, h, delta = randoms((k, d), (n, d), (n, k), seed=seed)
    D, Sigma = delta.T @ h, delta.T @ delta
    expected = reference.virtual_shift(W, h, delta, gamma)
    shift = gs.virtual_covariance_shift(W, D, Sigma, gamma)
    scale = 1e-11 * (1 + float(expected.abs().max()))
    assert torch.allclose(shift, expected, atol=scale)
    assert torch.allclose(virtual_covariance_factors(W, D, Sigma, gamma).dense(), expected, atol=scale)
    # the Gram's own change differs by the stated residual, exactly
    moved = W - gamma * D
    actual = moved.T @ moved - W.T @ W
    assert torch.allclose(gram_shift(W, D, gamma), actual, atol=100 * scale)
    assert torch.allclose(shift + gram_shift_residual(W, D, Sigma, gamma), actual, atol=100 * scale)
    # Feature Learning Equation
    assert float(fle_residual(W, D, (delta @ W).T @ h)) < 1e-12


def test_stacks_are_matrix_by_matrix() -> None:
    W, h, delta = randoms((2, 3, 4), (2, 7, 4), (2, 7, 3))
    D, Sigma = delta.mT @ h, delta.mT @ delta
    stacked = gs.virtual_covariance_shift(W, D, Sigma, 0.3)
    for i in range(2):
        assert torch.allclose(stacked[i], gs.virtual_covariance_shift(W[i], D[i], Sigma[i], 0.3))
        assert torch.allclose(gs.weight_gram(W)[i], W[i].T @ W[i])


@pytest.mark.parametrize("form", ["dense", "diagonal", "low-rank"])
@pytest.mark.parametrize("stack", [(), (2,)])
def test_accumulated_shift_is_the_sum(form: str, stack: tuple[int, ...]) -> None:
    total = AccumulatedShift(form, rank=12 if form == "low-rank" else None)  # type: ignore[arg-type]
    expected = torch.zeros(*stack, 12, 12, dtype=torch.float64)
    for step in range(5):
        W, D, S = randoms((*stack, 2, 12), (*stack, 2, 12), (*stack, 2, 2), seed=step)
        total.add(W, D, S @ S.mT, 0.2)
        expected += gs.virtual_covariance_shift(W, D, S @ S.mT, 0.2)
    assert total.steps == 5
    assert torch.allclose(total.diagonal(), expected.diagonal(dim1=-2, dim2=-1))
    if form == "diagonal":
        refused(total.dense, match="only the diagonal")
        return
    assert torch.allclose(total.dense(), expected, atol=1e-10)
    if form == "low-rank":
        assert total.discarded < 1e-12
        assert torch.allclose(total.factored().dense(), expected, atol=1e-10)


def test_low_rank_sum_keeps_the_largest_magnitudes_and_bounds_its_error() -> None:
    total, exact = AccumulatedShift("low-rank", rank=4), AccumulatedShift()
    for step in range(6):
        W, D = randoms((3, 10), (3, 10), seed=step)
        for one in (total, exact):
            one.add(W, D, torch.eye(3), 0.5)
    assert 0 < float((total.dense() - exact.dense()).norm()) <= total.discarded
    assert torch.linalg.matrix_rank(total.dense()) == 4


def test_truncation_is_by_magnitude() -> None:
    W, D = torch.eye(3, 6, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
    D[0, 0], D[1, 1], D[2, 2] = 5.0, -1.0, -2.0  # the shift is −2γ of this diagonal
    total = AccumulatedShift("low-rank", rank=2)
    total.add(W, D, torch.zeros(3, 3), 0.5)
    assert total.diagonal().tolist() == pytest.approx([-5.0, 0.0, 2.0, 0.0, 0.0, 0.0])
    assert total.discarded == pytest.approx(1.0)


def test_trajectory_sums_the_gradients() -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    gradients = [x * step for step in range(1, 6)]
    frames = virtual_trajectory(x, iter(gradients), gamma=0.2, every=2)
    assert frames.shape == (3, 4, 2)
    assert torch.allclose(frames[2], -x, atol=1e-6)
    assert torch.equal(frames[0], x)


def test_bad_input_is_named() -> None:
    with pytest.raises(
        InputError, match=r"Sigma has shape \(3, 3\) but W of shape \(2, 3\) needs Sigma of shape \(2, 2\)"
    ):
        gs.virtual_covariance_shift(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 3), 0.1)
    refused(virtual_update, torch.ones(2), torch.ones(3), 0.1, match="must agree")
    refused(virtual_trajectory, torch.ones(2), [torch.ones(2), torch.ones(3)], 0.1, match=r"gradients\[1\] has shape")
    refused(virtual_trajectory, torch.ones(2), [], 0.1, every=0, match="at least 1")
    refused(AccumulatedShift, "low-rank", match="rank=")
    refused(AccumulatedShift, "sparse", match="form must be")
    refused(AccumulatedShift().dense, match="no shift has been added")
    one = AccumulatedShift()
    one.add(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), 0.1)
    refused(one.factored, match="has no factors")
