"""A table of measures: one row per layer, one column per measure, with what could not be measured and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from gramscope.errors import InputError, MissingExtraError
from gramscope.measures.block_view import BlockView, block_view
from gramscope.notes import Note


@dataclass(frozen=True)
class Table:
    """Result of :func:`gramscope.measure`.

    Args:
        rows: ``{layer: {measure: value}}``; a value is a number or ``None`` where the measure has no answer there.
        network: measures of the whole network (loss, accuracy, samples).
        notes: why something is missing or may mislead, by layer or ``layer.measure``.
        errors: standard errors of the values that were estimated at random, ``{layer: {measure: error}}``.
    """

    rows: dict[str, dict[str, float | None]]
    network: dict[str, float | None] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    def __getitem__(self, layer: str) -> dict[str, float | None]:
        if layer not in self.rows:
            raise InputError(f"no row {layer!r}; there are: {', '.join(self.rows)}")
        return self.rows[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        """Names of the measures, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row))

    def column(self, measure: str) -> dict[str, float | None]:
        """One measure by layer."""
        if measure not in self.columns:
            raise InputError(f"no measure {measure!r}; there are: {', '.join(self.columns)}")
        return {layer: row.get(measure) for layer, row in self.rows.items()}

    def by_block(self, *measures: str) -> BlockView:
        """One line per kind of layer (q, k, v, …) over the blocks of a deep net, for some measures or all.

        >>> table = Table({"h.0.fc1": {"nfa": 0.5}, "h.1.fc1": {"nfa": 0.25}})
        >>> print(table.by_block("nfa"))
        nfa       0       1
        fc1  0.5000  0.2500
        """
        names = measures or tuple(self.columns)
        chosen = {name: self.column(name) for name in names}
        return block_view({layer: {name: chosen[name][layer] for name in names} for layer in self.rows}, format_value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; NaN and infinity become ``None``."""
        return {
            "layers": {layer: {name: _plain(value) for name, value in row.items()} for layer, row in self.rows.items()},
            "network": {name: _plain(value) for name, value in self.network.items()},
            "notes": {name: note.text for name, note in self.notes.items()},
            **({"errors": {layer: dict(row) for layer, row in self.errors.items()}} if self.errors else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """The table of stored values; stored notes have only a text and become remarks."""
        rows = {layer: dict(row) for layer, row in values["layers"].items()}
        notes = {name: Note("remark", text) for name, text in values.get("notes", {}).items()}
        errors = {layer: dict(row) for layer, row in values.get("errors", {}).items()}
        return cls(rows, dict(values.get("network", {})), notes, errors)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with layers as index and measures as columns."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_pandas() needs pandas: pip install 'gramscope[pandas]'") from error
        frame = pd.DataFrame.from_dict(self.rows, orient="index", columns=self.columns, dtype=float)
        frame.index.name = "layer"
        return frame

    def _cell(self, layer: str, name: str) -> str:
        value, error = self.rows[layer].get(name), self.errors.get(layer, {}).get(name)
        return format_value(value) + (f" ± {error:.1g}" if error is not None and value is not None else "")

    def __str__(self) -> str:
        columns = self.columns
        cells = [["layer", *columns]]
        cells += [[layer, *(self._cell(layer, name) for name in columns)] for layer in self.rows]
        lines = _aligned(cells)
        if len(lines[0]) > WIDTH:  # one line per measure may read better than one per layer
            turned = [list(line) for line in zip(*cells, strict=True)]
            lines = min(lines, _aligned([["measure", *turned[0][1:]], *turned[1:]]), key=lambda rows: len(rows[0]))
        return "\n".join([*lines, *self._remarks()])

    def _remarks(self) -> list[str]:
        """Lines below the table: measures of the network, and notes."""
        lines = []
        if self.network:
            lines.append(
                "network: " + ", ".join(f"{name} {format_value(value)}" for name, value in self.network.items())
            )
        reasons: dict[str, list[str]] = {}
        for name, note in self.notes.items():
            reasons.setdefault(note.text, []).append(name)
        for reason, found in reasons.items():
            cells = {f"{layer}.{column}" for layer in found for column in self.columns}
            names = [name for name in found if name not in cells]  # a layer's note covers its cells
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"note: {shown}: {reason}")
        return lines

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        columns = self.columns
        rows = [("th", ["layer", *columns])]
        rows += [("td", [layer, *(format_value(row.get(n)) for n in columns)]) for layer, row in self.rows.items()]
        lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows)
        remarks = "".join(f"<div>{escape(line)}</div>" for line in self._remarks())
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{remarks}"


#: printed lines up to this length keep one line per layer
WIDTH = 120


def _aligned(cells: list[list[str]]) -> list[str]:
    """Lines with the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]


def format_value(value: float | None) -> str:
    """A number in at most nine characters.

    >>> [format_value(v) for v in (0.5, 12, 1234567.0, 1e-7, None)]
    ['0.5000', '12', '1.235e+06', '1.000e-07', '-']
    """
    if value is None:
        return "-"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
