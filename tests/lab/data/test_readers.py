"""File formats: what is read is what was written, and damaged or hostile files are refused."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.data import load
from gramscope_lab.data.images import read_cifar, read_idx, read_npz, read_svhn
from official_files import cifar_records, idx_bytes, random_images, write_svhn
from refusals import assert_refused

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
    assert_refused(message, read_idx, path, 2)


def test_an_idx_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros((1, 2, 3), np.uint8)) + bytes(1 << 26)))
    assert_refused("too many bytes for 1 × 2 × 3", read_idx, path, 3)


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
        assert_refused(rf"batch.*records of {3072 + labels} bytes", read_cifar, path, labels)


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
        assert_refused(r"a\.mat", read_svhn, path)


def test_only_the_two_arrays_of_svhn_are_read(tmp_path: Path) -> None:
    from scipy.io import savemat

    images, labels = random_images(4, (3, 32, 32), 10)
    right, column = images.transpose(2, 3, 1, 0), labels[:, None]
    path = tmp_path / "a.mat"
    savemat(path, {"cell": np.array([{}, 1], object), "X": right, "text": "passed over", "y": column})
    np.testing.assert_array_equal(read_svhn(path)[0], images)
    for wrong in ({"X": right}, {"X": images, "y": column}, {"X": right, "y": column.astype(object)}, {"y": column}):
        savemat(path, wrong)
        assert_refused(r"the cropped SVHN files hold bytes X \(32, 32, 3, n\)", read_svhn, path)


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
        assert_refused(message, read_npz, tmp_path / f"{name}.npz", keys)


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
    assert_refused("cannot be read as .npz", read_npz, zipped(tmp_path / "a.npz", content), KEYS)


def test_any_error_of_a_library_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("8 TB")

    path = zipped(tmp_path / "a.npz", b"")
    monkeypatch.setattr(np, "load", fail)
    assert_refused(r"a.npz cannot be read as .npz \(MemoryError: 8 TB\)", read_npz, path, KEYS)


# -- .npz files as data sets --------------------------------------------------------------------------------------
def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def split(path: Path, x: Any, y: Any) -> str:
    """A file of six training and three test samples."""
    return save(path, x_train=x[:6], y_train=y[:6], x_test=x[6:], y_test=y[6:])


def test_npz_of_labels_targets_images_and_tokens(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3
    data = load(split(tmp_path / "a.npz", x, y))
    assert (data.name, data.classes, data.x_train.dtype) == ("a", 3, torch.float32)
    np.testing.assert_allclose(data.x_train.numpy(), x[:6], rtol=1e-6)
    data = load(split(tmp_path / "b.npz", x, x[:, :2]))
    assert (data.classes, data.outputs, data.y_train.dtype) == (None, 2, torch.float32)
    grey = (np.arange(9 * 16) % 256).astype(np.uint8).reshape(9, 4, 4)
    data = load(split(tmp_path / "c.npz", grey, y), scale="signed")
    assert data.input_shape == (1, 4, 4)
    np.testing.assert_allclose(data.x_test.numpy()[:, 0], grey[6:] / 127.5 - 1, atol=1e-6)
    colour = np.random.default_rng(1).integers(0, 256, (9, 5, 6, 3), np.uint8)
    data = load(split(tmp_path / "d.npz", colour, y[:, None]))
    assert data.input_shape == (3, 5, 6)
    assert float(data.x_train[2, 1, 3, 4]) == pytest.approx(colour[2, 3, 4, 1] / 255)
    assert load(split(tmp_path / "e.npz", np.arange(18).reshape(9, 2), y)).x_train.dtype == torch.int64
    tokens = np.arange(27).reshape(9, 3)
    data = load(split(tmp_path / "f.npz", tokens, np.where(tokens > 25, -100, tokens % 5)))
    assert (data.classes, data.labels_tokens, data.y_test[-1].tolist()) == (5, True, [4, 0, -100])


def test_wrong_files_and_options_are_explained(tmp_path: Path) -> None:
    x, y = np.zeros((4, 2)), np.zeros(4, int)
    save(tmp_path / "good.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for name, options, message in (
        ("none", {}, "no file"),
        ("good", {"scale": "signed"}, "scale='signed' is for images"),
        ("good", {"top": 3}, "has no option top"),
    ):
        assert_refused(message, load, str(tmp_path / f"{name}.npz"), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((4, 2), np.uint8)}, "x_train is torch.uint8 but x_test torch.float32"),
        ({"x_test": np.zeros((4, 2), np.int32)}, "x_train is torch.float32 but x_test torch.int64"),
        (
            {"x_train": np.zeros((4, 5, 6, 3), np.uint8), "x_test": np.zeros((4, 3, 5, 6), np.uint8)},
            r"x_train is \(5, 6, 3\), one of x_test \(3, 5, 6\)",
        ),
        ({"x_test": np.zeros((0, 2)), "y_test": np.zeros(0, int)}, r"x_test \(0, 2\) is empty"),
        ({"x_train": np.zeros((0, 2)), "y_train": np.zeros(0, int)}, r"x_train \(0, 2\) is empty"),
        ({"y_test": np.zeros(4)}, "labels or floats for both"),
    ],
)
def test_npz_that_would_mislead_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    x, y = np.zeros((4, 2)), np.arange(4) % 2
    with pytest.raises(InputError, match=message):
        load(save(tmp_path / "a.npz", **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | change)))


def test_classes_are_counted_and_whole_floats_are_announced(tmp_path: Path) -> None:
    x, y = np.zeros((30, 2)), np.arange(30) % 3
    assert load(save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)).classes == 3
    assert load(save(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x, y_test=y), classes=5).classes == 5
    with pytest.warns(ResultWarning, match="whole numbers as torch.float32, which are a regression target"):
        assert load(save(tmp_path / "c.npz", x_train=x, y_train=y / 1, x_test=x, y_test=y / 1)).task == "regression"


def test_whole_numbers_beyond_int64_are_refused(tmp_path: Path) -> None:
    x, y = np.array([[2**63]], np.uint64), np.array([0])
    with pytest.raises(InputError, match="x_train holds 9223372036854775808, which is beyond int64"):
        load(save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x - 1, y_test=y))


def test_numbers_beyond_float32_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x_train contains NaN or infinity"):
        load(split(tmp_path / "a.npz", np.full((9, 2), -1e300), np.arange(9) % 3))
