"""Any NumPy ``.npz`` file as a data set."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib import format as npy

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet, check_same_kind, from_tensors
from gramscope_lab.data.pixels import Scale, scaled
from gramscope_lab.data.unpacking import too_large, unpacked_limit

#: what zipfile and NumPy raise for damaged files
_NPZ_ERRORS = (
    ValueError, TypeError, KeyError, OSError, EOFError, SyntaxError, MemoryError, RecursionError, OverflowError,
    NotImplementedError, RuntimeError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
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
        inputs = _tensor(path, "x_train", x_train), _tensor(path, "x_test", x_test)
    y_train, y_test = (_tensor(path, key, arrays[key]) for key in ("y_train", "y_test"))
    return from_tensors(path.stem, inputs[0], y_train, inputs[1], y_test, classes=classes, description=str(path))


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            found = {file.filename.removesuffix(".npy"): file for file in archive.infolist()}
            missing = [key for key in KEYS if key not in found]
            if missing:
                names = [*list(found)[:10], *["…"][: len(found) // 11]]
                raise InputError(f"{path} has no {', '.join(missing)}; it has {', '.join(names) or 'nothing'}")
            if sum(found[key].file_size for key in KEYS) > unpacked_limit(path):
                raise too_large(path)
            return {key: _array(archive, found[key]) for key in KEYS}
    except InputError:
        raise
    except _NPZ_ERRORS as error:
        raise InputError(
            f"{path} cannot be read as .npz ({error}); write it with numpy.savez(path, x_train=…, y_train=…, x_test=…, "
            "y_test=…) from numeric arrays"
        ) from error


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """One array of the file: a header with its type and shape, then its values. Python objects are refused."""
    name, size = member.filename, member.file_size
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without a limit
        raise ValueError(f"{name} is packed by method {member.compress_type}, which NumPy does not write")
    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has format {version}")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects")
        header = file.tell()
        if dtype.itemsize * math.prod(shape) != size - header or min(shape, default=0) < 0:
            raise ValueError(f"{name} has {size - header} bytes for {dtype} {shape}")
        values = np.frombuffer(bytearray(file.read(size - header)), dtype)
    return values.reshape(shape, order="F" if fortran else "C")


def _channels_first(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        return np.moveaxis(images, -1, 1)
    return images


def _tensor(path: Path, key: str, array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            numbers = array.astype(np.float32)
        if array.size and np.isinf(numbers).any() and not np.isinf(array).any():
            raise InputError(f"{path}: {key} holds {np.abs(array).max():.3g}, which is beyond float32; rescale it")
        return torch.from_numpy(numbers)
    if array.dtype == np.uint8 and array.ndim > 1:
        return torch.from_numpy(array.copy())
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(
            f"{path}: {key} holds {int(array.max())}, which is beyond int64; use smaller whole numbers or floats"
        )
    return torch.from_numpy(array.astype(np.int64))
