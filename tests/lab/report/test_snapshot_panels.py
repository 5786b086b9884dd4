from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gramscope_lab.report import snapshot_panels
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.panel import Panel
from gramscope_lab.report.snapshot_panels import diagonals_panel, spectra_panel
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layer_snapshots import load_diagonals, load_spectra, save_diagonals, save_spectra
from made_up_runs import write_run


def test_spectra_and_diagonals_follow_the_slider(panels: dict[str, Panel], group: Path) -> None:
    run = RunDirectory(group / "vcl" / "seed-0")
    view = panels["spectra"].views[0]
    assert view.moments == tuple(f"epoch {e}" for e in range(5))
    assert view.facets[1].frames[2].lines[1].y == pytest.approx(load_spectra(run, 20)["readout"].tolist())
    images = panels["diagonals"].views[1]
    titles = [facet.title.split(",")[0] for facet in images.facets]
    assert titles == ["Weight Gram WᵀW", "AGOP", "Virtual covariance Σv"]
    stored = load_diagonals(run, 40)["hidden1"]
    rho = np.corrcoef(stored["nfm"].flatten(), stored["agop"].flatten())[0, 1]
    assert images.facets[1].title.endswith(f"ρ = {rho:.2f}")
    picture = images.facets[2].frames[4]
    assert picture.diverging
    np.testing.assert_allclose(np.array(picture.values, dtype=float), stored["vcs"], rtol=1e-4)


def test_large_images_and_many_layers_stay_small(tmp_path: Path) -> None:
    layers = [f"fc{i}" for i in range(60)]
    run = write_run(tmp_path / "deep", layers=layers, epochs=1, snapshots=False)
    for step in range(0, 300, 10):
        save_spectra(run, step, {layer: torch.linspace(1, 0, 400) for layer in layers})
        image = torch.rand(3, 100, 100, generator=torch.Generator().manual_seed(step))
        save_diagonals(run, step, {layers[0]: {"nfm": image}})
    runs = read_runs([run.path])
    spectra = spectra_panel(runs)
    assert len(spectra.views[0].facets) == 8
    assert "8 of 60 layers" in spectra.note
    assert sum(len(row) for row in spectra.table.rows) < 100_000
    blocks = spectra_panel(read_runs([write_blocks(tmp_path / "blocks")]))
    assert {view.label: len(view.facets) for view in blocks.views} == {"head": 1, "fc": 4}
    assert np.shape(diagonals_panel(runs).views[0].facets[0].frames[0].values) == (64, 64)


def write_blocks(path: Path) -> Path:
    run = write_run(path, layers=(), epochs=1, snapshots=False)
    save_spectra(run, 0, {layer: torch.ones(4) for layer in (*(f"layers.{i}.fc" for i in range(4)), "head")})
    return run.path


def test_damaged_artefacts_are_left_out_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=2)
    (run.path / "artefacts" / "spectra-000000010.safetensors").write_bytes(b"broken")
    save_spectra(run, 20, {"hidden1": torch.tensor([float("nan")])})
    runs = read_runs([run.path])
    assert spectra_panel(runs).views[0].moments == ("epoch 0",)
    assert any("spectra-000000010" in problem for problem in runs.problems)


def test_artefacts_of_any_type_and_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1, snapshots=False)
    for step, dtype in enumerate((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.bfloat16)):
        save_spectra(run, step, {"hidden1": torch.ones(3).to(dtype)})
        save_diagonals(run, step, {"hidden1": {"nfm": torch.ones(2, 2).to(dtype)}})
    run.save_artefact("spectra-²", {"hidden1": torch.ones(3)})
    runs = read_runs([run.path])
    assert len(spectra_panel(runs).views[0].moments) == len(diagonals_panel(runs).views[0].moments) == 5


def test_tensors_too_large_to_draw_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_panels, "MOST", 10)
    run = write_run(tmp_path / "x", epochs=1, snapshots=False)
    save_spectra(run, 0, {"hidden1": torch.ones(11), "hidden2": torch.ones(10)})
    assert [facet.title for facet in spectra_panel(read_runs([run.path])).views[0].facets] == ["hidden2"]
