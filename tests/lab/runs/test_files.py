from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gramscope.errors import InputError, StorageError
from gramscope_lab.runs.files import (
    TEMPORARY,
    from_toml,
    inside,
    read_file,
    remove,
    remove_stale,
    to_json,
    write_file,
)


def test_write_file_replaces_or_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(StorageError, match="cannot write .*a.txt: disk full; .* run the command again"):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "/etc/passwd", "link", "link/x", "loop", "a\0b"])
def test_no_name_leads_out_of_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_text("precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    if name == "loop":  # it leads nowhere; what is read there is an error
        with pytest.raises(InputError):
            read_file(inside(root, name))
        return
    with pytest.raises(InputError, match="leads out of it|cannot be followed"):
        inside(root, name)
    assert inside(root, "a/b") == root / "a" / "b"


def test_pipes_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "file") == b"12345"
    for name, message in (("none", "cannot read"), ("pipe", "not a regular file")):
        with pytest.raises(InputError, match=message):
            read_file(tmp_path / name)


@pytest.mark.parametrize("content", [b"x = " + b"[" * 5000, b"x = " + b"9" * 5000, b"\xff", b"x = "])
def test_bad_toml_is_explained(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(InputError, match="cannot read .*a.toml"):
        from_toml(tmp_path / "a.toml")


def test_removing_removes_links_and_not_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "victim")
    remove(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    assert (tmp_path / "victim" / "file").read_text() == "precious"


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}77-step-1").mkdir()
    (tmp_path / f"{TEMPORARY}77-config.toml").write_text("")
    (tmp_path / "mine").write_text("")
    remove_stale(tmp_path)
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
