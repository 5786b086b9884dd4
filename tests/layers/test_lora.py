"""LoRA layers, against one ``nn.Linear`` with the weight W + BA."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import BY_NAME, captured, close, close_to_autograd, close_to_twin, normal, sample_losses
from gramscope.errors import LayerError
from gramscope.layers.select import select_layers

peft = pytest.importorskip("peft")


def test_lora_is_one_layer_and_its_factors_are_on_request() -> None:
    model, x, y = BY_NAME["lora"].make()
    twin = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    scale, a, b = model[0].scaling["default"], model[0].lora_A["default"].weight, model[0].lora_B["default"].weight
    twin[0].weight.data, twin[0].bias = (model[0].base_layer.weight + scale * b @ a).detach(), model[0].base_layer.bias
    twin[2] = model[2]
    close_to_twin(model, twin, {"0": "0", "2": "2"}, x, y)
    assert select_layers(model).names == ("0", "2")
    assert select_layers(model, "0").names == ("0",)
    close_to_autograd(captured(model, x, y, ["*.lora_A.*", "0.lora_B"]), sample_losses(model(x), y).sum())
    model[0].merge()
    close(captured(model, x, y)["0"].D, captured(twin, x, y)["0"].D)


def test_dropout_between_the_factors_is_noticed() -> None:
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), config).base_model.model.double()
    x, y = normal(4, 5), torch.arange(4) % 3
    assert "not W h + b" in captured(model.train(), x, y).unsupported["0"].text
    assert captured(model.eval(), x, y).order == ["0", "1"]


def test_optimizers_train_the_factors() -> None:
    model, x, y = BY_NAME["lora"].make()
    model[0].base_layer.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    summary = gs.GramWhitened(torch.optim.SGD(trained, lr=0.1), model).summary()
    assert "0.lora_A.default.weight  2 × 5   whitened" in summary
    assert "0.lora_A.default.weight" in gs.VCL(model, gamma=0.1, solver="recursive").param_groups[0]["layers"]


def test_adapters_of_transformers_conv1d() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).double().eval()
    with gs.capture(model) as tape:
        model(torch.arange(12).reshape(2, 6)).logits.sum().backward()
    (name,) = [name for name in tape.order if name.endswith("c_attn")]
    assert tape[name].weight.shape == (24, 8)


def test_a_plain_base_is_the_reference_of_an_adapted_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    base = transformers.GPT2LMHeadModel(config).double().eval()
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), lora).double().eval()
    data = [{"input_ids": torch.arange(12).reshape(2, 6)}]
    table = gs.measure(model, data, reference=base, measures=["weight_change", "nfa_ptk"], jacobians=True)
    (changed,) = (row for row in table.rows.values() if row["weight_change"])
    assert changed["nfa_ptk"] is not None
    with pytest.raises(LayerError, match=r"0 of \d+ names match: one model has .*wte.*, the other 0"):
        gs.measure(model, data, reference=nn.Sequential(nn.Linear(2, 3)), measures=["weight_change"])


def test_a_base_before_tokens_were_added_is_compared_where_both_have_them() -> None:
    old = nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(10, 4)).double()
    new = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Linear(10, 6)).double()
    with torch.no_grad():
        for now, before in ((new[0], old[0]), (new[2], old[2])):
            now.weight[: len(before.weight)] = 1.5 * before.weight
    x, y = torch.arange(20).reshape(10, 2) % 9, torch.arange(10) % 4
    table = gs.measure(
        new, (x, y), nn.CrossEntropyLoss(), reference=old, measures=["weight_change", "nfa_centered", "nfa_ptk"]
    )
    assert [table[name]["weight_change"] for name in ("0", "2")] == [pytest.approx(0.5)] * 2
    change = torch.zeros_like(new[2].weight)
    change[:4] = 0.5 * old[2].weight
    K = gs.tangent_kernel(new, x)["2"]
    assert table["2"]["nfa_centered"] == pytest.approx(float(gs.nfa(change.detach(), K)))
    assert table["2"]["nfa_ptk"] is None
    assert "it cannot run on these inputs" in str(table.notes["(output)"])
    pairs = gs.compare(old, new)
    assert [pairs[name]["change"] for name in ("0", "2")] == [pytest.approx(0.5)] * 2
    assert "the first 4 × 10 entries are compared" in str(pairs.notes["2"])
