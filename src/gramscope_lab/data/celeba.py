"""CelebA: one attribute as a two-class problem ([NFA] Fig. 9 uses glasses, a balanced subset of 7,500)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.downloads import Files
from gramscope_lab.data.images import Array, Labelled, Scale, image_set, reading


def celeba(
    files: Files,
    generator: torch.Generator,
    *,
    attribute: str = "Eyeglasses",
    n_train: int | None = 7500,
    n_test: int | None = 2000,
    balanced: bool = True,
    image_size: int = 64,
    grey: bool = False,
    scale: Scale = "unit",
) -> DataSet:
    """Aligned faces, label 1 where the attribute is present.

    Args:
        files: the lists of attributes and of partitions, and the pictures as a folder or a zip file.
        generator: draws the samples.
        attribute: one of the 40 columns of ``list_attr_celeba.txt``.
        n_train, n_test: samples drawn from the official training and test partition; ``None``: as many as there are.
        balanced: as many samples with the attribute as without.
        image_size: side of the images: the central square of the 178×218 picture, reduced.
        grey: one channel instead of three.
        scale: see :data:`gramscope_lab.data.images.Scale`.
    """
    labels = _attribute(files["attributes"], attribute)
    partition = _partition(files["partition"])
    open_picture = _pictures(files["images"])

    def split(number: int, description: str, count: int | None) -> Labelled:
        names = [name for name in labels if partition.get(name) == number]
        values = torch.tensor([labels[name] for name in names], dtype=torch.int64)
        chosen = _choose(values, count, balanced, generator, f"CelebA's {description} partition, {attribute}")
        pictures = [_decode(open_picture(names[i]), names[i], image_size, grey) for i in chosen.tolist()]
        return np.stack(pictures), values[chosen].numpy()

    return image_set("celeba", split(0, "training", n_train), split(2, "test", n_test), 2, scale)


def _attribute(path: Path, attribute: str) -> dict[str, int]:
    """File name → 0 or 1. The file: number of images, names of the attributes, then a name and ±1 for each."""
    lines = [line.split() for line in _text(path).splitlines()]
    columns, rows = lines[1] if len(lines) > 1 else [], lines[2:]
    if not columns or lines[0] != [str(len(rows))] or any(len(row) != len(columns) + 1 for row in rows):
        raise InputError(
            f"{path} is truncated or not CelebA's list of attributes, which has the number of pictures, a line of names, "
            "then a file name and a value for each name; fetch it again"
        )
    if attribute not in columns:
        raise InputError(f"attribute={attribute!r} is not one of CelebA's: {', '.join(columns)}")
    column = columns.index(attribute) + 1
    return {row[0]: int(row[column] == "1") for row in rows}


def _partition(path: Path) -> dict[str, int]:
    """File name → 0 (training), 1 (validation) or 2 (test)."""
    with reading(path, "CelebA's partition, a file name and 0, 1 or 2 on each line"):
        return {name: int(number) for name, number in (line.split() for line in _text(path).splitlines())}


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _choose(values: Tensor, count: int | None, balanced: bool, generator: torch.Generator, name: str) -> Tensor:
    """Indices of ``count`` samples, drawn without replacement, half of each label if balanced; in random order."""
    order = torch.randperm(len(values), generator=generator)
    if balanced:
        groups = [order[values[order] == label] for label in (0, 1)]
        most = 2 * min(len(group) for group in groups)
    else:
        groups, most = [order], len(order)
    count = most if count is None else count
    if not 0 < count <= most:
        raise InputError(f"{name}: {count} {'balanced ' if balanced else ''}samples wanted, {most} are there")
    if balanced:
        order = torch.cat([groups[0][: count // 2], groups[1][: count - count // 2]])
        return order[torch.randperm(len(order), generator=generator)]
    return order[:count]


def _pictures(path: Path) -> Callable[[str], bytes]:
    """A function from file name to the bytes of the picture, from the folder or straight from the zip file."""

    def from_folder(name: str) -> bytes:
        if Path(name).name != name or not (path / name).is_file():
            raise InputError(f"{path} has no {name}, which the list of attributes names; unpack it again")
        return (path / name).read_bytes()

    def from_archive(name: str) -> bytes:
        with reading(path, f"a zip file with img_align_celeba/{name}"):
            return archive.read(f"img_align_celeba/{name}")

    if path.is_dir():
        return from_folder
    with reading(path, "a zip file"):
        archive = zipfile.ZipFile(path)
    return from_archive


def _decode(content: bytes, name: str, side: int, grey: bool) -> Array:
    """A picture as bytes ``[channels, side, side]``: the central square, reduced."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError('CelebA\'s JPEG pictures need Pillow: pip install "gramscope[celeba]"') from error
    try:
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
            square = min(width, height)
            left, top = (width - square) // 2, (height - square) // 2
            converted = picture.convert("L" if grey else "RGB")
            reduced = converted.resize((side, side), Image.Resampling.BOX, (left, top, left + square, top + square))
    except Exception as error:
        raise InputError(f"{name} is not a readable picture ({error}); unpack or fetch the pictures again") from error
    pixels = np.asarray(reduced)
    return pixels[None] if grey else np.moveaxis(pixels, -1, 0)
