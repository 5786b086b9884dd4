"""A table of measures: one row per layer, one column per measure, with what could not be measured and why."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from gramscope.errors import InputError, MissingExtraError, Note, no_such
from gramscope.linalg.measured import Measured
from gramscope.names import split_name
from gramscope.text_table import text_table

#: columns of a page, and of a terminal that does not tell
WIDTH = 100
#: columns of notes: those of a block of code on a page
NOTES = 88
#: columns of the lines of :meth:`Table.by_block`
NARROW = 80
#: the line of the blocks' own outputs
RESIDUAL = "(residual stream)"


@dataclass(frozen=True)
class Table:
    """Result of :func:`gramscope.measure`.

    Args:
        rows: ``{layer: {measure: value}}``; a value is a number, with an ``error`` where it was estimated at random
            (:class:`~gramscope.linalg.measured.Measured`), or ``None`` where the measure has no answer.
        network: measures of the whole network (loss, accuracy, samples).
        notes: why something is missing or may mislead, by layer or ``layer.measure``.

    >>> Table({"fc1": {"nfa": 0.5, "nc1": 12.0}, "fc2": {"nfa": Measured(0.25, 0.01), "nc1": None}})
    layer          nfa      nc1
    fc1         0.5000  12.0000
    fc2    0.25 ± 0.01        -
    """

    rows: dict[str, dict[str, float | None]]
    network: dict[str, float | None] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)

    def __getitem__(self, name: str) -> dict[str, float | None]:
        """The row of a layer, or the column of a measure."""
        if name in self.rows:
            return self.rows[name]
        if name in self.columns:
            return self.column(name)
        raise InputError(no_such("row or column", name, [*self.rows, *self.columns]))

    def __sub__(self, other: Table) -> Table:
        """What changed from ``other`` to this table, in the cells that both have; errors are those of differences.

        >>> (Table({"fc": {"nfa": 0.75}}) - Table({"fc": {"nfa": 0.5}}))["nfa"]
        {'fc': 0.25}
        """
        if not isinstance(other, Table):
            return NotImplemented
        rows = {
            layer: {
                name: _difference(x, other.rows[layer][name]) for name, x in row.items() if name in other.rows[layer]
            }
            for layer, row in self.rows.items()
            if layer in other.rows
        }
        network = {
            name: _difference(x, other.network[name]) for name, x in self.network.items() if name in other.network
        }
        alone = [layer for layer in (*self.rows, *other.rows) if (layer in self.rows) != (layer in other.rows)]
        notes = {layer: Note("remark", "only one of the two tables has this layer") for layer in alone}
        return Table(rows, network, notes)

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
            raise InputError(no_such("measure", measure, self.columns))
        return {layer: row.get(measure) for layer, row in self.rows.items()}

    @property
    def errors(self) -> dict[str, dict[str, float]]:
        """Standard errors of the values that were estimated at random, ``{layer: {measure: error}}``."""
        found = {
            layer: {name: x.error for name, x in row.items() if isinstance(x, Measured) and x.error is not None}
            for layer, row in self.rows.items()
        }
        return {layer: row for layer, row in found.items() if row}

    def by_block(self, *measures: str) -> BlockView:
        """One line per kind of layer (q, k, v, …) over the blocks of a deep net, for some measures or all.

        >>> table = Table({"h.0.fc1": {"nfa": 0.5}, "h.1.fc1": {"nfa": 0.25}, "head": {"nfa": 0.3}})
        >>> print(table.by_block("nfa"))
        nfa        0       1
        fc1   0.5000  0.2500
        head  0.3000          (no block)

        Outputs of whole blocks (``outputs="h.*"``) are one line, ``(residual stream)``.
        """
        shown = measures or tuple(self.columns)
        cells = {f"{layer}.{name}" for layer in self.rows for name in shown}
        notes = {name: note for name, note in self.notes.items() if name in cells}
        return BlockView({name: _by_kind_and_block(self.column(name)) for name in shown}, notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; NaN and infinity become ``None``."""
        return {
            "layers": {layer: {name: _plain(value) for name, value in row.items()} for layer, row in self.rows.items()},
            "network": {name: _plain(value) for name, value in self.network.items()},
            "notes": {name: note.text for name, note in self.notes.items()},
            **({"errors": self.errors} if self.errors else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Table:
        """The table of stored values; stored notes have only a text and become remarks."""
        notes = {name: Note("remark", text) for name, text in values.get("notes", {}).items()}
        return cls(with_errors(values["layers"], values.get("errors", {})), dict(values.get("network", {})), notes)

    def save(self, path: str | Path) -> None:
        """Write the table to a file, ``.json`` or ``.parquet``, with errors and notes; floats come back exactly."""
        from gramscope.measures.table_files import write_tables

        write_tables(path, {0: self})

    @staticmethod
    def load(path: str | Path) -> Table:
        """The table of a file that :meth:`save` wrote."""
        from gramscope.measures.table_files import read_tables

        tables, _ = read_tables(path)
        if len(tables) != 1:
            raise InputError(f"{path} holds {len(tables)} tables; read it with gs.Series.load")
        return next(iter(tables.values()))

    def plot(self, column: str, backend: Literal["matplotlib", "plotly"] = "matplotlib") -> Any:
        """A figure of one measure: kinds of layers × depth where there are blocks, else a line over the layers."""
        from gramscope.measures.plots import plot_table

        return plot_table(self, column, backend)

    def to_pandas(self, errors: bool = True) -> Any:
        """A ``pandas.DataFrame`` with layers as index and measures as columns.

        Estimates have a column of their standard errors, ``"nfa ±"``, unless ``errors=False``; ``frame.attrs["notes"]`` holds
        the notes.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtraError("to_pandas() needs pandas: pip install 'gramscope[pandas]'") from error
        frame = pd.DataFrame.from_dict(self.rows, orient="index", columns=self.columns, dtype=float)
        frame.index.name = "layer"
        frame.attrs["notes"] = {name: note.text for name, note in self.notes.items()}
        if errors:
            for name in dict.fromkeys(name for row in self.errors.values() for name in row):
                frame[f"{name} ±"] = [self.errors.get(layer, {}).get(name) for layer in self.rows]
        return frame

    def __str__(self) -> str:
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        names, lines = _short(list(self.rows))
        columns = [[name, *(format_cell(row.get(name)) for row in self.rows.values())] for name in self.columns]
        return "\n".join(
            ["\n\n".join(_tables(["layer", *names], columns, width)), *lines, *self.remarks(min(width, NOTES))]
        )

    __repr__ = __str__

    def remarks(self, width: int) -> list[str]:
        """Lines below the table, no longer than ``width``: measures of the network, and notes."""
        lines = []
        if self.network:
            values = ", ".join(f"{name} {format_value(value)}" for name, value in self.network.items())
            lines.append(f"network: {values}")
        reasons: dict[str, list[str]] = {}
        for name, note in self.notes.items():
            reasons.setdefault(note.text, []).append(name)
        for reason, found in reasons.items():
            cells = {f"{layer}.{column}" for layer in found for column in self.columns}
            names = [name for name in found if name not in cells]  # a layer's note covers its cells
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"note: {shown}: {reason}")
        return [textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False) for line in lines]

    def _repr_html_(self) -> str:
        """The table in a notebook."""
        columns = self.columns
        rows = [("th", ["layer", *columns])]
        rows += [("td", [layer, *(format_cell(row.get(n)) for n in columns)]) for layer, row in self.rows.items()]
        lines = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in rows)
        remarks = "".join(f"<div>{escape(line)}</div>" for line in self.remarks(10**6))
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{remarks}"


@dataclass(frozen=True)
class BlockView:
    """Measures by kind of layer and number of block; print it to see one line per kind.

    Args:
        values: ``{measure: {kind: {block: value}}}``. Layers outside all blocks have the block ``None``; with several lists of
            blocks (an encoder and a decoder) the kind begins with the name of its list.
        notes: those on cells of the table.
    """

    values: dict[str, dict[str, dict[int | None, float | None]]]
    notes: dict[str, Note] = field(default_factory=dict)

    def __getitem__(self, measure: str) -> dict[str, dict[int | None, float | None]]:
        return self.values[measure]

    def __str__(self) -> str:
        blocks = "\n\n".join(self._text(measure, kinds) for measure, kinds in self.values.items())
        return "\n".join([blocks, *Table({}, notes=self.notes).remarks(NOTES)])

    __repr__ = __str__

    def _text(self, measure: str, kinds: dict[str, dict[int | None, float | None]]) -> str:
        blocks = sorted({block for row in kinds.values() for block in row if block is not None})
        if not blocks:
            return "\n".join([measure, *text_table([[kind, format_cell(row[None])] for kind, row in kinds.items()])])
        inside = {kind: row for kind, row in kinds.items() if None not in row}
        columns = [[str(b), *(format_cell(row[b]) if b in row else "" for row in inside.values())] for b in blocks]
        lines = _tables([measure, *inside], columns, NARROW)
        outside = [[kind, format_cell(row[None]), "(no block)"] for kind, row in kinds.items() if None in row]
        return "\n".join([*lines, *(text_table(outside) if outside else [])])


def _difference(x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else x - y


def with_errors(
    rows: Mapping[str, Mapping[str, float | None]],
    errors: Mapping[str, Mapping[str, float]],
    remarks: Mapping[str, str] = {},
) -> dict[str, dict[str, float | None]]:
    """Rows of a table whose numbers know their errors, and their remarks, which are given by ``layer.measure``."""

    def number(layer: str, name: str, value: float | None) -> float | None:
        error, remark = errors.get(layer, {}).get(name), remarks.get(f"{layer}.{name}", "")
        return value if value is None or (error is None and not remark) else Measured(value, error, remark)

    return {layer: {name: number(layer, name, value) for name, value in row.items()} for layer, row in rows.items()}


def format_value(value: float | None) -> str:
    """A number in at most nine characters.

    >>> [format_value(v) for v in (0.5, 1.0, 12, 0.0003147, 1234567.0, 1e-7, None)]
    ['0.5000', '1.0000', '12', '0.0003147', '1.235e+06', '1.000e-07', '-']
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.3e}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.4g}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def format_cell(value: float | None) -> str:
    """A number with its error, to the digit of the error, and a star where it says little.

    >>> format_cell(Measured(0.5, 0.012)), format_cell(Measured(0.95, remark="trivial: random eigenvectors too"))
    ('0.50 ± 0.01', '0.9500*')
    """
    if not isinstance(value, Measured):
        return format_value(value)
    star = "*" if value.remark.startswith(("trivial", "doubtful")) else ""
    if value.error is None:
        return format_value(value) + star
    digits = max(0, -math.floor(math.log10(value.error))) if 1e-4 <= value.error < 100 else None
    shown = format_value(value) if digits is None else f"{value:.{digits}f}"
    return f"{shown}{star} ± {value.error:.1g}"


