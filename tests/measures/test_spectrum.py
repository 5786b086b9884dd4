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
    feature_spectrum,
    feature_spectrum_from_moments,
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
    nothing = weight_spectrum(torch.zeros(3, 2))
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
