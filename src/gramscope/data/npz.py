"""Any NumPy ``.npz`` file as a data set."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gramscope.data.dataset import DataSet, check_same_kind, from_tensors
from gramscope.data.pixels import Scale, scaled
from gramscope.errors import InputError

KEYS = ("x_train", "y_train", "x_test", "y_test")


def load_npz(path: Path, *, scale: Scale = "unit", classes: int | None = None) -> DataSet:
    """Read ``x_train, y_train, x_test, y_test``; object arrays are refused, so no pickle is ever read.

    Args:
        path: the file.
        scale: for bytes (``uint8``), which are images: ``[n, c, h, w]``, ``[n, h, w, c]`` with 1 or 3 channels, or
            ``[n, h, w]``. Floats are taken as they are (as float32), other integers and booleans as whole numbers.
        classes: number of classes, where the labels at hand do not show all of them.
    """
    arrays = _read(path)
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise InputError(f"{path}: {key} is {array.dtype} {array.shape}; numbers with a sample axis are needed")
    x_train, x_test = arrays["x_train"], arrays["x_test"]
    check_same_kind(str(path), str(x_train.dtype), str(x_test.dtype))
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InputError(
            f"{path}: one sample of x_train is {x_train.shape[1:]}, one of x_test {x_test.shape[1:]}; give one shape "
            "with the axes in one order"
        )
    if x_train.dtype == np.uint8 and x_train.ndim > 2 and x_train.size and x_test.size:
        inputs = scaled(_channels_first(x_train), _channels_first(x_test), scale)
    elif scale != "unit":
        raise InputError(f"{path}: scale={scale!r} is for images of bytes; x_train is {x_train.dtype} {x_train.shape}")
    else:
        inputs = _tensor(x_train), _tensor(x_test)
    y_train, y_test = _tensor(arrays["y_train"]), _tensor(arrays["y_test"])
    return from_tensors(path.stem, inputs[0], y_train, inputs[1], y_test, classes=classes, description=str(path))


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("it is no archive of arrays")
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            missing = [key for key in KEYS if key not in file]
            if missing:
                raise InputError(f"{path} has no {', '.join(missing)}; it has {', '.join(file) or 'nothing'}")
            arrays = {key: file[key] for key in KEYS}
            broken = [key for key, array in arrays.items() if not isinstance(array, np.ndarray)]
            if broken:
                raise zipfile.BadZipFile(f"{', '.join(broken)} is no array")
            return arrays
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, InputError):
            raise
        reason = "it holds Python objects" if "pickle" in str(error) else error
        raise InputError(
            f"{path} cannot be read as .npz ({reason}); write it with numpy.savez(path, x_train=…, y_train=…, x_test=…, "
            "y_test=…) from numeric arrays"
        ) from error


def _channels_first(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        return np.moveaxis(images, -1, 1)
    return images


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind == "f":
        return torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8 and array.ndim > 1:
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.astype(np.int64))
