from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gramscope.errors import InputError
from gramscope_lab.runs.checkpoints import is_checkpoint
from gramscope_lab.runs.directory import RunDirectory


def save(run: RunDirectory, step: int) -> Path:
    return run.save_checkpoint(step, {"w": torch.full((2, 2), float(step))}, {"m": torch.arange(3)})


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {"epochs": 1, "data": {"name": "digits"}})
    assert run.config == {"epochs": 1, "data": {"name": "digits"}}
    with pytest.raises(InputError, match="already holds a run"):
        RunDirectory.create(tmp_path / "x", {})
    run.append({"step": 1})
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


def test_force_replaces_a_run_with_its_members_and_figures_and_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    save(run, 3)
    run.save_artefact("strip-0.5", {"w": torch.ones(2)})
    run.figure_path("gram-fig2.png").write_text("ours")
    member = RunDirectory.create(run.path / "seed-0", {})
    member.append({"step": 1})
    (member.path / "notes.txt").write_text("mine")
    (run.path / "folder").mkdir()
    (run.path / "folder" / "thesis.tex").write_text("mine")
    run.clear()
    left = sorted(path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file())
    assert left == ["folder/thesis.tex", "seed-0/notes.txt"]


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write a run to .*file/x"):
        RunDirectory.create(tmp_path / "file" / "x", {})


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
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]


def test_opening_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory.open(tmp_path / "nothing")


def test_checkpoints_are_kept_and_pruned(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "x", {})
    with pytest.raises(InputError, match="no checkpoint yet"):
        run.load_checkpoint()
    for step in (2, 4, 10):
        path = save(run, step)
        assert is_checkpoint(path)
    assert run.checkpoint_steps() == [2, 4, 10]
    for keep in (0, 5, 3):
        run.prune_checkpoints(keep)
        assert run.checkpoint_steps() == [2, 4, 10]
    run.prune_checkpoints(2)
    assert run.checkpoint_steps() == [4, 10]
    newest = run.load_checkpoint()
    assert newest.step == 10
    assert torch.equal(newest.model["w"], torch.full((2, 2), 10.0))
    assert torch.equal(run.load_checkpoint(4).state["m"], torch.arange(3))
    with pytest.raises(InputError, match="no checkpoint at step 5; there are: 4, 10"):
        run.load_checkpoint(5)


NAMES = (
    "lock.json",
    ".lock",
    ".stop",
    "records.jsonl",
    "environment.json",
    "checkpoints",
    "artefacts",
    "figures",
    "seed-0",
)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_followed_out_of_the_directory(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for file in ("file", "spectra-1.safetensors", "report.html", "step-000000001.safetensors"):
        (victim / file).write_text("precious")
    before = sorted(victim.rglob("*"))
    run = RunDirectory.create(tmp_path / "run", {})
    (run.path / name).symlink_to(victim / "file" if "." in name else victim)
    actions: list[Callable[[], object]] = [
        lambda: run.lock.acquire().release(),
        lambda: run.append({"step": 1}),
        lambda: save(run, 1),
        lambda: run.prune_checkpoints(1),
        lambda: run.save_artefact("a", {"w": torch.ones(1)}),
        lambda: run.figure_path("report.html").write_text("ours"),
        lambda: run.write_environment({}),
        lambda: run.remove_stale(),
        lambda: (run.figures(), run.artefacts(), run.records(), run.checkpoint_steps(), run.members()),
        lambda: RunDirectory.create(run.path, {}, force=True),
    ]
    for action in actions:
        with suppress(InputError):
            action()
    assert name not in [member.name for member in run.members()]
    assert sorted(victim.rglob("*")) == before
    assert {path.read_text() for path in before if path.is_file()} == {"precious"}


def test_a_linked_figure_is_neither_shown_nor_written(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    run = RunDirectory.create(tmp_path / "x", {})
    run.figure_path("a.png").write_text("ours")
    (run.path / "figures" / "b.png").symlink_to(tmp_path / "secret")
    assert [path.name for path in run.figures(".png")] == ["a.png"]
    with pytest.raises(InputError, match="leads out of it"):
        run.figure_path("b.png")


def test_a_start_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()
    (path / ".partial-77-config.toml").write_text("half")
    (path / "lock.json").write_text('{"pid": 77, "host": "here"}')
    (path / ".lock").write_text("")
    run = RunDirectory.create(path, {"epochs": 1})
    with run.lock:
        pass
    assert sorted(p.name for p in path.iterdir()) == ["config.toml"]
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mine").write_text("my own file")
    with pytest.raises(InputError, match="no run of gramscope"):
        RunDirectory.create(tmp_path / "y", {})


def test_force_checks_every_member_before_it_erases_one(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    members = [RunDirectory.create(group.path / f"seed-{seed}", {"seeds": [seed]}) for seed in range(3)]
    with members[2].lock, pytest.raises(InputError, match="seed-2 is in use"):
        RunDirectory.create(group.path, {}, force=True)
    assert [member.config for member in members] == [{"seeds": [seed]} for seed in range(3)]


def test_stale_files_of_killed_writers_are_removed_from_a_group(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    member = RunDirectory.create(group.path / "seed-0", {})
    save(member, 1)
    (member.path / "checkpoints" / ".partial-77-step-000000002.safetensors").touch()
    (group.path / ".partial-77-environment.json").write_text("")
    with group.lock:
        group.remove_stale()
    left = sorted(path.relative_to(group.path).as_posix() for path in group.path.rglob("*") if path.is_file())
    assert left == ["config.toml", "seed-0/checkpoints/step-000000001.safetensors", "seed-0/config.toml"]


def test_groups_join_their_members(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {"seeds": [2, 10]})
    for seed in (10, 2):
        member = RunDirectory.create(group.path / f"seed-{seed}", {"seeds": [seed]})
        member.append({"kind": "evaluation", "seed": seed}, {"kind": "end", "finished": seed == 2})
    assert [run.name for run in group.runs()] == ["seed-2", "seed-10"]
    assert group.records("evaluation") == [
        {"run": "seed-2", "kind": "evaluation", "seed": 2},
        {"run": "seed-10", "kind": "evaluation", "seed": 10},
    ]
    assert group.status() == "stopped"
    group.clear()
    assert list(group.path.iterdir()) == []


def test_members_may_have_any_name(tmp_path: Path) -> None:
    group = RunDirectory.create(tmp_path / "g", {})
    for name in ("²", "x²3", "٣", "a"):  # digits that are no numbers, and numbers of other scripts
        RunDirectory.create(group.path / name, {})
    assert {run.name for run in group.members()} == {"²", "x²3", "٣", "a"}


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
