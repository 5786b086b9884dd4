"""Quantised layers: memory, adapters, errors; ``tests/instruments/test_case_by_column.py`` has their numbers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope.layers import quantised
from gramscope.layers.select import select_layers
from quantised_layers import FORMATS, Packed, four_bits

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def made(convert: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    model[2], model[4] = convert(model[2]), convert(model[4])
    return model.eval()


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3


@pytest.mark.parametrize("name", ["packed", "bitsandbytes nf4"])
def test_one_layer_at_a_time_is_dequantised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        model = made(FORMATS[name][0])
    read, alive, most = quantised.dequantised, list[Any](), 0

    def counted(module: nn.Module) -> Tensor:
        nonlocal most
        weight = read(module)
        alive[:] = [(other, shape) for other, shape in alive if other() is not None]
        alive.append((weakref.ref(weight), weight.shape))
        most = max(most, len({shape for _, shape in alive}))
        return weight

    monkeypatch.setattr(quantised, "dequantised", counted)
    gs.measure(model, [(X, Y), (X, Y)], nn.CrossEntropyLoss(), measures=["gradient_norm", "nfa", "weight_norm"])
    assert most == 1


def test_a_module_keeps_its_bias_where_reading_fails() -> None:
    module = Packed(nn.Linear(32, 3))
    module.scales = module.scales[:, :2]
    with pytest.raises(RuntimeError):
        quantised.dequantised(module)
    assert module.bias is not None


def test_adapters_on_quantised_weights() -> None:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        model = made(four_bits)
        config = peft.LoraConfig(r=2, target_modules=["2"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).base_model.model.eval()
    layer = {layer.name: layer for layer in select_layers(adapted)}["2"]
    module: Any = layer.module
    expected = quantised.dequantised(module.base_layer) + module.get_delta_weight("default")
    assert torch.allclose(layer.weight(), expected)
    table = gs.measure(adapted, (X, Y), nn.CrossEntropyLoss(), measures=["gradient_norm", "nfa"])
    assert table["2"]["gradient_norm"] is not None
    assert "bitsandbytes nf4" in str(table.notes["2"])


def test_optimizers_leave_quantised_weights_alone() -> None:
    with torch.random.fork_rng(devices=[]):
        model = made(Packed)
    before = copy.deepcopy(model.state_dict())
    rule = gs.FreeMuon(model)
    assert "2.weight" in rule.summary()
    assert "quantised, so it cannot be set" in rule.summary()
    F.cross_entropy(model(X), Y).backward()
    rule.step()
    assert torch.equal(model.state_dict()["2.qweight"], before["2.qweight"])
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
