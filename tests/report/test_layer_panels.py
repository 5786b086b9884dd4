from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from gramscope.report.layer_panels import MOMENTS, layer_panels
from gramscope.report.loaded_runs import read_runs
from gramscope.report.panel import Panel
from made_up_runs import append_epoch, value, write_run


def test_maps_hold_layers_by_time(panels: dict[str, Panel]) -> None:
    facets = panels["surrogate"].views[0].facets
    assert [facet.title for facet in facets] == ["sgd", "vcl"]
    maps = [facet.frames[0] for facet in facets]
    assert all(found.log for found in maps)
    assert (maps[1].x_ticks, maps[1].y_ticks) == (("0", "1", "2", "3", "4"), ("hidden1", "readout"))
    expected = [[statistics.mean(value("surrogate", s, e, d, 0.9) for s in (0, 1)) for e in range(5)] for d in range(2)]
    np.testing.assert_allclose(np.array(maps[1].values, dtype=float), expected)
    assert len({(found.low, found.high) for found in maps}) == 1
    assert "my own" in [view.label for view in panels["weights"].views]


def test_layers_are_compared_at_their_last_measurement(panels: dict[str, Panel]) -> None:
    view = next(v for v in panels["by-layer"].views if v.label == "Target linearity")
    plot = view.facets[0].frames[0]
    assert plot.ticks == ("hidden1", "readout")
    for line, speed in zip(plot.lines, (0.3, 0.9), strict=True):
        expected = [statistics.mean(value("target_linearity", s, 4, d, speed) for s in (0, 1)) for d in (0, 1)]
        assert line.y == pytest.approx(expected)


def test_long_runs_are_thinned_and_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", epochs=1, snapshots=False, finished=False)
    for epoch in range(2, 90):
        append_epoch(run, epoch)
    found = next(panel for panel in layer_panels(read_runs([run.path])) if panel.key == "nfa")
    heat = found.views[0].facets[0].frames[0]
    assert (len(heat.x_ticks), heat.x_ticks[0], heat.x_ticks[-1]) == (MOMENTS, "0", "89")
    assert f"{MOMENTS} of 90 moments" in found.note
    assert len(found.table.rows) == 180
