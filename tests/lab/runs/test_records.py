from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope.errors import InputError
from gramscope_lab.runs import records
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.records import append_records, iter_records, last_record, records_end, truncate_records
from refusals import assert_refused


def read(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [record for record, _ in iter_records(path, **options)]


def test_records_are_readable_at_once_and_by_pandas(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [{"kind": "evaluation", "step": 1, "loss": 0.5}])
    assert read(path) == [{"kind": "evaluation", "step": 1, "loss": 0.5}]
    append_records(path, [{"step": 2, "loss": float("nan")}, {"step": 3, "name": "zwölf\n"}])
    table = pd.read_json(path, lines=True)
    assert list(table["step"]) == [1, 2, 3]
    assert table["loss"].isna().tolist() == [False, True, True]
    assert read(path)[2]["name"] == "zwölf\n"
    ((_, end), *_) = iter_records(path)
    assert [record["step"] for record in read(path, start=end)] == [2, 3]


@given(st.integers(min_value=0, max_value=200))
def test_any_cut_loses_at_most_the_last_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "records.jsonl"
    records = [{"step": i, "text": "é" * i} for i in range(8)]
    append_records(path, records)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    whole = content.count(b"\n")
    found = read(path)
    assert found == records[:whole]
    assert last_record(path) == (found[-1] if found else None)
    append_records(path, [{"step": "new"}])  # starts on a line of its own
    assert read(path) == [*found, {"step": "new"}]


def test_the_last_record_of_a_kind_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [{"kind": "evaluation", "step": step} for step in range(3)])
    append_records(path, [{"kind": "end", "text": "x" * 40} for _ in range(records.TAIL // 60 + 9)])
    assert records_end(path) > records.TAIL
    assert last_record(path, "evaluation") == {"kind": "evaluation", "step": 2}
    assert last_record(path, "measurement") is None
    append_records(path, [{"kind": "evaluation", "step": 7}, {"kind": "end"}])
    assert last_record(path, "evaluation") == {"kind": "evaluation", "step": 7}
    assert last_record(path) == {"kind": "end"}


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 1}\n')
    with pytest.raises(InputError, match="line 2 is not JSON"):
        read(path)
    damaged: list[str] = []
    assert read(path, damaged=damaged) == [{"a": 1}, {"c": 1}]
    assert len(damaged) == 1
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="line 1 holds list"):
        read(path)
    assert read(tmp_path / "none.jsonl") == []


def test_truncating_goes_back_to_an_end(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [{"step": 1}, {"step": 2}])
    end = records_end(path)
    append_records(path, [{"step": 3}])
    truncate_records(path, end)
    assert read(path) == [{"step": 1}, {"step": 2}]
    for wrong in (end + 1, end - 1, 5):
        assert_refused("records are missing, or the file was edited", truncate_records, path, wrong)
    for wrong in (None, -1, {}, "1"):
        assert_refused("does not say which records", truncate_records, path, wrong)
    truncate_records(path, 0)
    assert path.read_bytes() == b""


def test_pipes_and_deep_values_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records.jsonl")
    assert_refused("not a regular file", read, tmp_path / "records.jsonl")
    (tmp_path / "deep.jsonl").write_text('{"a": ' + "[" * 200_000 + "\n")
    assert_refused("line 1 is not JSON", read, tmp_path / "deep.jsonl")


def test_a_million_records_need_little_memory(tmp_path: Path) -> None:
    """A twentieth of them here; the state is found from the end of the file."""
    run = RunDirectory.create(tmp_path / "x", {"method": {"name": "sgd"}})
    line = b'{"kind": "measurement", "step": 1, "layer": "hidden1", "nfa": 0.123456789}\n'
    (run.path / "records.jsonl").write_bytes(line * 50_000 + b'{"kind": "end", "finished": true}\n')
    tracemalloc.start()
    try:
        assert sum(1 for _ in run.iter_records("measurement")) == 50_000
        assert run.status() == "finished"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
