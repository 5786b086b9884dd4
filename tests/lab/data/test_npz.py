from __future__ import annotations

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
    save(tmp_path / "good.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for name, options, message in (
        ("none", {}, "no file"),
        ("good", {"scale": "signed"}, "scale='signed' is for images"),
        ("good", {"top": 3}, "has no option top"),
    ):
        with pytest.raises(InputError, match=message):
            load(str(tmp_path / f"{name}.npz"), **options)


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


def test_whole_numbers_beyond_int64_are_refused(tmp_path: Path) -> None:
    x, y = np.array([[2**63]], np.uint64), np.array([0])
    with pytest.raises(InputError, match="x_train holds 9223372036854775808, which is beyond int64"):
        load(save(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x - 1, y_test=y))


def test_numbers_beyond_float32_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x_train contains NaN or infinity"):
        load(split(tmp_path / "a.npz", np.full((9, 2), -1e300), np.arange(9) % 3))
