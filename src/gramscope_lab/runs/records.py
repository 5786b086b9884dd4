"""Records: one JSON object a line, appended and flushed, readable while the run goes on.

``pandas.read_json(path, lines=True)`` gives them as a table. Numbers that are not finite are written as ``null``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from gramscope.errors import InputError
from gramscope_lab.runs import files

Record: TypeAlias = dict[str, Any]


class RecordWriter:
    """Appends records to a file. When a call returns, its records are in the file; when it fails, none of them is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with files.explained(str(path)):
            self._count = _end_last_line(path)
            self._handle: int | None = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def extend(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records with one system call."""
        lines = [to_line(record) for record in records]
        handle = self._opened()
        with files.explained(str(self.path)):
            end = files.system.fstat(handle).st_size
            try:
                files.write_all(handle, b"".join(lines))
            except BaseException:
                with suppress(OSError):
                    files.system.ftruncate(handle, end)
                raise
        self._count += len(lines)

    def position(self) -> dict[str, int]:
        """What a checkpoint remembers: the number of records, and of bytes, that are safe on disk."""
        handle = self._opened()
        with files.explained(str(self.path)):
            files.system.fsync(handle)
            return {"lines": self._count, "bytes": files.system.fstat(handle).st_size}

    def _opened(self) -> int:
        if self._handle is None:
            raise InputError(f"{self.path} is closed")
        return self._handle

    def close(self) -> None:
        """Close the file; closing it twice does no harm."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            files.system.close(handle)


def to_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of the file."""
    return files.to_json(dict(record)).encode() + b"\n"


def read_records(path: Path) -> list[Record]:
    """All records of a file; a half-written last line is skipped, any other malformed line is an error."""
    return [record for record, _ in _read(path)]


def _read(path: Path) -> Iterator[tuple[Record, int]]:
    """Each record with the position where its line ends."""
    content = files.read_file(path, files.MOST_RECORDS) if files.exists(path) else b""
    end = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        last = end + len(line) == len(content)
        end += len(line) + (not last)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except RecursionError as error:
            raise InputError(f"{path}, line {number} is nested too deeply; delete that line") from error
        except ValueError as error:
            if last:  # still being written, or cut off by a crash
                return
            raise InputError(f"{path}, line {number} is not JSON ({error}); restore or delete that line") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number} holds {type(record).__name__}, not an object; delete that line")
        yield record, end


def edited(records: Sequence[Record], step: int, lines: int) -> str:
    """What shows that lines were deleted or doubled since a checkpoint at ``step`` counted ``lines`` records; else nothing."""
    counted = [record for record in records if record.get("kind") != "end"]
    if not all(isinstance(record.get("step"), int) for record in counted):
        return ""  # records of another kind of run, which do not show when they were written
    before = [record for record in counted if record["step"] <= step]
    if len(before) != lines:
        return f"{len(before)} records up to step {step}, where {lines} were written"
    steps = [record["step"] for record in before if record.get("kind") == "evaluation"]
    wrong = next((later for earlier, later in pairwise(steps) if later <= earlier), None)
    return "" if wrong is None else f"an evaluation of step {wrong} after one of the same or a later step"


def truncate_records(path: Path, position: Any) -> None:
    """Cut a file of records back to a :meth:`RecordWriter.position`, the end it had at a checkpoint.

    Lines are counted, not bytes, so that a file an editor changed (blank lines, other line ends) keeps its records.
    Checkpoints of earlier versions have only the number of bytes, which must be the end of a line.
    """
    lines = position.get("lines") if isinstance(position, dict) else position
    if not isinstance(lines, int) or lines < 0:
        raise InputError(f"the checkpoint does not say how many records of {path} belong to it; remove the checkpoint")
    if isinstance(position, int):
        end = position
        if end not in (0, *(end for _, end in _read(path))):
            raise InputError(
                f"{path} has no record that ends at byte {end}, where its checkpoint was written: records are missing, "
                "or the file was edited; restore it"
            )
    else:
        ends = [0, *(end for _, end in _read(path))]
        if len(ends) <= lines:
            raise InputError(
                f"{path} has {len(ends) - 1} records but its checkpoint was written after {lines}; records are missing"
            )
        end = ends[lines]
    if files.exists(path):
        with files.explained(str(path)), files.opened(path, os.O_WRONLY) as handle:
            files.system.ftruncate(handle, end)


def _end_last_line(path: Path) -> int:
    """Prepare a file for appending and count its records: end the last line if it is whole, else remove it."""
    content = files.read_file(path, files.MOST_RECORDS) if files.exists(path) else b""
    end = content.rfind(b"\n") + 1
    last = content[end:]
    if last.strip():
        with files.opened(path, os.O_WRONLY | os.O_APPEND) as handle:
            if _whole(last):
                files.write_all(handle, b"\n")
                end = len(content)
            else:
                files.system.ftruncate(handle, end)
    return sum(1 for line in content[:end].split(b"\n") if line.strip())


def _whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
