"""Layers of a deep net arranged by kind and block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gramscope.names import split_name
from gramscope_lab.report.read import distinct, shorten

#: fewer blocks than this are shown as single layers
LEAST_BLOCKS = 3


@dataclass(frozen=True)
class BlockLayout:
    """``inside[i][j]`` is the layer of kind ``kinds[i]`` in block ``blocks[j]``, or ``None``.

    Layers outside all blocks come ``before`` or ``after`` them.
    """

    kinds: tuple[str, ...]
    blocks: tuple[str, ...]
    inside: tuple[tuple[str | None, ...], ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """Labels of the columns of a map: layers before, blocks, layers after."""
        return distinct([*("in" for _ in self.before), *self.blocks, *("out" for _ in self.after)])

    @property
    def rows(self) -> list[list[str | None]]:
        """The layer of each cell of a map; a layer outside the blocks fills its column."""
        return [[*self.before, *row, *self.after] for row in self.inside]


def block_layout(layers: Sequence[str]) -> BlockLayout | None:
    """Arrange layers, given from input to output; ``None`` if fewer than three blocks share a kind."""
    names = {layer: split_name(layer) for layer in layers}
    inside = [layer for layer in layers if names[layer].block is not None]
    repeated = Counter((names[layer].stack, names[layer].kind) for layer in inside)
    if not repeated or max(repeated.values()) < LEAST_BLOCKS:
        return None
    stacks = _short_stacks(sorted({names[layer].stack for layer in inside}))
    cells: dict[str, dict[int, str]] = {}
    for layer in inside:
        block, kind, stack = names[layer]
        row = shorten(f"{stacks[stack]} {kind}".strip(), 32)
        while block in cells.get(row, {}):  # two names that shorten to one
            row += "′"
        cells.setdefault(row, {})[block or 0] = layer
    numbers = sorted({number for row in cells.values() for number in row})
    outside = [layer for layer in layers if names[layer].block is None]
    first = layers.index(inside[0])
    return BlockLayout(
        tuple(cells),
        tuple(map(str, numbers)),
        tuple(tuple(row.get(number) for number in numbers) for row in cells.values()),
        tuple(layer for layer in outside if layers.index(layer) < first),
        tuple(layer for layer in outside if layers.index(layer) > first),
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
