"""A run gets a signal at a random line of its code; nothing that was reported is lost, and the run can be resumed.

The run is a forked process. It counts the lines of gramscope that it executes and sends itself the signal at one of them, so
that the same seed gives the same point again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.small_run import check_kept, check_resumed, configuration, outcome, small_data
from gramscope_lab.training import train as train_module
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.train import train

SEED, TIMES = 2026, 60
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL")


class Noted(Reporter):
    """Writes every record that the user was told to a file that a killed process leaves behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self, records: Any, label: str = "") -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def train_in_child(config: TrainConfig, path: Path, signal_at: int, signal_number: int, notes: Path) -> int:
    """Train in a forked process that signals itself at a line; its exit status. It notes how many lines it ran."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which are not used here
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        count = 0

        def trace(frame: Any, event: str, argument: object) -> Any:
            nonlocal count
            if "gramscope" not in frame.f_code.co_filename:
                return None
            if event == "line":
                count += 1
                if count == signal_at:
                    os.kill(os.getpid(), signal_number)
            return trace

        sys.settrace(trace)
        train(config, path, data=small_data(), reporter=Noted(notes), parallel="1")
        sys.settrace(None)
        notes.with_suffix(".lines").write_text(str(count))
        status = 0
    finally:
        os._exit(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("seeds", [[0], [0, 1]], ids=["run", "group"])
def test_signals_at_random_lines(
    seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(train_module, "describe_environment", lambda device: {"torch": "2", "device": device})
    config, data = configuration(seeds), small_data()
    notes = tmp_path / "notes"
    assert train_in_child(config, tmp_path / "whole", -1, signal.SIGINT, notes) == 0
    lines, whole = int(notes.with_suffix(".lines").read_text()), outcome(tmp_path / "whole")
    draw = random.Random(SEED)
    tried: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    wrong = []
    print(f"seed {SEED}: {TIMES} signals in {lines} lines")
    for number in range(TIMES):
        name, at = draw.choice(SIGNALS), draw.randint(1, lines)
        path, notes = tmp_path / f"{number}", tmp_path / f"notes-{number}"
        train_in_child(config, path, at, getattr(signal, name), notes)
        reported = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        tried[name] += 1
        try:
            check_kept(path, reported)
            check_resumed(path, config, data, whole)
        except Exception as error:
            lost[name] += 1
            wrong.append(f"{name} at line {at}: {type(error).__name__}: {error}")
    for name, times in tried.items():
        record_property("fault", f"{name}, seed {SEED}|{'run' if len(seeds) == 1 else 'group'}|{times}|{lost[name]}")
    assert wrong == []
