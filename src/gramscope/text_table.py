"""Tables as text, for a terminal: the one printer of everything that gramscope shows in rows and columns."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table, with two spaces between its columns.

    Args:
        rows: cells, the headings first; every row has equally many.
        left: how many columns are aligned to the left, from the first on; the others are aligned to the right.

    >>> print("\\n".join(text_table([["layer", "rank"], ["0", "12"], ["fc.out", "3"]])))
    layer   rank
    0         12
    fc.out     3
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
