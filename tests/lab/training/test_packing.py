from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from gramscope_lab.training.packing import pack, unpack
from refusals import assert_refused

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


def test_what_cannot_be_stored_is_named() -> None:
    assert_refused(r"a\.b = .* of type object", pack, {"a": {"b": object()}})
    assert_refused("lacks tensor 'w'", unpack, {}, {"$tensor": "w"})
