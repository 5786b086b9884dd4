"""The summary says in words what was seen, and lists what was run."""

from __future__ import annotations

import base64
import statistics
from pathlib import Path

import pytest

from gramscope_lab.report.read import Runs, read_runs
from gramscope_lab.report.summary import claims_table, facts, pictures, results_table, sentences, state, tables
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import CLAIMS, MEASURES, accuracy, write_run


def percent(*values: float) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


def write_loop(path: Path, series: dict[int, float]) -> RunDirectory:
    """Accuracies of a training loop of one's own."""
    run = RunDirectory.create(path, {})
    run.append(*({"step": s, "layers": {"fc": {"nfa": 0.5}}, "network": {"accuracy": v}} for s, v in series.items()))
    return run


def test_the_story_of_two_methods(runs: Runs) -> None:
    def mean(epoch: int, speed: float) -> str:
        return percent(*(accuracy(seed, epoch, speed) for seed in (0, 1)))

    end = f"At the end (epoch 4, 2 seeds) vcl has test accuracy {mean(4, 0.9)}, sgd {mean(4, 0.3)}."
    assert sentences(runs)[0] == end
    assert state(runs) == "finished · 4 runs of 2 settings · epoch 4 · 1 of 3 claims hold"


def test_the_story_of_the_layers(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine", {})
    for step, linear in ((0, 0.69), (9, 0.9)):
        row = {"target_linearity": linear, "target_linearity_null": 0.12, "nfa": linear, "nfa_null": 0.65}
        run.append({"step": step, "layers": {"a": {**row, "target_linearity": 0.4}, "b": {**row, "nfa": 0.5}}})
    assert sentences(read_runs([run.path]))[-3:] == [
        "At the inputs of b the targets became easier to read by a linear map: target linearity went from 0.69 to 0.90 "
        "with mine; targets that are noise would give 0.12.",
        "How far weights point where the output is sensitive, above chance, ended highest in a with mine (0.04 to 0.25).",
        "These numbers describe layers, they do not grade nets.",
    ]


def test_nobody_is_called_better_within_the_spread(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "all", {})
    for method, speed in (("sgd", 0.50), ("vcl", 0.51)):
        for seed in (0, 1):
            write_run(tmp_path / "all" / f"{method}-{seed}", method=method, seed=seed, speed=speed, snapshots=False)
    end, overlap, *_ = sentences(read_runs([tmp_path / "all"]))
    assert end.startswith("At the end (epoch 4, 2 seeds) vcl has")
    assert overlap == "The spread over seeds of sgd overlaps with that of vcl."


def test_one_run_many_runs_and_claims(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{i}", lr=0.1 * i, epochs=2, speed=0.1 * i, snapshots=False).path for i in range(1, 7)
    ]
    end = percent(accuracy(0, 2, 0.1))
    assert sentences(read_runs(paths[:1]))[0] == f"At the end (epoch 2, 1 seed) sgd has test accuracy {end}."
    assert "and 2 more" in sentences(read_runs(paths))[0]
    run = RunDirectory.create(tmp_path / "claims", {"part": "claims"})
    run.append(*({"kind": "claim", **claim} for claim in CLAIMS))
    assert sentences(read_runs([run.path])) == ["Of 3 claims 1 holds."]


def test_a_training_loop_of_the_users_own_is_named(tmp_path: Path) -> None:
    runs = read_runs([write_loop(tmp_path / "mine", {0: 0.1, 3: 0.7}).path])
    told = "At the end (step 3, 1 seed) mine has monitored sample accuracy 70.0 %."
    assert sentences(runs) == [told]
    assert dict(facts(runs, runs.roots[0]))["training loop"] == ["your own, watched by gs.Monitor"]


def test_facts_and_tables(runs: Runs) -> None:
    found = dict(facts(runs, runs.roots[0]))
    assert (found["method"], found["method.lr"]) == (["sgd", "vcl"], ["0.1"])
    assert (found["data"], found["epochs"], found["seeds"]) == (["digits"], ["4"], ["0, 1"])
    assert found["command"] == ["/somewhere/bin/gramscope train"]
    results, claims = results_table(runs), claims_table(runs)
    assert results is not None
    assert claims is not None
    assert [row[0][0] for row in results.rows] == ["sgd", "vcl"]
    assert results.rows[1][1][1] == pytest.approx(statistics.mean(accuracy(seed, 4, 0.9) for seed in (0, 1)))
    assert [row[3][0] for row in claims.rows] == ["✓ holds", "✗ does not", "? open"]
    every_run, layers = tables(runs)
    assert (len(every_run.rows), len(layers.columns)) == (4, 2 + len(MEASURES))


def test_pictures_of_an_experiment_are_embedded_and_links_are_not_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x", epochs=1)
    run.figure_path("vcl-fig1.png").write_bytes(b"pixels")
    (tmp_path / "secret.png").write_bytes(b"secret")
    run.figure_path("x.png").symlink_to(tmp_path / "secret.png")
    run.figure_path("loop.png").symlink_to("loop.png")
    address = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    assert pictures(read_runs([run.path])) == {"vcl-fig1": address}
