"""Saving, loading and copying gs.VCL."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.errors import InputError
from optim.nets import AdamW, data, mlp, net, same, train


@pytest.mark.parametrize("options", [{}, {"solver": "exact"}])
@pytest.mark.parametrize("kind", ["narrow", "tokens"])
def test_continuation_and_copies_are_bit_identical(kind: str, options: dict[str, Any]):
    def make() -> tuple[nn.Module, gs.VCL]:
        model = net(kind)[0].float()
        return model, gs.VCL(model, gamma=0.02, readout=AdamW, **options)

    model, optimizer = make()
    batches = [data(net(kind)[1], seed=step, dtype=torch.float32) for step in range(26)]
    for x, y in batches[:20]:
        train(model, optimizer, x, y)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    twin, copied = copy.deepcopy((model, optimizer))
    for x, y in batches[20:]:
        train(twin, copied, x, y)  # leaves the original alone
    for x, y in batches[20:]:
        train(model, optimizer, x, y)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    again, loaded = make()
    loaded.load_state_dict(stored["optimizer"])
    again.load_state_dict(stored["model"])
    for x, y in batches[20:]:
        train(again, loaded, x, y)
    same(model, again, atol=0, rtol=0)
    same(model, twin, atol=0, rtol=0)


def test_half_precision_parameters_keep_a_precise_state():
    model = mlp(30, 4, 3, dtype=torch.bfloat16)
    optimizer = gs.VCL(model, gamma=0.05)
    train(model, optimizer, *data(30, dtype=torch.bfloat16), 3)
    state = optimizer.state[model[0].weight]
    assert state["basis"].dtype == torch.float32
    kept = state["weights"].float() @ state["basis"][:4]
    torch.testing.assert_close(model[0].weight.float(), kept, atol=0, rtol=1e-2)


def test_pickling_points_to_the_state():
    with pytest.raises(InputError, match="state_dict"):
        pickle.dumps(gs.VCL(mlp(5, 4, 3)))


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ((20, 6, 3), {"solver": "exact"}, "solver='exact'"),
        ((20, 7, 3), {}, r"shape \(7, 20\), not \(6, 20\)"),
        ((20, 6, 3), {"alpha": 0.5}, r"alpha=0\.5, not 0\.1"),
        ((20, 6, 6, 3), {"layers": ["2"]}, r"layers=\['2\.weight'\]"),
        (None, {}, "not one of VCL; was the checkpoint saved with another optimizer"),
    ],
)
def test_states_of_another_form_are_refused(sizes: tuple[int, ...] | None, options: dict[str, Any], words: str):
    stored = torch.optim.SGD(mlp(20, 6, 3).parameters(), lr=0.1).state_dict()
    if sizes is not None:
        model = mlp(*sizes)
        optimizer = gs.VCL(model, gamma=0.05, **options)
        train(model, optimizer, *data(20))
        stored = optimizer.state_dict()
    with pytest.raises(InputError, match=words):
        gs.VCL(mlp(20, 6, 3)).load_state_dict(stored)
