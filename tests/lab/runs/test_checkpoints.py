"""Damaged and mixed-up checkpoints are recognised, and the one before is used; nested states come back exactly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.runs.directory import RunDirectory
from refusals import assert_refused


def three_checkpoints(path: Path) -> RunDirectory:
    run = RunDirectory.create(path, {})
    for step in (1, 2, 3):
        run.append({"step": step})
        run.save_checkpoint(
            step, {"w": torch.full((50,), float(step))}, {"m": torch.arange(9) + step, "text": "x" * step}
        )
    return run


def flip(place: float) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def another(path: Path) -> None:
    shutil.copy(path.with_name("step-000000002.safetensors"), path)


def linked(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"flip at {place}": flip(place) for place in (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)},
    "another step": another,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "deep": lambda path: path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_written_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    run = three_checkpoints(tmp_path / "x")
    good = run.load_checkpoint()
    path = run.checkpoint_path(3)
    damage(path)
    with pytest.warns(ResultWarning, match="step-000000003.*the checkpoint before it is used"):
        found = run.load_checkpoint()
    assert found.step == 2
    assert torch.equal(found.model["w"], torch.full((50,), 2.0))
    with pytest.raises(InputError, match="step-000000003"):
        run.load_checkpoint(3)
    if path.is_file():
        run.save_checkpoint(good.step, good.model, good.state)
        assert run.load_checkpoint().step == 3


def test_a_checkpoint_behind_a_link_is_refused(tmp_path: Path) -> None:
    run = three_checkpoints(tmp_path / "x")
    linked(run.path / "checkpoints" / "step-000000003.safetensors")
    assert_refused("leads out of it", run.load_checkpoint)


def test_without_any_intact_checkpoint_nothing_is_guessed(tmp_path: Path) -> None:
    run = three_checkpoints(tmp_path / "x")
    for step in (1, 2, 3):
        flip(0.5)(run.checkpoint_path(step))
    with pytest.warns(ResultWarning), pytest.raises(InputError, match="no checkpoint of .* is intact"):
        run.load_checkpoint()


def test_anybody_can_load_the_model(tmp_path: Path) -> None:
    run = three_checkpoints(tmp_path / "x")
    assert torch.equal(load_file(run.checkpoint_path(2))["model/w"], torch.full((50,), 2.0))


# -- nested states ------------------------------------------------------------------------------------------------
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees)
def test_a_state_comes_back_exactly(tmp_path: Path, tree: Any) -> None:
    run = RunDirectory(tmp_path)
    run.save_checkpoint(1, {}, tree)
    back = run.load_checkpoint().state
    assert back == tree
    assert repr(back) == repr(tree)  # tuples stay tuples, True stays True


def test_tensors_that_share_memory_and_what_cannot_be_stored(tmp_path: Path) -> None:
    run, base = RunDirectory(tmp_path), torch.arange(6.0).reshape(2, 3)
    run.save_checkpoint(
        1, {"w": base}, {"state": {0: {"a": base.mT, "b": base[0]}}, "x": [float("nan")], "t": torch.tensor(2)}
    )
    back = run.load_checkpoint().state
    assert torch.equal(back["state"][0]["a"], base.mT)
    assert torch.equal(back["state"][0]["b"], base[0])
    assert back["x"][0] != back["x"][0]
    assert int(back["t"]) == 2
    assert_refused(r"state/a/b = .* of type object", run.save_checkpoint, 2, {}, {"a": {"b": object()}})
