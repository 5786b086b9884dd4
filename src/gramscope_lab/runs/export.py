"""Records as a flat table: one row a record, or a layer of a record, in Arrow, Parquet, CSV or JSON lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gramscope.errors import InputError, load_extra
from gramscope.names import printable
from gramscope_lab.runs.files import to_json, write_file

FORMATS = ("parquet", "csv", "jsonl")


def to_rows(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Flat rows. A record of :class:`gramscope.Monitor` gives one row per layer and one, without a layer, of the network.

    Lists and dictionaries inside other records become JSON text.

    >>> to_rows([{"step": 5, "layers": {"fc": {"nc1": 0.5}}, "network": {"loss": 2.0}, "notes": {}}])
    [{'step': 5, 'layer': None, 'loss': 2.0}, {'step': 5, 'layer': 'fc', 'nc1': 0.5}]
    """
    rows: list[dict[str, Any]] = []
    for record in records:
        if not isinstance(record.get("layers"), Mapping):
            rows.append(_plain_row(record))
            continue
        head = _plain_row({key: value for key, value in record.items() if key not in ("layers", "network", "notes")})
        for layer, row in {None: record.get("network", {}), **record["layers"]}.items():
            if isinstance(row, Mapping):  # what is not a table is damage
                rows.append({**head, "layer": _plain(layer), **_plain_row(row)})
    return rows


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {printable(key): _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return float(value)  # of a measure with an error, the number
    if isinstance(value, int) and abs(value) >= 2**1000:  # beyond float64
        return str(value)
    return to_json(value) if isinstance(value, list | dict) else value


def to_arrow(records: Iterable[Mapping[str, Any]]) -> Any:
    """The rows as a ``pyarrow.Table``; ``.to_pandas()`` makes it a DataFrame.

    A column holds booleans, whole numbers or numbers where all its values are such, else text; what a row lacks is null.

    Args:
        records: of ``RunDirectory.records()``, or of a monitor.
    """
    arrow = load_extra("pyarrow", "parquet")
    rows = to_rows(records)
    columns = {name: [row.get(name) for row in rows] for name in _names(rows)}
    return arrow.table({name: _column(arrow, values) for name, values in columns.items()})


def _column(arrow: Any, values: list[Any]) -> Any:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        kind = arrow.bool_()
    elif kinds == {int} and all(value is None or abs(value) < 2**63 for value in values):
        kind = arrow.int64()
    elif kinds and kinds <= {int, float}:
        kind = arrow.float64()
        values = [None if value is None else float(value) for value in values]
    else:
        kind = arrow.string()
        values = [value if value is None or isinstance(value, str) else to_json(value) for value in values]
    return arrow.array(values, kind)


def write_records(records: Iterable[Mapping[str, Any]], path: Path, form: str) -> None:
    """Write records to a file: as rows to Parquet or CSV, unchanged to JSON lines.

    Raises:
        InputError: the format is not one of :data:`FORMATS`.
        MissingExtraError: Parquet without pyarrow.
    """
    if form not in FORMATS:
        raise InputError(f"format {form!r} is not known; there are: {', '.join(FORMATS)}")
    if form == "parquet":
        parquet = load_extra("pyarrow.parquet", "parquet")
        buffer = io.BytesIO()
        parquet.write_table(to_arrow(records), buffer)
        content = buffer.getvalue()
    elif form == "csv":
        rows, text = to_rows(records), io.StringIO(newline="")
        writer = csv.DictWriter(text, _names(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
    else:
        content = "".join(to_json(dict(record)) + "\n" for record in records).encode()
    write_file(path, content)


def _names(rows: list[dict[str, Any]]) -> list[str]:
    """All columns, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
