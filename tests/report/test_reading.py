from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope.errors import InputError
from gramscope.measures.columns import MEASURES as COMPUTED
from gramscope.report.over_seeds import evaluation_curve, layer_curve, summarise
from gramscope.report.reading import read_runs
from gramscope.report.words import GROUPS, MEASURES
from gramscope.runs.directory import RunDirectory
from made_up_runs import accuracy, value, write_run


def test_runs_that_differ_by_the_seed_are_one_setting(group: Path) -> None:
    runs = read_runs([group])
    assert [(setting.name, len(setting.runs)) for setting in runs.settings] == [("sgd", 2), ("vcl", 2)]
    assert [run.seed for run in runs.all] == [0, 1, 0, 1]
    assert [run.name for run in runs.others] == ["both/claims"]
    assert (runs.clock, runs.status, len(runs.records("claim"))) == ("epoch", "finished", 3)


def test_settings_are_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", lr=0.1)
    write_run(tmp_path / "b", lr=0.01)
    write_run(tmp_path / "c", method="vcl")
    names = [setting.name for setting in read_runs([tmp_path / name for name in "abc"]).settings]
    assert names == ["sgd, lr 0.1", "sgd, lr 0.01", "vcl"]
    write_run(tmp_path / "d", lr=0.1)
    names = [setting.name for setting in read_runs([tmp_path / "a", tmp_path / "d"]).settings]
    assert names == ["sgd (a)", "sgd (d)"]
    assert [setting.name for setting in read_runs([tmp_path / "a", tmp_path / "a"]).settings] == [
        "sgd (a) #1",
        "sgd (a) #2",
    ]


def test_mean_and_spread_over_seeds_are_those_of_the_records(group: Path) -> None:
    vcl = read_runs([group]).settings[1]
    found = evaluation_curve(vcl, "test_accuracy", "epoch")
    assert found.moments == [0.0, 1.0, 2.0, 3.0, 4.0]
    for epoch, summary in enumerate(found.values):
        values = [accuracy(seed, epoch, 0.9) for seed in (0, 1)]
        assert summary.mean == pytest.approx(statistics.mean(values))
        assert summary.deviation == pytest.approx(statistics.stdev(values))
        assert (summary.low, summary.high) == pytest.approx(
            (
                statistics.mean(values) - 2 * statistics.stdev(values),
                statistics.mean(values) + 2 * statistics.stdev(values),
            )
        )
    layer = layer_curve(vcl, "surrogate", "readout", "step")
    assert layer.moments == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert layer.values[3].mean == pytest.approx(statistics.mean(value("surrogate", s, 3, 1, 0.9) for s in (0, 1)))
    assert evaluation_curve(vcl, "test_accuracy", "seconds").moments == [0.0, 0.5, 1.0, 1.5, 2.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_summary_is_mean_and_sample_deviation(values: list[float]) -> None:
    found = summarise([None, *values, float("nan"), float("inf")])
    assert found is not None
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-9, rel=1e-9)
    assert found.deviation == pytest.approx(statistics.stdev(values), abs=1e-6, rel=1e-9)
    assert summarise([None]) is None


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
    assert [v.mean for v in evaluation_curve(setting, "held_loss", "step").values] == [2.0, -1.0]


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        read_runs([tmp_path])


def test_formulas_are_those_of_the_measures() -> None:
    for name, measure in COMPUTED.items():
        assert MEASURES[name].formula == measure.formula, name
    assert {name for shown in GROUPS for name in shown.measures} <= set(MEASURES)
