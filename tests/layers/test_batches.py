"""What counts as data, and how batches become inputs and targets."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gramscope as gs
from cases import normal, refused
from gramscope.errors import InputError
from gramscope.layers.batches import batches, head

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 3


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        [(X, Y)],
        (X.numpy(), Y.numpy()),
        [X.numpy(), Y.numpy()],
        [[X.numpy(), Y]],
        TensorDataset(X, Y),
        Stream(),
        {"x": X, "labels": Y},
        UserDict({"x": X, "labels": Y}),
    ],
    ids=lambda data: type(data).__name__,
)
def test_one_batch_in_every_form(data: object) -> None:
    ((inputs, target),) = batches(data)
    x = inputs["x"] if isinstance(inputs, dict) else inputs
    assert torch.equal(x, X)
    assert torch.equal(target, Y)


def test_several_inputs_and_several_batches() -> None:
    for data in (((X, X + 1), Y), [(X, X + 1), Y], [((X, X + 1), Y)], ({"a": X, "b": X + 1}, Y)):
        ((inputs, target),) = batches(data)
        assert len(inputs) == 2
        assert torch.equal(target, Y)
    assert [len(x) for x, _ in batches(((X, Y), (X[:2], Y[:2])))] == [6, 2]
    refused(list, batches((X, X, Y)), match=r"a tuple of 3 tensors is neither a batch .* nor a loader")
    refused(list, batches(()), match="the loader yielded no batch")


def test_numpy_takes_the_models_type() -> None:
    model = nn.Linear(2, 3)
    x = X.double().numpy()
    expected = gs.collect(model, (X, Y), nn.CrossEntropyLoss())
    found = gs.collect(model, (x, Y.numpy()), nn.CrossEntropyLoss())
    assert torch.equal(found["(model)"].D, expected["(model)"].D)
    assert torch.equal(gs.agop(model, x)["(model)"], gs.agop(model, X)["(model)"])
    assert torch.equal(gs.tangent_kernel(model, (x, None))["(model)"], gs.tangent_kernel(model, X)["(model)"])
    assert gs.measure(model, [x, Y.numpy()], nn.CrossEntropyLoss()).network["samples"] == 6
    assert gs.Monitor(model, (x, Y.numpy()), samples=4).records[0]["network"]["samples"] == 4
    assert torch.equal(gs.agop(model.double(), x)["(model)"], gs.agop(model, X.double())["(model)"])


def test_the_first_samples_of_nested_batches() -> None:
    part = head(UserDict({"a": X, "b": [X, "text"], "c": torch.ones(2, 2)}), 3, 6)
    assert torch.equal(part["a"], X[:3])
    assert part["b"][1] == "text"
    assert part["c"].shape == (2, 2)


def test_how_lists_of_two_arrays_are_read() -> None:
    for data in (
        [normal(5, 4), torch.arange(5)],
        [normal(5, 4).numpy(), np.arange(5)],
        [normal(5, 3, 8, 8), normal(5, 2)],
    ):
        ((_, target),) = batches(data)
        assert target is not None
    for data in (
        [normal(5, 4), normal(6, 4)],
        [normal(5, 4), normal(5, 2)],
        [normal(5, 4).numpy(), normal(5, 1).numpy()],
    ):
        refused(list, batches(data), match=r"may be inputs and target or two batches: write the tuple \(x, y\), or")
        assert len(list(batches(tuple(data)))) == 1
        assert len(list(batches([(x, None) for x in data]))) == 2


@pytest.mark.parametrize("samples", [list(zip(X, Y, strict=True)), list(zip(X, Y.tolist(), strict=True))])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), None])
def test_single_samples_are_no_batches(samples: list[Any], loss: Any) -> None:
    with pytest.raises(
        InputError, match=r"batch 0 has one number as its target.*DataLoader\(samples, batch_size=256\)"
    ):
        gs.measure(nn.Linear(2, 3), samples, loss)
    loader = DataLoader(samples, batch_size=256)
    assert gs.collect(nn.Linear(2, 3), loader, loss).n == 6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "yielded no batch"),
        ([(torch.zeros(0, 5), torch.zeros(0))], "batch 0 of the loader is empty"),
        ([(torch.ones(2, 5), torch.ones(2), torch.ones(2))], "a tuple of 3 items; pass unpack="),
        ([(torch.ones(2, 5), torch.zeros(3, dtype=torch.long))], "2 inputs but 3 targets"),
        ([torch.ones(2, 5)], "has no target for the loss"),
        (["text"], "the loader yields str"),
        (3, "loader is a int"),
    ],
)
def test_odd_loaders(data: object, message: str) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    refused(gs.collect, model, data, F.cross_entropy, match=message)
