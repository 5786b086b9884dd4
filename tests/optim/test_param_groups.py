"""The groups hold every trained parameter once, the matrices are the hidden ones, and torch's optimizers take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gramscope as gs
from refusals import assert_refused


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 2),
    )


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=6)
    )


def names(model: nn.Module, **options: Any) -> list[str]:
    matrices, rest = gs.param_groups(model, **options)
    given = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, matrices["params"] + rest["params"])) == sorted(map(id, given))
    return matrices["param_names"]


def test_groups_hold_hidden_matrices_and_the_rest() -> None:
    assert names(convolutional()) == ["4.weight"]
    assert names(convolutional(), head=True) == ["4.weight", "6.weight"]
    assert names(convolutional(), head=True, exclude="4") == ["6.weight"]
    frozen = convolutional()
    frozen[4].weight.requires_grad_(False)
    assert names(frozen, head=True) == ["6.weight"]


def test_embeddings_positions_and_tied_heads_are_the_rest() -> None:
    found = names(language_model())
    assert found == [
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    untied = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    assert names(untied) == ["1.weight"]
    untied[2].weight = untied[0].weight
    assert names(untied, head=True) == ["1.weight"]  # tied: an embedding


def test_experts_are_stacks_of_matrices_and_routers_can_be_left_out() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, vocab_size=11, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config)
    prefix = "model.layers.0."
    found = [name.removeprefix(prefix) for name in names(model, exclude="*.gate")]
    assert found == [f"self_attn.{part}_proj.weight" for part in "qkvo"]


def test_muon_and_adamw_train_both_groups() -> None:
    model = language_model()
    matrices, rest = gs.param_groups(model, {"lr": 0.02, "weight_decay": 0.0}, {"lr": 1e-2})
    optimizers = torch.optim.Muon([matrices]), torch.optim.AdamW([rest])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(12).reshape(2, 6) % 11
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    assert optimizers[0].param_groups[0]["lr"] == 0.02


def test_one_optimizer_takes_both_groups() -> None:
    optimizer = torch.optim.AdamW(gs.param_groups(convolutional(), {"lr": 0.1}, {"lr": 0.2}))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_wrong_arguments_are_refused() -> None:
    assert_refused("no hidden weight matrix", gs.param_groups, nn.Linear(3, 2))
    assert_refused("matrix=0.02", gs.param_groups, convolutional(), 0.02)
    assert_refused("key 'params'", gs.param_groups, convolutional(), rest={"params": []})
