"""SIGKILL at a random moment; the script beside this file does it with more kills."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gramscope.cli.flags import to_arguments
from gramscope.training.config import TrainConfig
from gramscope.training.train import train
from training.kill_resume import kill_and_resume, same


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_runs_resume_bit_identically(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [16]},
            "method": {"name": "adamw"},
            "seeds": [0, 1],
            "epochs": 12,
            "checkpoint_every": 0.6,
            "device": "cpu",
            "execution": "vectorised",
        }
    )
    train(config, tmp_path / "whole")
    kill_and_resume(tmp_path, to_arguments(config), kills=1, seed=0, longest=0.5)
    assert same(tmp_path / "whole", tmp_path / "killed")
