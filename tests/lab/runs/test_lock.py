from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gramscope.errors import InputError
from gramscope_lab.runs.lock import Lock

HOLD = """
import sys, pathlib
from gramscope_lab.runs.lock import Lock
lock = Lock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_second_lock_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    with first:
        assert second.held_by_other()
        assert not first.held_by_other()
        with pytest.raises(InputError, match=r"is in use by process \d+ on"):
            second.acquire()
    assert not (tmp_path / "lock").exists()
    with second:
        pass


def test_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert Lock(path).held_by_other()
    with pytest.raises(InputError, match=f"process {holder.pid}"):
        Lock(path).acquire()
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert json.loads(path.read_text())["pid"] == holder.pid  # the file is stale
    assert not Lock(path).held_by_other()
    with Lock(path):
        pass
