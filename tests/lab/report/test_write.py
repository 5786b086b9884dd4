from __future__ import annotations

from pathlib import Path

import pytest

import gramscope_lab.report.page as page_module
from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.report import write_report
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.panel import Panel
from gramscope_lab.report.write import report_content
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import write_run


def test_every_panel_has_text_a_formula_and_data(panels: dict[str, Panel]) -> None:
    assert list(panels) == [
        "accuracy", "loss", "ends", "target-linearity", "surrogate", "nfa", "rank", "virtual-covariance", "weights",
        "by-layer", "spectra", "diagonals", "collapse",
    ]  # fmt: skip
    for key, found in panels.items():
        assert found.sentence.endswith(".")
        assert not found.missing
        assert found.views
        assert len(found.table.rows) > 0
        assert all(len(row) <= len(found.table.columns) for row in found.table.rows)
        for view in found.views:
            assert view.formula or view.label == "my own", (key, view.label)
            assert all(len(facet.frames) == max(1, len(view.moments)) for facet in view.facets)


def test_panels_say_what_was_not_recorded(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "bare", {"method": {"name": "sgd"}})
    empty = {panel.key: panel for panel in report_content(read_runs([run.path])).panels}
    assert all(panel.missing and not panel.views for panel in empty.values())
    assert "measure-every" in empty["nfa"].missing
    run.append({"kind": "evaluation", "step": 0, "epoch": 0.0, "test_loss": 1.0})
    run.close()
    found = report_content(read_runs([run.path]))
    assert {panel.key for panel in found.panels if panel.views} == {"loss"}  # one run has no last values to compare
    assert "test loss 1.00 at epoch 0" in found.overview.headline


def test_users_of_their_own_loop_are_told_of_the_monitor(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine", {})
    run.append({"step": 0, "layers": {"fc": {"weight_norm": 1.0}}, "network": {}})
    run.close()
    missing = {panel.key: panel.missing for panel in report_content(read_runs([run.path])).panels if panel.missing}
    assert 'gs.Monitor(model, data, loss, measures=["nfa", ' in missing["nfa"]
    assert '"nc1"' in missing["collapse"]
    assert "save_spectra" in missing["spectra"]
    assert "save_diagonals" in missing["diagonals"]
    assert "gs.Monitor records it where" in missing["loss"]
    assert not any("gramscope train" in text for text in missing.values())


def test_files_are_written_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "one", epochs=1, layers=(), snapshots=False)
    run.figure_path("panel-old.png").write_text("")
    report = write_report([run.path])
    assert report.page == tmp_path / "one" / "figures" / "report.html"
    names = {f"panel-{key}.{end}" for key in ("accuracy", "loss") for end in ("png", "pdf")}
    assert {path.name for path in report.page.parent.iterdir()} == {"report.html", *names}
    assert {path.name for path in report.figures} == names
    for path in report.figures:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "two", epochs=1, seed=1)
    assert write_report(["one", "two"], figures=False).page == Path("report/report.html")
    assert RunDirectory.open("one").status() == "finished"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the report"):
        write_report(["one"], tmp_path / "file")
    with pytest.raises(InputError, match="at least one"):
        write_report([])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, group: Path) -> None:
    real = page_module.find_spec
    monkeypatch.setattr(page_module, "find_spec", lambda name: None if name == "plotly" else real(name))
    with pytest.raises(MissingExtraError, match=r"needs plotly.*gramscope\[report\]"):
        write_report([group])


def test_pictures_of_others_beside_a_new_report_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", epochs=1, layers=(), snapshots=False)
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("panel-discussion.png", "panel-notes.txt"):
        (mine / name).write_text("precious")
    write_report([run.path], mine)
    assert (mine / "panel-discussion.png").read_text() == (mine / "panel-notes.txt").read_text() == "precious"
