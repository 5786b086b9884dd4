from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest

from gramscope.errors import InputError
from gramscope_lab.data.idx import read_idx
from official_files import idx_bytes, random_images


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path: Path, suffix: str) -> None:
    array = random_images(5, (3, 4), 2)[0]
    path = tmp_path / f"a{suffix}"
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert np.array_equal(read_idx(path, 3), array)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (idx_bytes(np.zeros((2, 3), np.uint8))[:-1], "a", "holds 5 bytes for 2 × 3"),
        (idx_bytes(np.zeros((2, 3), np.uint8)) + b"x", "a", "holds 7 bytes"),
        (idx_bytes(np.zeros(3, np.uint8)), "a", "2 dimensions"),
        (b"<html>", "a", "3c 68 74 6d"),
        (b"", "a", "not an idx file"),
        (bytes((0, 0, 8, 2)) + bytes(4) + b"\xff" * 4, "a", "0 × 4294967295 values"),
        (b"<html>", "a.gz", "not a gzip file"),
        (gzip.compress(idx_bytes(np.zeros((20, 30), np.uint8)))[:-9], "a.gz", "truncated"),
    ],
    ids=[
        "short",
        "long",
        "flat",
        "page",
        "empty",
        "none of many",
        "page-gz",
        "truncated-gz",
    ],  # gzip puts the time into its bytes
)
def test_damaged_idx_is_explained(tmp_path: Path, content: bytes, name: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(path, 2)


def test_an_idx_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    packer = zlib.compressobj(9, wbits=31)
    zeros = bytes(1 << 24)
    path.write_bytes(b"".join(packer.compress(zeros) for _ in range(20)) + packer.flush())
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match=r"unpacks to more than 268,435,456 bytes"):
        read_idx(path, 3)
    path.write_bytes(gzip.compress(b"") * 1000)
    with pytest.raises(InputError, match="more than 100 compressed parts"):
        read_idx(path, 3)
