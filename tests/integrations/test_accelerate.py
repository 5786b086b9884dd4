"""A loop of Accelerate with our measures and optimizers: what its tracker got, and a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gramscope as gs
from gramscope.instruments.log import scalars

accelerate = pytest.importorskip("accelerate")


def test_a_loop_logs_what_measure_gives_and_resumes(tmp_path: Path) -> None:
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):
        name = "kept"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.rows: dict[int, dict[str, float]] = {}

        @property
        def tracker(self) -> Any:
            return self

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **options: Any) -> None:
            assert step is not None
            self.rows.setdefault(step, {}).update(values)

    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    tracker = Tracker()
    accelerator = accelerate.Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    accelerator.init_trackers("test")

    def made() -> tuple[Any, Any, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        return accelerator.prepare(net, gs.VCL(net, gamma=0.1), DataLoader(TensorDataset(x, y), batch_size=8))

    def train(model: Any, optimizer: Any, loader: Any) -> None:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()

    model, optimizer, loader = made()
    for epoch in range(2):
        train(model, optimizer, loader)
        measures = ["target_linearity", "weight_norm", "gradient_norm"]
        plain = accelerator.unwrap_model(model)
        table = gs.measure(plain, (x, y), nn.CrossEntropyLoss(), measures=measures, process_group=False)
        accelerator.log(scalars(table.to_dict()), step=epoch)
        if epoch == 0:
            accelerator.save_state(tmp_path / "half")
    expected = gs.measure(model, (x, y), nn.CrossEntropyLoss(), measures=measures)
    assert expected.rows == table.rows
    for layer in ("0", "2"):
        for name in measures:
            assert tracker.rows[1][f"gramscope/{name}/{layer}"] == pytest.approx(expected[layer][name])
    assert tracker.rows[1]["gramscope/accuracy"] == expected.network["accuracy"]
    assert tracker.rows[1]["gramscope/loss"] == pytest.approx(expected.network["loss"])
    assert tracker.rows[0]["gramscope/loss"] > 1.01 * tracker.rows[1]["gramscope/loss"]

    accelerator.free_memory()
    again, second, batches = made()
    accelerator.load_state(tmp_path / "half")
    train(again, second, batches)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
