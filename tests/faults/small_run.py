"""A run of a second, and what must hold after it was disturbed: shared by the tests of faults and of signals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gramscope_lab.data import DataSet, from_tensors
from gramscope_lab.runs import files
from gramscope_lab.runs.checkpoints import read_checkpoint
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import LOCK, plain
from gramscope_lab.runs.records import iter_records
from gramscope_lab.training.config import TrainConfig
from gramscope_lab.training.reporter import Reporter
from gramscope_lab.training.train import train


class Reported(Reporter):
    """Remembers every record that the user was told."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def records(self, records: Any, label: str = "") -> None:
        self.found += records


def small_data() -> DataSet:
    """Twenty-four samples of two classes."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 3, generator=g), torch.arange(24) % 2
    return from_tensors("small", x[:16], y[:16], x[16:], y[16:])


def configuration(seeds: list[int]) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "seeds": seeds, "epochs": 2, "batch_size": 8, "device": "cpu", "checkpoint_every": 1,
            "keep": 1, "measure": {"samples": 0}, "data": {"name": "given"}, "model": {"name": "mlp", "hidden": [2]},
            "method": {"name": "adamw", "lr": 0.1},
        }
    )  # fmt: skip


def outcome(path: Path) -> list[Any]:
    """What a finished run or group left: records without times, and the bits of the last checkpoint."""
    found: list[Any] = []
    for run in RunDirectory(path).runs():
        last = run.load_checkpoint()
        records = [{k: v for k, v in record.items() if k != "seconds"} for record in run.records()]
        state = plain({key: value for key, value in last.state.items() if key != "seconds"})
        found.append((run.path.name if run.path != path else "", last.step, records, plain(dict(last.model)), state))
    return found


def stored(path: Path) -> list[dict[str, Any]]:
    return [record for file in path.rglob("records.jsonl") for record, _ in iter_records(file)]


def stale(path: Path) -> list[str]:
    return [found.name for found in path.rglob("*") if found.name.startswith(files.TEMPORARY) or found.name == LOCK]


def check_kept(path: Path, reported: list[dict[str, Any]]) -> None:
    """No reported record is missing, and every checkpoint that is there is whole."""
    kept = stored(path)
    assert all(record in kept for record in reported), "a reported record is missing"
    for step in path.rglob("step-*"):
        read_checkpoint(step)


def check_resumed(path: Path, config: TrainConfig, data: DataSet | None, whole: list[Any]) -> None:
    """The run can be taken up again, gives the bits of an undisturbed one, and leaves nothing behind."""
    train(config, path, data=data, resume=RunDirectory(path).exists(), parallel="2" if data is None else "1")
    assert outcome(path) == whole, "the resumed run differs"
    assert stale(path) == []
