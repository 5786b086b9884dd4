"""One writer per run directory: the system's lock on a file, and beside it who holds it, for those who only read.

The system frees the lock of a process that dies. Where the file system has no locks, a file that exists is the lock: one of a
dead process of this host is taken over, one of another host only with ``force``.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.runs import files
from gramscope_lab.runs.files import LOCK, LOCKED

#: what the system answers where a file system has no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: seconds after which the lock of another host whose run has not changed is not believed
_SILENT = 3600.0


class Lock:
    """The lock of a run directory. Re-entrant: release once per acquire."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: BaseFileLock | None = None
        self._count = 0

    def acquire(self, *, force: bool = False) -> Lock:
        """Take the lock, or raise an :class:`InputError` that names the holder.

        Args:
            force: take the lock of another host over, where the file system has no locks that end with their process.
        """
        if self._count == 0:
            self._lock = self._taken(force)
            try:
                facts = {"pid": os.getpid(), "host": platform.node(), "started": _started(os.getpid())}
                files.write_file(self._says(), json.dumps(facts).encode())
            except BaseException:
                self._lock.release()
                raise
        self._count += 1
        return self

    def _taken(self, force: bool) -> BaseFileLock:
        path = files.inside(self.folder, LOCKED)
        if not self.folder.is_dir():  # filelock would make it
            raise InputError(f"cannot write to {self.folder}: there is no such folder; use another directory")
        try:
            if _has_locks(self.folder):
                lock: BaseFileLock = FileLock(path, thread_local=False)
            else:
                warnings.warn(
                    f"the file system of {self.folder} has no locks: the file {path} stands for one; where a writer on "
                    "another host has died, use --force",
                    ResultWarning,
                    stacklevel=4,
                )
                holder = self.holder()
                if force if holder.get("host") != platform.node() else not _lives(holder):
                    path.unlink(missing_ok=True)
                lock = SoftFileLock(path, thread_local=False)
            lock.acquire(timeout=0)
        except Timeout:
            raise InputError(
                f"{self.folder} is in use by {self.described()}; wait for it or use another directory"
            ) from None
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error}; use another directory") from error
        return lock

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._count == 1 and self._lock is not None:
            try:
                with suppress(OSError):  # a file that stays behind names a process that is no longer there
                    self._says().unlink()
                    if not isinstance(self._lock, SoftFileLock):  # while it is held: nobody can hold it under this name
                        (self.folder / LOCKED).unlink()
            finally:
                self._lock.release()
                self._count = 0
        self._count = max(0, self._count - 1)

    def held_by_other(self) -> bool:
        """Whether a living process holds the lock, not by this object. The lock itself is not touched."""
        facts = {} if self._count else self.holder()
        if not facts:
            return False
        if facts["host"] == platform.node() and sys.platform != "win32":
            return _lives(facts)
        changed = [path.stat().st_mtime for path in self.folder.glob("*") if path.exists()]
        return time.time() - max(changed, default=0.0) < _SILENT

    def holder(self) -> dict[str, Any]:
        """Process, host and start time of who wrote that they hold the lock; empty if nobody did."""
        try:
            facts = json.loads(files.read_file(self._says()))
        except (ValueError, RecursionError):  # InputError is a ValueError
            return {}
        sound = isinstance(facts, dict) and isinstance(facts.get("pid"), int) and isinstance(facts.get("host"), str)
        return facts if sound else {}

    def described(self) -> str:
        """The holder in words."""
        facts = self.holder()
        return f"process {facts['pid']} on {facts['host']}" if facts else "another process"

    def _says(self) -> Path:
        return files.inside(self.folder, LOCK)

    def __enter__(self) -> Lock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _has_locks(folder: Path) -> bool:
    """Whether the system locks files in a folder, tried with one of our own."""
    if sys.platform == "win32":
        return True
    import fcntl

    path = folder / f"{files.TEMPORARY}{os.getpid()}-lock"
    with files.opened(path, os.O_RDWR | os.O_CREAT) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        finally:
            path.unlink()
    return True


def _started(pid: int) -> str:
    """When a process of this host was started, in the system's own count; empty where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _lives(facts: dict[str, Any]) -> bool:
    """Whether the process that wrote this is there, and not a later one of the same number."""
    try:
        os.kill(facts["pid"], 0)
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return False
    return bool(_started(facts["pid"]) == facts.get("started", ""))
