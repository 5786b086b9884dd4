"""A process that is killed is replaced, and the results are those of one process."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.train import train
from lab.training.helpers import Config, Notes, weights, without_time


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_process_is_replaced(tmp_path: Path, config: Config) -> None:
    settings = config("adamw", seeds=[0, 1], epochs=6, checkpoint_every=0.5, execution="processes")

    class Killing(Notes):
        killed = ""

        def records(self, records: Any, label: str = "") -> None:
            if not self.killed and records[0]["step"] > 100:
                self.killed = label
                facts = RunDirectory(tmp_path / "run").member(label).lock._facts()
                os.kill(int(str(facts["pid"])), signal.SIGKILL)

    reporter = Killing()
    found = train(settings, tmp_path / "run", reporter=reporter)
    whole = train(replace(settings, execution="one-by-one"))
    lost = "its process died with exit code -9; it starts again from its last checkpoint"
    assert reporter.notes[1:] == [f"{reporter.killed}: {lost}"]
    assert torch.equal(weights(found), weights(whole))
    assert without_time(found.records) == without_time(whole.records)
