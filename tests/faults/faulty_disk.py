"""A stand-in for the system's file operations: any one of them fails, or the power is cut and what was not flushed is lost."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ERRORS = {"full disk": errno.ENOSPC, "broken disk": errno.EIO, "no permission": errno.EACCES}
#: the process dies: everything that it did stays, or what it did not flush is lost, all of it or a random part
CRASHES = ("crash", "power cut, all lost", "power cut, part lost")
OF_PATHS = ("open", "replace", "rename", "mkdir", "unlink", "remove", "rmdir")
OF_HANDLES = ("write", "fsync", "ftruncate", "pread", "close")


class Crash(BaseException):
    """The process is gone: nothing after it happens, not even cleaning up."""


class FaultyDisk:
    """Counts the file operations in ``root`` and lets number ``at`` fail in the way ``fault``.

    It knows what the disk has for certain: the names in a folder and the bytes of a file when they were last flushed.
    """

    def __init__(self, root: Path, at: int = -1, fault: str = "") -> None:
        self.root, self.at, self.fault = root, at, fault
        self.calls: list[str] = []
        self.dead = False
        self._handles: dict[int, Path] = {}
        self._held: list[int] = []  # so that no other file gets the number of a removed one
        self._names: dict[int, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self._open = io.open

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand in for the system inside this context."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (*OF_PATHS, *OF_HANDLES):
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            for module in (io, builtins):
                patch.setattr(module, "open", self._opened(module.open))
            try:
                yield
            finally:
                patch.undo()
                for handle in (*self._handles, *self._held):  # the system closes what a dead process had open
                    with suppress(OSError):
                        os.close(handle)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            ours = first in self._handles if name in OF_HANDLES else self._inside(first, options.get("dir_fd"))
            if not ours:
                return function(first, *rest, **options)
            if self._begin(name):
                if self.fault not in ("no permission", "short write") and name == "write":
                    function(first, rest[0][: len(rest[0]) // 2])
                elif self.fault in ERRORS and name == "close":
                    self._done(name, function(first), first)
                elif self.fault == "short write" and name == "write":
                    return function(first, rest[0][:1])
                self._fail(str(first))
            if name == "fsync":
                return self._flush(first)
            return self._done(name, function(first, *rest, **options), first)

        return call

    def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``open``, which files of Python use; one for writing counts twice: it is opened, and it is filled."""

        def call(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if self._inside(file) and "opener" not in options:  # which opens it with os.open
                if self._begin("read" if mode.startswith("r") else "open"):
                    self._fail(str(file))
                if not mode.startswith("r") and self._begin("fill"):
                    function(file, mode, *rest, **options).close()
                    if self.fault in ERRORS:
                        return function("/dev/full", mode, *rest, **options)
                    self._fail(str(file))
            return function(file, mode, *rest, **options)

        return call

    def _inside(self, path: Any, folder: int | None = None) -> bool:
        if folder in self._handles:
            return True
        return isinstance(path, str | Path) and Path(path).is_relative_to(self.root)

    def _begin(self, name: str) -> bool:
        """Count an operation; whether it is the one that fails."""
        if self.dead:
            raise Crash
        self.calls.append(name)
        return len(self.calls) - 1 == self.at

    def _done(self, name: str, result: Any, first: Any) -> Any:
        if name == "open":
            self._handles[result] = Path(first)
            self._held.append(os.dup(result))
        elif name == "close":
            self._handles.pop(first, None)
        return result

    def _fail(self, what: str) -> None:
        if self.fault in ERRORS:
            raise OSError(ERRORS[self.fault], os.strerror(ERRORS[self.fault]), what)
        if self.fault in CRASHES:
            self.dead = True
            raise Crash

    # -- what is on the disk for certain -------------------------------------------------------------------------
    def _flush(self, handle: int) -> None:
        path, number = self._handles[handle], os.fstat(handle).st_ino
        if path.is_dir():
            self._names[number] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            with self._open(path, "rb") as file:
                self._bytes[number] = file.read()

    def cut_power(self) -> None:
        """Leave of what was not flushed nothing or a random part."""
        if self.fault.startswith("power cut"):
            self._cut(self.root, random.Random(self.at) if self.fault.endswith("part lost") else None)

    def _cut(self, folder: Path, draw: random.Random | None) -> None:
        before = self._names.get(folder.stat().st_ino, {})
        now = {entry.name: entry.inode() for entry in os.scandir(folder)}
        for name in sorted({*before, *now}):
            path = folder / name
            if before.get(name) != now.get(name) and (draw is None or draw.random() < 0.5):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                if name in before:
                    path.write_bytes(self._bytes.get(before[name], b""))
            elif path.is_dir():
                self._cut(path, draw)
            elif name in now:
                certain, content = self._bytes.get(now[name], b""), path.read_bytes()
                if content != certain:
                    ends = sorted((len(certain), len(content)))
                    path.write_bytes(certain if draw is None else content[: draw.randint(*ends)])
