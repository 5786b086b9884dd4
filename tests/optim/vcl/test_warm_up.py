"""The warm-up trains the last layer alone."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

import gramscope as gs
from gramscope.errors import InputError
from optim.nets import data, mlp, train


@pytest.mark.parametrize("computed", [False, True])
def test_warm_up_trains_the_last_layer_only(computed: bool):
    model = mlp(7, 5, 5, 3)
    if computed:
        weight_norm(model[4])
    x, y = data()
    before = copy.deepcopy(model.state_dict())
    optimizer = gs.VCL(model, readout=partial(torch.optim.SGD, lr=0.5), solver="recursive")
    losses = optimizer.warm_up([(x[:5], y[:5]), {"input": x[5:], "labels": y[5:]}], F.cross_entropy, epochs=4)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith("4.")}
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any("basis" in state for state in optimizer.state.values())
    train(model, optimizer, x, y)
    model[4].requires_grad_(False)
    with pytest.raises(InputError, match="the last layer executed, '4', is frozen"):
        optimizer.warm_up([(x, y)], F.cross_entropy)


def test_a_single_layer_has_nothing_to_warm_up():
    optimizer = gs.VCL(mlp(7, 3, bias=False), solver="recursive")
    assert optimizer.readout is None
    with pytest.raises(InputError, match="nothing to warm up"):
        optimizer.warm_up([data()], F.cross_entropy)
