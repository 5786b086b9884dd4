"""Estimated spectra against dense ones."""

from __future__ import annotations

import pytest
import torch

import gramscope as gs
from refusals import assert_refused

SHAPES = {
    "random": lambda g: torch.randn(300, 500, generator=g),
    "decaying": lambda g: torch.randn(500, 300, generator=g) * torch.arange(1, 301.0) ** -1,
    "spiked": lambda g: (
        torch.randn(300, 300, generator=g) + 5 * torch.randn(300, 3, generator=g) @ torch.randn(3, 300, generator=g)
    ),
    "low rank": lambda g: torch.randn(300, 4, generator=g) @ torch.randn(4, 300, generator=g),
}


@pytest.mark.parametrize("scale", [1.0, 1e-30])
@pytest.mark.parametrize("name", SHAPES)
def test_estimates_agree_with_the_dense_spectrum(name: str, scale: float) -> None:
    W = scale * SHAPES[name](torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    found, dense = gs.large_weight_spectrum(W, top=4), gs.weight_spectrum(W)
    assert torch.equal(torch.get_rng_state(), before)
    for what in ("effective_rank", "participation_ratio"):
        estimate = getattr(found, what)
        assert estimate.error is not None
        exact = getattr(dense, what)
        assert abs(estimate.value - exact) < 4 * estimate.error + 1e-3 * exact
        assert estimate.error < 0.05 * exact
    assert found.stable_rank.value == pytest.approx(dense.stable_rank, rel=2e-3)
    true = dense.values[:4]
    assert bool((found.values <= true * (1 + 1e-5)).all())
    nearest = (found.values[:, None] - dense.values[None]).abs().amin(1)
    assert bool((nearest <= found.errors + 1e-5 * true[0]).all())


def test_wrong_arguments() -> None:
    assert_refused("top=9", gs.large_weight_spectrum, torch.ones(3, 4), top=9)
    assert_refused("one group at a time", gs.large_weight_spectrum, torch.ones(2, 3, 4))
