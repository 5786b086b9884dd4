from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gramscope.errors import InputError, ResultWarning
from gramscope_lab.data import load


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
    good = Path(save(tmp_path / "good.npz", x_train=x, y_train=y, x_test=x, y_test=y))
    save(tmp_path / "part.npz", x_train=x, x_test=x, y_test=y)
    (tmp_path / "cut.npz").write_bytes(good.read_bytes()[:-40])
    for name, options, message in (
        ("none", {}, "no file"),
        ("part", {}, "no y_train; it has x_train, x_test, y_test"),
        ("cut", {}, "cannot be read"),
        ("good", {"scale": "signed"}, "scale='signed' is for images"),
        ("good", {"top": 3}, "has no option top"),
    ):
        with pytest.raises(InputError, match=message):
            load(str(tmp_path / f"{name}.npz"), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((4, 2), np.uint8)}, "x_train is uint8 but x_test float64"),
        ({"x_test": np.zeros((4, 2), np.int32)}, "x_train is float64 but x_test int32"),
        (
            {"x_train": np.zeros((4, 5, 6, 3), np.uint8), "x_test": np.zeros((4, 3, 5, 6), np.uint8)},
            r"x_train is \(5, 6, 3\), one of x_test \(3, 5, 6\)",
        ),
        ({"x_test": np.zeros((0, 2)), "y_test": np.zeros(0, int)}, r"x_test \(0, 2\) is empty"),
        ({"x_train": np.zeros((0, 2)), "y_train": np.zeros(0, int)}, r"x_train \(0, 2\) is empty"),
        ({"x_train": np.array([{"a": 1}, None], object)}, "cannot be read as .npz"),
        ({"y_test": np.array(list("abcd"))}, "y_test is <U1"),
        ({"y_test": np.zeros(4)}, "labels or floats for both"),
        ({"y_train": np.array([0, 1, 2, 2_000_000_000])}, "4 different labels go up to 2000000000, .* give classes"),
    ],
)
def test_npz_that_would_mislead_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    x, y = np.zeros((4, 2)), np.arange(4) % 2
    with pytest.raises(InputError, match=message):
        load(save(tmp_path / "a.npz", **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | change)))


def test_labels_that_may_be_none_are_announced(tmp_path: Path) -> None:
    x = np.zeros((3000, 2))
    y = 1000 * (np.arange(3000) % 3)
    with pytest.warns(ResultWarning, match="3 different labels go up to 2000, which makes 2001 classes"):
        data = load(save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y))
    assert data.classes == 2001
    data = load(save(tmp_path / "b.npz", x_train=x[:9], y_train=y[:9], x_test=x, y_test=y), classes=3000)
    assert data.classes == 3000
    y = np.arange(3000) % 3.0
    with pytest.warns(ResultWarning, match="3 different whole numbers; floats are a regression target"):
        data = load(save(tmp_path / "c.npz", x_train=x, y_train=y, x_test=x, y_test=y))
    assert data.task == "regression"


def test_what_is_no_npz_is_said_without_advice_to_unpickle(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros((4, 2)))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    (tmp_path / "garbage.npz").write_bytes(b"nothing of the kind")
    with zipfile.ZipFile(tmp_path / "texts.npz", "w") as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{key}.npy", "no array")
    save(tmp_path / "objects.npz", **dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.array([None, "a"])))
    for name in ("array", "garbage", "texts", "objects"):
        with pytest.raises(InputError, match="cannot be read as .npz") as caught:
            load(str(tmp_path / f"{name}.npz"))
        assert "pickle" not in str(caught.value)


def test_whole_numbers_beyond_int64_are_refused(tmp_path: Path) -> None:
    x, y = np.array([[2**63]], np.uint64), np.array([0])
    with pytest.raises(InputError, match="x_train holds 9223372036854775808, which is beyond int64"):
        load(save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x - 1, y_test=y))


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
def test_headers_are_checked_before_memory_is_taken(tmp_path: Path, header: bytes) -> None:
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{key}.npy", content)
    with pytest.raises(InputError, match="cannot be read as .npz"):
        load(str(tmp_path / "a.npz"))


def test_an_npz_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{key}.npy", bytes(70 << 20))
    with pytest.raises(InputError, match="unpacks to more than"):
        load(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_packing_with_a_limit_is_unpacked(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{key}.npy", bytes(1 << 20))
    with pytest.raises(InputError, match="which NumPy does not write"):
        load(str(tmp_path / "a.npz"))


def test_numbers_beyond_float32_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x_train holds 1e\+300, which is beyond float32"):
        load(split(tmp_path / "a.npz", np.full((9, 2), -1e300), np.arange(9) % 3))
