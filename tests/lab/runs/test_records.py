from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope.errors import InputError
from gramscope_lab.runs.records import RecordWriter, read_records, truncate_records


def test_records_are_readable_at_once_and_by_pandas(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.extend([{"kind": "evaluation", "step": 1, "loss": 0.5}])
    assert read_records(path) == [{"kind": "evaluation", "step": 1, "loss": 0.5}]
    writer.extend([{"step": 2, "loss": float("nan")}, {"step": 3, "name": "zwölf\n"}])
    writer.close()
    table = pd.read_json(path, lines=True)
    assert list(table["step"]) == [1, 2, 3]
    assert table["loss"].isna().tolist() == [False, True, True]
    assert read_records(path)[2]["name"] == "zwölf\n"


@given(st.integers(min_value=0, max_value=200))
def test_any_cut_loses_at_most_the_last_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "records.jsonl"
    writer = RecordWriter(path)
    records = [{"step": i, "text": "é" * i} for i in range(8)]
    writer.extend(records)
    writer.close()
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    whole = content.count(b"\n")
    found = read_records(path)
    assert found[:whole] == records[:whole]
    assert len(found) <= whole + 1  # a line that lacks only its newline is complete
    writer = RecordWriter(path)  # a writer starts on a line of its own
    writer.extend([{"step": "new"}])
    writer.close()
    assert read_records(path) == [*found, {"step": "new"}]


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 1}\n')
    with pytest.raises(InputError, match="line 2 is not JSON"):
        read_records(path)
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="line 1 holds list"):
        read_records(path)
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(
    "edit", [lambda c: c, lambda c: c.replace(b"\n", b"\r\n"), lambda c: c.replace(b"\n", b"\n\n")]
)
def test_truncating_goes_back_to_a_position_also_in_an_edited_file(tmp_path: Path, edit: Any) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.extend([{"step": 1}, {"step": 2}])
    position = writer.position()
    writer.extend([{"step": 3}])
    writer.close()
    path.write_bytes(edit(path.read_bytes()))
    truncate_records(path, position)
    assert read_records(path) == [{"step": 1}, {"step": 2}]
    writer = RecordWriter(path)
    writer.extend([{"step": 3}])
    assert writer.position()["lines"] == 3
    writer.close()
    with pytest.raises(InputError, match="3 records but its checkpoint was written after 4; records are missing"):
        truncate_records(path, {"lines": 4, "bytes": 0})


def test_positions_of_earlier_versions_are_bytes_that_must_end_a_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    for wrong in (30, 5, 11):
        with pytest.raises(InputError, match=f"no record that ends at byte {wrong}"):
            truncate_records(path, wrong)
    for wrong in (None, -1, {}, {"lines": "1"}):
        with pytest.raises(InputError, match="does not say how many records"):
            truncate_records(path, wrong)
    truncate_records(path, 12)
    assert read_records(path) == [{"step": 1}]
    truncate_records(path, 0)
    assert path.read_bytes() == b""


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    writer = RecordWriter(path)
    writer.extend([{"step": 3}])
    writer.close()
    assert [record["step"] for record in read_records(path)] == [1, 2, 3]


def test_pipes_and_deep_values_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        read_records(tmp_path / "records.jsonl")
    (tmp_path / "deep.jsonl").write_text('{"a": ' + "[" * 200_000 + "\n")
    with pytest.raises(InputError, match="line 1 is nested too deeply"):
        read_records(tmp_path / "deep.jsonl")
