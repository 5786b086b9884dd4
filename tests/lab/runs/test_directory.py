from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope.errors import InputError
from gramscope_lab.runs.checkpoints import Checkpoint, is_checkpoint
from gramscope_lab.runs.directory import RunDirectory
from gramscope_lab.runs.layout import MARK
from gramscope_lab.runs.starting import clear, remove_litter


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
    with pytest.raises(InputError, match="holds no run of gramscope"):
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
    clear(run)
    left = sorted(path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file())
    assert left == sorted(own)


def test_a_run_from_before_the_list_of_files_is_cleared_too(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    run.save_artefact("diagonals-000000003", {"w": torch.ones(2)})
    run.figure_path("report.html").write_text("ours")
    (run.path / ".files").unlink()
    clear(run)
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


def test_force_spares_a_configuration_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[site]\ntitle = 'mine'\n")
    (tmp_path / "records.jsonl").write_text("precious\n")
    for force in (False, True):
        with pytest.raises(InputError, match=r"config.toml was not written by gramscope"):
            RunDirectory.create(tmp_path, {}, force=force)
    assert (tmp_path / "records.jsonl").read_text() == "precious\n"
    old = RunDirectory.create(tmp_path / "old", {"data": {}, "model": {}, "method": {}})
    config = old.path / "config.toml"
    config.write_bytes(config.read_bytes().removeprefix(MARK))  # as earlier versions wrote it
    RunDirectory.create(old.path, {"x": 1}, force=True)
    assert old.config == {"x": 1}


def test_a_run_is_started_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RunDirectory.write_config

    def written(run: RunDirectory, config: dict[str, Any]) -> None:
        write(run, config)
        if config == {"a": 1}:  # another process comes in before the start is complete
            with pytest.raises(InputError, match="in use"):
                RunDirectory.create(run.path, {"a": 2}, force=True)

    monkeypatch.setattr(RunDirectory, "write_config", written)
    run = RunDirectory.create(tmp_path / "x", {"a": 1})
    assert run.config == {"a": 1}
    assert not (run.path / "lock").exists()


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
    for keep in (0, 5, 3):
        run.prune_checkpoints(keep)
        assert run.checkpoint_steps() == [2, 4, 10]
    run.prune_checkpoints(2)
    assert run.checkpoint_steps() == [4, 10]
    newest = run.load_checkpoint()
    assert newest.step == newest.state["step"] == 10
    assert torch.equal(newest.model["w"], torch.full((2, 2), 10.0))
    assert torch.equal(run.load_checkpoint(4).tensors["m"], torch.arange(3))
    with pytest.raises(InputError, match="no checkpoint at step 5; there are: 4, 10"):
        run.load_checkpoint(5)


def test_nothing_is_followed_out_of_the_directory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "step-000000001").mkdir()
    for name in ("file", "spectra-1.safetensors", "report.html"):
        (victim / name).write_text("precious")
    before = sorted(victim.rglob("*"))
    for name in (
        "lock",
        ".files",
        "records.jsonl",
        "environment.json",
        "checkpoints",
        "artefacts",
        "figures",
        "seed-0",
    ):
        run = RunDirectory.create(tmp_path / f"run-{name}", {})
        (run.path / name).symlink_to(victim if name[0] in "cafs" else victim / "file")
        actions: list[Callable[[], object]] = [
            lambda run=run: RunDirectory.create(run.path, {}, force=True),
            lambda run=run: run.append({"step": 1}),
            lambda run=run: run.save_checkpoint(checkpoint(1)),
            lambda run=run: run.save_artefact("a", {"w": torch.ones(1)}),
            lambda run=run: run.figure_path("report.html").write_text("ours"),
            lambda run=run: run.write_environment({}),
            lambda run=run: (run.figures(), run.artefacts(), run.records(), run.checkpoint_steps(), run.members()),
        ]
        for action in actions:
            with suppress(InputError):
                action()
        run.close()
        assert run.name not in [member.name for member in run.members()]
    assert sorted(victim.rglob("*")) == before
    assert {path.read_text() for path in before if path.is_file()} == {"precious"}


@pytest.mark.parametrize("name", ["../victim", "{out}/victim", "figures/../../victim", "config.toml", "figures/"])
def test_the_list_of_files_names_only_artefacts_and_figures(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_text("precious")
    run = RunDirectory.create(tmp_path / "x", {})
    run.figure_path("a.png").write_text("ours")
    with (run.path / ".files").open("a") as file:
        file.write(name.format(out=tmp_path) + "\n")
    clear(run)
    assert (tmp_path / "victim").read_text() == "precious"
    assert list(run.path.iterdir()) == []


def test_a_linked_figure_is_neither_shown_nor_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    run = RunDirectory.create(tmp_path / "x", {})
    run.figure_path("a.png").write_text("ours")
    (run.path / "figures" / "b.png").symlink_to(tmp_path / "secret")
    assert [path.name for path in run.figures(".png")] == ["a.png"]
    with pytest.raises(InputError, match="b.png is a link"):
        run.figure_path("b.png")


def test_a_start_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()
    (path / ".partial-77-config.toml").write_text("half")
    (path / "lock").write_text('{"pid": 77, "host": "here"}')
    run = RunDirectory.create(path, {"epochs": 1})
    with run.lock:
        pass
    assert sorted(p.name for p in path.iterdir()) == ["config.toml"]
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "lock").write_text("my own file")
    with pytest.raises(InputError, match="no run of gramscope"):
        RunDirectory.create(tmp_path / "y", {})


def test_force_checks_every_member_before_it_erases_one(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    members = [RunDirectory.create(group.path / f"seed-{seed}", {"seeds": [seed]}) for seed in range(3)]
    with members[2].lock, pytest.raises(InputError, match="seed-2 is in use"):
        RunDirectory.create(group.path, {}, force=True)
    assert [member.config for member in members] == [{"seeds": [seed]} for seed in range(3)]


def test_litter_of_killed_writers_is_removed_from_a_group(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    member = RunDirectory.create(group.path / "seed-0", {})
    member.save_checkpoint(checkpoint(1))
    (member.path / "checkpoints" / ".partial-77-step-000000002").mkdir()
    (member.path / "lock").write_text("")
    half = group.path / "seed-1"
    half.mkdir()
    (half / ".partial-77-config.toml").write_text("")
    (group.path / ".partial-77-environment.json").write_text("")
    with group.lock:
        remove_litter(group)
    left = sorted(path.relative_to(group.path).as_posix() for path in group.path.rglob("*") if path.is_file())
    folder = "seed-0/checkpoints/step-000000001"
    names = ("manifest.json", "model.safetensors", "state.json", "training.safetensors")
    assert left == ["config.toml", *(f"{folder}/{name}" for name in names), "seed-0/config.toml"]
    assert not half.exists()


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
    clear(group)
    assert list(group.path.iterdir()) == []


def test_members_may_have_any_name(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    for name in ("²", "x²3", "٣", "a"):  # digits that are no numbers, and numbers of other scripts
        RunDirectory.create(group.path / name, {})
    assert {run.name for run in group.members()} == {"²", "x²3", "٣", "a"}


def test_groups_in_groups_are_read_to_a_limit(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    path = group.path
    for _ in range(400):
        path = path / "a"
        path.mkdir()
        (path / "config.toml").write_bytes(MARK)
    for read in (group.status, group.records, lambda: list(group.runs()), lambda: remove_litter(group)):
        with pytest.raises(InputError, match="is nested in 32 groups"):
            read()
    with pytest.raises(InputError, match="is nested in 32 groups"):
        RunDirectory.create(group.path, {}, force=True)
    assert path.exists()


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
