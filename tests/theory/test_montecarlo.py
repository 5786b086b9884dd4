from __future__ import annotations

import pytest
import torch

from gramscope.theory.montecarlo import RandomMLP, estimate
from gramscope.theory.tangent_kernels import ACTIVATIONS
from reference import mlp_tangents
from refusals import assert_refused


def test_error_bars_cover_at_the_stated_rate() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 300, generator=generator)  # 300 experiments of 400 draws
    found = estimate(values)
    covered = float((found.mean.abs() < 2 * found.error).float().mean())
    assert 0.91 < covered < 0.99


def test_one_net_has_no_error_bar() -> None:
    assert_refused("at least 2", estimate, torch.ones(1))


# -- random nets -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_tangents_by_autograd(name: str, layer: int) -> None:
    net = RandomMLP(3, (5, 4, 6), name, scales=(1.0, 2.0, 0.5, 1.5))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = net.sample(torch.Generator().manual_seed(0), 2)
    j, h, f = net.tangents(weights, x, layer)
    for i in range(2):
        one = [w[i] for w in weights]
        assert torch.allclose(j[i], mlp_tangents(one, x, ACTIVATIONS[name].phi, layer))
    z = x
    for w in weights[:layer]:
        z = ACTIVATIONS[name].phi(z @ w.mT)
    assert torch.equal(h.expand_as(z), z)
    assert f.shape == (2, 4)


def test_draws_are_chunked_by_memory() -> None:
    x = torch.zeros(3, 4, dtype=torch.float64)
    net = RandomMLP(4, (5,), "relu")
    sizes = [len(j) for j, _, _ in net.draws(x, 7, torch.Generator(), chunk_bytes=2000)]
    assert sum(sizes) == 7
    assert len(sizes) > 1
