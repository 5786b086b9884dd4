"""A training that is measured afterwards, and claims without a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gramscope_lab.experiments.experiment import Claim, Options, Results
from gramscope_lab.experiments.parts import Recorder, Training
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.trained import Trained
from refusals import assert_refused


def test_training_part(tmp_path: Path) -> None:
    config = TrainConfig.from_dict(
        {
            "data": {"name": "digits", "samples": 64, "test_samples": 32},
            "model": {"name": "mlp", "hidden": [4]},
            "method": {"name": "sgd"},
            "seeds": [0, 1],
            "epochs": 1,
            "device": "cpu",
            "execution": "one-by-one",
        }
    )
    seen: list[list[str]] = []

    def after(trained: Trained, recorder: Recorder) -> None:
        if not seen:
            seen.append([])
            raise KeyboardInterrupt
        seen.append(list(trained.members))
        recorder.record("norm", value=1.0)

    root = RunDirectory.create(tmp_path / "x", {})
    part = Training("sgd", config, after)
    with pytest.raises(KeyboardInterrupt):
        part.run(root, Reporter())
    assert not part.complete(root)  # trained, but not measured
    part.run(root, Reporter())
    assert part.complete(root)
    assert seen == [[], ["seed-0", "seed-1"]]
    results = Results("x", None, Options(), root)
    assert len(results.records("evaluation", part="sgd", epoch=1.0)) == 2
    assert results.records("norm", part="sgd.after")[0]["run"] == "sgd.after"
    assert not results.records("norm", part="sgd")


def test_an_open_claim_needs_a_reason() -> None:
    assert_refused("undecided without a reason", Claim, "x", "1", "2", None)
    assert Claim("x", "1", "2", torch.tensor(True)).holds is True  # type: ignore[arg-type]
