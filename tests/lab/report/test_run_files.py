"""Damaged run directories: the report shows the rest and says what is missing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.matplotlib_figures import save_panel
from gramscope_lab.report.page import Content, payload, render_update
from gramscope_lab.report.write import report_content, write_report
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.files import to_json
from made_up_runs import CLAIMS, write_run


def content_of(*paths: Path) -> Content:
    """The content of a report, drawn in full but for plotly's script."""
    content = report_content(read_runs(paths))
    payload(content)
    to_json(render_update(content, version="", interval=0)).encode("utf-8", "replace")
    return content


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**200, -1, 2**64, 1e308, -1e308, 5e-324, 0.5])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["evaluation", "measurement", "claim", "end", "layers", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(
    ["kind", "step", "epoch", "seconds", "layer", "layers", "network", "seed", "test_loss", "test_accuracy", "nfa", "nc1",
     "surrogate", "holds", "claim", "reason", "finished", ""]
)  # fmt: skip
CHANGES = st.lists(st.tuples(st.integers(0, 100), KEYS, st.booleans(), JSON), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = write_run(tmp_path_factory.mktemp("damage") / "x", epochs=2)
    monitor = {"step": 3, "layers": {"fc": {"nfa": 0.5}}, "network": {"loss": 2.0}}
    run.append(monitor, *({"kind": "claim", **claim} for claim in CLAIMS))
    run.close()
    return run


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(changes=CHANGES, lines=st.lists(st.binary(max_size=8), max_size=2))
def test_mutated_records_never_raise(sound: RunDirectory, changes: list[Any], lines: list[bytes]) -> None:
    records = sound.path / "records.jsonl"
    original = records.read_bytes()
    found: list[dict[str, Any]] = [json.loads(line) for line in original.splitlines()]
    for index, key, remove, value in changes:
        record = found[index % len(found)]
        if remove:
            record.pop(key, None)
        else:
            record[key] = value
    try:
        records.write_bytes(b"\n".join([json.dumps(record).encode() for record in found] + lines))
        content_of(sound.path)
    finally:
        records.write_bytes(original)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("records.jsonl", '{"kind": "evaluation", "step": 0, "test_loss": 1.0}\n[1]\n{"kind"\n{}\n', "line 2"),
        ("records.jsonl", '{"kind": "evaluation", "step": "first", "test_loss": 1.0}\n', "without a step"),
        ("records.jsonl", '{"kind": "measurement", "step": 1, "nfa": 1.0}\n', "without the name of a layer"),
        ("records.jsonl", '{"step": 1, "layers": [1]}\n', "'layers' is not a table"),
        ("records.jsonl", '{"kind": "evaluation", "step": 1, "test_loss": 1e300}\n', "beyond 1e+150"),
        ("config.toml", "method = [", "config.toml"),
        ("environment.json", "[1]", "environment.json"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    (run.path / name).write_text(text)
    write_report([run.path], tmp_path, figures=False)
    assert any(words in problem for problem in content_of(run.path).overview.problems)


def test_readable_records_beside_damaged_ones_are_shown_and_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=2)
    with (run.path / "records.jsonl").open("a") as file:
        file.write(
            'not JSON\n{"kind": "evaluation", "step": 30, "epoch": 3.0, "test_accuracy": 0.9, "test_loss": [1]}\n'
        )
    content = content_of(run.path)
    accuracy = next(panel for panel in content.panels if panel.key == "accuracy")
    assert accuracy.views[0].facets[0].frames[0].lines[0].y[-1] == 0.9
    assert content.overview.status == "damaged"
    for panel in content.panels[:4]:
        save_panel(panel, tmp_path, "panel-")


def test_names_are_spelled_out_in_the_page(tmp_path: Path) -> None:
    hostile = "a\x00\x1b[31m\u202eb\u2066\ud800"
    run = write_run(tmp_path / "x", epochs=1)
    run.append({"kind": "measurement", "step": 1, "layer": hostile, "nfa": 0.5, hostile: 1.0})
    run.close()
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace('"sgd"', '"sgd\\u001b\\u202E"'))
    page = to_json(render_update(content_of(run.path), version="", interval=0))
    assert not [letter for letter in page if letter in "\x00\x1b\u202e\u2066\ud800"]
    assert "\\\\u202eb" in page
    for escaped in (r"\u0000", r"\u001b", r"\ud800"):
        assert not re.search(rf"(?<!\\)\\{escaped[1:]}", page)


def test_a_pipe_in_place_of_the_records_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    (run.path / "records.jsonl").unlink()
    os.mkfifo(run.path / "records.jsonl")
    assert any("not a regular file" in problem for problem in content_of(run.path).overview.problems)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    run, foreign = write_run(tmp_path / "x", epochs=1), write_run(tmp_path / "foreign", method="secret", epochs=1)
    for name in ("records.jsonl", "environment.json", "artefacts"):
        (run.path / name).rename(run.path / f"old-{name}")
        (run.path / name).symlink_to(foreign.path / name)
    content = content_of(run.path)
    assert not any(panel.views for panel in content.panels)
    assert sum("link" in problem for problem in content.overview.problems) == 3
    group = RunDirectory.create(tmp_path / "group", {})
    (group.path / "member").symlink_to(foreign.path)
    write_run(group.path / "own", epochs=1)
    assert [setting.name for setting in content_of(group.path).runs.settings] == ["sgd"]
