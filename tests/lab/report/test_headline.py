from __future__ import annotations

from pathlib import Path

from gramscope_lab.report.headline import headline
from gramscope_lab.report.loaded_runs import read_runs
from gramscope_lab.report.overview import overview
from gramscope_lab.runs.directory import RunDirectory
from made_up_runs import CLAIMS, accuracy, write_run


def percent(*values: float) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


def test_the_story_of_two_methods(group: Path) -> None:
    def mean(epoch: int, speed: float) -> str:
        return percent(*(accuracy(seed, epoch, speed) for seed in (0, 1)))

    assert headline(read_runs([group])) == (
        f"vcl reaches test accuracy {mean(1, 0.9)} after 1 epoch, where sgd has {mean(1, 0.3)}; at the end (epoch 4, 2 seeds) "
        f"vcl has {mean(4, 0.9)}, sgd {mean(4, 0.3)}."
    )


def test_nobody_is_called_better_within_the_spread(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "all", {})
    for method, speed in (("sgd", 0.50), ("vcl", 0.51)):
        for seed in (0, 1):
            write_run(tmp_path / "all" / f"{method}-{seed}", method=method, seed=seed, speed=speed, snapshots=False)
    found = headline(read_runs([tmp_path / "all"]))
    assert found.startswith("Test accuracy at the end (epoch 4, 2 seeds) vcl has")
    assert found.endswith("The spread over seeds of sgd overlaps with that of vcl.")


def test_one_run_many_runs_and_claims(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{i}", lr=0.1 * i, epochs=2, speed=0.1 * i, snapshots=False).path for i in range(1, 7)
    ]
    ends = percent(accuracy(0, 0, 0.1)), percent(accuracy(0, 2, 0.1))
    assert headline(read_runs(paths[:1])) == (
        f"The test accuracy of sgd goes from {ends[0]} at epoch 0 to {ends[1]} at epoch 2 (1 seed)."
    )
    assert "the other 5 settings" in headline(read_runs(paths))
    run = RunDirectory.create(tmp_path / "claims", {"part": "claims"})
    run.append(*({"kind": "claim", **claim} for claim in CLAIMS))
    run.close()
    assert headline(read_runs([run.path])) == "Of 3 claims 1 holds."


def test_a_training_loop_of_the_users_own_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "mine", {})
    for step in (0, 3):
        run.append({"step": step, "layers": {"fc": {"nfa": 0.5}}, "network": {"loss": 2.0 - 0.1 * step}})
    run.close()
    runs = read_runs([run.path])
    assert headline(runs) == (
        "1 run of your own training loop, watched by gs.Monitor. "
        "The monitored sample loss of mine goes from 2.00 at step 0 to 1.70 at step 3 (1 seed)."
    )
    assert runs.status == "recorded"
    facts = dict(overview(runs).facts[0][1])
    assert facts["training loop"] == ["your own, watched by gs.Monitor; steps 0 to 3, 1 layer measured"]


def test_a_lead_worth_telling_is_told(tmp_path: Path) -> None:
    values = {"quick": {0: 0.1, 1: 0.12, 6: 0.5, 9: 0.9}, "slow": {0: 0.1, 1: 0.11, 6: 0.15, 9: 0.6}}
    for name, series in values.items():
        run = RunDirectory.create(tmp_path / name, {})
        for step, found in series.items():
            run.append({"step": step, "layers": {"fc": {"nfa": 0.5}}, "network": {"accuracy": found}})
        run.close()
    runs = read_runs([tmp_path / name for name in values])
    assert "quick reaches monitored sample accuracy 50.0 % after 6 steps, where slow has 15.0 %" in headline(runs)
    results = overview(runs).results
    assert results is not None
    assert "seconds" not in results.columns  # nobody recorded them
