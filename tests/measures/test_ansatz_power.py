from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import fractional_matrix_power
from scipy.optimize import minimize_scalar
from torch import nn

import gramscope as gs
from cases import normal, randoms
from gramscope.linalg.psd import random_orthogonal
from gramscope.measures.ansatz_power import fitted_power, power_alignment


def dense(W: torch.Tensor, K: torch.Tensor, power: float) -> float:
    A = (W.T @ W).numpy()
    values, vectors = np.linalg.eigh((W.T @ K @ W).numpy())
    raised = np.where(values > 1e-12 * values[-1], np.maximum(values, 1e-300) ** power, 0.0)
    B = (vectors * raised) @ vectors.T
    return float((A * B).sum() / (np.linalg.norm(A) * np.linalg.norm(B)))


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5)])
def test_powers_and_the_best_of_them(shape: tuple[int, int]) -> None:
    W, J = randoms(shape, (30, shape[0]))
    K = J.T @ J * torch.outer(*2 * [torch.arange(1.0, shape[0] + 1).double()])
    for power in (0.25, 1.0, 2.0):
        assert power_alignment(W, K, power) == pytest.approx(dense(W, K, power), rel=1e-9)
    if shape == (7, 3):
        B = fractional_matrix_power((W.T @ K @ W).numpy(), 0.25)
        A = (W.T @ W).numpy()
        assert power_alignment(W, K, 0.25) == pytest.approx((A * B).sum() / (np.linalg.norm(A) * np.linalg.norm(B)))
    best = minimize_scalar(lambda p: -dense(W, K, p), bounds=(1 / 64, 4), method="bounded", options={"xatol": 1e-9})
    fit = fitted_power(W, K)
    assert fit.alignment == pytest.approx(-best.fun, rel=1e-9)
    assert fit.alignment >= dense(W, K, 1.0) - 1e-12
    assert fitted_power(1e-100 * W, 1e100 * K).power == pytest.approx(fit.power, rel=1e-4)


def test_a_stack_counts_as_diagonal_blocks() -> None:
    W, J = normal(2, 3, 4), normal(2, 9, 3, seed=1)
    K = J.mT @ J
    whole = power_alignment(torch.block_diag(*W), torch.block_diag(*K), 0.5)
    assert power_alignment(W, K, 0.5) == pytest.approx(whole)


def test_balanced_linear_nets_have_power_one_over_depth() -> None:
    """With W₃W₂W₁ balanced, the AGOP below layer ℓ is (W_ℓᵀW_ℓ)^(4−ℓ)."""
    bases = [random_orthogonal(5, torch.Generator().manual_seed(i)) for i in range(4)]
    s = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.2], dtype=torch.float64)
    net = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3))).double()
    for layer, low, high in zip(net, bases, bases[1:], strict=False):
        layer.weight.data = (high * s) @ low.T
    table = gs.measure(net, (normal(20, 5), normal(20, 5)), measures=["nfa_depth", "nfa_power", "nfa_fitted", "nfa"])
    for layer, depth in (("0", 3), ("1", 2), ("2", 1)):
        assert table[layer]["nfa_depth"] == pytest.approx(1.0)
        assert table[layer]["nfa_fitted"] == pytest.approx(1.0)
        assert table[layer]["nfa_power"] == pytest.approx(1 / depth, rel=1e-3)
    assert table["0"]["nfa"] < 0.95


def test_rounding_of_single_precision_is_no_direction() -> None:
    W, J = normal(6, 8), normal(30, 3, seed=1) @ normal(3, 6, seed=2)
    noise = normal(6, 6, seed=3)
    K = J.T @ J
    noisy = K + 1e-9 * K.norm() * (noise + noise.T)
    expected = dense(W, K, 0.1)
    assert power_alignment(W.float(), noisy, 0.1) == pytest.approx(expected, abs=1e-5)


def test_a_zero_kernel_has_no_alignment() -> None:
    fit = fitted_power(torch.eye(2), torch.zeros(2, 2))
    assert math.isnan(fit.power)
    assert math.isnan(fit.alignment)
