"""A run of MLflow in files: its metrics are read back and compared with the records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.integrations import mlflow as ours

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:mlflow", "ignore::DeprecationWarning")
mlflow = pytest.importorskip("mlflow")


def test_a_run_in_files_holds_what_measure_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    monkeypatch.setattr(ours, "MOST", 7)  # so that a record takes several calls
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    client = mlflow.MlflowClient(f"file:{tmp_path / 'runs'}")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path / 'runs'}")
    try:
        with mlflow.start_run() as run:
            options = {"measures": ["target_linearity", "nc1"], "outputs": "0", "every": 2}
            monitor = gs.Monitor(net, (x, y), nn.CrossEntropyLoss(), log=ours.MlflowLog(), **options)
            for _ in range(4):
                with torch.no_grad():
                    net[0].weight.mul_(1.1)
                monitor.step()
    finally:
        mlflow.set_tracking_uri(before)
    assert len(monitor.records[0]["layers"]) == 3
    for layer in monitor.records[0]["layers"]:
        name = f"gramscope/target_linearity/{layer}".replace("(", "_").replace(")", "_")
        found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
        assert found == monitor.series("target_linearity")[layer]
    table = gs.measure(net, (x, y), measures=["target_linearity"])
    assert found[-1][0] == 4
    last = client.get_metric_history(run.info.run_id, "gramscope/target_linearity/2")[-1]
    assert last.value == pytest.approx(table["2"]["target_linearity"])
