from __future__ import annotations

from gramscope_lab.report.block_layout import block_layout, layer_label


def test_encoder_and_decoder_have_rows_of_their_own() -> None:
    layers = ["shared", *(f"{part}.block.{i}.layer.0.q" for part in ("encoder", "decoder") for i in range(3))]
    layout = block_layout(layers)
    assert layout is not None
    assert layout.kinds == ("shared", "encoder layer.0.q", "decoder layer.0.q")
    assert layout.blocks == ("in", "0", "1", "2")
    assert layout.layers[2] == (None, *layers[4:])
    assert len({layer_label(layer) for layer in layers}) == 7


def test_every_layer_has_a_place() -> None:
    long = "block_sparse_moe.experts.{}.an_expert_with_a_very_long_name.w1"
    layers = [f"model.layers.{i}.{long.format(j)}" for i in range(4) for j in range(12)] + ["lm_head", "value_head"]
    layout = block_layout(layers)
    assert layout is not None
    assert sorted(layer for row in layout.layers for layer in row if layer) == sorted(layers)


def test_few_blocks_and_plain_nets_have_no_layout() -> None:
    assert block_layout(["layers.0.fc", "layers.1.fc", "readout"]) is None
    assert block_layout(["features.0", "features.3", "classifier"]) is None
    assert block_layout([]) is None
