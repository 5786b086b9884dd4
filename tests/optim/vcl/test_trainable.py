from __future__ import annotations

import pytest
from torch import nn

import gramscope as gs
from gramscope.errors import LayerError
from optim.nets import data, mlp, net, train


def test_layers_that_cannot_be_trained():
    model = mlp(7, 5, 5, 3)
    model[2].weight.requires_grad_(False)
    with pytest.raises(LayerError, match="frozen"):
        gs.VCL(model, layers=["2"], solver="recursive")
    optimizer = gs.VCL(model, solver="recursive")
    assert "nothing (frozen)" in optimizer.summary()
    train(model, optimizer, *data(), 1)
    attention, _ = net("tokens")
    with pytest.raises(LayerError, match="all three"):
        gs.VCL(attention, layers=["attention.q_proj"], solver="recursive")
    tied = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 4))
    tied[3].weight = tied[0].weight
    with pytest.raises(LayerError, match="shares its weight"):
        gs.VCL(tied, layers=["3"], solver="recursive")
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(LayerError, match="lazy"):
        gs.VCL(lazy, layers=["0"], solver="recursive")
