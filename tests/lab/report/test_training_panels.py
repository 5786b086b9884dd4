from __future__ import annotations

import statistics

import pytest

from gramscope_lab.report.panel import Line, Panel
from gramscope_lab.report.training_panels import common_range
from made_up_runs import accuracy


def test_curves_and_bands_hold_the_recorded_numbers(panels: dict[str, Panel]) -> None:
    accuracies = panels["accuracy"]
    lines = accuracies.views[0].facets[0].frames[0].lines
    assert [line.name for line in lines] == ["sgd", "vcl"]
    values = [accuracy(seed, 2, 0.9) for seed in (0, 1)]
    assert lines[1].y[2] == pytest.approx(statistics.mean(values))
    assert (lines[1].low[2], lines[1].high[2]) == pytest.approx((min(values), max(values)))
    row = dict(zip(accuracies.table.columns, accuracies.table.rows[-1], strict=True))
    time = {"step": 40, "epoch": 4.0, "seconds": 2.0}
    assert row == {"setting": "vcl", "seed": 1, **time, "test_accuracy": accuracy(1, 4, 0.9)}
    assert [view.label for view in accuracies.views] == ["over epochs", "over seconds of training"]
    assert [facet.title for facet in panels["loss"].views[0].facets] == ["Test", "Training batches"]
    assert (accuracies.log_switch, panels["loss"].log_switch) == (False, True)


def test_last_values_stand_side_by_side(panels: dict[str, Panel]) -> None:
    view = panels["ends"].views[0]
    assert (view.label, view.facets[0].frames[0].ticks) == ("Test accuracy", ("sgd", "vcl"))
    rows = [row for row in panels["ends"].table.rows if row[:2] == ("vcl", "test_accuracy")]
    assert [row[2] for row in rows] == [pytest.approx(statistics.mean(accuracy(seed, 4, 0.9) for seed in (0, 1)))]


def test_common_range() -> None:
    low, high = common_range([Line("a", 0, [0, 1], [0.2, 0.9], [-0.3, 0.7], [0.7, 1.4])], 1.0)
    assert -0.1 < low < 0.2
    assert 0.9 < high < 1.1
    assert common_range([Line("a", 0, [0], [-3.0])])[0] < -3
