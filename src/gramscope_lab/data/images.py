"""Image sets that lie in files, any ``.npz`` file, and the documented ``scale`` from bytes to floats.

Files are read in their authors' formats; no code in a file is run.
"""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope_lab.data.dataset import DataSet, from_tensors
from gramscope_lab.data.downloads import Files

Array = npt.NDArray[Any]
#: ``unit``: [0, 1]; ``signed``: [−1, 1]; ``standard``: mean 0 and variance 1 per channel over the training set
Scale: TypeAlias = Literal["unit", "signed", "standard"]
#: arrays of an ``.npz`` file
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
#: images ``[n, c, h, w]`` and labels ``[n]``
Labelled: TypeAlias = tuple[Array, Array]


def digits(files: Files, generator: torch.Generator, *, scale: Scale = "unit") -> DataSet:
    """The 1,797 handwritten digits of the UCI set's test half, 8×8, 17 grey levels; every fifth is a test sample."""
    with resources.as_file(resources.files("gramscope_lab.data") / "digits.npz") as path:
        arrays = read_npz(path, ("images", "labels"))
    images, labels = arrays["images"][:, None], arrays["labels"]
    test = np.arange(len(labels)) % 5 == 4
    return image_set("digits", (images[~test], labels[~test]), (images[test], labels[test]), 10, scale, top=16)


def mnist(files: Files, generator: torch.Generator, *, scale: Scale = "unit") -> DataSet:
    """60,000 + 10,000 handwritten digits, 28×28."""
    return image_set("mnist", _idx_images(files, "train"), _idx_images(files, "test"), 10, scale)


def fashion_mnist(files: Files, generator: torch.Generator, *, scale: Scale = "unit") -> DataSet:
    """60,000 + 10,000 articles of clothing, 28×28."""
    return image_set("fashion-mnist", _idx_images(files, "train"), _idx_images(files, "test"), 10, scale)


def svhn(files: Files, generator: torch.Generator, *, scale: Scale = "unit") -> DataSet:
    """73,257 + 26,032 house numbers, 32×32 in colour; the files' label 10 is the digit 0."""
    (x_train, y_train), (x_test, y_test) = (read_svhn(files[split]) for split in ("train", "test"))
    return image_set("svhn", (x_train, y_train % 10), (x_test, y_test % 10), 10, scale)


def cifar10(files: Files, generator: torch.Generator, *, scale: Scale = "unit") -> DataSet:
    """50,000 + 10,000 photographs in 10 classes, 32×32 in colour."""
    *train, (x_test, y_test) = (read_cifar(path, 1) for path in files.values())
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    return image_set("cifar10", (x_train, y_train[:, 0]), (x_test, y_test[:, 0]), 10, scale)


def cifar100(
    files: Files, generator: torch.Generator, *, scale: Scale = "unit", labels: Literal["fine", "coarse"] = "fine"
) -> DataSet:
    """50,000 + 10,000 photographs in 100 classes, or with ``labels="coarse"`` in 20; 32×32 in colour."""
    if labels not in ("fine", "coarse"):
        raise InputError(f"labels={labels!r} is not known; there are: fine, coarse")
    column, classes = (1, 100) if labels == "fine" else (0, 20)
    (x_train, y_train), (x_test, y_test) = (read_cifar(files[split], 2) for split in ("train", "test"))
    return image_set("cifar100", (x_train, y_train[:, column]), (x_test, y_test[:, column]), classes, scale)


def _idx_images(files: Files, split: str) -> Labelled:
    image_file, label_file = files[f"x_{split}"], files[f"y_{split}"]
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise InputError(f"{image_file} has {len(images)} images, {label_file} {len(labels)} labels")
    return images[:, None], labels


def image_set(name: str, train: Labelled, test: Labelled, classes: int, scale: Scale, top: int = 255) -> DataSet:
    """A data set from images of bytes 0 … ``top`` and labels."""
    x_train, x_test = scaled(train[0], test[0], scale, top)
    y_train, y_test = (torch.from_numpy(labels.astype(np.int64)) for _, labels in (train, test))
    return DataSet(name, x_train, y_train, x_test, y_test, classes)


def scaled(train: Array, test: Array, scale: Scale = "unit", top: int = 255) -> tuple[Tensor, Tensor]:
    """Images ``[n, c, h, w]`` of bytes 0 … ``top`` as float32 ``(x − centre)/spread``, one pair for train and test."""
    channels = train.shape[1]
    if scale == "unit":
        centre, spread = np.zeros(channels), np.full(channels, float(top))
    elif scale == "signed":
        centre, spread = np.full(channels, top / 2), np.full(channels, top / 2)
    elif scale == "standard":  # exact, from counts of the 256 values
        planes = _tensor(train).unbind(1)
        counts = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in planes]).numpy()
        values, total = np.arange(256), counts.sum(1)
        centre = counts @ values / total
        spread = np.sqrt(counts @ values**2 / total - centre**2)
        if not (spread > 0).all():
            raise InputError(f"scale='standard': channel {int(np.argmin(spread))} is constant over the training set")
    else:
        raise InputError(f"scale={scale!r} is not known; there are: unit, signed, standard")
    return _affine(train, centre, spread), _affine(test, centre, spread)


def _affine(images: Array, centre: Array, spread: Array) -> Tensor:
    x = _tensor(images).to(torch.float32)
    if centre.any():
        x.sub_(torch.from_numpy(centre).float()[:, None, None])
    return x.div_(torch.from_numpy(spread).float()[:, None, None])


def _tensor(images: Array) -> Tensor:
    return torch.from_numpy(np.require(images, requirements=["C", "W"]))


# -- any .npz file ------------------------------------------------------------------------------------------------
def load_npz(path: Path, *, scale: Scale = "unit", classes: int | None = None) -> DataSet:
    """Read ``x_train, y_train, x_test, y_test``.

    Args:
        path: the file.
        scale: for bytes (``uint8``), which are images: ``[n, c, h, w]``, ``[n, h, w, c]`` with 1 or 3 channels, or
            ``[n, h, w]``. Floats are taken as they are (as float32), other integers and booleans as whole numbers.
        classes: number of classes, where the labels at hand do not show all of them.
    """
    arrays = read_npz(path, NPZ_KEYS)
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
        inputs = _array(path, "x_train", x_train), _array(path, "x_test", x_test)
    y_train, y_test = (_array(path, key, arrays[key]) for key in ("y_train", "y_test"))
    return from_tensors(path.stem, inputs[0], y_train, inputs[1], y_test, classes=classes, description=str(path))


def _channels_first(images: Array) -> Array:
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        return np.moveaxis(images, -1, 1)
    return images


def _array(path: Path, key: str, array: Array) -> torch.Tensor:
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # infinity is refused by the data set
            return torch.from_numpy(array.astype(np.float32))
    if array.dtype == np.uint8 and array.ndim > 1:
        return torch.from_numpy(array)
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{path}: {key} holds {array.max()}, which is beyond int64; use smaller numbers or floats")
    return torch.from_numpy(array.astype(np.int64))


# -- file formats -------------------------------------------------------------------------------------------------
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
    from scipy.io import loadmat

    with reading(path, "a MATLAB file"):
        arrays = loadmat(path, appendmat=False, variable_names=["X", "y"])
        images, labels = (arrays.get(name, np.empty(0)) for name in "Xy")
        if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)) or labels.dtype.kind not in "uif":
            raise InputError(
                f"{path} holds X {images.dtype} {images.shape} and y {labels.dtype} {labels.shape}; the cropped SVHN files "
                "hold bytes X (32, 32, 3, n) and numbers y (n, 1)"
            )
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
