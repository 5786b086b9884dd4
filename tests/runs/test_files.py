from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gramscope.errors import InputError
from gramscope.runs.files import TEMPORARY, remove_unfinished, to_json, write_file, write_folder


def test_write_file_replaces_or_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"

    def fails(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_write_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "one").write_text("1")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_folder(tmp_path / "f", broken)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "f", lambda folder: (folder / "one").write_text("1") and None)
    assert (tmp_path / "f" / "one").read_text() == "1"


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}77-step-1").mkdir()
    (tmp_path / f"{TEMPORARY}77-config.toml").write_text("")
    (tmp_path / "mine").write_text("")
    remove_unfinished(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_json_is_strict() -> None:
    value = {
        "a": float("nan"),
        "b": (1, np.float32(0.5)),
        "c": torch.tensor([1.0, float("inf")]),
        3: Path("x"),
        "d": None,
    }
    assert json.loads(to_json(value)) == {"a": None, "b": [1, 0.5], "c": [1.0, None], "3": "x", "d": None}
    with pytest.raises(InputError, match="object"):
        to_json(object())
