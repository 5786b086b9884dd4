"""Loaders of the image sets that lie in files: digits, MNIST, Fashion-MNIST, SVHN, CIFAR-10 and CIFAR-100."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gramscope.errors import InputError
from gramscope_lab.data import sources
from gramscope_lab.data.batchfile import read_batch
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.idx import read_idx
from gramscope_lab.data.load_request import LoadRequest
from gramscope_lab.data.matfile import read_mat
from gramscope_lab.data.pixels import Bytes, Scale, scaled
from gramscope_lab.data.sources import Source

#: images and labels of one part of a set
Part = tuple[Bytes, npt.NDArray[Any]]


def digits(request: LoadRequest, *, scale: Scale = "unit") -> DataSet:
    """The 1,797 handwritten digits of the UCI set's test half, 8×8, 17 grey levels; every fifth is a test sample."""
    with resources.as_file(resources.files("gramscope_lab.data") / "digits.npz") as path, np.load(path) as file:
        images, labels = file["images"][:, None], file["labels"]
    test = np.arange(len(labels)) % 5 == 4
    return _data_set("digits", (images[~test], labels[~test]), (images[test], labels[test]), 10, scale, top=16)


def mnist(request: LoadRequest, *, scale: Scale = "unit") -> DataSet:
    """60,000 + 10,000 handwritten digits, 28×28."""
    return _idx_set(request, sources.MNIST, scale)


def fashion_mnist(request: LoadRequest, *, scale: Scale = "unit") -> DataSet:
    """60,000 + 10,000 articles of clothing, 28×28."""
    return _idx_set(request, sources.FASHION_MNIST, scale)


def svhn(request: LoadRequest, *, scale: Scale = "unit") -> DataSet:
    """73,257 + 26,032 house numbers, 32×32 in colour; the files' label 10 is the digit 0."""
    paths = request.files(sources.SVHN)
    return _data_set("svhn", _svhn_part(paths["train"]), _svhn_part(paths["test"]), 10, scale)


def cifar10(request: LoadRequest, *, scale: Scale = "unit") -> DataSet:
    """50,000 + 10,000 photographs in 10 classes, 32×32 in colour."""
    parts = [_cifar_part(path, ("labels",), "labels") for path in request.files(sources.CIFAR10).values()]
    train = (np.concatenate([x for x, _ in parts[:-1]]), np.concatenate([y for _, y in parts[:-1]]))
    return _cifar_set("cifar10", train, parts[-1], 10, scale)


def cifar100(request: LoadRequest, *, scale: Scale = "unit", labels: Literal["fine", "coarse"] = "fine") -> DataSet:
    """50,000 + 10,000 photographs in 100 classes, or with ``labels="coarse"`` in 20; 32×32 in colour."""
    if labels not in ("fine", "coarse"):
        raise InputError(f"labels={labels!r} is not known; there are: fine, coarse")
    paths, fields = request.files(sources.CIFAR100), ("coarse_labels", "fine_labels")
    train, test = (_cifar_part(paths[part], fields, f"{labels}_labels") for part in ("train", "test"))
    return _cifar_set("cifar100", train, test, 100 if labels == "fine" else 20, scale)


def _cifar_set(name: str, train: Part, test: Part, classes: int, scale: Scale) -> DataSet:
    images = [(rows.reshape(-1, 3, 32, 32), labels) for rows, labels in (train, test)]
    return _data_set(name, images[0], images[1], classes, scale)


def _data_set(name: str, train: Part, test: Part, classes: int, scale: Scale, top: int = 255) -> DataSet:
    x_train, x_test = scaled(train[0], test[0], scale, top)
    y_train, y_test = (torch.from_numpy(part[1].astype(np.int64)) for part in (train, test))
    return DataSet(name, x_train, y_train, x_test, y_test, classes)


def _idx_set(request: LoadRequest, source: Source, scale: Scale) -> DataSet:
    paths = request.files(source)
    parts = []
    for part in ("train", "test"):
        images, labels = read_idx(paths[f"x_{part}"], 3), read_idx(paths[f"y_{part}"], 1)
        if len(images) != len(labels):
            raise InputError(
                f"{paths[f'x_{part}']} has {len(images)} images, {paths[f'y_{part}']} {len(labels)} labels"
            )
        parts.append((images[:, None], labels))
    return _data_set(source.name, parts[0], parts[1], 10, scale)


def _svhn_part(path: Path) -> Part:
    arrays = read_mat(path)
    if "X" not in arrays or "y" not in arrays:
        raise InputError(f"{path} holds {', '.join(arrays) or 'no arrays'}; the cropped SVHN files hold X and y")
    images, labels = arrays["X"], arrays["y"].ravel()
    if images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8 or images.shape[-1:] != labels.shape:
        raise InputError(
            f"{path}: X is {images.dtype} {images.shape} and y {arrays['y'].shape}; the cropped SVHN files have uint8 "
            "X (32, 32, 3, n) and y (n, 1)"
        )
    return images.transpose(3, 2, 0, 1), labels.astype(np.int64) % 10


def _cifar_part(path: Path, fields: tuple[str, ...], wanted: str) -> Part:
    """Rows of 3,072 bytes and labels, from the binary version (label bytes, then pixel bytes, per record) or Python's."""
    if path.suffix != ".bin":
        batch = read_batch(path)
        if "data" not in batch or wanted not in batch:
            raise InputError(f"{path} holds {', '.join(batch)}; a CIFAR batch has data and {wanted}")
        images, labels = batch["data"], batch[wanted]
        if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < 256 for label in labels):
            raise InputError(f"{path}: {wanted} is not a list of labels")
        labels = np.asarray(labels)
        if not isinstance(images, np.ndarray) or images.shape != (len(labels), 3072):
            found = getattr(images, "shape", type(images).__name__)
            raise InputError(f"{path}: data is {found} for {len(labels)} labels; a CIFAR batch has 3,072 columns")
        return images, labels
    record = len(fields) + 3072
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % record:
        raise InputError(
            f"{path} has {len(content)} bytes, which is not a number of records of {record} bytes: it is truncated or "
            "not a binary CIFAR batch; delete it and fetch it again"
        )
    records = content.reshape(-1, record)
    return records[:, len(fields) :], records[:, fields.index(wanted)]
