"""Exported records read back as they were."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.errors import MissingExtraError
from gramscope_lab.cli import app
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.export import to_arrow, to_rows, write_records
from made_up_runs import write_run
from refusals import assert_refused


def export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gramscope", "runs", "export", *arguments])
    with pytest.raises(SystemExit) as end:
        app.main()
    return int(end.value.code or 0)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    for seed in range(2):
        write_run(tmp_path / "group" / f"seed-{seed}", seed=seed, epochs=2, snapshots=False)
    return RunDirectory.open(tmp_path / "group")


def test_every_format_holds_every_record(
    group: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = group.records()
    for form in ("parquet", "csv", "jsonl"):
        assert export(monkeypatch, "group", "--format", form) == 0
        assert f"{len(records)} records: group.{form}" in capsys.readouterr().out
    rows = pq.read_table("group.parquet").to_pylist()
    assert [{k: v for k, v in row.items() if v is not None} for row in rows] == [
        {k: v for k, v in record.items() if v is not None} for record in records
    ]
    assert [json.loads(line) for line in Path("group.jsonl").read_text().splitlines()] == records
    with Path("group.csv").open(newline="") as file:
        texts = list(csv.DictReader(file))
    assert [row["run"] for row in texts] == [record["run"] for record in records]
    assert [float(row["step"]) for row in texts] == [record["step"] for record in records]


def test_one_kind_and_existing_files(
    group: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(monkeypatch, "group", "--kind", "measurement", "--out", "m.parquet") == 0
    frame = pd.read_parquet("m.parquet")
    assert set(frame["kind"]) == {"measurement"}
    assert frame["target_linearity"].dtype == float
    assert len(frame) == len(group.records("measurement"))
    assert export(monkeypatch, "group", "--kind", "evaluation", "--out", "m.parquet") == 2
    assert export(monkeypatch, "group", "--kind", "evaluation", "--out", "m.parquet", "--force") == 0
    assert set(pd.read_parquet("m.parquet")["kind"]) == {"evaluation"}
    assert export(monkeypatch, "group", "--kind", "nothing") == 2
    assert export(monkeypatch, "group", "--format", "xlsx") == 2
    error = " ".join(capsys.readouterr().err.split())
    for text in ("m.parquet exists", "no records of kind 'nothing'; there are: ", "there are: parquet, csv, jsonl"):
        assert text in error


def test_a_monitor_gives_one_row_per_layer() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    monitor = gs.Monitor(net, (torch.rand(30, 3), torch.arange(30) % 2), nn.CrossEntropyLoss(), every=1)
    monitor.step()
    frame = to_arrow(monitor.records).to_pandas()
    assert len(frame) == 2 * 3
    row = frame[(frame["step"] == 1) & (frame["layer"] == "2")].iloc[0]
    assert row["target_linearity"] == monitor.records[1]["layers"]["2"]["target_linearity"]
    network = frame[frame["layer"].isna()]
    assert list(network["loss"]) == [record["network"]["loss"] for record in monitor.records]


def test_mixed_columns_become_text_and_missing_values_null() -> None:
    records = [{"a": 1, "b": True, "c": [1, 2]}, {"a": 2.5, "c": "x", "d": 2**70}, {"b": False, "c": 3, "d": 1}]
    table = to_arrow(records).to_pydict()
    assert table == {
        "a": [1.0, 2.5, None],
        "b": [True, None, False],
        "c": ["[1, 2]", "x", "3"],
        "d": [None, float(2**70), 1.0],
    }
    assert to_rows([{"c": {"k": 1}}]) == [{"c": '{"k": 1}'}]


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pip install --upgrade 'gramscope\[parquet\]'"):
        write_records([{"a": 1}], tmp_path / "x.parquet", "parquet")
    assert_refused("format 'xlsx'", write_records, [], tmp_path / "x", "xlsx")
