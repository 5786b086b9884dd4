from __future__ import annotations

import pytest
import torch

from gramscope.theory.activations import ACTIVATIONS
from gramscope.theory.random_mlp import RandomMLP
from reference import mlp_tangents


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
