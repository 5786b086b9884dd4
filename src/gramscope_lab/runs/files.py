"""Reading and writing files of a run: whole or not at all, never through a link, never more than a stated size.

Every call that touches the disk goes through ``system``, the module ``os``: a test replaces it to let any of them fail.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from gramscope.errors import InputError, StorageError

#: what touches the disk
system = os
#: names that start with this are unfinished; a later writer removes them
TEMPORARY = ".partial-"
#: most bytes of a file that is read at once: records of a very long run, and everything else
MOST_RECORDS, MOST_TEXT = 1 << 30, 1 << 26
_SAFE = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


# -- looking ------------------------------------------------------------------------------------------------------
def inside(root: Path, name: str) -> Path:
    """``root / name`` for a name below ``root``, where no part of the way is a link.

    A run directory may come from somebody else. A link in it, or a name such as ``../other``, would lead out of it.
    """
    pure = PurePath(name)
    if pure.is_absolute() or pure.drive or ".." in pure.parts or not pure.parts or "\0" in name:
        raise InputError(f"{name!r} is not a name inside {root}")
    path = root
    for part in pure.parts:
        path = path / part
        if stat.S_ISLNK(_mode(path)):
            raise InputError(
                f"{path} is a link; links in a run directory are not followed: remove it, or copy what it names"
            )
    return path


def exists(path: Path) -> bool:
    """Whether anything is there, a link included."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Whether a regular file is there, not a link to one."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Whether a folder is there, not a link to one."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return system.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def names_in(folder: Path) -> list[str]:
    """Names in a folder, in order; none where there is no folder."""
    return sorted(system.listdir(folder)) if is_folder(folder) else []


# -- reading ------------------------------------------------------------------------------------------------------
def open_file(path: Path, flags: int) -> int:
    """A descriptor of a regular file; a link, a pipe or a device in its place is refused, and not waited for.

    A file with a second name (a hard link) is not opened for writing: what is written would appear under both names.
    """
    handle = system.open(path, flags | _SAFE, 0o666)
    facts = system.fstat(handle)
    problem = ""
    if not stat.S_ISREG(facts.st_mode):
        problem = "is not a regular file; remove it"
    elif flags & (os.O_WRONLY | os.O_RDWR) and facts.st_nlink > 1:
        problem = f"is one of {facts.st_nlink} names of the same file (hard links); replace it by a copy"
    if problem:
        system.close(handle)
        raise InputError(f"{path} {problem}")
    return handle


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor that is closed at the end."""
    handle = open_file(path, flags)
    try:
        yield handle
    finally:
        system.close(handle)


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """The content of a regular file of at most ``most`` bytes."""
    try:
        with opened(path, os.O_RDONLY) as handle:
            size = system.fstat(handle).st_size
            if size > most:
                raise InputError(f"{path} has {size} bytes; at most {most} are read")
            blocks = []
            while block := system.read(handle, 1 << 24):
                blocks.append(block)
            return b"".join(blocks)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise InputError(f"cannot read {path}: its {size} bytes do not fit into memory") from error


def from_json(path: Path) -> Any:
    """Read a JSON file, with an error that names it."""
    return _parsed(path, read_file(path), json.loads)


def from_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, with an error that names it."""
    return parse_toml(path, read_file(path))


def parse_toml(path: Path, content: bytes) -> dict[str, Any]:
    """The values in a TOML text, with an error that names the file it came from."""
    return dict(_parsed(path, content, lambda content: tomllib.loads(content.decode())))


def _parsed(path: Path, content: bytes, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(content)
    except RecursionError as error:
        raise InputError(f"cannot read {path}: its values are nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON or TOML, a number of too many digits
        raise InputError(f"cannot read {path}: {error}") from error


# -- writing ------------------------------------------------------------------------------------------------------
@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of the system into one that says what could not be written and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {what}: {error.strerror or error}; what was written before is intact: "
            "make room or mend the disk, then continue with --resume"
        ) from error


def write_all(handle: int, content: bytes) -> None:
    """Write all of ``content``; the system may take a part of it at a time."""
    view = memoryview(content)
    while view:
        view = view[system.write(handle, view) :]


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk (a rename is durable only after that); not needed on Windows."""
    if os.name == "nt":
        return
    handle = system.open(path, os.O_RDONLY)
    try:
        system.fsync(handle)
    finally:
        system.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there."""
    if not is_folder(path):
        system.mkdir(path)


def _write_new(path: Path, content: bytes) -> None:
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
        write_all(handle, content)
        system.fsync(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a temporary neighbour, flushed to disk, then renamed over ``path``."""
    with _temporary_neighbour(path) as temporary:
        _write_new(temporary, content)
        system.replace(temporary, path)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of files atomically: a temporary neighbour, flushed to disk, then renamed to ``path``."""
    with _temporary_neighbour(path) as temporary:
        system.mkdir(temporary)
        for name, content in files.items():
            _write_new(temporary / name, content)
        sync_folder(temporary)
        system.rename(temporary, path)


@contextmanager
def _temporary_neighbour(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to and rename; removed after an error, else the renaming is flushed to disk."""
    temporary = _temporary(path)
    with explained(str(path)):
        try:
            yield temporary
        except BaseException:
            with suppress(OSError):
                remove(temporary)
            raise
        sync_folder(path.parent)


def _temporary(path: Path) -> Path:
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    remove(temporary)
    return temporary


# -- removing -----------------------------------------------------------------------------------------------------
def remove(path: Path) -> None:
    """Remove a file, a link (not what it names) or a folder with all in it; harmless where nothing is."""
    waiting = [path]
    while waiting:  # no recursion: folders of a foreign directory may be nested more deeply than calls may be
        last = waiting[-1]
        inner = names_in(last)
        if inner:
            waiting += [last / name for name in inner]
            continue
        if is_folder(last):
            system.rmdir(last)
        elif exists(last):
            system.unlink(last)
        waiting.pop()


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed writer left behind."""
    for name in names_in(folder):
        if name.startswith(TEMPORARY):
            remove(folder / name)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder unless something is in it."""
    if is_folder(folder) and not names_in(folder):
        system.rmdir(folder)


# -- JSON ---------------------------------------------------------------------------------------------------------
def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become ``null``, tuples become lists, paths become text.

    Text that UTF-8 cannot hold (the name of a file in another encoding) is escaped.
    """
    value = plain(value)
    text = json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent, allow_nan=False)
    return text


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
