"""Records: one JSON object a line, appended and flushed to disk, read one after the other while the run goes on.

``pandas.read_json(path, lines=True)`` gives them as a table. Numbers that are not finite are written as ``null``.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from gramscope.errors import InputError
from gramscope_lab.runs import files

Record: TypeAlias = dict[str, Any]

#: bytes at the end of a file in which its last record is looked for, and its last line
TAIL = 1 << 16


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add records to a file. When this returns they are on the disk; when it fails, none of them is in the file."""
    content = b"".join(files.to_json(dict(record)).encode() + b"\n" for record in records)
    with files.as_storage_errors(str(path), files.RESUME):
        _end_last_line(path)
        with files.opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as handle:
            end = os.fstat(handle).st_size
            try:
                files.write_all(handle, content)
                if end == 0:  # the file may be new
                    files.sync_folder(path.parent)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(handle, end)
                raise


def iter_records(path: Path, start: int = 0, damaged: list[str] | None = None) -> Iterator[tuple[Record, int]]:
    """Each record from byte ``start`` on, with the byte where its line ends; only one line is in memory.

    A last line without its end is left out: it is being written, or its writer was killed. Any other line that is no record
    is an error; with a list ``damaged``, the message is added to it and the other lines still come.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise InputError(f"{path} is not a regular file; remove it")
    end, number = start, 0
    try:
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                number += 1
                end += len(line)
                if not line.endswith(b"\n"):
                    return
                try:
                    yield _parsed(path, line, number), end
                except InputError as error:
                    if damaged is None:
                        raise
                    damaged.append(str(error))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def _parsed(path: Path, line: bytes, number: int) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number} is not JSON ({error}); restore or delete that line") from error
    if not isinstance(record, dict):
        raise InputError(f"{path}, line {number} holds {type(record).__name__}, not an object; delete that line")
    return record


def last_record(path: Path, kind: str | None = None) -> Record | None:
    """The last record of a file, or the last one of a kind; the end of a long file is looked at first."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        *lines, _ = file.read().split(b"\n")  # the last has no end
    for line in reversed(lines[size > TAIL :]):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and kind in (None, record.get("kind")):
                return record
    if size <= TAIL:
        return None
    records = (record for record, _ in iter_records(path, damaged=[]) if kind in (None, record.get("kind")))
    return next(iter(deque(records, maxlen=1)), None)


def records_end(path: Path) -> int:
    """Bytes of a file of records; what a checkpoint remembers."""
    return path.stat().st_size if path.exists() else 0


def truncate_records(path: Path, end: Any) -> None:
    """Cut a file of records back to the end that it had at a checkpoint."""
    if not isinstance(end, int) or end < 0:
        raise InputError(f"the checkpoint does not say which records of {path} belong to it; remove the checkpoint")
    if end == 0 and not path.exists():
        return
    with files.as_storage_errors(str(path)), files.opened(path, os.O_RDWR) as handle:
        size = os.fstat(handle).st_size
        if size < end or (end and os.pread(handle, 1, end - 1) != b"\n"):
            raise InputError(
                f"{path} does not have the {end} bytes of records that its checkpoint was written after: records are "
                "missing, or the file was edited; restore it, or start again with --force"
            )
        os.ftruncate(handle, end)


def _end_last_line(path: Path) -> None:
    """Prepare a file for appending: a last line whose writer was killed goes."""
    if records_end(path) == 0:
        return
    with files.opened(path, os.O_RDWR) as handle:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            os.ftruncate(handle, path.read_bytes().rfind(b"\n") + 1)
