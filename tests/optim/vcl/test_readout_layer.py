"""Which layer is left to the readout optimizer: the last one executed, also where VCL could not train it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gramscope as gs
from gramscope.errors import LayerError
from optim.nets import AdamW, HeadFirst, data, mlp, same, train


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return self.one(h) + self.two(h).sin()


class Tied(nn.Module):
    """Tokens in, tokens out, with one weight for both; the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.embedding = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embedding(x)
        return self.head(h + self.down(torch.tanh(self.up(h)))).flatten(0, 1)


def trained(optimizer: gs.VCL) -> list[str]:
    layers: list[str] = optimizer.param_groups[0]["layers"]
    return layers


def test_the_last_layer_executed_is_the_readout():
    model = HeadFirst().double()
    x, y = data()
    optimizer = gs.VCL(model, readout=AdamW, solver="recursive")
    assert "unless the first forward" in optimizer.summary()
    train(model, optimizer, x, y, 2)
    assert trained(optimizer) == ["body"]
    assert "exp_avg" in optimizer.state[model.head.weight]
    assert "basis" in optimizer.state[model.body.weight]
    assert "unless" not in optimizer.summary()
    again = HeadFirst().double()
    again.load_state_dict(model.state_dict())
    other = gs.VCL(again, readout=AdamW, solver="recursive")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, x, y, 2)
    train(again, other, x, y, 2)
    same(model, again, atol=0, rtol=0)


def test_ambiguous_readouts_ask_for_layers():
    model = Heads().double()
    x, y = data()
    with pytest.raises(LayerError, match="layers="):
        train(model, gs.VCL(model, solver="recursive"), x, y)
    train(model, gs.VCL(model, layers="body", solver="recursive"), x, y)


@pytest.mark.parametrize("head", ["frozen", "computed"])
def test_every_layer_before_a_head_that_cannot_be_trained(head: str) -> None:
    model = mlp(7, 6, 5, 3)
    if head == "frozen":
        model[4].requires_grad_(False)
    else:
        weight_norm(model[4])
    optimizer = gs.VCL(model, gamma=0.1, solver="recursive")
    assert trained(optimizer) == ["0", "2"]
    train(model, optimizer, *data())
    assert set(optimizer.diagnostics()) == {"0", "2"}


def test_a_tied_head_and_a_state_from_before_the_first_step() -> None:
    """Such a state leaves the head open, also in an optimizer that has found it meanwhile."""
    model = Tied()
    optimizer = gs.VCL(model, gamma=0.1, reduction=24.0, solver="recursive")
    start = copy.deepcopy(optimizer.state_dict())
    x = torch.arange(24).reshape(4, 6) % 11
    for _ in range(2):
        assert trained(optimizer) == ["up"]  # "down" is registered last and taken for the head until the first forward
        F.cross_entropy(model(x), x.flatten()).backward()
        optimizer.step()
        assert trained(optimizer) == ["up", "down"]
        assert "head.weight  11 × 8  SGD (readout)" in optimizer.summary()
        optimizer.load_state_dict(start)
        optimizer.zero_grad()
