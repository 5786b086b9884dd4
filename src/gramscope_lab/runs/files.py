"""Reading and writing files of a run: whole or not at all, and never outside its directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gramscope.errors import InputError, StorageError

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
RECORDS = "records.jsonl"
#: measurements of checkpoints, made after training
MEASURED = "measured.jsonl"
CHECKPOINTS = "checkpoints"
ARTEFACTS = "artefacts"
FIGURES = "figures"
#: who writes here, and the file that the system locks
LOCK, LOCKED = "lock.json", ".lock"
#: a file that asks the processes that train members of a group to save and stop
STOP = ".stop"
#: first line of a configuration that gramscope stored
MARK = b"# a run of gramscope\n"

#: what to do when a run could not write its records or checkpoints
RESUME = "continue with --resume"
#: names that start with this are unfinished; a later writer removes them
TEMPORARY = ".partial-"
_SAFE = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


# -- looking and reading ------------------------------------------------------------------------------------------
def inside(root: Path, name: str) -> Path:
    """``root / name``, or an error where that leads out of ``root``: by ``..``, by a full path or through a link."""
    path = root / name
    try:
        if path.resolve().is_relative_to(root.resolve()):
            return path
        reason = "leads out of it"
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a character that no name can have
        reason = f"cannot be followed ({error})"
    raise InputError(f"{name!r} in {root} {reason}; remove the link, or copy what it names")


def names_in(folder: Path) -> list[str]:
    """Names in a folder, in order; none where there is no folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def read_file(path: Path) -> bytes:
    """The content of a regular file."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path} is not a regular file; remove it")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def from_json(path: Path) -> Any:
    """Read a JSON file, with an error that names it."""
    return parse(path, read_file(path), json.loads)


def from_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, with an error that names it."""
    return parse_toml(path, read_file(path))


def parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    """The values in a TOML text, with an error that names the file it came from."""
    return dict(parse(path, content, lambda content: tomllib.loads(content.decode())))


def parse(path: Path, content: bytes, parser: Callable[[bytes], Any]) -> Any:
    """What ``parser`` makes of the content of a file, with an error that names the file."""
    try:
        return parser(content)
    except RecursionError as error:
        raise InputError(f"cannot read {path}: its values are nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON or TOML, a number of too many digits
        raise InputError(f"cannot read {path}: {error}") from error


def file_name(name: str) -> str:
    """``name`` itself, or an error where it cannot name a file in artefacts/ or figures/."""
    if not name or name.startswith(".") or not all(letter.isalnum() or letter in "-_.," for letter in name):
        raise InputError(f"{name!r} cannot name a file here; use letters, digits, '-', '_', '.' and ','")
    return name


def natural(name: str) -> list[tuple[int, float, str]]:
    """Sort key that puts seed-2 before seed-10."""
    return [(0, float(part), "") if part.isdecimal() else (1, 0.0, part) for part in re.split(r"(\d+)", name)]


def free_path(path: Path | str) -> Path:
    """``path`` itself, or with the first number that makes it new: x, x-2, x-3 …"""
    path = free = Path(path)
    number = 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


# -- writing ------------------------------------------------------------------------------------------------------
@contextmanager
def as_storage_errors(what: str, then: str = "run the command again") -> Iterator[None]:
    """Turn an error of the system into one that says what could not be written and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {what}: {error.strerror or error}; what was written before is intact: "
            f"make room or mend the disk, then {then}"
        ) from error


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor for writing, closed at the end; the last part of ``path`` may be no link."""
    handle = os.open(path, flags | _SAFE, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def write_all(handle: int, content: bytes) -> None:
    """Write all of ``content`` and flush it to disk; the system may take a part of it at a time."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]
    os.fsync(handle)


def write_file(path: Path, content: bytes, then: str = "run the command again") -> None:
    """Write a file atomically: a temporary neighbour, flushed to disk, then renamed over ``path``."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    with as_storage_errors(str(path), then):
        try:
            with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
                write_all(handle, content)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk (a rename is durable only after that); not needed on Windows."""
    if os.name != "nt":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and those it is in, unless they are there."""
    if not path.is_dir():
        make_folder(path.parent)
        with as_storage_errors(str(path)):
            path.mkdir(exist_ok=True)
            sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it names) or a folder with all in it; harmless where nothing is."""
    with as_storage_errors(str(path)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists() or path.is_symlink():
            path.unlink()


def remove_stale(folder: Path) -> None:
    """Remove what a killed writer left behind."""
    for name in names_in(folder):
        if name.startswith(TEMPORARY):
            remove(folder / name)


# -- JSON ---------------------------------------------------------------------------------------------------------
def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become ``null``, tuples become lists, paths become text."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


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
