"""Numbers that once came out wrong or raw at the ends of the range."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from gramscope.errors import NumericalError
from gramscope.measures.collapse import neural_collapse_from_rows
from gramscope.optim.vcl.recursion import recursive_step, start


@pytest.fixture
def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    H = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return H, H[:, :2] + torch.randn(20, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_measures_without_units_do_not_depend_on_scales(data: tuple[Tensor, Tensor], scale: float) -> None:
    H, Y = data
    for X, T in ((H * scale, Y), (H, Y * scale), (H * scale, Y * scale)):
        torch.testing.assert_close(gs.linear_cka(X, T), gs.linear_cka(H, Y))
        torch.testing.assert_close(gs.target_linearity(X, T), gs.target_linearity(H, Y))
        torch.testing.assert_close(gs.surrogate(X, T, normalized=True), gs.surrogate(H, Y, normalized=True))
    labels = torch.arange(20) % 3
    assert neural_collapse_from_rows(H * scale, labels).nc1 == pytest.approx(neural_collapse_from_rows(H, labels).nc1)


def test_results_out_of_range_are_errors() -> None:
    big = torch.full((2, 2), 1e30)
    with pytest.raises(NumericalError, match=r"WᵀW exceeds the range of torch.float32"):
        gs.weight_gram(big)
    H, Y = torch.eye(2).double() * 1e60, torch.tensor([1e60, -1e60], dtype=torch.float64)
    with pytest.raises(NumericalError, match="the surrogate exceeds the range of torch.float64"):
        gs.surrogate(H, Y, W=H)
    for size in (1e80, 1e-80):
        with pytest.raises(NumericalError, match="H has entries up to"):
            gs.surrogate(H * (size / 1e60), Y)


def test_correlations_of_one_number_are_undefined() -> None:
    one = torch.full((1, 1), 0.7)
    assert math.isnan(gs.nfa(one, one, center=True))
    assert math.isnan(gs.cosine(one, one, center=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits(dtype: torch.dtype) -> None:
    X, Y = (torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]]) * s for s in (1.0, 2.0))
    eight = X.to(dtype)
    assert gs.linear_cka(eight, Y.to(dtype)).item() == pytest.approx(1.0)
    assert gs.weight_spectrum(eight).rank == 2
    torch.testing.assert_close(gs.polar(eight).float(), gs.polar(X), atol=0.1, rtol=0)
    found = gs.region_crossings(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), eight, points=5)
    assert found.per_segment.shape == (9,)


def test_a_basis_without_truncation_is_made_orthonormal_again(generator: torch.Generator) -> None:
    k, d = 6, 16
    state = start(torch.randn(k, d, generator=generator) / d**0.5)
    state = replace(state, basis=torch.linalg.qr(torch.randn(d, d, generator=generator))[0] * (1 + 1e-4))
    for _ in range(32):
        h, delta = torch.randn(4, d, generator=generator), torch.randn(4, k, generator=generator)
        state, _, _ = recursive_step(state, (delta, h), delta.mT @ delta, 1e-3, 0.1, d)
    assert state.basis.shape == (d, d)
    assert float((state.basis @ state.basis.mT - torch.eye(d)).abs().max()) < 2e-6
