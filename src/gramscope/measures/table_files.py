"""Tables in files: JSON, or Parquet with one row for each cell. Every float comes back exactly as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gramscope.errors import InputError, MissingExtraError
from gramscope.measures.table import Table, with_errors
from gramscope.notes import Note

#: the entry of a Parquet file's metadata that holds what is not in its rows
_KEY = b"gramscope"


def save_table(table: Table, path: str | Path) -> None:
    """Write a table to ``path``, which ends in ``.json`` or ``.parquet``. The file is there whole or not at all."""
    path = Path(path)
    values = to_plain(table)
    if _ending(path) == ".json":
        write_whole(path, json.dumps(values, indent=1).encode())
        return
    cells = [
        {"layer": layer, "column": column, "value": value, "error": values["errors"].get(layer, {}).get(column)}
        for layer, row in values["layers"].items()
        for column, value in row.items()
    ]
    write_parquet(path, cells, {name: values[name] for name in ("network", "notes")})


def load_table(path: str | Path) -> Table:
    """The table that :func:`save_table` wrote."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist; Table.save writes such files")
    if _ending(path) == ".json":
        try:
            return from_plain(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} holds no table: {error}") from error
    cells, rest = read_parquet(path)
    rows: dict[str, dict[str, float | None]] = {}
    errors: dict[str, dict[str, float]] = {}
    for cell in cells:
        rows.setdefault(cell["layer"], {})[cell["column"]] = cell["value"]
        if cell["error"] is not None:
            errors.setdefault(cell["layer"], {})[cell["column"]] = cell["error"]
    return from_plain({"layers": rows, "errors": errors, **rest})


def to_plain(table: Table) -> dict[str, Any]:
    """A table as dictionaries that JSON can hold; NaN and infinities stay what they are."""
    notes = {name: [note.kind, note.text] for name, note in table.notes.items()}
    return {"layers": table.rows, "network": table.network, "notes": notes, "errors": table.errors}


def from_plain(values: Mapping[str, Any]) -> Table:
    """The table that :func:`to_plain` took apart."""
    notes = {name: Note(kind, text) for name, (kind, text) in values["notes"].items()}
    return Table(with_errors(values["layers"], values["errors"]), values["network"], notes)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, wait until it is on the disk, and then give it its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_parquet(path: Path, rows: list[dict[str, Any]], rest: Mapping[str, Any]) -> None:
    """Write rows of plain values, and beside them whatever JSON can hold."""
    pa, pq = _pyarrow()
    found = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    pq.write_table(found.replace_schema_metadata({_KEY: json.dumps(rest)}), sink)
    write_whole(path, sink.getvalue().to_pybytes())


def read_parquet(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What :func:`write_parquet` wrote."""
    pa, pq = _pyarrow()
    try:
        found = pq.read_table(path)
        return found.to_pylist(), json.loads(found.schema.metadata[_KEY])
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} was not written by gramscope: {error}") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("Parquet files need pyarrow: pip install 'gramscope[parquet]'") from error
    return pa, pq


def _ending(path: Path) -> str:
    if path.suffix not in (".json", ".parquet"):
        raise InputError(f"{path}: the name of a table's file ends in .json or .parquet")
    return path.suffix
