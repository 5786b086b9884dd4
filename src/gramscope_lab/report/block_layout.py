"""Layers of a deep net arranged by kind and block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gramscope.names import split_name
from gramscope_lab.report.panel import shorten

#: fewer blocks than this are shown as single layers
LEAST_BLOCKS = 3


@dataclass(frozen=True)
class BlockLayout:
    """``layers[i][j]`` is the layer of kind ``kinds[i]`` in block ``blocks[j]``, or ``None``.

    Layers outside all blocks are kinds of their own, in a column ``in`` before or ``out`` after the blocks.
    """

    kinds: tuple[str, ...]
    blocks: tuple[str, ...]
    layers: tuple[tuple[str | None, ...], ...]


def block_layout(layers: Sequence[str]) -> BlockLayout | None:
    """Arrange layers, given from input to output; ``None`` if fewer than three blocks share a kind."""
    names = {layer: split_name(layer) for layer in layers}
    inside = [layer for layer in layers if names[layer].block is not None]
    repeated = Counter((names[layer].stack, names[layer].kind) for layer in inside)
    if not repeated or max(repeated.values()) < LEAST_BLOCKS:
        return None
    stacks = _short_stacks(sorted({names[layer].stack for layer in inside}))
    cells: dict[str, dict[int, str]] = {}
    numbers = sorted({block for layer in inside if (block := names[layer].block) is not None})
    for place, layer in enumerate(layers):
        block, kind, stack = names[layer]
        if block is None:
            block = -1 if place < layers.index(inside[0]) else numbers[-1] + 1
        row = shorten(f"{stacks[stack]} {kind}".strip() if stack else kind, 32)
        while block in cells.get(row, {}):  # two names that shorten to one
            row += "′"
        cells.setdefault(row, {})[block] = layer
    used = {block for row in cells.values() for block in row}
    columns = [*([-1] if -1 in used else []), *numbers, *([numbers[-1] + 1] if numbers[-1] + 1 in used else [])]
    titles = {-1: "in", numbers[-1] + 1: "out"}
    return BlockLayout(
        tuple(cells),
        tuple(titles.get(column, str(column)) for column in columns),
        tuple(tuple(row.get(column) for column in columns) for row in cells.values()),
    )


def layer_label(layer: str) -> str:
    """A short label that keeps the number of the block.

    >>> layer_label("model.layers.11.self_attn.k_proj"), layer_label("lm_head")
    ('11 self_attn.k_proj', 'lm_head')
    """
    block, kind, stack = split_name(layer)
    if block is None:
        return shorten(layer, 28)
    part = next((part for part in ("encoder", "decoder") if part in stack.split(".")), "")
    return f"{part} {block} {shorten(kind, 24)}".strip()


def _short_stacks(stacks: Sequence[str]) -> dict[str, str]:
    """For each list of blocks the parts of its name that the others lack; empty if there is only one list."""
    shared = set.intersection(*(set(stack.split(".")) for stack in stacks))
    return {stack: ".".join(part for part in stack.split(".") if part not in shared) for stack in stacks}
