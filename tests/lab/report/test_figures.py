"""Panels hold the recorded numbers, in the form that suits the net, and plotly accepts every one of them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from gramscope_lab.report import snapshot_figures
from gramscope_lab.report.figures import Panel, View, figure
from gramscope_lab.report.layer_figures import LINES, MOMENTS, block_layout, layer_label, layer_panels
from gramscope_lab.report.read import read_runs
from gramscope_lab.report.snapshot_figures import snapshot_panels
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layer_snapshots import load_diagonals, load_spectra, save_diagonals, save_spectra
from made_up_runs import accuracy, append_epoch, value, write_run

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj")
LLAMA = [f"model.layers.{block}.{kind}" for block in range(11) for kind in KINDS] + ["lm_head"]
BLOCKS = [f"blocks.{i}.fc" for i in range(8)]


def measured(path: Path, layers: list[str], epochs: int = 2) -> dict[str, Panel]:
    run = write_run(path, layers=layers, epochs=epochs, snapshots=False)
    return {panel.key: panel for panel in layer_panels(read_runs([run.path]))}


def view_of(panel: Panel, label: str) -> View:
    return next(view for view in panel.views if view.label == label)


def lines(facet: Any) -> list[Any]:
    """The lines of a facet, without bands and nulls."""
    return [trace for trace in facet if trace["showlegend"]]


def test_plotly_accepts_every_panel_and_the_menu_shows_one_view_at_a_time(panels: dict[str, Panel]) -> None:
    assert list(panels) == [
        "by-layer", "layers-linearity", "layers-alignment", "layers-spectra", "layers-collapse", "layers-virtual",
        "layers-weights", "layers-other", "accuracy", "loss", "spectra", "diagonals",
    ]  # fmt: skip
    for key, panel in panels.items():
        drawn = figure(panel)
        go.Figure(drawn["data"], drawn["layout"], drawn["frames"])  # raises on what plotly does not know
        assert sum(trace["visible"] for trace in drawn["data"]) == sum(map(len, panel.views[0].facets)), key
        if len(panel.views) > 1:
            masks = [button["args"][0]["visible"] for button in drawn["layout"]["updatemenus"][0]["buttons"]]
            assert [sum(column) for column in zip(*masks, strict=True)] == [1] * len(drawn["data"]), key
        assert len(drawn["frames"]) == (len(panel.moments) if len(panel.moments) > 1 else 0)


# -- layers -----------------------------------------------------------------------------------------------------------
def test_a_few_layers_are_lines_over_training(panels: dict[str, Panel]) -> None:
    view = view_of(panels["layers-linearity"], "surrogate")
    assert (list(view.titles), view.y["type"]) == (["hidden1", "readout"], "log")
    found = lines(view.facets[1])
    assert [line["name"] for line in found] == ["sgd", "vcl"]
    expected = [statistics.mean(value("surrogate", s, e, 1, 0.9) for s in (0, 1)) for e in range(5)]
    assert found[1]["y"] == pytest.approx(expected, rel=1e-4)
    assert [view.label for view in panels["layers-other"].views] == ["my own"]


def test_deep_nets_are_shown_by_block_and_no_layer_is_left_out(tmp_path: Path) -> None:
    found = measured(tmp_path / "x", LLAMA)
    panel = found["layers-alignment"]
    assert list(panel.moments) == ["epoch 0", "epoch 1", "epoch 2"]
    heat = panel.views[0].facets[0][0]
    assert (heat["x"], heat["y"]) == ([*map(str, range(11)), "out"], [*KINDS])
    last = heat["frames"][-1]["z"]
    place = LLAMA.index("model.layers.10.self_attn.k_proj")
    assert last[1][10] == pytest.approx(value("nfa", 0, 2, place, 0.5), rel=1e-4)
    assert [row[11] for row in last] == pytest.approx([value("nfa", 0, 2, len(LLAMA) - 1, 0.5)] * 5, rel=1e-4)
    assert heat["customdata"][1][10:] == ["10 self_attn.k_proj", "lm_head"]
    assert "by-layer" not in found  # the maps show the end first


def test_layers_are_compared_at_their_last_measurement(panels: dict[str, Panel]) -> None:
    view = panels["by-layer"].views[0]
    assert (view.label, view.x["categoryarray"]) == ("target linearity", ["hidden1", "readout"])
    for line, speed in zip(lines(view.facets[0]), (0.3, 0.9), strict=True):
        expected = [statistics.mean(value("target_linearity", s, 4, d, speed) for s in (0, 1)) for d in (0, 1)]
        assert line["y"] == pytest.approx(expected, rel=1e-4)


def test_long_runs_and_many_layers_are_thinned_and_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", layers=BLOCKS, epochs=1, snapshots=False, finished=False)
    for epoch in range(2, 90):
        append_epoch(run, epoch, layers=BLOCKS)
    panel = next(panel for panel in layer_panels(read_runs([run.path])) if panel.key == "layers-alignment")
    assert (len(panel.moments), panel.moments[0], panel.moments[-1]) == (MOMENTS, "epoch 0", "epoch 89")
    assert f"{MOMENTS} of 90 moments" in panel.note
    many = measured(tmp_path / "many", [f"hidden{i}" for i in range(LINES + 6)])["layers-alignment"]
    assert (len(many.views[0].facets), many.note) == (LINES, f"{LINES} of {LINES + 6} layers are drawn.")


@pytest.mark.parametrize(
    ("values", "ends"), [((0.52, 1.0003), (0.5, 1.0)), ((0.9991, 1.0), (0.9, 1.0)), ((-0.002, 0.31), (0.0, 0.4))]
)
def test_colour_scales_end_at_tenths_and_rounding_noise_does_not_widen_them(
    tmp_path: Path, values: tuple[float, float], ends: tuple[float, float]
) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    run.append({"step": 0, "layers": {name: {"nfa": values[i % 2]} for i, name in enumerate(BLOCKS)}})
    panel = next(panel for panel in layer_panels(read_runs([run.path])) if panel.key == "layers-alignment")
    assert (panel.views[0].colours["cmin"], panel.views[0].colours["cmax"]) == ends


def test_nulls_are_drawn_beside_what_they_belong_to(tmp_path: Path) -> None:
    row = {"nfa": 0.5, "nfa_null": 0.25, "my_own": 0.5, "my_own_null": 0.125}
    for name, layers in (("few", BLOCKS[:2]), ("many", BLOCKS)):
        run = RunDirectory.create(tmp_path / name, {})
        run.append({"step": 0, "layers": dict.fromkeys(layers, row)})
        found = {panel.key: panel for panel in layer_panels(read_runs([run.path]))}
        (view,) = found["layers-alignment"].views
        if name == "few":
            assert [view.label for view in found["by-layer"].views] == ["nfa", "my own"]
            measure, null = view.facets[0]
            assert (measure["y"], null["y"], null["line"]["dash"]) == ([0.5], [0.25], "dot")
        else:
            assert view.facets[0][0]["text"][0] == ["0.5, null 0.25"] * len(BLOCKS)


def test_encoder_and_decoder_have_rows_of_their_own() -> None:
    layers = ["shared", *(f"{part}.block.{i}.layer.0.q" for part in ("encoder", "decoder") for i in range(3))]
    layout = block_layout(layers)
    assert layout is not None
    assert (layout.kinds, layout.columns) == (("encoder layer.0.q", "decoder layer.0.q"), ["in", "0", "1", "2"])
    assert layout.rows[1] == ["shared", *layers[4:]]
    assert len({layer_label(layer) for layer in layers}) == 7


def test_every_layer_has_a_place_and_few_blocks_have_none() -> None:
    long = "block_sparse_moe.experts.{}.an_expert_with_a_very_long_name.w1"
    layers = [f"model.layers.{i}.{long.format(j)}" for i in range(4) for j in range(12)] + ["lm_head", "value_head"]
    layout = block_layout(layers)
    assert layout is not None
    assert {layer for row in layout.rows for layer in row if layer} == set(layers)
    assert len(set(layout.columns)) == len(layout.columns)
    for plain in (["layers.0.fc", "layers.1.fc", "readout"], ["features.0", "features.3", "classifier"], []):
        assert block_layout(plain) is None


# -- training ---------------------------------------------------------------------------------------------------------
def test_curves_and_bands_hold_the_recorded_numbers(panels: dict[str, Panel]) -> None:
    panel = panels["accuracy"]
    assert [view.label for view in panel.views] == ["over epoch", "over seconds"]
    band, line = panel.views[0].facets[0][2:]
    values = [accuracy(seed, 2, 0.9) for seed in (0, 1)]
    assert (line["name"], line["x"][2]) == ("vcl", 2.0)
    assert line["y"][2] == pytest.approx(statistics.mean(values), rel=1e-4)
    assert (band["y"][2], band["y"][-3]) == pytest.approx((max(values), min(values)), rel=1e-4)
    assert list(panels["loss"].views[0].titles) == ["Test", "Training batches"]
    assert [view.y["type"] for view in panels["loss"].views] == ["linear", "log", "linear"]


# -- spectra and diagonals --------------------------------------------------------------------------------------------
def test_spectra_and_diagonals_follow_the_slider(panels: dict[str, Panel], group: Path) -> None:
    run = RunDirectory(group / "vcl" / "seed-0")
    panel = panels["spectra"]
    assert list(panel.moments) == [f"epoch {e}" for e in range(5)]
    vcl = panel.views[0].facets[1][1]
    assert vcl["frames"][2]["y"] == pytest.approx(load_spectra(run, 20)["readout"].tolist(), rel=1e-4)
    images = panels["diagonals"].views[0]
    stored = load_diagonals(run, 40)["hidden1"]
    rho = np.corrcoef(stored["nfm"].flatten(), stored["agop"].flatten())[0, 1]
    assert list(images.titles[3:5]) == ["vcl\nWᵀW", f"vcl\nAGOP, ρ = {rho:.2f}"]
    picture = images.facets[5][0]
    assert picture["zmin"] == -picture["zmax"]
    np.testing.assert_allclose(np.array(picture["frames"][4]["z"], dtype=float), stored["vcs"], rtol=1e-4)


def test_large_images_and_many_layers_stay_small(tmp_path: Path) -> None:
    layers = [f"fc{i}" for i in range(60)]
    run = write_run(tmp_path / "deep", layers=layers, epochs=1, snapshots=False)
    for step in range(0, 300, 10):
        save_spectra(run, step, {layer: torch.linspace(1, 0.1, 400) for layer in layers})
        image = torch.rand(3, 100, 100, generator=torch.Generator().manual_seed(step))
        save_diagonals(run, step, {layers[0]: {"nfm": image}})
    spectra, diagonals = snapshot_panels(read_runs([run.path]))
    assert len(spectra.views[0].facets) == 8
    assert "8 of 60 layers" in spectra.note
    numbers = sum(len(frame["y"]) for facet in spectra.views[0].facets for trace in facet for frame in trace["frames"])
    assert numbers < 60_000
    assert np.shape(diagonals.views[0].facets[0][0]["z"]) == (64, 64)


def test_spectra_of_a_kind_stand_in_one_plot(tmp_path: Path) -> None:
    run = write_run(tmp_path / "blocks", layers=(), epochs=1, snapshots=False)
    save_spectra(run, 0, {layer: torch.ones(4) for layer in (*(f"layers.{i}.fc" for i in range(4)), "head")})
    (spectra,) = snapshot_panels(read_runs([run.path]))
    assert {view.label: len(view.facets[0]) for view in spectra.views} == {"fc": 4, "head": 1}


def test_damaged_artefacts_are_left_out_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=2)
    (run.path / "artefacts" / "spectra-000000010.safetensors").write_bytes(b"broken")
    save_spectra(run, 20, {"hidden1": torch.tensor([float("nan")])})
    runs = read_runs([run.path])
    assert list(snapshot_panels(runs)[0].moments) == ["epoch 0"]
    assert any("spectra-000000010" in problem for problem in runs.problems)


def test_artefacts_of_any_type_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_figures, "MOST", 10)
    run = write_run(tmp_path / "x", epochs=1, snapshots=False)
    for step, dtype in enumerate((torch.float8_e4m3fn, torch.int8, torch.bool, torch.bfloat16)):
        save_spectra(run, step, {"hidden1": torch.ones(3).to(dtype), "large": torch.ones(11)})
        save_diagonals(run, step, {"hidden1": {"nfm": torch.ones(2, 2).to(dtype)}})
    spectra, diagonals = snapshot_panels(read_runs([run.path]))
    assert len(spectra.moments) == len(diagonals.moments) == 4
    assert list(spectra.views[0].titles) == ["hidden1"]
