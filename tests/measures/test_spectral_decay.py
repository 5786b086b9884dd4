"""RankMe, α-ReQ and power laws against loops over singular values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cases import normal, refused
from gramscope.measures.spectral_decay import alpha_req, rankme, weight_exponent


@pytest.mark.parametrize(("n", "d", "rank"), [(50, 6, 6), (50, 6, 2), (4, 6, 4)])
def test_rankme_of_the_rows_themselves(n: int, d: int, rank: int) -> None:
    H = normal(n, rank) @ normal(rank, d, seed=1) + 0.5 * (rank == d)
    s = np.linalg.svd(H.numpy(), compute_uv=False)
    p = s / s.sum() + 1e-7
    assert rankme(H.T @ H, n) == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-6)
    assert rankme(1e-60 * H.T @ H, n) == pytest.approx(rankme(H.T @ H, n))


def test_alpha_is_the_slope_of_the_spectrum() -> None:
    H = normal(60, 8) * torch.arange(1.0, 9.0)
    H = H - H.mean(0)
    values = np.linalg.svd(H.numpy(), compute_uv=False) ** 2
    slope, _ = np.polyfit(np.log(np.arange(1, 9)), np.log(values), 1)
    assert alpha_req(H.T @ H) == pytest.approx(-slope, rel=1e-9)


def test_directions_of_rounding_are_not_fitted() -> None:
    exact = torch.diag(1 / torch.arange(1.0, 9.0).double())
    noisy = torch.block_diag(exact, torch.tensor([[1e-15]], dtype=torch.float64))
    assert alpha_req(noisy, eps=1.2e-7) == pytest.approx(alpha_req(exact))
    refused(alpha_req, torch.diag(torch.tensor([1.0, 2.0])), match="at least 3 eigenvalues")


def test_zero_features() -> None:
    assert math.isnan(rankme(torch.zeros(3, 3), 5))


def clauset(values: np.ndarray) -> float:
    """The fit of Clauset, Shalizi and Newman by loops."""
    values, fits = np.sort(values), []
    for start in range(len(values) - 9):
        tail = values[start:]
        alpha = 1 + len(tail) / np.log(tail / tail[0]).sum()
        law = 1 - (tail / tail[0]) ** (1 - alpha)
        steps = [(i / len(tail), (i + 1) / len(tail)) for i in range(len(tail))]
        fits.append((max(max(abs(x - a), abs(x - b)) for x, (a, b) in zip(law, steps, strict=True)), alpha))
    return min(fits)[1]


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (12, 12)])
def test_fit_by_loops(shape: tuple[int, int]) -> None:
    W = normal(*shape)
    assert weight_exponent(W) == pytest.approx(clauset(np.linalg.svd(W.numpy(), compute_uv=False) ** 2), rel=1e-9)
    assert weight_exponent(1e-30 * W) == pytest.approx(weight_exponent(W))


@pytest.mark.parametrize("alpha", [2.0, 4.0])
def test_a_known_law_is_found(alpha: float) -> None:
    quantiles = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    eigenvalues = quantiles ** (-1 / (alpha - 1))
    assert weight_exponent(torch.diag(eigenvalues.sqrt())) == pytest.approx(alpha, rel=0.05)


def test_few_eigenvalues() -> None:
    refused(weight_exponent, normal(9, 50), match="at least 10 eigenvalues; this weight has 9")
    assert weight_exponent(torch.eye(12)) != weight_exponent(torch.eye(12))  # no law: NaN
