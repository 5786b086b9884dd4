from __future__ import annotations

from pathlib import Path

import torch

from gramscope_lab.runs.directory import RunDirectory, describe_environment


def test_environment_says_what_matters(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    assert run.environment == {}
    facts = describe_environment()
    run.write_environment(facts)
    stored = run.environment
    assert stored["torch"] == torch.__version__
    assert stored == facts
