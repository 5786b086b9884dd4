"""Runs of Weights & Biases (offline) and of MLflow (in files) are read back and compared with the records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.instruments.log import scalars
from gramscope.integrations import loggers
from gramscope.integrations.loggers import MlflowLog, WandbLog
from refusals import assert_refused

wandb = pytest.importorskip("wandb")
mlflow = pytest.importorskip("mlflow")


def payloads(content: bytes) -> Iterator[bytes]:
    """The messages of an offline file: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB)."""
    at, joined = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        joined += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of several
            yield joined
            joined = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's history."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for payload in payloads(file.read_bytes()):
        message = Record.FromString(payload)
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def test_an_offline_run_holds_what_measure_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(40, 1, 2, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    with wandb.init(mode="offline", project="test", dir=str(tmp_path)) as run:
        monitor = gs.Monitor(net, (x, y), nn.CrossEntropyLoss(), every=2, log=WandbLog())
        for step in range(4):
            if step < 2:
                run.log({"other": float(step)}, step=10 * step)  # the user's own numbering of steps
            with torch.no_grad():
                net[1].weight.mul_(1.1)
            monitor.step()
    wandb.teardown()  # waits for the process that writes the file
    rows = history(tmp_path)
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if "gramscope/step" in row:
            found.setdefault(row["gramscope/step"], {}).update(row)
    assert list(found) == [0, 2, 4] == [record["step"] for record in monitor.records]
    assert [row["other"] for row in rows if "other" in row] == [0, 1]  # nothing of the user's is lost
    for record in monitor.records:
        for name, value in scalars(record).items():
            assert found[record["step"]][name] == pytest.approx(value, rel=1e-9), name
    table = gs.measure(net, (x, y), measures=["target_linearity"])
    assert found[4]["gramscope/target_linearity/3"] == pytest.approx(table["3"]["target_linearity"], rel=1e-9)


def test_a_run_is_needed() -> None:
    assert_refused("no active run: call wandb.init", WandbLog)


@pytest.mark.filterwarnings("ignore::FutureWarning:mlflow", "ignore::DeprecationWarning")
def test_a_run_in_files_holds_what_measure_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    monkeypatch.setattr(loggers, "MOST", 7)  # so that a record takes several calls
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    client = mlflow.MlflowClient(f"file:{tmp_path / 'runs'}")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"file:{tmp_path / 'runs'}")
    try:
        with mlflow.start_run() as run:
            options = {"measures": ["target_linearity", "nc1"], "outputs": "0", "every": 2}
            monitor = gs.Monitor(net, (x, y), nn.CrossEntropyLoss(), log=MlflowLog(), **options)
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
        assert dict(found) == monitor.series["target_linearity"][layer]
    table = gs.measure(net, (x, y), measures=["target_linearity"])
    assert found[-1][0] == 4
    last = client.get_metric_history(run.info.run_id, "gramscope/target_linearity/2")[-1]
    assert last.value == pytest.approx(table["2"]["target_linearity"])
