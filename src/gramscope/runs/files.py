"""Writing files so that a crash leaves either the old content or the new, never half of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gramscope.errors import InputError

#: names that start with this are unfinished; a later writer removes them
TEMPORARY = ".partial-"


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk (a rename is durable only after that); not needed on Windows."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Flush a file's content to disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a temporary neighbour, flushed to disk, then renamed over ``path``."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically: ``fill`` writes into a temporary one, which is flushed and renamed to ``path``."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in temporary.iterdir():
            sync_file(file)
        sync_directory(temporary)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed writer left behind."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder unless something is in it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become ``null``, tuples become lists, paths become text."""
    return json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # a NumPy scalar or array, or a tensor
        return plain(value.tolist())
    raise InputError(f"cannot write {value!r} of type {type(value).__name__} as JSON")


def from_json(path: Path) -> Any:
    """Read a JSON file, with an error that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
