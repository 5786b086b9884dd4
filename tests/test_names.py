"""Names as transformers, timm, torchvision and torch give them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope.names import split_name


@pytest.mark.parametrize(
    ("name", "block", "kind"),
    [
        ("model.layers.11.self_attn.k_proj", 11, "self_attn.k_proj"),  # Llama
        ("transformer.h.3.attn.c_attn", 3, "attn.c_attn"),  # GPT-2
        ("bert.encoder.layer.2.attention.self.query", 2, "attention.self.query"),
        ("vit.encoder.layer.0.intermediate.dense", 0, "intermediate.dense"),
        ("blocks.7.mlp.fc1", 7, "mlp.fc1"),  # timm
        ("encoder.layers.encoder_layer_4.mlp.0", 4, "mlp.0"),  # torchvision
        ("visual.transformer.resblocks.1.attn.out_proj", 1, "attn.out_proj"),  # CLIP
        ("encoder.block.0.layer.0.SelfAttention.q", 0, "layer.0.SelfAttention.q"),  # T5
        ("model.layers.3.block_sparse_moe.experts.5.w1", 3, "block_sparse_moe.experts.5.w1"),  # Mixtral
        ("backbone.layers.9.mixer.in_proj", 9, "mixer.in_proj"),  # Mamba
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default", 0, "self_attn.q_proj.lora_A.default"),
        ("encoder.layers.1.linear2", 1, "linear2"),  # nn.TransformerEncoder
    ],
)
def test_blocks_of_known_families(name: str, block: int, kind: str) -> None:
    assert split_name(name)[:2] == (block, kind)


@pytest.mark.parametrize(
    "name",
    ["0", "net.2", "layers.0", "hidden1", "features.3", "features.3.conv.0", "layer1.0.conv1", "lm_head", "", "h.x.fc"],
)
def test_other_layers_belong_to_no_block(name: str) -> None:
    assert split_name(name) == (None, name, "")


def test_encoder_and_decoder_are_told_apart() -> None:
    names = [split_name(f"{part}.block.0.layer.0.SelfAttention.q") for part in ("encoder", "decoder")]
    assert [name.stack for name in names] == ["encoder.block", "decoder.block"]


@given(st.text(alphabet=".hlayerbock_0123456789²", max_size=40))
def test_every_text_is_accepted(name: str) -> None:
    block, kind, stack = split_name(name)
    assert name.endswith(kind)
    assert name.startswith(stack)
    assert (block is None) == (stack == "")
