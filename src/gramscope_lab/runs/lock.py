"""One writer per run directory. The system frees the lock of a process that dies, so no stale lock can block a run."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from gramscope.errors import InputError
from gramscope_lab.runs import files

if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            os.lseek(handle, 1 << 20, os.SEEK_SET)  # beyond the text, so that others can still read who holds it
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


#: how the text of a lock file begins
_START = b'{"pid": '


class Lock:
    """An exclusive lock on a file, held until :meth:`release` or the end of the process.

    Who holds it may take it again and must give it back as often. The file says who holds it. A file left by a killed
    process is taken over, because the lock itself belongs to the process, not to the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._again = 0

    def acquire(self) -> Lock:
        """Take the lock, or raise an :class:`InputError` that names the holder."""
        if self._handle is not None:
            self._again += 1
            return self
        while self._handle is None:
            handle = self._open()
            if not _try_lock(handle):
                files.system.close(handle)
                raise InputError(
                    f"{self.path.parent} is in use by {self.holder()}; wait for it or use another directory"
                )
            if self._same_file(handle):
                self._handle = handle
            else:  # the holder removed it between our opening and our locking
                files.system.close(handle)
        try:
            self._say_who(self._handle)
        except BaseException:
            self.release()
            raise
        return self

    def _open(self) -> int:
        try:
            return files.open_file(files.inside(self.path.parent, self.path.name), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise InputError(f"cannot write to {self.path.parent}: {error}; use another directory") from error

    def _say_who(self, handle: int) -> None:
        if not self.is_ours():
            raise InputError(f"{self.path} is not a lock of gramscope; move it out of the way")
        with files.explained(str(self.path)):
            files.system.ftruncate(handle, 0)
            files.system.lseek(handle, 0, os.SEEK_SET)
            files.write_all(handle, json.dumps({"pid": os.getpid(), "host": platform.node()}).encode())

    def release(self) -> None:
        """Give the lock back and remove its file; harmless when it is not held."""
        if self._again:
            self._again -= 1
        elif self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                if self.is_ours():
                    with suppress(OSError):  # a file that stays behind locks nothing
                        files.system.unlink(self.path)
            finally:
                files.system.close(handle)

    def held_by_other(self) -> bool:
        """Whether a living process (not this object) holds the lock."""
        if self._handle is not None or not files.is_file(self.path):
            return False
        try:
            with files.opened(self.path, os.O_RDWR) as handle:
                return not _try_lock(handle)
        except (
            OSError,
            InputError,
        ):  # this user may not write here, or the lock is not gramscope's: nothing can be said
            return False

    def holder(self) -> str:
        """Who wrote the lock file, in words."""
        facts = self._facts()
        return f"process {facts['pid']} on {facts['host']}" if facts else "another process"

    def is_ours(self) -> bool:
        """Whether the file is one that this class wrote, or began to write."""
        try:
            content = files.read_file(self.path, 4096)
        except InputError:
            return False
        return content.startswith(_START) or _START.startswith(content)

    def _facts(self) -> dict[str, object]:
        try:
            facts = json.loads(files.read_file(self.path, 4096))
        except (ValueError, RecursionError):  # InputError is a ValueError
            return {}
        return facts if isinstance(facts, dict) and {"pid", "host"} <= facts.keys() else {}

    def _same_file(self, handle: int) -> bool:
        try:
            return os.path.samestat(files.system.fstat(handle), files.system.lstat(self.path))
        except FileNotFoundError:
            return False

    def __enter__(self) -> Lock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
