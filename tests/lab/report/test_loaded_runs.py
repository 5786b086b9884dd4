from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gramscope.errors import InputError
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.overview import overview
from gramscope_lab.report.seed_statistics import evaluation_curve, layer_curve
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import write_run


def setting_names(*paths: Path) -> list[str]:
    return [setting.name for setting in read_runs(paths).settings]


def test_runs_that_differ_by_the_seed_are_one_setting(group: Path) -> None:
    runs = read_runs([group])
    assert [(setting.name, len(setting.runs)) for setting in runs.settings] == [("sgd", 2), ("vcl", 2)]
    assert [run.seed for run in runs.all] == [0, 1, 0, 1]
    assert [run.name for run in runs.others] == ["both/claims"]
    assert (runs.clock, runs.status, len(runs.records("claim"))) == ("epoch", "finished", 3)


def test_settings_are_named_by_their_differences(tmp_path: Path) -> None:
    write_run(tmp_path / "a", lr=0.1)
    write_run(tmp_path / "b", lr=0.01)
    write_run(tmp_path / "c", method="vcl")
    write_run(tmp_path / "d", lr=0.1)
    assert setting_names(*(tmp_path / name for name in "abc")) == ["sgd, lr 0.1", "sgd, lr 0.01", "vcl"]
    assert setting_names(tmp_path / "a", tmp_path / "d") == ["sgd (a)", "sgd (d)"]
    assert setting_names(tmp_path / "a", tmp_path / "a") == ["sgd (a) #1", "sgd (a) #2"]


def test_records_of_a_monitor_are_read(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine", {})
    for step in (0, 3):
        record: dict[str, Any] = {"layers": {"fc": {"nfa": 0.5 + step}}, "network": {"loss": 2.0 - step, "samples": 9}}
        run.append({"step": step, **record})
    run.close()
    runs = read_runs([run.path])
    assert runs.clock == "step"
    (setting,) = runs.settings
    assert [v.mean for v in layer_curve(setting, "nfa", "fc", "step").values] == [0.5, 3.5]
    assert [v.mean for v in evaluation_curve(setting, "monitored_loss", "step").values] == [2.0, -1.0]


def test_seeds_of_ones_own_loop_are_one_setting(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        for seed in (0, 1):
            run = RunDirectory.create(tmp_path / "mine" / f"lr{lr}-seed{seed}", {"seed": seed, "lr": lr})
            run.append({"step": 0, "layers": {"fc": {"nfa": 0.5}}, "network": {"loss": 2.0}})
            run.close()
    runs = read_runs([tmp_path / "mine"])
    assert {setting.name: [run.seed for run in setting.runs] for setting in runs.settings} == {
        "lr 0.01": [0, 1],
        "lr 0.1": [0, 1],
    }
    facts = dict(overview(runs).facts[0][1])
    assert facts["configuration"] == ["lr 0.01", "lr 0.1"]
    assert facts["seeds"] == ["0, 1"]
    assert setting_names(tmp_path / "mine" / "lr0.1-seed0") == ["lr0.1-seed0"]


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        read_runs([tmp_path])
