"""Names of layers: which block of a deep net a layer belongs to, which kind of layer it is there, and how to show it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

#: names of the lists that hold the blocks of transformers and their relatives
_LISTS = frozenset({
    "layers", "layer", "h", "block", "blocks", "resblocks", "transformer_blocks", "encoder_layers", "decoder_layers",
})  # fmt: skip
#: a block that carries its number in its own name, as torchvision's ``encoder_layer_3``
_NUMBERED = re.compile(r"(\w*(?:layer|block)_)(\d+)", re.ASCII)
#: characters that move a terminal's cursor, turn the direction of a line around, or cannot be written as UTF-8
_UNSAFE = {
    **{code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))},
    **{code: f"\\u{code:04x}" for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
    **{code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)},
}


def printable(text: str) -> str:
    """Text with its control characters, but tab and new line, and halves of surrogate pairs spelled out.

    >>> printable("\\x1b[2J")
    '\\\\x1b[2J'
    """
    return text if text.isascii() and text.isprintable() else text.translate(_UNSAFE)


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


#: parts of names that wrappers insert: torch.compile, checkpointing, FSDP, PEFT
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "base_layer"})


def match_names(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Pairs of names that mean the same layer or weight of two models, which may be wrapped differently.

    Parts that wrappers insert do not count, and one of the models may have one prefix more on all of its names
    (``module.``, ``base_model.model.``): the one with which most names match.

    >>> match_names(["h.0.fc.weight"], ["base_model.model.h.0.fc.base_layer.weight", "base_model.model.h.0.fc.lora_A.weight"])
    {'h.0.fc.weight': 'base_model.model.h.0.fc.base_layer.weight'}
    """
    mine, theirs = ({_unwrapped(name): name for name in reversed(list(part))} for part in (names, others))
    best: dict[str, str] = {}
    for prefix in _prefixes(mine, theirs):
        pairs = {mine[name]: theirs[prefix + name] for name in mine if prefix + name in theirs}
        best = pairs if len(pairs) > len(best) else best
    for prefix in _prefixes(theirs, mine):
        pairs = {mine[prefix + name]: theirs[name] for name in theirs if prefix + name in mine}
        best = pairs if len(pairs) > len(best) else best
    return {name: best[name] for name in reversed(mine.values()) if name in best}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _prefixes(short: Iterable[str], long: Iterable[str]) -> list[str]:
    """What stands before the first few of the short names in longer ones, and nothing."""
    found = {""}
    for name in list(short)[:8]:
        found |= {other.removesuffix(name) for other in long if other.endswith(f".{name}")}
    return sorted(found, key=len)
