"""Names of layers: which block of a deep net a layer belongs to, and which kind of layer it is there."""

from __future__ import annotations

import re
from typing import NamedTuple

#: names of the lists that hold the blocks of transformers and their relatives
_LISTS = frozenset({
    "layers", "layer", "h", "block", "blocks", "resblocks", "transformer_blocks", "encoder_layers", "decoder_layers",
})  # fmt: skip
#: a block that carries its number in its own name, as torchvision's ``encoder_layer_3``
_NUMBERED = re.compile(r"(\w*(?:layer|block)_)(\d+)", re.ASCII)


class LayerName(NamedTuple):
    """The parts of a layer's name.

    Args:
        block: number of the block, from 0; ``None`` for a layer outside all blocks.
        kind: name inside the block, the same in every block; the whole name for a layer outside.
        stack: name of the list of blocks, which tells an encoder from a decoder; empty for a layer outside.
    """

    block: int | None
    kind: str
    stack: str = ""


def split_name(name: str) -> LayerName:
    """Split the name of a layer into block and kind. The outermost list of blocks counts.

    >>> split_name("model.layers.11.self_attn.k_proj")
    LayerName(block=11, kind='self_attn.k_proj', stack='model.layers')
    >>> split_name("encoder.block.0.layer.1.DenseReluDense.wi")
    LayerName(block=0, kind='layer.1.DenseReluDense.wi', stack='encoder.block')

    Layers of plain sequences and of convolutional nets belong to no block:

    >>> split_name("features.3")
    LayerName(block=None, kind='features.3', stack='')
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        numbered = _NUMBERED.fullmatch(part)
        if numbered and len(numbered[2]) < 10:
            return LayerName(int(numbered[2]), ".".join(parts[i + 1 :]), ".".join([*parts[:i], numbered[1]]))
        number = parts[i + 1]
        if part in _LISTS and number.isascii() and number.isdigit() and len(number) < 10 and i + 2 < len(parts):
            return LayerName(int(number), ".".join(parts[i + 2 :]), ".".join(parts[: i + 1]))
    return LayerName(None, name)
