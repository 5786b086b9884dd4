from __future__ import annotations

import base64
import statistics
from pathlib import Path

import pytest

from gramscope.report.loaded_runs import read_runs
from gramscope.report.overview import overview
from gramscope.report.page import Content
from gramscope.runs.directory import RunDirectory
from made_up_runs import CLAIMS, MEASURES, accuracy, write_run


def test_summary_gives_the_outcome(content: Content) -> None:
    found = content.overview
    assert "Of 2 settings vcl ends best" in found.headline
    assert "overlaps" not in found.headline
    best = statistics.mean(accuracy(seed, 4, 0.9) for seed in (0, 1))
    assert f"{100 * best:.1f}" in found.headline
    assert [claim["holds"] for claim in found.claims] == [claim["holds"] for claim in CLAIMS]
    assert {card.label: card.value for card in found.cards}["claims that hold"] == "1 of 3"
    facts = dict(found.facts[0][1])
    assert facts["method"] == ["sgd, lr 0.1", "vcl, lr 0.1"]
    assert facts["command"] == ["gramscope train"]
    assert [row[0].text for row in found.results.rows] == ["sgd", "vcl"]
    assert found.results.rows[1][1].value == pytest.approx(best)
    layers = next(table for table in found.tables if table.key == "layers")
    assert len(layers.columns) == 2 + len(MEASURES)


def test_headline_says_if_the_best_is_not_clearly_best(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "all", {})
    for method, speed in (("sgd", 0.50), ("vcl", 0.51)):
        for seed in (0, 1):
            path = tmp_path / "all" / f"{method}-{seed}"
            write_run(path, method=method, seed=seed, speed=speed, snapshots=False)
    headline = overview(read_runs([tmp_path / "all"])).headline
    assert "vcl ends best" in headline
    assert headline.endswith("the ± 2σ range of sgd overlaps with it.")


def test_pictures_of_an_experiment_are_embedded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    run.figure_path("vcl-fig1.png").write_bytes(b"pixels")
    run.figure_path("panel-of-a-report.png").write_bytes(b"pixels")
    address = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    assert overview(read_runs([run.path])).pictures == {"vcl-fig1": address}
