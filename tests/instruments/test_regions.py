"""Counted linear regions against exact crossings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import refused
from gramscope.errors import InputError, LayerError
from gramscope.instruments.regions import region_crossings


def network(generator: torch.Generator) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.LeakyReLU()).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def test_first_layer_crossings_are_exact(generator: torch.Generator) -> None:
    net = network(generator)
    X = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    z = net[0](X)
    exact = ((z[:, None] > 0) != (z[None] > 0)).sum(2).flatten()
    result = region_crossings(net[:2], X, points=3)
    assert torch.equal(result.per_segment, exact)  # a unit changes at most once on a segment


def test_more_points_find_more_crossings(generator: torch.Generator) -> None:
    net = network(generator)
    X = 3 * torch.randn(6, 2, dtype=torch.float64, generator=generator)
    means = [region_crossings(net, X, points=points).mean for points in (2, 9, 129, 1025)]
    assert means == sorted(means)
    result = region_crossings(net, X, points=129)
    assert len(result.per_layer) == 2
    assert sum(result.per_layer) == pytest.approx(result.mean)
    assert region_crossings(net, X, pairs=4, generator=generator).per_segment.shape == (4,)


def test_other_piecewise_linear_units() -> None:
    X = torch.tensor([[-3.0], [9.0]])
    assert region_crossings(nn.Sequential(nn.ReLU6()), X, points=99).per_segment.tolist() == [0, 2, 2, 0]


def test_the_network_is_left_as_it_was(generator: torch.Generator) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Dropout())
    net[1].eval()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    X = torch.randn(4, 2, generator=generator)
    before = torch.get_rng_state()
    region_crossings(net, X)
    with pytest.raises(InputError, match="cannot run on these inputs"):
        region_crossings(net, torch.randn(4, 5, generator=generator))
    assert torch.equal(before, torch.get_rng_state())
    assert [m.training for m in net] == [True, False, True, True]
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_networks_that_hide_their_units_are_named() -> None:
    with pytest.raises(LayerError, match="no ReLU-like module of the network ran"):
        region_crossings(nn.Linear(2, 2), torch.ones(2, 2))
    for points in (1, 2.5, "9"):
        refused(region_crossings, nn.ReLU(), torch.ones(2, 2), points=points, match="points")
