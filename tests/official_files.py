"""Small files in the official formats of the downloaded data sets, written as the authors' own tools wrote them."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def random_images(n: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Array, Array]:
    """Bytes ``[n, *shape]`` and labels that show every class at least once if n allows it."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), np.uint8), rng.permutation(np.arange(n) % classes).astype(np.uint8)


def idx_bytes(array: Array) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx_set(folder: Path, arrays: dict[str, Array], *, zipped: bool = True, dotted: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, name in IDX_NAMES.items():
        name = name.replace("-idx", ".idx") if dotted else name
        content = idx_bytes(arrays[part])
        (folder / (name + ".gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)


def cifar_records(images: Array, *labels: Array) -> bytes:
    """Binary version: the label bytes, then the three planes, for each image."""
    return np.concatenate([*(label[:, None] for label in labels), images.reshape(len(images), -1)], 1).tobytes()


def write_cifar10(folder: Path, images: Array, labels: Array) -> None:
    """Six batches of equal size; the last is the test batch."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name, x, y in zip(names, np.split(images, 6), np.split(labels, 6), strict=True):
        (folder / name).write_bytes(cifar_records(x, y))


def tar_bytes(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_svhn(folder: Path, images: Array, labels: Array, name: str, *, compressed: bool = True) -> None:
    """MATLAB 5: X (32, 32, 3, n) and y (n, 1), the digit 0 as label 10."""
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    stored = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    savemat(folder / name, {"X": images.transpose(2, 3, 1, 0), "y": stored}, do_compression=compressed)


def write_celeba(folder: Path, images: list[Array], glasses: list[bool], partition: list[int]) -> None:
    """Pictures [h, w, 3], the list of attributes (two of them here) and the partition."""
    from PIL import Image

    (folder / "img_align_celeba").mkdir(parents=True)
    attributes = [str(len(images)), "Bald Eyeglasses "]
    rows = []
    for index, (image, has, part) in enumerate(zip(images, glasses, partition, strict=True), start=1):
        name = f"{index:06d}.jpg"
        Image.fromarray(image).save(folder / "img_align_celeba" / name, quality=95)
        attributes.append(f"{name} -1 {' 1' if has else '-1'}")
        rows.append(f"{name} {part}")
    (folder / "list_attr_celeba.txt").write_text("\n".join(attributes) + "\n")
    (folder / "list_eval_partition.txt").write_text("\n".join(rows) + "\n")
