"""Any NumPy ``.npz`` file as a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet, from_tensors
from gramscope_lab.data.images import Scale, scaled
from gramscope_lab.data.readers import Array, read_npz

KEYS = ("x_train", "y_train", "x_test", "y_test")


def load_npz(path: Path, *, scale: Scale = "unit", classes: int | None = None) -> DataSet:
    """Read ``x_train, y_train, x_test, y_test``.

    Args:
        path: the file.
        scale: for bytes (``uint8``), which are images: ``[n, c, h, w]``, ``[n, h, w, c]`` with 1 or 3 channels, or
            ``[n, h, w]``. Floats are taken as they are (as float32), other integers and booleans as whole numbers.
        classes: number of classes, where the labels at hand do not show all of them.
    """
    arrays = read_npz(path, KEYS)
    x_train, x_test = arrays["x_train"], arrays["x_test"]
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InputError(
            f"{path}: one sample of x_train is {x_train.shape[1:]}, one of x_test {x_test.shape[1:]}; give one shape "
            "with the axes in one order"
        )
    if x_train.dtype == x_test.dtype == np.uint8 and x_train.ndim > 2 and x_train.size and x_test.size:
        inputs = scaled(_channels_first(x_train), _channels_first(x_test), scale)
    elif scale != "unit":
        raise InputError(f"{path}: scale={scale!r} is for images of bytes; x_train is {x_train.dtype} {x_train.shape}")
    else:
        inputs = _tensor(path, "x_train", x_train), _tensor(path, "x_test", x_test)
    y_train, y_test = (_tensor(path, key, arrays[key]) for key in ("y_train", "y_test"))
    return from_tensors(path.stem, inputs[0], y_train, inputs[1], y_test, classes=classes, description=str(path))


def _channels_first(images: Array) -> Array:
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        return np.moveaxis(images, -1, 1)
    return images


def _tensor(path: Path, key: str, array: Array) -> torch.Tensor:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # infinity is refused by the data set
            return torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8 and array.ndim > 1:
        return torch.from_numpy(array)
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{path}: {key} holds {array.max()}, which is beyond int64; use smaller numbers or floats")
    return torch.from_numpy(array.astype(np.int64))
