from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gramscope.errors import InputError
from gramscope.runs.checkpoints import Checkpoint, is_checkpoint
from gramscope.runs.directory import RunDirectory
from gramscope.runs.environment import describe_environment, differences


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step, {"w": torch.full((2, 2), float(step))}, {"m": torch.arange(3)}, {"step": step, "records": 0}
    )


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {"epochs": 1, "data": {"name": "digits"}})
    assert run.config == {"epochs": 1, "data": {"name": "digits"}}
    with pytest.raises(InputError, match="already holds a run"):
        RunDirectory.create(tmp_path / "x", {})
    run.append({"step": 1})
    run.close()
    (run.path / "notes.txt").write_text("mine")
    again = RunDirectory.create(tmp_path / "x", {"epochs": 2}, force=True)
    assert again.records() == []
    assert again.config == {"epochs": 2}
    assert (run.path / "notes.txt").read_text() == "mine"


def test_force_spares_what_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is no run of ours"):
        RunDirectory.create(tmp_path, {}, force=True)
    with pytest.raises(InputError, match="is a file"):
        RunDirectory.create(tmp_path / "thesis.tex", {}, force=True)


def test_force_spares_own_files_in_every_folder(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    run.save_checkpoint(checkpoint(3))
    run.save_artefact("strip-0.5", {"w": torch.ones(2)})
    run.save_artefact("spectra-000000003", {"w": torch.ones(2)})
    run.figure_path("gram-fig2.png").write_text("ours")
    for name in ("report.html", "panel-curves.png", "panel-curves.pdf"):
        (run.path / "figures" / name).write_text("ours")
    own = ["figures/mine.png", "artefacts/mine.safetensors", "checkpoints/notes.txt", "checkpoints/best/model.pt"]
    (run.path / "checkpoints" / "best").mkdir()
    for name in own:
        (run.path / name).write_text("mine")
    run.clear()
    left = sorted(path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file())
    assert left == sorted(own)


def test_a_run_from_before_the_list_of_files_is_cleared_too(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    run.save_artefact("diagonals-000000003", {"w": torch.ones(2)})
    run.figure_path("report.html").write_text("ours")
    (run.path / ".files").unlink()
    run.clear()
    assert list(run.path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write a run to .*file/x"):
        RunDirectory.create(tmp_path / "file" / "x", {})
    with pytest.raises(InputError, match="cannot write to .*missing"):
        RunDirectory(tmp_path / "missing").lock.acquire()


def test_force_does_not_take_a_running_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    with run.lock:
        assert RunDirectory(run.path).status() == "running"
        with pytest.raises(InputError, match="in use"):
            RunDirectory.create(run.path, {}, force=True)
    assert run.config == {}


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory.open(tmp_path / "nothing")


def test_checkpoints_are_kept_and_pruned(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    with pytest.raises(InputError, match="no checkpoint yet"):
        run.load_checkpoint()
    for step in (2, 4, 10):
        path = run.save_checkpoint(checkpoint(step))
        assert is_checkpoint(path)
    assert run.checkpoint_steps() == [2, 4, 10]
    run.prune_checkpoints(2)
    assert run.checkpoint_steps() == [4, 10]
    newest = run.load_checkpoint()
    assert newest.step == newest.state["step"] == 10
    assert torch.equal(newest.model["w"], torch.full((2, 2), 10.0))
    assert torch.equal(run.load_checkpoint(4).tensors["m"], torch.arange(3))
    with pytest.raises(InputError, match="no checkpoint at step 5; there are: 4, 10"):
        run.load_checkpoint(5)
    (run.path / "checkpoints" / "step-000000010" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot read"):
        run.load_checkpoint()


def test_groups_join_their_members(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {"seeds": [2, 10]})
    for seed in (10, 2):
        member = RunDirectory.create(group.path / f"seed-{seed}", {"seeds": [seed]})
        member.append({"kind": "evaluation", "seed": seed}, {"kind": "end", "finished": seed == 2})
        member.close()
    assert [run.name for run in group.runs()] == ["seed-2", "seed-10"]
    assert group.records("evaluation") == [
        {"run": "seed-2", "kind": "evaluation", "seed": 2},
        {"run": "seed-10", "kind": "evaluation", "seed": 10},
    ]
    assert group.status() == "stopped"
    group.clear()
    assert list(group.path.iterdir()) == []


def test_artefacts_and_figures(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    matrices = {"hidden1": torch.eye(3).mT, "hidden2": torch.ones(2)}
    run.save_artefact("diagonals-0", matrices)
    assert run.artefacts() == ["diagonals-0"]
    assert all(torch.equal(run.load_artefact("diagonals-0")[key], value) for key, value in matrices.items())
    with pytest.raises(InputError, match="no artefact 'other'; there are: diagonals-0"):
        run.load_artefact("other")
    for name in ("../escape", "", ".hidden", "a/b"):
        with pytest.raises(InputError, match="cannot name a file"):
            run.figure_path(name)
    assert run.figure_path("curves.png").parent.is_dir()


def test_environment_says_what_matters(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    assert run.environment == {}
    facts = describe_environment()
    run.write_environment(facts)
    stored = run.environment
    assert stored["torch"] == torch.__version__
    assert differences(stored, facts) == {}
    assert differences({**stored, "threads": 99}, facts) == {"threads": (99, torch.get_num_threads())}
