"""One writer per run directory, whatever the file system, and readers that take no lock."""

from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import UnixFileLock

from gramscope.errors import ResultWarning
from gramscope_lab.runs import lock as lock_module
from gramscope_lab.runs.lock import Lock
from refusals import assert_refused

HOLD = """
import sys, pathlib, warnings
warnings.simplefilter("ignore")
from gramscope_lab.runs.lock import Lock
if sys.argv[2:]:
    import errno, filelock
    def refused(self): raise OSError(errno.ENOLCK, "no locks available")
    filelock.UnixFileLock._acquire = refused
lock = Lock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["flock", "no flock"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With locks, and without."""
    if request.param == "no flock":

        def refused(self: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(UnixFileLock, "_acquire", refused)
    return str(request.param)


@pytest.mark.filterwarnings("ignore:the file system of:gramscope.errors.ResultWarning")
def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path, file_system: str) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    with first, first:  # re-entrant
        assert second.held_by_other()
        assert not first.held_by_other()
        assert_refused(r"is in use by process \d+ on", second.acquire)
    assert list(tmp_path.iterdir()) == []
    with second:
        pass


@pytest.mark.filterwarnings("ignore:the file system of:gramscope.errors.ResultWarning")
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path, file_system: str) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), *(["soft"] if file_system == "no flock" else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert Lock(tmp_path).held_by_other()
        assert_refused(f"process {holder.pid}", Lock(tmp_path).acquire)
        holder.send_signal(signal.SIGKILL)
    assert Lock(tmp_path).holder()["pid"] == holder.pid  # the file is stale
    assert not Lock(tmp_path).held_by_other()
    with Lock(tmp_path):
        pass


def test_without_locks_a_file_stands_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another host needs force; a new process of an old number is another process."""

    def refused(self: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(UnixFileLock, "_acquire", refused)

    def left(host: str, **facts: Any) -> None:
        (tmp_path / ".lock").write_text(f"1\n{host}\n")
        (tmp_path / "lock.json").write_text(json.dumps({"pid": 1, "host": host, "started": "0", **facts}))

    left("elsewhere")
    assert Lock(tmp_path).held_by_other()
    with pytest.warns(ResultWarning, match="has no locks"):
        assert_refused("process 1 on elsewhere", Lock(tmp_path).acquire)
    with pytest.warns(ResultWarning, match="has no locks"):
        lock = Lock(tmp_path).acquire(force=True)
    lock.release()
    left("elsewhere")
    monkeypatch.setattr(lock_module, "_SILENT", 0.0)
    assert not Lock(tmp_path).held_by_other()  # nothing has changed there for long
    left(platform.node(), pid=os.getpid(), started="another time")
    assert not Lock(tmp_path).held_by_other()
    with pytest.warns(ResultWarning, match="has no locks"):
        Lock(tmp_path).acquire().release()


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    assert_refused("cannot write to .*missing", Lock(tmp_path / "missing").acquire)


@pytest.mark.parametrize(
    "content", ["", "[", "[" * 5000, "[1]", '{"pid": "x"}', '{"pid": 1}', f'{{"pid": {10**20}, "host": "x"}}']
)
def test_what_is_no_holder(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock.json").write_text(content)
    assert Lock(tmp_path).described().startswith(("another process", "process 1000"))
    Lock(tmp_path).held_by_other()
