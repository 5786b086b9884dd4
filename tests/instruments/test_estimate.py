"""Estimated bytes against those that statistics hold and a measurement takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gramscope as gs
from comparing import collected, held_bytes
from gramscope.instruments.measure import given_by, plan_of
from gramscope.measures.columns import columns_of
from live_bytes import LiveBytes
from refusals import assert_refused

LOSS = nn.CrossEntropyLoss()
NAMES = ["weight_norm", "gradient_norm", "vcs_cosine", "nfa", "target_linearity", "nc1"]


def problem(hidden: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, hidden), nn.GELU(), nn.Linear(hidden, 120), nn.GELU(), nn.Linear(120, 10))
    return model, torch.randn(400, 200), torch.arange(400) % 10


@pytest.mark.parametrize(("hidden", "memory"), [(150, 2**28), (500, 2**21)])
def test_sums_take_no_more_than_estimated(hidden: int, memory: int) -> None:
    model, x, y = problem(hidden)
    found = gs.estimate(model, LOSS, measures=NAMES, memory=memory)
    plan = plan_of(columns_of(NAMES, given_by(model, LOSS)))
    stats = collected(model, (x, y), LOSS, plan, memory=memory)
    for layer in stats:
        held = sum(held_bytes(total) for total in layer.sums.values())
        assert 0.2 * sum(found.sums[layer.name].values()) < held <= sum(found.sums[layer.name].values()) + 4096
    with LiveBytes() as live:
        gs.measure(model, [(x[:50], y[:50])] * 8, LOSS, measures=NAMES, memory=memory, progress=False)
    activations = 50 * 4 * 4 * (200 + 2 * hidden + 2 * 120 + 10)
    assert live.peak < 2 * (found.total + activations)
    assert "in all" in str(found)


def test_features_of_many_targets_take_no_more_than_estimated() -> None:
    model, names, data = nn.Linear(6, 64), ["target_linearity"], (torch.randn(300, 6), torch.randn(300, 64))
    found = gs.estimate(model, nn.MSELoss(), measures=names).sums["(model)"]
    stats = collected(model, data, nn.MSELoss(), plan_of(columns_of(names, given_by(model, nn.MSELoss()))))
    assert sum(held_bytes(total) for total in stats["(model)"].sums.values()) <= sum(found.values()) + 4096


def test_unknown_names_are_refused() -> None:
    assert_refused("no measure 'size'", gs.estimate, problem(8)[0], LOSS, measures="size")
    with pytest.raises(TypeError, match="did you mean 'measures'"):
        gs.estimate(problem(8)[0], LOSS, measure="nfa")
