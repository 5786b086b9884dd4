"""Fused experts in every form that transformers has; ``tests/instruments/test_models.py`` compares their columns."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, sample_losses

transformers = pytest.importorskip("transformers")


def test_an_expert_without_tokens_has_no_gradient() -> None:
    model, x, y = BY_NAME["experts"].make(n=1)
    vars(model.get_submodule("block.experts")).pop("has_post_expert_norm", None)  # transformers up to 5.17 has it not
    with gs.capture(model) as tape:
        tape.backward(sample_losses(model(x[:1, :1]), y[:1]))
    record = tape["block.experts.gate_up_proj"]
    assert record.h.shape == (6, 1, 1, 5)
    assert (record.D.flatten(1).norm(dim=1) > 0).sum() == 2  # the two experts of the one token


@pytest.mark.parametrize("choice", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss", "Qwen3Moe", "DeepseekV3"])
def test_every_implementation_and_storage_has_the_gradients_of_autograd(kind: str, choice: str) -> None:
    sizes = {
        "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
    }  # fmt: skip
    experts = {
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4,
    }  # fmt: skip
    if kind == "Qwen3Moe":
        experts |= {"moe_intermediate_size": 8}
    if kind == "DeepseekV3":
        experts = {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8,
            "first_k_dense_replace": 0, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
            "v_head_dim": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes, **experts, tie_word_embeddings=False)
    config._experts_implementation = choice
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(15).reshape(3, 5)
    with gs.capture(model) as tape:
        tape.backward(model(ids).logits.square().mean((1, 2)))
    assert config._experts_implementation == choice
    names = {record.name.rpartition("mlp.")[2] for record in tape if "mlp" in record.name}
    assert {"gate" if kind != "GptOss" else "router", "experts.gate_up_proj", "experts.down_proj"} <= names
    total = model(ids).logits.square().mean((1, 2)).sum()
    for record in tape:
        (gradient,) = torch.autograd.grad(total, record.layer.parameter, retain_graph=True)
        expected = record.layer.to_matrix(gradient)
        assert (record.D - expected).norm() <= 1e-4 * expected.norm()


def quantise(W: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``W [experts, k, d]`` in MXFP4, number by number: blocks, scales and the weight that they stand for."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    groups = W.double().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = ((groups / 2 ** exponents[..., None]).unsqueeze(-1) - numbers).abs().argmin(-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), (numbers[codes] * 2 ** exponents[..., None]).flatten(-2)


def kernels_tensor(data: Tensor) -> SimpleNamespace:
    """A tensor as transformers' kernels keep it, in a layout that leaves everything in its place."""
    return SimpleNamespace(
        storage=SimpleNamespace(data=data.mT, layout=SimpleNamespace(unswizzle_data=lambda data: data))
    )


@pytest.mark.parametrize("kernels", [False, True])
def test_experts_of_four_bits(kernels: bool) -> None:
    """In transformers' modules, whose kernels need a GPU: blocks and scales as in files, or stand-ins for their tensors."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    config = transformers.GptOssConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, head_dim=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        exact = transformers.GptOssForCausalLM(config).double().eval()
        for parameter in exact.parameters():
            nn.init.normal_(parameter, std=0.3)
    stored = []
    for block in exact.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(block.mlp.experts, name)
            stored.append(quantise(weight.data.mT))
            weight.data = stored[-1][2].mT.contiguous()
    model, parts = copy.deepcopy(exact).float(), iter(stored)
    for block in model.model.layers:
        experts = mxfp4.Mxfp4GptOssExperts(config)
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales, _ = next(parts)
            setattr(experts, f"{name}_bias", getattr(block.mlp.experts, f"{name}_bias"))
            delattr(experts, name)
            if kernels:
                setattr(experts, name, kernels_tensor(blocks.flatten(-2)))
                setattr(experts, f"{name}_precision_config", SimpleNamespace(weight_scale=kernels_tensor(scales)))
            else:
                experts.register_buffer(f"{name}_blocks", blocks)
                experts.register_buffer(f"{name}_scales", scales)
        block.mlp = mxfp4.Mxfp4GptOssMLP(block.mlp.router, experts)
    ids = torch.arange(15).reshape(3, 5)
    data = [{"input_ids": part, "labels": part} for part in (ids[:1], ids[1:])]
    table = gs.measure(model, data, measures=["gradient_norm", "nfa", "weight_norm", "effective_rank"], progress=False)
    loss = exact(ids, labels=ids).loss
    assert table.network["loss"] == pytest.approx(loss.item(), rel=1e-5)
    known = gs.measure(exact, data, measures="nfa", progress=False)
    for layer, (_, _, W) in zip([name for name in table if ".experts." in name], stored, strict=True):
        (gradient,) = torch.autograd.grad(loss, exact.get_parameter(layer), retain_graph=True)
        assert table[layer]["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-3)
        assert table[layer]["weight_norm"] == pytest.approx(float(W.norm()), rel=1e-6)
        assert table[layer]["nfa"] == pytest.approx(known[layer]["nfa"], rel=1e-3)
        assert "MXFP4" in str(table.notes[layer])
    assert not any(hasattr(module, "_is_hooked") or "forward" in vars(module) for module in model.modules())
