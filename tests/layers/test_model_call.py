"""Errors of the model's own forward, models of several inputs, and parts of what a model returns."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import Around, refused
from gramscope.errors import GramscopeError, InputError, LayerError
from gramscope.instruments.agop import dual_tangent_kernel
from gramscope.layers.model_call import call_model, select_output

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6) % 3


class Two(nn.Module):
    """A siamese net: one branch called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head, self.seen = nn.Linear(2, 4), nn.Linear(4, 3), []

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        self.seen.append(len(a))
        return self.head(torch.tanh(self.branch(a)) - scale * torch.tanh(self.branch(b)))


def test_models_of_several_inputs() -> None:
    model = Two()
    a, b = X, X.flip(0) / 7
    expected = gs.agop(model, [((a[:4], b[:4]), None), ((a[4:], b[4:]), None)])
    for inputs in ({"a": a, "b": b}, {"a": a.numpy(), "b": b, "scale": 1.0}, ((a, b), Y)):
        torch.testing.assert_close(gs.agop(model, inputs), expected)
    with pytest.raises(
        InputError, match=r"missing 1 required positional argument.*say what the model takes with unpack="
    ):
        gs.collect(model, (a, Y))
    table = gs.measure(model, ((a, b), Y), nn.CrossEntropyLoss())
    assert table["branch"]["gradient_norm"] is not None


def test_large_inputs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramscope.instruments.agop.CPU_BATCH", 4)
    model = Two()
    gs.agop(model, {"a": X, "b": X.numpy()})
    assert model.seen == [4, 2, 2]  # of the first batch two samples alone, for the structure


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
    refused(gs.collect, model, x, match=message)


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
    refused(gs.agop, made_inside, X, match=r"made under torch.inference_mode; copy.deepcopy\(model\) outside")
    assert gs.agop(copy.deepcopy(made_inside), X)["0"].shape == (2, 2)


class Result(NamedTuple):
    logits: Tensor
    hidden: Tensor


def test_parts_of_named_tuples() -> None:
    model, x = Around(lambda m, x: Result(m.layer(x), x), layer=nn.Linear(2, 3)), X.double()
    assert gs.agop(model, x, output="logits")["layer"].shape == gs.agop(model, x, output=0)["layer"].shape == (2, 2)
    assert select_output({"loss": x.sum(), "prediction_outputs": x}) is x  # of PatchTST
    refused(gs.agop, model, x, output="scores", match="output='scores' is not in what the model returned: a Result")
    refused(gs.agop, model, x, match=r"the model returned a Result, not a tensor; say which item with output= \(an ind")


@pytest.mark.parametrize(
    ("model", "x"),
    [(nn.Linear(4, 3), X), (nn.Linear(4, 3), X[0]), (nn.Conv2d(3, 2, 3), torch.ones(2, 1, 5, 5))],
)
def test_inputs_of_another_width(model: nn.Module, x: Tensor) -> None:
    shape = ", ".join(map(str, x.shape))
    with pytest.raises(
        InputError, match=rf"cannot run on these inputs: .*the inputs have shape \({shape},?\); its first"
    ):
        gs.collect(model, x)


@pytest.mark.parametrize("memory", ["1GB", 1e9, None, 0])
def test_memory_is_a_number_of_bytes(memory: Any) -> None:
    for kernel in (gs.agop, dual_tangent_kernel):
        refused(kernel, nn.Linear(2, 3), X, memory=memory, match="memory=.* positive whole number")


def test_models_are_modules() -> None:
    def forward(x: Tensor) -> Tensor:
        return x

    for use in (gs.collect, gs.measure, gs.agop, gs.tangent_kernel, dual_tangent_kernel, gs.Monitor):
        refused(use, forward, X, match=r"model is a function; give a torch.nn.Module", error=GramscopeError)
    with pytest.raises(GramscopeError, match=r"model is a function; give a torch.nn.Module"), gs.capture(forward):
        pass


def test_a_model_that_overrides_call_is_refused() -> None:
    class OwnCall(Two):
        def __call__(self, a: Tensor) -> Tensor:
            return self.head(self.branch(a))  # type: ignore[no-any-return]

    for use in (gs.measure, gs.agop, gs.tangent_kernel, dual_tangent_kernel):
        refused(use, OwnCall(), X, match="OwnCall has a __call__ of its own, .*name it forward", error=LayerError)


def test_parts_of_a_batch_that_the_model_does_not_take() -> None:
    model = Two()
    table = gs.measure(model, {"a": X, "b": X + 1, "text": ["a word"] * 6, "labels": Y}, nn.CrossEntropyLoss())
    expected = gs.measure(model, ((X, X + 1), Y), nn.CrossEntropyLoss())
    assert table["head"] == expected["head"]
    assert table.notes["(batch)"].text == "the model's forward has no argument for text: not passed to it"
    missing = "cannot run on these inputs: .*missing 1 required positional argument: 'b'.*unpack="
    refused(gs.measure, model, {"a": X, "labels": Y}, nn.CrossEntropyLoss(), match=missing)


class Caching(nn.Module):
    """Like a language model of transformers: unless told otherwise it keeps what generation needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.asked: list[bool] = []

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        self.asked.append(use_cache)
        return self.layer(x)  # type: ignore[no-any-return]


def test_language_models_need_not_cache() -> None:
    model = Caching()
    call_model(model, {"x": X})
    call_model(model, {"x": X, "use_cache": True})
    assert model.asked == [False, True]


def test_no_remedy_for_types_that_have_nothing_to_do_with_the_inputs() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("value cannot be converted to type float without overflow")

    with pytest.raises(RuntimeError, match="overflow$"):
        call_model(Overflowing(), torch.arange(4))


def test_weights_without_data_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with pytest.raises(LayerError, match=r"weights are on meta, without data: 0, 1 \(2 of 2 layers\)"):
        gs.measure(model, (torch.ones(2, 4), torch.arange(2)), nn.CrossEntropyLoss())
