"""Which layers a selector stands for, and errors that name the layer and the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases import BY_NAME, refused
from gramscope.errors import LayerError
from gramscope.layers.select import select_layers


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("0", ["0"]),
        (["0", "4"], ["0", "4"]),
        ("[24]", ["2", "4"]),
        (nn.Linear, ["0", "2", "4"]),
        ([nn.Linear, "0"], ["0", "2", "4"]),
    ],
)
def test_selectors(selector: object, expected: list[str]) -> None:
    model, _, _ = BY_NAME["mlp"].make()
    assert list(select_layers(model, selector).names) == expected


def test_selectors_that_match_nothing() -> None:
    model, _, _ = BY_NAME["mlp"].make()
    with pytest.raises(LayerError, match=r"layers: no linear-like layer 'fc\*'; there are: 0, 2, 4"):
        select_layers(model, "fc*")
    refused(select_layers, nn.Sequential(nn.ReLU()), match="has no linear-like layer", error=LayerError)
    refused(select_layers, nn.Sequential(nn.EmbeddingBag(3, 4)), match="lookup table", error=LayerError)
    with pytest.raises(LayerError, match="complex weights"):
        select_layers(nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64)), "0")


def test_a_module_is_no_selector() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    for selector in (model[1], [model[1]]):
        refused(select_layers, model, selector, match=r"not Linear.* of type Linear; this one is '1'", error=LayerError)


def test_a_lazy_layer_must_have_run() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    refused(select_layers, model, match=r"'0.weight' has no shape yet .*: run one forward pass first", error=LayerError)
    model(torch.ones(1, 2))
    assert select_layers(model).names == ("0", "1")