def _tables(first: list[str], columns: Sequence[list[str]], width: int) -> list[str]:
    """Columns as tables no wider than ``width``, below each other; long headings in several lines where that helps."""
    if len("\n".join(text_table([list(row) for row in zip(first, *columns, strict=True)])).split("\n")[0]) > width:
        columns = [[*heading_lines(name, max(map(len, cells), default=1)), *cells] for name, *cells in columns]
    else:
        columns = [[name, *cells] for name, *cells in columns]
    tables: list[list[list[str]]] = []
    room = 0
    for column in columns:
        size = 2 + max(map(len, column))
        if not tables or room < size:
            tables.append([])
            room = width - max(map(len, first))
        tables[-1].append(column)
        room -= size
    return ["\n".join(text_table(_rows(first, table))) for table in tables] or [first[0]]


def _rows(first: list[str], columns: list[list[str]]) -> list[list[str]]:
    """Rows of a table whose headings have several lines, the last of them beside ``first[0]``."""
    height = max(map(len, columns))
    return [
        list(row) for row in zip(*([""] * (height - len(column)) + column for column in (first, *columns)), strict=True)
    ]


def heading_lines(name: str, width: int) -> list[str]:
    """A name in lines about as wide as its column, broken at underscores.

    >>> heading_lines("target_linearity_null", 15), heading_lines("target_linearity_null", 16)
    (['target', 'linearity_null'], ['target_linearity', 'null'])
    """
    lines: list[str] = []
    for part in name.split("_"):
        if lines and len(f"{lines[-1]}_{part}") <= width:
            lines[-1] += f"_{part}"
        else:
            lines.append(part)
    return lines


