"""Reading data files in their authors' formats. No code in a file is run."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gramscope.errors import InputError

Array = npt.NDArray[Any]


@contextmanager
def reading(path: Path, form: str, remedy: str = "delete it and fetch it again") -> Iterator[None]:
    """Turn whatever a library raises on missing, truncated or damaged content into one error that names the file."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be read as {form} ({type(error).__name__}: {error}); {remedy}") from error


def read_idx(path: Path, dimensions: int) -> Array:
    """An idx file of bytes, gzipped or not: magic number ``00 00 08 D``, D big-endian sizes, then the values."""
    with (
        reading(path, "an idx file"),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file,
    ):
        start = file.read(4)
        if start != bytes((0, 0, 8, dimensions)):
            raise InputError(
                f"{path} is not an idx file of bytes with {dimensions} dimensions: it starts with {start.hex(' ')} "
                f"instead of 00 00 08 0{dimensions}"
            )
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        size = math.prod(shape)
        content = file.read(size + 1)
        if len(content) != size:
            sizes = " × ".join(map(str, shape))
            raise InputError(f"{path} has too {'many' if len(content) > size else 'few'} bytes for {sizes} values")
        return np.frombuffer(content, np.uint8).reshape(shape)


def read_cifar(path: Path, labels: int) -> tuple[Array, Array]:
    """The binary version of CIFAR: for each image its label bytes, then 3,072 pixels; images ``[n, 3, 32, 32]``, labels."""
    record = labels + 3072
    with reading(path, "a binary CIFAR batch"):
        content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % record:
        raise InputError(
            f"{path} has {len(content)} bytes, which is not a number of records of {record} bytes: it is truncated or "
            "not a binary CIFAR batch; delete it and fetch it again"
        )
    records = content.reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, :labels]


def read_svhn(path: Path) -> tuple[Array, Array]:
    """Images ``[n, 3, 32, 32]`` and labels of a MATLAB file of SVHN; nothing but two numeric arrays is read."""
    from scipy.io import loadmat, whosmat

    with reading(path, "a MATLAB file"):
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape, kind in whosmat(path, appendmat=False):
            if kind in ("uint8", "double"):
                shapes.setdefault(name, shape)
        wanted = {"X": (32, 32, 3, *shapes.get("X", ())[3:4]), "y": (*shapes.get("X", ())[3:4], 1)}
        if {name: shapes.get(name) for name in wanted} != wanted:
            present = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no numeric arrays"
            raise InputError(f"{path} holds {present}; the cropped SVHN files hold X (32, 32, 3, n) and y (n, 1)")
        arrays = loadmat(path, appendmat=False, variable_names=list(wanted))
        images, labels = arrays["X"], arrays["y"]
        if images.dtype != np.uint8:
            raise InputError(f"{path}: X is {images.dtype}; the pixels of SVHN are bytes")
        return images.transpose(3, 2, 0, 1), labels.ravel().astype(np.int64)


def read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, Array]:
    """Arrays of numbers by name from NumPy's format."""
    arguments = ", ".join(f"{key}=…" for key in keys)
    with (
        reading(path, ".npz", f"write it with numpy.savez(path, {arguments}) from numeric arrays"),
        path.open("rb") as file,
    ):
        archive = np.load(file, allow_pickle=False)
        missing = [key for key in keys if key not in archive.files]
        if missing:
            raise InputError(f"{path} has no {', '.join(missing)}; it has {', '.join(archive.files[:10]) or 'nothing'}")
        arrays = {key: np.asarray(archive[key]) for key in keys}
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.ndim == 0:
            raise InputError(f"{path}: {key} is {array.dtype} {array.shape}; numbers with a sample axis are needed")
    return arrays
