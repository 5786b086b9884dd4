from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gramscope.errors import InputError
from gramscope.training.packing import pack, unpack

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def through_json(tree: Any) -> Any:
    tensors, plain = pack(tree)
    return unpack(tensors, json.loads(json.dumps(plain, allow_nan=False)))


@given(trees)
def test_round_trip_is_exact(tree: Any) -> None:
    back = through_json(tree)
    assert back == tree
    assert repr(back) == repr(tree)  # tuples stay tuples, True stays True


def test_nan_and_tensors() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    back = through_json({"state": {0: {"a": base.mT, "b": base[0]}}, "x": [float("nan")], "t": torch.tensor(2)})
    assert torch.equal(back["state"][0]["a"], base.mT)
    assert torch.equal(back["state"][0]["b"], base[0])
    assert back["x"][0] != back["x"][0]
    assert int(back["t"]) == 2


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Muon"])
def test_torch_optimizers_continue_bit_identically(name: str) -> None:
    def step(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    def build(layer: nn.Linear) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if name in ("SGD", "Muon") else {}
        return getattr(torch.optim, name)([layer.weight], lr=0.01, **options)

    first = nn.Linear(3, 5, bias=False)
    nn.init.constant_(first.weight, 0.5)
    one = build(first)
    for _ in range(3):
        step(first, one)
    second = nn.Linear(3, 5, bias=False)
    second.load_state_dict(through_json(first.state_dict()))
    two = build(second)
    two.load_state_dict(through_json(one.state_dict()))
    for _ in range(3):
        step(first, one)
        step(second, two)
    assert torch.equal(first.weight, second.weight)


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(InputError, match=r"a\.b = .* of type object"):
        pack({"a": {"b": object()}})
    with pytest.raises(InputError, match="lacks tensor 'w'"):
        unpack({}, {"$tensor": "w"})
