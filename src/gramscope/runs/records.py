"""Records: one JSON object a line, appended and flushed, readable while the run goes on.

``pandas.read_json(path, lines=True)`` gives them as a table. Numbers that are not finite are written as ``null``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from gramscope.errors import InputError
from gramscope.runs.files import to_json

Record: TypeAlias = dict[str, Any]


class RecordWriter:
    """Appends records to a file. Each is flushed, so that a reader or a crash never loses more than the last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _drop_half_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        self.extend([record])

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write several records with one flush."""
        self._file.write("".join(to_json(dict(record)) + "\n" for record in records))
        self._file.flush()

    def position(self) -> int:
        """Bytes written so far and safe on disk: what a checkpoint remembers."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        self._file.close()


def read_records(path: Path) -> list[Record]:
    """All records of a file; a half-written last line is passed over, any other malformed line is an error."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline yet: still being written, or cut off by a crash
                break
            raise InputError(f"{path}, line {number} is not JSON ({error}); restore or delete that line") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number} holds {type(record).__name__}, not an object; delete that line")
        records.append(record)
    return records


def truncate_records(path: Path, position: int) -> None:
    """Cut a record file back to ``position`` bytes, the end it had at a checkpoint."""
    size = path.stat().st_size if path.exists() else 0
    if size < position:
        raise InputError(f"{path} has {size} bytes but its checkpoint was written at {position}; records are missing")
    if size > position:
        os.truncate(path, position)


def _drop_half_line(path: Path) -> None:
    """Remove what follows the last newline, so that appending starts on a line of its own."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
