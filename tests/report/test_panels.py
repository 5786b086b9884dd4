from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from gramscope.report.build import collect
from gramscope.report.curves import common_range
from gramscope.report.interactive import log_ticks
from gramscope.report.layers import MOMENTS
from gramscope.report.page import Content
from gramscope.report.panel import HeatMap, Line, LinePlot, Panel
from gramscope.report.reading import read_runs
from gramscope.runs.directory import RunDirectory
from gramscope.runs.layer_snapshots import load_diagonals, load_spectra, save_diagonals, save_spectra
from made_up_runs import CLAIMS, MEASURES, accuracy, append_epoch, value, write_run


@pytest.fixture(scope="module")
def content(group: Path) -> Content:
    return collect(read_runs([group]))


def panel(content: Content, key: str) -> Panel:
    return next(found for found in content.panels if found.key == key)


def test_every_panel_has_words_a_formula_and_data(content: Content) -> None:
    assert [p.key for p in content.panels] == [
        "accuracy", "loss", "ends", "target-linearity", "surrogate", "nfa", "rank", "virtual-covariance", "weights",
        "by-layer", "spectra", "diagonals", "collapse",
    ]  # fmt: skip
    for found in content.panels:
        assert found.sentence.endswith(".")
        assert not found.missing
        assert found.views
        assert len(found.table.rows) > 0
        assert all(len(row) <= len(found.table.columns) for row in found.table.rows)
        for view in found.views:
            assert view.formula or view.label == "my own", (found.key, view.label)
            assert all(len(facet.frames) == max(1, len(view.moments)) for facet in view.facets)


def test_curves_and_bands_hold_the_recorded_numbers(content: Content) -> None:
    accuracies = panel(content, "accuracy")
    plot = accuracies.views[0].facets[0].frames[0]
    assert isinstance(plot, LinePlot)
    assert [line.name for line in plot.lines] == ["sgd", "vcl"]
    values = [accuracy(seed, 2, 0.9) for seed in (0, 1)]
    line = plot.lines[1]
    assert line.y[2] == pytest.approx(statistics.mean(values))
    assert line.low is not None
    assert line.high is not None
    assert line.high[2] - line.low[2] == pytest.approx(4 * statistics.stdev(values))
    row = dict(zip(accuracies.table.columns, accuracies.table.rows[-1], strict=True))
    assert row == {
        "setting": "vcl",
        "seed": 1,
        "step": 40,
        "epoch": 4.0,
        "seconds": 2.0,
        "test_accuracy": accuracy(1, 4, 0.9),
    }
    assert [view.label for view in accuracies.views] == ["over epochs", "over seconds of training"]
    assert [facet.title for facet in panel(content, "loss").views[0].facets] == ["Test", "Training batches"]


def test_maps_hold_layers_by_time(content: Content) -> None:
    surrogate = panel(content, "surrogate").views[0].facets
    assert [facet.title for facet in surrogate] == ["sgd", "vcl"]
    maps = [facet.frames[0] for facet in surrogate]
    assert all(isinstance(found, HeatMap) and found.log for found in maps)
    found = maps[1]
    assert isinstance(found, HeatMap)
    assert (found.x_ticks, found.y_ticks) == (("0", "1", "2", "3", "4"), ("hidden1", "readout"))
    expected = [[statistics.mean(value("surrogate", s, e, d, 0.9) for s in (0, 1)) for e in range(5)] for d in range(2)]
    np.testing.assert_allclose(np.array(found.values, dtype=float), expected)
    assert {(m.low, m.high) for m in maps if isinstance(m, HeatMap)} == {(found.low, found.high)}
    assert "my own" in [view.label for view in panel(content, "weights").views]


def test_layers_are_compared_at_their_last_measurement(content: Content) -> None:
    view = next(v for v in panel(content, "by-layer").views if v.label == "Target linearity")
    plot = view.facets[0].frames[0]
    assert isinstance(plot, LinePlot)
    assert plot.ticks == ("hidden1", "readout")
    for line, speed in zip(plot.lines, (0.3, 0.9), strict=True):
        expected = [statistics.mean(value("target_linearity", s, 4, d, speed) for s in (0, 1)) for d in (0, 1)]
        assert line.y == pytest.approx(expected)


def test_spectra_and_diagonals_follow_the_slider(content: Content, group: Path) -> None:
    run = RunDirectory(group / "vcl" / "seed-0")
    view = panel(content, "spectra").views[0]
    assert view.moments == tuple(f"epoch {e}" for e in range(5))
    frame = view.facets[1].frames[2]
    assert isinstance(frame, LinePlot)
    assert frame.lines[1].y == pytest.approx(load_spectra(run, 20)["readout"].tolist())
    images = panel(content, "diagonals").views[1]
    assert [facet.title.split(",")[0] for facet in images.facets] == [
        "Weight Gram WᵀW", "AGOP", "Virtual covariance Σv",
    ]  # fmt: skip
    stored = load_diagonals(run, 40)["hidden1"]
    rho = np.corrcoef(stored["nfm"].flatten(), stored["agop"].flatten())[0, 1]
    assert images.facets[1].title.endswith(f"ρ = {rho:.2f}")
    picture = images.facets[2].frames[4]
    assert isinstance(picture, HeatMap)
    assert picture.diverging
    np.testing.assert_allclose(np.array(picture.values, dtype=float), stored["vcs"], rtol=1e-4)


