"""One writer per run directory, whatever the file system, and readers that take no lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gramscope.errors import ResultWarning
from gramscope_lab.runs import lock as lock_module
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.lock import Lock
from refusals import assert_refused

HOLD = """
import sys, pathlib, warnings
warnings.simplefilter("ignore")
from gramscope_lab.runs.lock import Lock
if sys.argv[2:]:
    import fcntl, os
    def refused(handle, operation): raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
    fcntl.flock = refused
lock = Lock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def without_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system answer that the file system has no locks."""

    def refused(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.fixture(params=[0, errno.ENOLCK, errno.ENOSYS], ids=["flock", "ENOLCK", "ENOSYS"])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the system answers where a file is to be locked: nothing, or that the file system has no locks."""
    if request.param:
        without_flock(monkeypatch, request.param)
    return int(request.param)


@pytest.mark.filterwarnings("ignore:the file system of:gramscope.errors.ResultWarning")
def test_a_second_lock_is_refused_and_names_the_holder(tmp_path: Path, refusal: int) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    with first, first:  # re-entrant
        assert second.held_by_other()
        assert not first.held_by_other()
        assert_refused(r"is in use by process \d+ on", second.acquire)
    assert list(tmp_path.iterdir()) == []
    with second:
        pass


@pytest.mark.filterwarnings("ignore:the file system of:gramscope.errors.ResultWarning")
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path, refusal: int) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), *([str(refusal)] if refusal else [])]
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
    without_flock(monkeypatch, errno.ENOLCK)

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


TRAIN = """
import fcntl, os, signal, sys
number = int(sys.argv[1])
def refused(handle, operation): raise OSError(number, os.strerror(number))
fcntl.flock = refused
from gramscope_lab.command import main
from gramscope_lab.runs.directory import RunDirectory
if sys.argv[2] == "killed":
    save = RunDirectory.save_checkpoint
    def killed(*arguments):
        save(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    RunDirectory.save_checkpoint = killed
sys.argv[1:] = ["train", *sys.argv[3:]]
main()
"""


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=["ENOLCK", "ENOSYS"])
def test_a_run_on_a_file_system_without_locks_is_killed_and_resumed(tmp_path: Path, number: int) -> None:
    def gramscope(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", TRAIN, str(number), *arguments], capture_output=True, text=True, check=False
        )

    run = RunDirectory(tmp_path / "run")
    settings = ("--hidden", "4", "--epochs", "2", "--checkpoint-every", "1", "--out", str(run.path))
    killed = gramscope("killed", *settings)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "has no locks" in killed.stderr
    assert run.lock.holder()["host"] == platform.node()
    assert (run.path / ".lock").exists()  # a killed process leaves it
    assert run.status() == "stopped"
    (step,) = run.checkpoint_steps()
    resumed = gramscope("whole", "--resume", str(run.path))
    assert resumed.returncode == 0, resumed.stderr
    assert run.status() == "finished"
    assert run.checkpoint_steps() == [step, 2 * step]
    assert [record["epoch"] for record in run.records("evaluation")] == [0, 1, 2]
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints", "config.toml", "environment.json", "records.jsonl",
    ]  # fmt: skip


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    assert_refused("cannot write to .*missing", Lock(tmp_path / "missing").acquire)


@pytest.mark.parametrize(
    "content", ["", "[", "[" * 5000, "[1]", '{"pid": "x"}', '{"pid": 1}', f'{{"pid": {10**20}, "host": "x"}}']
)
def test_what_is_no_holder(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock.json").write_text(content)
    assert Lock(tmp_path).described().startswith(("another process", "process 1000"))
    Lock(tmp_path).held_by_other()
