"""Tables in files: JSON, or Parquet with one row for each cell. Every float comes back exactly as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gramscope.errors import InputError, MissingExtraError, Note, StorageError
from gramscope.measures.table import Table, with_errors

#: the entry of a Parquet file's metadata that holds what is not in its rows
_KEY = b"gramscope"


def write_tables(path: str | Path, tables: Mapping[int, Table], **rest: Any) -> None:
    """Write tables by step, and beside them whatever JSON can hold, to a file that ends in ``.json`` or ``.parquet``."""
    path = Path(path)
    plain = {step: _to_plain(table) for step, table in tables.items()}
    if _ending(path) == ".json":
        write_whole(path, json.dumps({"tables": plain, **rest}, indent=1).encode())
        return
    cells = [
        {"step": step, "layer": layer, "column": column, "value": value, "error": table["errors"].get(layer, {}).get(column)}
        for step, table in plain.items()
        for layer, row in table["layers"].items()
        for column, value in row.items()
    ]  # fmt: skip
    others = {step: {"network": table["network"], "notes": table["notes"]} for step, table in plain.items()}
    pa, pq = _pyarrow()
    sink = pa.BufferOutputStream()
    kept = {_KEY: json.dumps({"tables": others, **rest})}
    pq.write_table(pa.Table.from_pylist(cells).replace_schema_metadata(kept), sink)
    write_whole(path, sink.getvalue().to_pybytes())


def read_tables(path: str | Path) -> tuple[dict[int, Table], dict[str, Any]]:
    """What :func:`write_tables` wrote: the tables, and the rest."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist; Table.save and Series.save write such files")
    reader = _from_json if _ending(path) == ".json" else _from_parquet
    try:
        found = reader(path)
        return {int(step): _from_plain(table) for step, table in found.pop("tables").items()}, found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds no table of gramscope: {error}") from error


def _from_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def _from_parquet(path: Path) -> dict[str, Any]:
    _, pq = _pyarrow()
    content = pq.read_table(path)
    found: dict[str, Any] = json.loads(content.schema.metadata[_KEY])
    for table in found["tables"].values():
        table |= {"layers": {}, "errors": {}}
    for cell in content.to_pylist():
        table = found["tables"][str(cell["step"])]
        table["layers"].setdefault(cell["layer"], {})[cell["column"]] = cell["value"]
        if cell["error"] is not None:
            table["errors"].setdefault(cell["layer"], {})[cell["column"]] = cell["error"]
    return found


def _to_plain(table: Table) -> dict[str, Any]:
    """A table as dictionaries that JSON can hold; NaN and infinities stay what they are."""
    notes = {name: [note.kind, note.text] for name, note in table.notes.items()}
    return {"layers": table.rows, "network": table.network, "notes": notes, "errors": table.errors}


def _from_plain(values: Mapping[str, Any]) -> Table:
    """The table that :func:`_to_plain` took apart; the note of a cell is the remark of its number again."""
    notes = {name: Note(kind, text) for name, (kind, text) in values["notes"].items()}
    remarks = {name: note.text for name, note in notes.items()}
    return Table(with_errors(values["layers"], values["errors"], remarks), values["network"], notes)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, wait until it is on the disk, and then give it its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; what was there before is intact"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


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