def _short(names: list[str]) -> tuple[list[str], list[str]]:
    """Names without a long prefix that most of them have, and a line that says which one.

    >>> _short(["model.layers.0.q", "model.layers.1.q", "lm_head"])
    (['…0.q', '…1.q', 'lm_head'], ['… stands for model.layers.'])
    """
    prefix = ""
    while True:
        parts = [name[len(prefix) :].split(".", 1) for name in names if name.startswith(prefix)]
        heads = [part[0] for part in parts if len(part) == 2]
        best = max(set(heads), key=heads.count, default="")
        if not best or best.isdigit() or heads.count(best) < max(2, 0.6 * len(names)):
            break
        prefix += f"{best}."
    if len(prefix) < 4:
        return names, []
    short = [f"…{name[len(prefix) :]}" if name.startswith(prefix) else name for name in names]
    return short, [f"… stands for {prefix}"]


def _by_kind_and_block(values: Mapping[str, float | None]) -> dict[str, dict[int | None, float | None]]:
    """Values of layers by kind of layer and block."""
    # a block itself, captured with outputs=, is split as if it held a layer of this name
    names = {layer: split_name(layer) for layer in values}
    blocks = {layer: split_name(f"{layer.removesuffix(' (output)')}.{RESIDUAL}") for layer in values}
    names |= {layer: name for layer, name in blocks.items() if name.block is not None and name.kind == RESIDUAL}
    stacks = {name.stack for name in names.values() if name.block is not None}
    found: dict[str, dict[int | None, float | None]] = {}
    for layer, value in values.items():
        block, kind, stack = names[layer]
        if block is not None and len(stacks) > 1:
            kind = f"{stack}: {kind}"
        if kind.endswith(RESIDUAL) and value is None:
            continue  # a block has features, but no weight of its own
        found.setdefault(kind, {})[block] = value
    return found


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
