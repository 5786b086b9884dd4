from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.seed_statistics import FEW_SEEDS, evaluation_curve, layer_curve, spread_sentence, summarise
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import accuracy, value, write_run


def test_mean_and_spread_over_seeds_are_those_of_the_records(group: Path) -> None:
    vcl = read_runs([group]).settings[1]
    found = evaluation_curve(vcl, "test_accuracy", "epoch")
    assert found.times == [0.0, 1.0, 2.0, 3.0, 4.0]
    for epoch, summary in enumerate(found.values):
        values = [accuracy(seed, epoch, 0.9) for seed in (0, 1)]
        assert (summary.mean, summary.deviation) == pytest.approx((statistics.mean(values), statistics.stdev(values)))
        assert (summary.low, summary.high) == pytest.approx((min(values), max(values)))  # two seeds: their range
    layer = layer_curve(vcl, "surrogate", "readout", "step")
    assert layer.times == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert layer.values[3].mean == pytest.approx(statistics.mean(value("surrogate", s, 3, 1, 0.9) for s in (0, 1)))
    assert evaluation_curve(vcl, "test_accuracy", "seconds").times == [0.0, 0.5, 1.0, 1.5, 2.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_summary_is_mean_and_sample_deviation(values: list[float]) -> None:
    found = summarise([None, *values, float("nan"), float("inf")])
    assert found is not None
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-9, rel=1e-9)
    assert found.deviation == pytest.approx(statistics.stdev(values), abs=1e-6, rel=1e-9)
    ends = (found.mean - 2 * found.deviation, found.mean + 2 * found.deviation)
    assert (found.low, found.high) == (ends if len(values) >= FEW_SEEDS else (min(values), max(values)))
    assert summarise([None]) is None


@pytest.mark.parametrize(
    ("seeds", "words"), [(1, "one seed"), (2, "2 seeds: bands and bars show the range"), (5, "± 2σ")]
)
def test_spread_is_named_for_what_it_is(tmp_path: Path, seeds: int, words: str) -> None:
    RunDirectory.create(tmp_path / "all", {})
    for seed in range(seeds):
        write_run(tmp_path / "all" / f"seed-{seed}", seed=seed, epochs=1, layers=(), snapshots=False)
    assert words in spread_sentence(read_runs([tmp_path / "all"]))
