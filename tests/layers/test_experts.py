"""Fused experts, against one ``nn.Linear`` for each expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from cases import BY_NAME, Around, close_to_twin, sample_losses

transformers = pytest.importorskip("transformers")


class PlainExperts(nn.Module):
    """Every expert sees every token; those that were not chosen have no part in the sum."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate = _linear(block.gate.weight)
        self.up = nn.ModuleList(_linear(w) for w in block.experts.gate_up_proj)
        self.down = nn.ModuleList(_linear(w) for w in block.experts.down_proj)
        self.top = block.gate.top_k  # Mixtral takes its softmax in float32

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).float().softmax(-1).topk(self.top, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            share = (shares * (chosen == e)).sum(-1, keepdim=True)
            inside = (share > 0).to(x.dtype)  # tokens that do not reach an expert are zero there
            a, b = up(x * inside).chunk(2, -1)
            total = total + share * down(F.silu(a) * b)
        return total


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    return layer


def test_experts_and_router_against_linear_layers() -> None:
    model, x, y = BY_NAME["experts"].make()
    twin = Around(
        lambda m, x: m.head(m.block(m.enter(x)).mean(1)),
        enter=model.enter,
        block=PlainExperts(model.block),
        head=model.head,
    )
    names: dict[str, str | list[str]] = {
        "enter": "enter",
        "block.gate": "block.gate",
        "block.experts.gate_up_proj": [f"block.up.{e}" for e in range(6)],
        "block.experts.down_proj": [f"block.down.{e}" for e in range(6)],
    }
    close_to_twin(model, twin, names, x, y)


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
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    experts = {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 4,
    }
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
        expected = record.layer.matrix(gradient)
        assert (record.D - expected).norm() <= 1e-4 * expected.norm()
