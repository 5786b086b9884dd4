"""Spectra against NumPy, and estimated ones against dense ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gramscope as gs
from cases import normal, refused
from gramscope.linalg.moments import moments
from gramscope.measures.spectrum import (
    alpha_req,
    feature_spectrum,
    feature_spectrum_from_moments,
    rankme,
    weight_exponent,
    weight_spectrum,
)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 3))
def test_weight_spectrum_equals_numpy(k: int, d: int, seed: int) -> None:
    W = normal(k, d, seed=seed)
    s = np.linalg.svd(W.numpy(), compute_uv=False)
    p = s / s.sum()
    result = weight_spectrum(W)
    assert np.allclose(result.values.numpy(), s)
    assert result.rank == min(k, d)
    assert result.effective_rank == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-10)
    assert result.stable_rank == pytest.approx((s**2).sum() / s[0] ** 2, rel=1e-10)
    assert result.nuclear_rank == pytest.approx(s.sum() ** 2 / (s**2).sum(), rel=1e-10)
    assert result.participation_ratio == pytest.approx((s**2).sum() ** 2 / (s**4).sum(), rel=1e-10)


def test_stacked_weights_are_diagonal_blocks_and_zero_has_no_rank() -> None:
    W = normal(3, 2, 4)
    assert torch.allclose(weight_spectrum(W).values, weight_spectrum(torch.block_diag(*W)).values)
    constant = torch.full((1000, 3), 0.1, dtype=torch.float64)  # centred it is rounding alone
    for nothing in (weight_spectrum(torch.zeros(3, 2)), feature_spectrum_from_moments(moments(constant, constant))):
        assert nothing.rank == 0
        assert math.isnan(nothing.effective_rank)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("n", [40, 4])
def test_feature_spectrum(n: int, center: bool) -> None:
    H = normal(n, 6) + 2
    h = H - H.mean(0) if center else H
    expected = torch.linalg.svdvals(h)
    result = feature_spectrum(H, center)
    assert torch.allclose(result.values, expected, atol=1e-12)
    assert result.rank == min(6, n - center)
    by_moments = feature_spectrum_from_moments(moments(H, H[:, :1]), center)
    assert torch.allclose(by_moments.values[: min(n, 6)], expected, atol=1e-6)
    assert by_moments.participation_ratio == pytest.approx(result.participation_ratio, rel=1e-9)
    assert by_moments.effective_rank == pytest.approx(result.effective_rank, rel=1e-10)  # also where HᵀH is singular
    assert by_moments.rank == result.rank


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_ranks_do_not_depend_on_the_scale(scale: float) -> None:
    H = normal(30, 4)
    for spectrum in (weight_spectrum, feature_spectrum):
        plain, scaled = spectrum(H), spectrum(scale * H)
        for name in ("rank", "effective_rank", "stable_rank", "participation_ratio"):
            assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-9)


SHAPES = {
    "random": lambda g: torch.randn(300, 500, generator=g),
    "decaying": lambda g: torch.randn(500, 300, generator=g) * torch.arange(1, 301.0) ** -1,
    "spiked": lambda g: (
        torch.randn(300, 300, generator=g) + 5 * torch.randn(300, 3, generator=g) @ torch.randn(3, 300, generator=g)
    ),
    "low rank": lambda g: torch.randn(300, 4, generator=g) @ torch.randn(4, 300, generator=g),
}


@pytest.mark.parametrize("name", SHAPES)
def test_estimates_agree_with_the_dense_spectrum(name: str) -> None:
    W = SHAPES[name](torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    found, dense = gs.large_weight_spectrum(W, top=4), gs.weight_spectrum(W)
    assert torch.equal(torch.get_rng_state(), before)
    for what in ("effective_rank", "participation_ratio", "nuclear_rank"):
        estimate, exact = getattr(found, what), getattr(dense, what)
        assert estimate.error is not None
        assert abs(estimate - exact) < 4 * estimate.error + 1e-3 * exact
        assert estimate.error < 0.05 * exact
    assert found.stable_rank == pytest.approx(dense.stable_rank, rel=2e-3)
    true = dense.values[:4]
    assert bool((found.values <= true * (1 + 1e-5)).all())
    nearest = (found.values[:, None] - dense.values[None]).abs().amin(1)
    assert found.errors is not None
    assert bool((nearest <= found.errors + 1e-5 * true[0]).all())


def test_wrong_arguments() -> None:
    refused(gs.large_weight_spectrum, torch.ones(3, 4), top=9, match="top=9")
    refused(gs.large_weight_spectrum, torch.ones(2, 3, 4), match="one group at a time")


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
