"""What counts as data, how batches become inputs and targets, and errors of the model's own forward."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import gramscope as gs
from gramscope.errors import InputError, LayerError
from gramscope.layers.batches import batches, head

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 3


class Two(nn.Module):
    """A siamese net: one branch called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(torch.tanh(self.branch(a)) - scale * torch.tanh(self.branch(b)))


class Stream(IterableDataset):  # type: ignore[type-arg]
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
    assert [len(x) for x, _ in batches([X, X[:2]])] == [6, 2]  # alike: two batches without targets
    assert [len(x) for x, _ in batches(((X, Y), (X[:2], Y[:2])))] == [6, 2]
    with pytest.raises(InputError, match=r"a tuple of 3 tensors is neither a batch .* nor a loader"):
        list(batches((X, X, Y)))
    with pytest.raises(InputError, match="the loader yielded no batch"):
        list(batches(()))


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


def test_models_of_several_inputs() -> None:
    model = Two()
    a, b = X, X.flip(0) / 7
    expected = gs.agop(model, [((a[:4], b[:4]), None), ((a[4:], b[4:]), None)])
    for inputs in ((a, b), {"a": a, "b": b}, {"a": a.numpy(), "b": b, "scale": 1.0}, ((a, b), Y)):
        found = gs.agop(model, inputs)
        torch.testing.assert_close(found["branch"], expected["branch"])
        torch.testing.assert_close(found["head"], expected["head"])
    with pytest.raises(
        InputError, match=r"missing 1 required positional argument.*say what the model takes with unpack="
    ):
        gs.collect(model, (a, Y))
    table = gs.measure(model, ((a, b), Y), nn.CrossEntropyLoss())
    assert table["branch"]["gradient_norm"] is not None


def test_large_inputs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.instruments.agop.BATCH", 4)
    seen = []

    class Watched(Two):
        def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            seen.append(len(a))
            return super().forward(a, b, scale)

    gs.agop(Watched(), (X, X))
    gs.agop(Watched(), {"a": X, "b": X.numpy()})
    assert seen == [4, 2, 4, 2]


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (
            nn.Linear(2, 3),
            X.double(),
            r"inputs are torch.float64 and the weights torch.float32: pass x.to\(torch.float32\)",
        ),
        (nn.Linear(2, 3), X.long(), r"inputs are torch.int64 where a layer wants numbers of torch.float32"),
        (nn.Conv1d(1, 3, 1), X.byte()[:, None], r"inputs are torch.uint8 where a layer wants numbers of torch.float32"),
        (nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 3)), X, r"where an embedding wants indices: pass x.long\(\)"),
    ],
)
def test_types_that_do_not_go_together(model: nn.Module, x: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gs.collect(model, x)


def test_other_errors_of_the_model_stay_its_own() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("its own reasons")

    with pytest.raises(RuntimeError, match="its own reasons") as caught:
        gs.collect(Broken(2, 3), X)
    assert not isinstance(caught.value, InputError)


def test_inference_mode_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    expected = gs.measure(model, (X, Y), nn.CrossEntropyLoss())
    with torch.inference_mode():
        x = X + 0
        inside = gs.measure(model, (x, Y), nn.CrossEntropyLoss())
    assert x.is_inference()
    assert inside.to_dict() == expected.to_dict()
    assert gs.measure(model, (x, Y), nn.CrossEntropyLoss()).to_dict() == expected.to_dict()
    with torch.inference_mode():
        made_inside = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    with pytest.raises(InputError, match=r"made under torch.inference_mode; copy.deepcopy\(model\) outside"):
        gs.agop(made_inside, X)
    assert gs.agop(copy.deepcopy(made_inside), X)["0"].shape == (2, 2)


def test_a_module_is_no_selector() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    for selector in (model[1], [model[1]]):
        with pytest.raises(LayerError, match=r"not a module \(Linear\); this one is '1'"):
            gs.collect(model, X, layers=selector)  # type: ignore[arg-type]
    with pytest.raises(LayerError, match="this one is not in the model"):
        gs.collect(model, X, layers=nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_first_samples_of_nested_batches() -> None:
    part = head(UserDict({"a": X, "b": [X, "text"], "c": torch.ones(2, 2)}), 3, 6)
    assert torch.equal(part["a"], X[:3])
    assert part["b"][1] == "text"
    assert part["c"].shape == (2, 2)


class Result(NamedTuple):
    logits: Tensor
    hidden: Tensor


def test_parts_of_named_tuples() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Result:
            return Result(self.layer(x), x)

    expected = gs.agop(Named(), X, output=0)["layer"].shape
    assert gs.agop(Named(), X, output="logits")["layer"].shape == expected
    with pytest.raises(InputError, match="output='scores' is not in what the model returned: a Result"):
        gs.agop(Named(), X, output="scores")
    with pytest.raises(
        InputError, match=r"the model returned a Result, not a tensor; say which part with output= \(an index"
    ):
        gs.agop(Named(), X)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (
            nn.CrossEntropyLoss(),
            Y + 1,
            r"CrossEntropyLoss failed on an output of \(6, 3\) torch.float32 and a target of ",
        ),
        (nn.BCEWithLogitsLoss(), torch.ones(6, 3, dtype=torch.long), r"a target of \(6, 3\) torch.int64: "),
        (nn.CrossEntropyLoss(), torch.zeros(6, 4, dtype=torch.long), r"a target of \(6, 4\) torch.int64: "),
        (lambda f, y: f[9], Y, r"<lambda> failed on an output of \(6, 3\)"),
    ],
)
def test_losses_that_fail_are_named(loss: Any, y: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gs.collect(nn.Linear(2, 3), (X, y), loss)
