from __future__ import annotations

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import normal, randoms, refused
from gramscope.measures.fact import fact_alignment, fact_residual


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (2, 3, 4)])
def test_both_sides_of_the_theorem(shape: tuple[int, ...]) -> None:
    W, D = randoms(shape, shape)
    A, B = W.mT @ W, -W.mT @ D
    assert float(fact_alignment(W, D)) == pytest.approx(float((A * B).sum() / (A.norm() * B.norm())), rel=1e-12)
    assert float(fact_residual(W, D, 0.3)) == pytest.approx(float((A - B / 0.3).norm() / A.norm()), rel=1e-12)
    assert float(fact_alignment(1e-200 * W, 1e200 * D)) == pytest.approx(float(fact_alignment(W, D)), rel=1e-12)
    refused(fact_residual, W, D, 0.0, match="weight_decay=0.0: give the positive λ")


def test_a_net_trained_with_weight_decay_obeys_it() -> None:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = normal(50, 4)
    y = torch.stack([x[:, 0] * 2, torch.tanh(x[:, 1] - x[:, 2])], 1)
    before = gs.measure(net, (x, y), nn.MSELoss(), measures=["fact", "fact_residual"], weight_decay=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    for _ in range(3000):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    after = gs.measure(net, (x, y), nn.MSELoss(), measures=["fact", "fact_residual"], weight_decay=0.01)
    for layer in ("0", "2"):
        assert before[layer]["fact_residual"] > 1
        assert after[layer]["fact"] == pytest.approx(1.0, abs=1e-4)
        assert after[layer]["fact_residual"] == pytest.approx(0.0, abs=1e-3)


def test_the_residual_says_what_it_needs() -> None:
    table = gs.measure(nn.Linear(3, 2), (torch.rand(5, 3), torch.rand(5, 2)), nn.MSELoss(), measures="fact_residual")
    assert table["(model)"]["fact_residual"] is None
    assert "pass weight_decay=" in table.notes["(model).fact_residual"].text
