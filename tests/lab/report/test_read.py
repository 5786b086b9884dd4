"""Run directories are read once and sorted into settings; damage is left out and named."""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gramscope.errors import InputError
from gramscope_lab.report.page import render, write_report
from gramscope_lab.report.read import Runs, read_runs, spread_sentence
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import CLAIMS, accuracy, value, write_run


def setting_names(*paths: Path) -> list[str]:
    return [setting.name for setting in read_runs(paths).settings]


def test_runs_that_differ_by_the_seed_are_one_setting(runs: Runs) -> None:
    assert [(setting.name, len(setting.runs)) for setting in runs.settings] == [("sgd", 2), ("vcl", 2)]
    assert [run.seed for run in runs.all] == [0, 1, 0, 1]
    assert [run.name for run in runs.others] == ["both/claims"]
    assert (runs.clock, runs.status, len(runs.claims)) == ("epoch", "finished", 3)


def test_settings_are_named_by_their_differences(tmp_path: Path) -> None:
    write_run(tmp_path / "a", lr=0.1)
    write_run(tmp_path / "b", lr=0.01)
    write_run(tmp_path / "c", method="vcl")
    write_run(tmp_path / "d", lr=0.1)
    assert setting_names(*(tmp_path / name for name in "abc")) == ["sgd, lr 0.1", "sgd, lr 0.01", "vcl"]
    assert setting_names(tmp_path / "a", tmp_path / "d") == ["sgd (a)", "sgd (d)"]
    assert setting_names(tmp_path / "a", tmp_path / "a") == ["sgd (a)", "sgd (a)′"]


def test_records_of_a_monitor_are_read(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine", {})
    for step in (0, 3):
        record: dict[str, Any] = {"layers": {"fc": {"nfa": 0.5 + step}}, "network": {"loss": 2.0 - step, "samples": 9}}
        run.append({"step": step, **record})
    runs = read_runs([run.path])
    assert (runs.clock, runs.status, runs.all[0].monitored) == ("step", "recorded", True)
    (setting,) = runs.settings
    assert [v.mean for v in setting.curve("nfa", "fc", "step").values] == [0.5, 3.5]
    assert [v.mean for v in setting.curve("monitored_loss", None, "step").values] == [2.0, -1.0]


def test_seeds_of_ones_own_loop_are_one_setting(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        for seed in (0, 1):
            run = RunDirectory.create(tmp_path / "mine" / f"lr{lr}-seed{seed}", {"seed": seed, "lr": lr})
            run.append({"step": 0, "layers": {"fc": {"nfa": 0.5}}, "network": {"loss": 2.0}})
    found = {setting.name: [run.seed for run in setting.runs] for setting in read_runs([tmp_path / "mine"]).settings}
    assert found == {"lr 0.01": [0, 1], "lr 0.1": [0, 1]}
    assert setting_names(tmp_path / "mine" / "lr0.1-seed0") == ["lr0.1-seed0"]


def test_curves_are_means_and_spreads_over_seeds(runs: Runs) -> None:
    vcl = runs.settings[1]
    found = vcl.curve("test_accuracy", None, "epoch")
    assert found.times == [0.0, 1.0, 2.0, 3.0, 4.0]
    for epoch, spread in enumerate(found.values):
        values = [accuracy(seed, epoch, 0.9) for seed in (0, 1)]
        assert (spread.mean, spread.deviation) == pytest.approx((statistics.mean(values), statistics.stdev(values)))
        assert (spread.least, spread.largest) == pytest.approx((min(values), max(values)))
    layer = vcl.curve("surrogate", "readout", "step")
    assert layer.times == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert layer.values[3].mean == pytest.approx(statistics.mean(value("surrogate", s, 3, 1, 0.9) for s in (0, 1)))
    assert vcl.curve("test_accuracy", None, "seconds").times == [0.0, 0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(("seeds", "words"), [(1, "one seed"), (2, "2 seeds: bands and bars show the range")])
def test_spread_is_named_for_what_it_is(tmp_path: Path, seeds: int, words: str) -> None:
    RunDirectory.create(tmp_path / "all", {})
    for seed in range(seeds):
        write_run(tmp_path / "all" / f"seed-{seed}", seed=seed, epochs=1, layers=(), snapshots=False)
    assert words in spread_sentence(read_runs([tmp_path / "all"]))


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        read_runs([tmp_path])


# -- damage -----------------------------------------------------------------------------------------------------------
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
    return run


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(changes=CHANGES, lines=st.lists(st.binary(max_size=8), max_size=2))
def test_mutated_records_never_raise(sound: RunDirectory, changes: list[Any], lines: list[bytes]) -> None:
    records = sound.path / "records.jsonl"
    original = records.read_bytes()
    found: list[dict[str, Any]] = [json.loads(line) for line in original.splitlines()]
    for index, key, remove, new in changes:
        record = found[index % len(found)]
        if remove:
            record.pop(key, None)
        else:
            record[key] = new
    try:
        records.write_bytes(b"\n".join([json.dumps(record).encode() for record in found] + lines))
        render(read_runs([sound.path])).encode()
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
    assert any(words in problem for problem in read_runs([run.path]).problems)
    assert words.split("'")[0] in write_report([run.path], tmp_path).read_text(encoding="utf-8")


def test_readable_records_beside_damaged_ones_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=2)
    with (run.path / "records.jsonl").open("a") as file:
        file.write('not JSON\n{"kind": "evaluation", "step": 30, "test_accuracy": 0.9, "test_loss": [1]}\n')
    runs = read_runs([run.path])
    assert runs.settings[0].curve("test_accuracy", None, "epoch").values[-1].mean == 0.9
    assert runs.status == "damaged"


def test_names_are_spelled_out_in_the_page(tmp_path: Path) -> None:
    hostile = "a\x00\x1b[31m\u202eb\u2066\ud800"
    run = write_run(tmp_path / "x", epochs=1)
    run.append({"kind": "measurement", "step": 1, "layer": hostile, "nfa": 0.5, hostile: 1.0})
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace('"sgd"', '"sgd\\u001b\\u202E"'))
    page = render(read_runs([run.path]))
    page = page.replace(page[page.index("<script>") : page.rindex("<script>")], "")  # plotly's own text
    assert not [letter for letter in page if letter in "\x00\x1b\u202e\u2066\ud800"]
    assert "\\u202eb" in page


def test_a_pipe_in_place_of_the_records_is_not_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    (run.path / "records.jsonl").unlink()
    os.mkfifo(run.path / "records.jsonl")
    assert any("not a regular file" in problem for problem in read_runs([run.path]).problems)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    run, foreign = write_run(tmp_path / "x", epochs=1), write_run(tmp_path / "foreign", method="secret", epochs=1)
    for name in ("records.jsonl", "environment.json", "artefacts"):
        (run.path / name).rename(run.path / f"old-{name}")
        (run.path / name).symlink_to(foreign.path / name)
    runs = read_runs([run.path])
    assert not any(run.evaluations or run.by_layer or run.environment for run in runs.all)
    assert sum("link" in problem for problem in runs.problems) >= 2
    assert "secret" not in render(runs)
    group = RunDirectory.create(tmp_path / "group", {})
    (group.path / "member").symlink_to(foreign.path)
    write_run(group.path / "own", epochs=1)
    assert [setting.name for setting in read_runs([group.path]).settings] == ["sgd"]
