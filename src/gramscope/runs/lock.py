"""One writer per run directory. The system frees the lock of a process that dies, so no stale lock can block a run."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from gramscope.errors import InputError

if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[str]) -> bool:
        try:
            file.seek(1 << 20)  # beyond the text, so that others can still read who holds it
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class Lock:
    """An exclusive lock on a file, held until :meth:`release` or the end of the process.

    The file says who holds it. A file left by a killed process is taken over, because the lock itself belongs to the
    process, not to the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def acquire(self) -> Lock:
        """Take the lock, or raise an :class:`InputError` that names the holder."""
        while self._file is None:
            try:
                file = self.path.open("a+", encoding="utf-8")
            except OSError as error:
                raise InputError(f"cannot write to {self.path.parent}: {error}; use another directory") from error
            if not _try_lock(file):
                file.close()
                raise InputError(
                    f"{self.path.parent} is in use by {self.holder()}; wait for it or use another directory"
                )
            if self._same_file(file):
                self._file = file
            else:  # the holder removed it between our opening and our locking
                file.close()
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), "host": platform.node()}, self._file)
        self._file.flush()
        return self

    def release(self) -> None:
        """Give the lock back and remove its file; harmless when it is not held."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def held_by_other(self) -> bool:
        """Whether a living process (not this object) holds the lock."""
        if self._file is not None or not self.path.exists():
            return False
        try:
            with self.path.open("a+", encoding="utf-8") as file:
                return not _try_lock(file)
        except OSError:  # not ours to write: nothing can be said
            return False

    def holder(self) -> str:
        """Who wrote the lock file, in words."""
        try:
            facts = json.loads(self.path.read_text(encoding="utf-8"))
            return f"process {facts['pid']} on {facts['host']}"
        except (OSError, ValueError, KeyError):
            return "another process"

    def _same_file(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def __enter__(self) -> Lock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
