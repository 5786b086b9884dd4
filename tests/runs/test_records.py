from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope.errors import InputError
from gramscope.runs.records import RecordWriter, read_records, truncate_records


def test_records_are_readable_at_once_and_by_pandas(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.append({"kind": "evaluation", "step": 1, "loss": 0.5})
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
    writer.append({"step": "new"})
    writer.close()
    assert read_records(path) == [*records[:whole], {"step": "new"}]


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 1}\n')
    with pytest.raises(InputError, match="line 2 is not JSON"):
        read_records(path)
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="line 1 holds list"):
        read_records(path)
    assert read_records(tmp_path / "none.jsonl") == []


def test_truncating_goes_back_to_a_position(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = RecordWriter(path)
    writer.append({"step": 1})
    position = writer.position()
    writer.append({"step": 2})
    writer.close()
    truncate_records(path, position)
    assert read_records(path) == [{"step": 1}]
    with pytest.raises(InputError, match="records are missing"):
        truncate_records(path, position + 1)