def test_collapse_is_shown_at_the_readout(content: Content) -> None:
    facets = panel(content, "collapse").views[0].facets
    plot = facets[0].frames[0]
    assert isinstance(plot, LinePlot)
    assert plot.lines[0].y[-1] == pytest.approx(statistics.mean(value("nc1", s, 4, 1, 0.3) for s in (0, 1)))
    assert len(facets) == 5


def test_summary_says_what_came_out(content: Content) -> None:
    overview = content.overview
    assert "Of 2 settings vcl ends best" in overview.headline
    assert "overlaps" not in overview.headline
    best = statistics.mean(accuracy(seed, 4, 0.9) for seed in (0, 1))
    assert f"{100 * best:.1f}" in overview.headline
    assert [claim["holds"] for claim in overview.claims] == [claim["holds"] for claim in CLAIMS]
    assert {card.label: card.value for card in overview.cards}["claims that hold"] == "1 of 3"
    facts = dict(overview.facts[0][1])
    assert facts["method"] == ["sgd, lr 0.1", "vcl, lr 0.1"]
    assert facts["command"] == ["gramscope train"]
    assert overview.results is not None
    assert [row[0].text for row in overview.results.rows] == ["sgd", "vcl"]
    assert overview.results.rows[1][1].value == pytest.approx(best)
    layers = next(table for table in overview.tables if table.key == "layers")
    assert len(layers.columns) == 2 + len(MEASURES)


def test_the_summary_says_when_the_best_is_not_apart(tmp_path: Path) -> None:
    for method, speed in (("sgd", 0.50), ("vcl", 0.51)):
        for seed in (0, 1):
            write_run(tmp_path / f"{method}-{seed}", method=method, seed=seed, speed=speed, snapshots=False)
    paths = [tmp_path / f"{method}-{seed}" for method in ("sgd", "vcl") for seed in (0, 1)]
    group = RunDirectory.create(tmp_path / "all", {})
    for path in paths:
        path.rename(group.path / path.name)
    headline = collect(read_runs([group.path])).overview.headline
    assert "vcl ends best" in headline
    assert headline.endswith("the ± 2σ range of sgd overlaps with it.")


def test_panels_say_what_was_not_recorded(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "bare", {"method": {"name": "sgd"}})
    found = collect(read_runs([run.path]))
    assert all(p.missing and not p.views for p in found.panels)
    assert "measure-every" in panel(found, "nfa").missing
    run.append({"kind": "evaluation", "step": 0, "epoch": 0.0, "test_loss": 1.0})
    run.close()
    found = collect(read_runs([run.path]))
    assert panel(found, "loss").views
    assert panel(found, "accuracy").missing
    assert "test loss 1 at epoch 0" in found.overview.headline


def test_long_runs_are_thinned_and_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", epochs=1, snapshots=False, finished=False)
    for epoch in range(2, 90):
        append_epoch(run, epoch)
    run.close()
    found = panel(collect(read_runs([run.path])), "nfa")
    heat = found.views[0].facets[0].frames[0]
    assert isinstance(heat, HeatMap)
    assert (len(heat.x_ticks), heat.x_ticks[0], heat.x_ticks[-1]) == (MOMENTS, "0", "89")
    assert f"{MOMENTS} of 90 moments" in found.note
    assert len(found.table.rows) == 180


def test_large_images_and_many_layers_stay_small(tmp_path: Path) -> None:
    layers = [f"block{i}.fc" for i in range(60)]
    run = write_run(tmp_path / "deep", layers=layers, epochs=1, snapshots=False)
    for step in range(0, 300, 10):
        save_spectra(run, step, {layer: torch.linspace(1, 0, 400) for layer in layers})
        save_diagonals(
            run, step, {layers[0]: {"nfm": torch.rand(3, 100, 100, generator=torch.Generator().manual_seed(step))}}
        )
    found = collect(read_runs([run.path]))
    spectra, images = panel(found, "spectra"), panel(found, "diagonals")
    assert len(spectra.views[0].facets) == 8
    assert "8 of 60 layers" in spectra.note
    assert sum(len(row) for row in spectra.table.rows) < 100_000
    picture = images.views[0].facets[0].frames[0]
    assert isinstance(picture, HeatMap)
    assert (len(picture.values), len(picture.values[0])) == (64, 64)


def test_ranges() -> None:
    line = Line("a", 0, [0, 1], [0.2, 0.9], [-0.3, 0.7], [0.7, 1.4])
    low, high = common_range([line], 1.0)
    assert -0.1 < low < 0.2
    assert 0.9 < high < 1.1
    assert common_range([Line("a", 0, [0], [-3.0])])[0] < -3
    assert log_ticks(0.02, 9000) == pytest.approx([0.1, 1, 10, 100, 1000])
    assert all(0.31 <= mark <= 0.62 for mark in log_ticks(0.31, 0.62))
    assert all(math.isfinite(mark) for mark in log_ticks(1e-12, 1e12))
