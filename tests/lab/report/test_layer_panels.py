from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from gramscope_lab.report.layer_panels import layer_panels
from gramscope_lab.report.layer_views import COLUMNS
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.panel import HeatMap, Panel
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import append_epoch, value, write_run

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
LLAMA = [f"model.layers.{block}.{kind}" for block in range(11) for kind in KINDS] + ["lm_head"]
PLAIN = [f"hidden{i}" for i in range(8)]


def measured(path: Path, layers: list[str], epochs: int = 2) -> dict[str, Panel]:
    run = write_run(path, layers=layers, epochs=epochs, snapshots=False)
    return {panel.key: panel for panel in layer_panels(read_runs([run.path]))}


def test_a_few_layers_are_lines_over_training(panels: dict[str, Panel]) -> None:
    facets = panels["surrogate"].views[0].facets
    assert [facet.title for facet in facets] == ["hidden1", "readout"]
    plot = facets[1].frames[0]
    assert (plot.log_y, [line.name for line in plot.lines]) == (True, ["sgd", "vcl"])
    expected = [statistics.mean(value("surrogate", s, e, 1, 0.9) for s in (0, 1)) for e in range(5)]
    assert plot.lines[1].y == pytest.approx(expected)
    assert "my own" in [view.label for view in panels["weights"].views]


def test_more_layers_are_maps_over_training(tmp_path: Path) -> None:
    (view,) = measured(tmp_path / "x", PLAIN)["nfa"].views
    (heat,) = view.facets[0].frames
    assert (heat.x_ticks, heat.y_ticks) == (("0", "1", "2"), tuple(PLAIN))
    expected = [[value("nfa", 0, e, d, 0.5) for e in range(3)] for d in range(8)]
    np.testing.assert_allclose(np.array(heat.values, dtype=float), expected)


def test_deep_nets_are_shown_by_block_and_no_layer_is_left_out(tmp_path: Path) -> None:
    found = measured(tmp_path / "x", LLAMA)
    by_block, every = found["nfa"].views
    assert by_block.moments == ("epoch 0", "epoch 1", "epoch 2")
    last = by_block.facets[0].frames[-1]
    assert (last.x_ticks, last.y_ticks) == ((*map(str, range(11)), "out"), (*KINDS, "lm_head"))
    assert last.values[1][10] == pytest.approx(value("nfa", 0, 2, LLAMA.index("model.layers.10.self_attn.k_proj"), 0.5))
    assert sum(cell is not None for row in last.values for cell in row) == len(LLAMA)
    assert every.label == "NFA, uncentred: every layer over training"
    labels = every.facets[0].frames[0].y_ticks
    assert (len(labels), len(set(labels)), labels[51]) == (56, 56, "10 self_attn.k_proj")
    depth = next(view for view in found["by-layer"].views if view.label == "NFA, uncentred").facets[0].frames[0]
    assert ([line.name for line in depth.lines], depth.legend) == ([*KINDS, "lm_head"], True)
    assert depth.lines[0].x == list(range(11))


def test_layers_are_compared_at_their_last_measurement(panels: dict[str, Panel]) -> None:
    view = next(v for v in panels["by-layer"].views if v.label == "Target linearity")
    plot = view.facets[0].frames[0]
    assert plot.ticks == ("hidden1", "readout")
    for line, speed in zip(plot.lines, (0.3, 0.9), strict=True):
        expected = [statistics.mean(value("target_linearity", s, 4, d, speed) for s in (0, 1)) for d in (0, 1)]
        assert line.y == pytest.approx(expected)


def test_long_runs_are_thinned_and_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", layers=PLAIN, epochs=1, snapshots=False, finished=False)
    for epoch in range(2, 90):
        append_epoch(run, epoch, layers=PLAIN)
    found = next(panel for panel in layer_panels(read_runs([run.path])) if panel.key == "nfa")
    heat = found.views[0].facets[0].frames[0]
    assert (len(heat.x_ticks), heat.x_ticks[0], heat.x_ticks[-1]) == (COLUMNS, "0", "89")
    assert f"{COLUMNS} of 90 moments" in found.note
    assert len(found.table.rows) == 8 * 90


def test_the_sentence_describes_the_measure_that_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", layers=(), epochs=1, snapshots=False, finished=False)
    run.append({"kind": "measurement", "step": 10, "layer": "fc", "vcs_gram_cosine": 0.5})
    run.close()
    panel = next(panel for panel in layer_panels(read_runs([run.path])) if panel.key == "virtual-covariance")
    (view,) = panel.views
    assert view.formula == "ρ(v, WᵀW)"
    assert "along the weight Gram WᵀW" in view.sentence
    assert "true change" not in view.sentence


@pytest.mark.parametrize(
    ("values", "ends"), [((0.52, 1.0003), (0.5, 1.0)), ((0.9991, 1.0), (0.9, 1.0)), ((-0.002, 0.31), (0.0, 0.4))]
)
def test_colour_scales_end_at_tenths_and_rounding_noise_does_not_widen_them(
    tmp_path: Path, values: tuple[float, float], ends: tuple[float, float]
) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    run.append({"step": 0, "layers": {name: {"nfa": values[i % 2]} for i, name in enumerate(PLAIN)}})
    run.close()
    heat = next(p for p in layer_panels(read_runs([run.path])) if p.key == "nfa").views[0].facets[0].frames[0]
    assert isinstance(heat, HeatMap)
    assert (heat.low, heat.high) == ends


def test_null_values_stand_beside_what_they_belong_to_and_every_measure_is_compared(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    row = dict.fromkeys(("nfa", "nfa_null", "vcs_cosine", "vcs_null", "nc1", "my_own"), 0.5)
    run.append({"step": 0, "layers": {"0": row, "2": row}})
    run.close()
    found = {panel.key: [view.label for view in panel.views] for panel in layer_panels(read_runs([run.path]))}
    assert found["nfa"] == ["NFA, uncentred", "NFA, null"]
    assert found["virtual-covariance"] == ["Virtual against true shift", "Virtual against true shift, null"]
    assert found["weights"] == ["my own"]
    assert found["by-layer"] == [
        *found["nfa"], *found["virtual-covariance"], "NC1, scatter within classes", "my own",
    ]  # fmt: skip
