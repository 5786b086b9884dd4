"""File formats: what is read is what was written, and damaged or hostile files are refused."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gramscope.errors import InputError
from gramscope_lab.data.readers import read_cifar, read_idx, read_npz, read_svhn
from official_files import cifar_records, idx_bytes, random_images, write_svhn

KEYS = ("x", "y")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path: Path, suffix: str) -> None:
    array = random_images(5, (3, 4), 2)[0]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(idx_bytes(array)) if suffix else idx_bytes(array))
    assert np.array_equal(read_idx(path, 3), array)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (idx_bytes(np.zeros((2, 3), np.uint8))[:-1], "a", "too few bytes for 2 × 3"),
        (idx_bytes(np.zeros((2, 3), np.uint8)) + b"x", "a", "too many bytes"),
        (idx_bytes(np.zeros(3, np.uint8)), "a", "2 dimensions"),
        (b"<html>", "a", "3c 68 74 6d"),
        (b"", "a", "not an idx file"),
        (bytes((0, 0, 8, 2)) + b"\xff" * 8, "a", "cannot be read as an idx file"),
        (b"<html>", "a.gz", "cannot be read as an idx file"),
        (gzip.compress(idx_bytes(np.zeros((20, 30), np.uint8)), mtime=0)[:-9], "a.gz", "fetch it again"),
    ],
)
def test_damaged_idx_is_explained(tmp_path: Path, content: bytes, name: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(path, 2)


def test_an_idx_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((1, 2, 3), np.uint8)) + bytes(1 << 26)))
    with pytest.raises(InputError, match="too many bytes for 1 × 2 × 3"):
        read_idx(path, 3)


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar_records(tmp_path: Path, labels: int) -> None:
    images, classes = random_images(6, (3, 32, 32), 10)
    path = tmp_path / "batch.bin"
    path.write_bytes(cifar_records(images, *[classes + column for column in range(labels)]))
    pixels, columns = read_cifar(path, labels)
    np.testing.assert_array_equal(pixels, images)
    np.testing.assert_array_equal(columns[:, -1], classes + labels - 1)
    for content in (path.read_bytes()[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"batch.*records of {3072 + labels} bytes"):
            read_cifar(path, labels)


@pytest.mark.parametrize("compressed", [True, False])
def test_svhn_files(tmp_path: Path, compressed: bool) -> None:
    images, labels = random_images(4, (3, 32, 32), 10)
    write_svhn(tmp_path, images, labels, "a.mat", compressed=compressed)
    path = tmp_path / "a.mat"
    pixels, classes = read_svhn(path)
    np.testing.assert_array_equal(pixels, images)
    np.testing.assert_array_equal(classes % 10, labels)
    content = path.read_bytes()
    for cut in (content[:-30], content[:300], content[:132], b"\x89HDF\r\n", b""):
        path.write_bytes(cut)
        with pytest.raises(InputError, match=r"a\.mat"):
            read_svhn(path)


def test_only_the_two_arrays_of_svhn_are_read(tmp_path: Path) -> None:
    from scipy.io import savemat

    images, labels = random_images(4, (3, 32, 32), 10)
    right, column = images.transpose(2, 3, 1, 0), labels[:, None]
    path = tmp_path / "a.mat"
    savemat(path, {"cell": np.array([{}, 1], object), "X": right, "text": "passed over", "y": column})
    np.testing.assert_array_equal(read_svhn(path)[0], images)
    for wrong in ({"X": right}, {"X": images, "y": column}, {"X": right, "y": column.astype(object)}, {"y": column}):
        savemat(path, wrong)
        with pytest.raises(InputError, match=r"the cropped SVHN files hold X \(32, 32, 3, n\)"):
            read_svhn(path)


def zipped(path: Path, content: bytes) -> Path:
    """An .npz file whose arrays have this content."""
    with zipfile.ZipFile(path, "w") as file:
        for key in KEYS:
            file.writestr(f"{key}.npy", content)
    return path


def test_what_is_no_npz_of_numbers_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros((4, 2)))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    (tmp_path / "garbage.npz").write_bytes(b"nothing of the kind")
    zipped(tmp_path / "texts.npz", b"no array")
    np.savez(tmp_path / "objects.npz", **dict.fromkeys(KEYS, np.array([None, "a"])))
    np.savez(tmp_path / "good.npz", **dict.fromkeys(KEYS, np.zeros(3)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-40])
    for name in ("array", "garbage", "objects", "cut"):
        with pytest.raises(InputError, match=r"cannot be read as .npz.*numpy.savez\(path, x=…, y=…\)"):
            read_npz(tmp_path / f"{name}.npz", KEYS)
    np.savez(tmp_path / "words.npz", **dict.fromkeys(KEYS, np.array(["a"])))
    for name, keys, message in (
        ("words", KEYS, "x is <U1"),
        ("texts", KEYS, r"x is \|S8"),
        ("good", ("x", "z"), "has no z; it has x, y"),
        ("none", KEYS, "there is no file"),
    ):
        with pytest.raises(InputError, match=message):
            read_npz(tmp_path / f"{name}.npz", keys)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000000)}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -8)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        b"{'descr': (",
        b"(" * 5000,
        b"\xff\x00",
    ],
)
def test_hostile_headers_of_npz(tmp_path: Path, header: bytes) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    with pytest.raises(InputError, match="cannot be read as .npz"):
        read_npz(zipped(tmp_path / "a.npz", content), KEYS)


def test_any_error_of_a_library_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("8 TB")

    path = zipped(tmp_path / "a.npz", b"")
    monkeypatch.setattr(np, "load", fail)
    with pytest.raises(InputError, match=r"a.npz cannot be read as .npz \(MemoryError: 8 TB\)"):
        read_npz(path, KEYS)
