"""Runs the tests on the second device in a process of their own, since torch cannot forget a device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_everything_on_the_second_device() -> None:
    tests = Path(__file__).with_name("on_second_device.py")
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-n", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    print(run.stdout[-6000:], run.stderr[-2000:])
    passed = re.search(r"^(\d+) passed", run.stdout, re.MULTILINE)
    assert run.returncode == 0
    assert passed is not None
    assert int(passed[1]) > 10
