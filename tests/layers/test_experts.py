"""Fused experts in every form that transformers has; ``tests/instruments/test_models.py`` compares their columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gramscope as gs
from cases import BY_NAME, sample_losses

transformers = pytest.importorskip("transformers")


def test_an_expert_without_tokens_has_no_gradient() -> None:
    model, x, y = BY_NAME["experts"].make(n=1)
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
