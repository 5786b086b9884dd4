from __future__ import annotations

import base64
import statistics
from pathlib import Path

import pytest

from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.overview import overview
from gramscope_lab.report.page import Content
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import CLAIMS, MEASURES, accuracy, write_run


def test_summary_gives_the_outcome(content: Content) -> None:
    found = content.overview
    best = statistics.mean(accuracy(seed, 4, 0.9) for seed in (0, 1))
    assert [claim["holds"] for claim in found.claims] == [claim["holds"] for claim in CLAIMS]
    assert {card.label: card.value for card in found.cards}["claims that hold"] == "1 of 3"
    facts = dict(found.facts[0][1])
    assert facts["method"] == ["sgd, lr 0.1", "vcl, lr 0.1"]
    assert facts["command"] == ["gramscope train"]
    assert [row[0].text for row in found.results.rows] == ["sgd", "vcl"]
    assert found.results.rows[1][1].value == pytest.approx(best)
    layers = next(table for table in found.tables if table.key == "layers")
    assert len(layers.columns) == 2 + len(MEASURES)


def test_pictures_of_an_experiment_are_embedded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    run.figure_path("vcl-fig1.png").write_bytes(b"pixels")
    run.figure_path("panel-of-a-report.png").write_bytes(b"pixels")
    address = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    assert overview(read_runs([run.path])).pictures == {"vcl-fig1": address}


def test_no_picture_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    (tmp_path / "secret.png").write_bytes(b"secret")
    run.figure_path("x.png").symlink_to(tmp_path / "secret.png")
    run.figure_path("loop.png").symlink_to("loop.png")
    assert overview(read_runs([run.path])).pictures == {}


def test_switches_of_layers_are_not_listed(tmp_path: Path) -> None:
    model = {"name": "mlp", "hidden": [6, 6], "bias": [False, True, True], "norm": True}
    run = RunDirectory.create(tmp_path / "x", {"model": model, "method": {"name": "sgd"}})
    assert dict(overview(read_runs([run.path])).facts[0][1])["model"] == ["mlp, hidden 6×6, norm"]


@pytest.mark.parametrize(("epochs", "columns"), [((2, 2), []), ((2, 3), ["epoch", "seeds"])])
def test_results_have_a_column_for_the_end_only_where_settings_differ(
    tmp_path: Path, epochs: tuple[int, int], columns: list[str]
) -> None:
    paths = [write_run(tmp_path / str(i), method=f"m{i}", epochs=n).path for i, n in enumerate(epochs)]
    table = overview(read_runs(paths)).results
    assert table is not None
    assert [name for name in table.columns if name in ("epoch", "seeds")] == columns
    assert ("Every setting ends at epoch 2, with 1 seed." in table.note) is not bool(columns)
    assert "\u00a0" in table.rows[0][1].text  # lines break before a range alone
