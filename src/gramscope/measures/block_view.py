"""A table of a deep net by block: one line per kind of layer, over depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gramscope.names import split_name

#: the line of the blocks' own outputs
RESIDUAL = "(residual stream)"


@dataclass(frozen=True)
class BlockView:
    """Measures by kind of layer and number of block; print it to see one line per kind.

    Args:
        values: ``{measure: {kind: {block: value}}}``. Layers outside all blocks have the block ``None``; with several lists of
            blocks (an encoder and a decoder) the kind begins with the name of its list.
        cell: writes one value.
    """

    values: dict[str, dict[str, dict[int | None, float | None]]]
    cell: Callable[[float | None], str]

    def __getitem__(self, measure: str) -> dict[str, dict[int | None, float | None]]:
        return self.values[measure]

    def __str__(self) -> str:
        return "\n\n".join(self._lines(measure, kinds) for measure, kinds in self.values.items())

    __repr__ = __str__

    def _lines(self, measure: str, kinds: dict[str, dict[int | None, float | None]], width: int = 120) -> str:
        blocks = sorted({block for row in kinds.values() for block in row if block is not None})
        inside = {kind: row for kind, row in kinds.items() if None not in row}
        outside = {kind: row[None] for kind, row in kinds.items() if None in row}
        cells = {kind: {b: self.cell(row[b]) if b in row else "" for b in blocks} for kind, row in inside.items()}
        first = max(map(len, [measure, *kinds]))
        size = max((len(text) for row in cells.values() for text in row.values()), default=1)
        size = max(size, len(str(blocks[-1])) if blocks else 1) + 2
        each = max(1, (width - first) // size)  # blocks in one line; deeper nets go on below
        lines = []
        for start in range(0, len(blocks), each):
            chosen = blocks[start : start + each]
            lines.append(measure.ljust(first) + "".join(str(b).rjust(size) for b in chosen))
            lines += [kind.ljust(first) + "".join(row[b].rjust(size) for b in chosen) for kind, row in cells.items()]
        if not blocks:
            lines.append(measure)
        mark = "  (no block)" if blocks else ""
        lines += [f"{kind.ljust(first)}  {self.cell(value)}{mark}" for kind, value in outside.items()]
        return "\n".join(lines)


def block_view(rows: Mapping[str, Mapping[str, float | None]], cell: Callable[[float | None], str]) -> BlockView:
    """Rows ``{layer: {measure: value}}`` by measure, kind of layer and block.

    >>> rows = {"h.0.fc1": {"nfa": 0.1}, "h.1.fc1": {"nfa": 0.2}, "head": {"nfa": 0.3}}
    >>> print(block_view(rows, str))
    nfa     0    1
    fc1   0.1  0.2
    head  0.3  (no block)

    Outputs of whole blocks (``outputs="h.*"``) are one line, ``(residual stream)``.
    """
    # a block itself, captured with outputs=, is split as if it held a layer of this name
    names = {layer: split_name(layer) for layer in rows}
    blocks = {layer: split_name(f"{layer.removesuffix(' (output)')}.{RESIDUAL}") for layer in rows}
    names |= {layer: name for layer, name in blocks.items() if name.block is not None and name.kind == RESIDUAL}
    stacks = {name.stack for name in names.values() if name.block is not None}
    values: dict[str, dict[str, dict[int | None, float | None]]] = {}
    for layer, row in rows.items():
        block, kind, stack = names[layer]
        if block is not None and len(stacks) > 1:
            kind = f"{stack}: {kind}"
        for measure, value in row.items():
            if kind.endswith(RESIDUAL) and value is None:
                continue  # a block has features, but no weight of its own
            values.setdefault(measure, {}).setdefault(kind, {})[block] = value
    return BlockView(values, cell)
