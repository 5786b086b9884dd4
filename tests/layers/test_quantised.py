"""Quantised layers, against the same model with ordinary layers that hold the dequantised weights."""

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

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


class Packed(nn.Module):
    """A layer as GPTQ and AWQ store it: eight inputs in one int32, scales and zeros of groups of 32 inputs.

    The libraries' own wheels need a GPU and its compiler.
    """

    def __init__(self, linear: nn.Linear, group: int = 32) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = linear.in_features, linear.out_features, group
        W = linear.weight.detach().mT.unflatten(0, (-1, group))
        zeros = W.amin(1, keepdim=True)
        scales = (W.amax(1, keepdim=True) - zeros) / 15
        codes = ((W - zeros) / scales).round().to(torch.int32).flatten(0, 1).unflatten(0, (-1, 8))
        self.register_buffer("qweight", sum(codes[:, i] << 4 * i for i in range(8)))
        self.register_buffer("scales", scales.squeeze(1))
        self.register_buffer("qzeros", zeros.squeeze(1))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.stack([self.qweight >> 4 * i & 15 for i in range(8)], 1).flatten(0, 1)
        W = codes.unflatten(0, (-1, self.group)) * self.scales.unsqueeze(1) + self.qzeros.unsqueeze(1)
        z = x @ W.flatten(0, 1)
        return z if self.bias is None else z + self.bias


def packed(linear: nn.Linear) -> nn.Module:
    return Packed(linear)


def four_bits(linear: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, quant_type="nf4")
    made.weight = bnb.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    made.bias = linear.bias
    return made.to("cpu")  # type: ignore[no-any-return]


def eight_bits(linear: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    made.bias = linear.bias
    return made.to("cpu")  # type: ignore[no-any-return]


def torchao(name: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    def convert(linear: nn.Linear) -> nn.Module:
        quantisation = pytest.importorskip("torchao.quantization")
        quantisation.quantize_(linear, getattr(quantisation, name)(**options))
        return linear

    return convert


FORMATS: dict[str, tuple[Callable[[nn.Linear], nn.Module], str, float]] = {
    "packed": (packed, "Packed (qweight)", 1e-4),
    "bitsandbytes nf4": (four_bits, "bitsandbytes nf4", 2e-3),  # its backward pass rounds once more
    "bitsandbytes int8": (eight_bits, "bitsandbytes int8", 0.1),  # inputs are rounded too
    "torchao int8": (torchao("Int8WeightOnlyConfig"), "torchao Int8Tensor", 1e-4),
    "torchao int4": (torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), "torchao IntxUnpacked", 1e-4),
}


def made(convert: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    model[2], model[4] = convert(model[2]), convert(model[4])
    return model.eval()


def twin_of(model: nn.Module) -> nn.Module:
    """The model with ordinary layers of the dequantised weights."""
    twin = nn.Sequential(*model)
    for layer in select_layers(model):
        if isinstance(layer, quantised.QuantisedLayer):
            bias = getattr(layer.module, "bias", None)
            plain = nn.Linear(layer.module.in_features, layer.module.out_features, bias is not None)  # type: ignore[arg-type]
            plain.weight.data, plain.bias.data = layer.weight().clone(), bias.detach().clone()  # type: ignore[union-attr]
            twin[int(layer.name)] = plain
    return twin


X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_is_that_of_the_dequantised_weights(name: str) -> None:
    convert, said, limit = FORMATS[name]
    with torch.random.fork_rng(devices=[]):
        model = made(convert)
    twin = twin_of(model)
    options: dict[str, Any] = {
        "measures": ["gradient", "nfa", "effective_rank", "weight_norm", "agop_trace", "vcs_cosine"]
    }
    options["measures"] = ["gradient_norm", *options["measures"][1:]]
    with torch.no_grad():
        model(X)  # inference first: bitsandbytes packs its weights again
    found, expected = (gs.measure(net, (X, Y), nn.CrossEntropyLoss(), **options) for net in (model, twin))
    for layer, row in expected.rows.items():
        assert found[layer] == pytest.approx(row, rel=limit), layer
    assert said in str(found.notes["2"])
    assert "2" not in expected.notes
    original = made(lambda linear: linear)
    assert float((twin[2].weight - original[2].weight).norm() / original[2].weight.norm()) < 0.15  # type: ignore[operator, union-attr]


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
        model = made(packed)
    before = copy.deepcopy(model.state_dict())
    rule = gs.FreeMuon(model)
    assert "2.weight" in rule.summary()
    assert "quantised, so it cannot be set" in rule.summary()
    F.cross_entropy(model(X), Y).backward()
    rule.step()
    assert torch.equal(model.state_dict()["2.qweight"], before["2.qweight"])
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
