"""Damaged and mixed-up checkpoints are recognised, and the one before is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gramscope.errors import DamagedCheckpointError, InputError, ResultWarning
from gramscope_lab.runs.checkpoints import Checkpoint, memory, read_checkpoint, read_tensors
from gramscope_lab.runs.directory import RunDirectory


def three_checkpoints(path: Path) -> RunDirectory:
    run = RunDirectory.create(path, {})
    for step in (1, 2, 3):
        weights = {"w": torch.full((50,), float(step))}
        run.save_checkpoint(
            Checkpoint(step, weights, {"m": torch.arange(9) + step}, {"step": step, "text": "x" * step})
        )
    return run


def flip(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-2] ^= 1
        (folder / name).write_bytes(content)

    return damage


def mixed(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder.with_name("step-000000002") / name, folder / name)


DAMAGE = {
    **{
        f"flip {name}": flip(name)
        for name in ("model.safetensors", "training.safetensors", "state.json", "manifest.json")
    },
    **{
        f"mixed {name}": mixed(name)
        for name in ("model.safetensors", "training.safetensors", "state.json", "manifest.json")
    },
    "missing": lambda folder: (folder / "model.safetensors").unlink(),
    "cut": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "deep": lambda folder: (folder / "manifest.json").write_bytes(b"[" * 200_000),
    "list": lambda folder: (folder / "manifest.json").write_bytes(b"[]"),
    **{
        f"files are {value}": lambda folder, value=value: (folder / "manifest.json").write_text(
            f'{{"step": 3, "files": {value}}}'
        )
        for value in ("[]", "null", "7", '"model.safetensors"', "[[1, 2]]")
    },
    "a folder": lambda folder: ((folder / "state.json").unlink(), (folder / "state.json").mkdir()),
    "a pipe": lambda folder: ((folder / "state.json").unlink(), os.mkfifo(folder / "state.json")),
    "a link": lambda folder: (
        (folder / "state.json").rename(folder.parent.parent / "elsewhere"),
        (folder / "state.json").symlink_to(folder.parent.parent / "elsewhere"),
    ),
}


def test_files_that_claim_too_much_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 24).to_bytes(8, "little") + b"{" + b" " * (1 << 24))
    with pytest.raises(InputError, match="lists its tensors in 16777216 bytes"):
        read_tensors(path)
    os.truncate(path, memory() + 1)  # a file with a hole
    with pytest.raises(InputError, match=r"has \d+ bytes; at most"):
        read_tensors(path)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_written_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    run = three_checkpoints(tmp_path / "x")
    folder = run.path / "checkpoints" / "step-000000003"
    good = run.load_checkpoint()
    damage(folder)
    with pytest.warns(ResultWarning, match="step-000000003.*the checkpoint before it is used"):
        found = run.load_checkpoint()
    assert found.step == found.state["step"] == 2
    assert torch.equal(found.model["w"], torch.full((50,), 2.0))
    with pytest.raises(InputError, match="step-000000003"):
        run.load_checkpoint(3)
    run.save_checkpoint(good)
    assert run.load_checkpoint().step == 3


def test_without_any_intact_checkpoint_nothing_is_guessed(tmp_path: Path) -> None:
    run = three_checkpoints(tmp_path / "x")
    for step in (1, 2, 3):
        flip("model.safetensors")(run.path / "checkpoints" / f"step-{step:09d}")
    with pytest.warns(ResultWarning), pytest.raises(InputError, match="no checkpoint of .* is intact"):
        run.load_checkpoint()


def test_checkpoints_of_earlier_versions_have_no_manifest(tmp_path: Path) -> None:
    run = three_checkpoints(tmp_path / "x")
    (run.path / "checkpoints" / "step-000000003" / "manifest.json").unlink()
    assert run.load_checkpoint().step == 3


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    run = three_checkpoints(tmp_path / "x")
    folder = run.path / "checkpoints" / "step-000000003"
    (folder / "manifest.json").unlink()
    for content in (b"[1]", b"{", b"[" * 200_000):
        (folder / "state.json").write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match="state.json"):
            read_checkpoint(folder)
