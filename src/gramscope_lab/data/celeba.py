"""CelebA: one attribute as a two-class problem ([NFA] Fig. 9 uses glasses, a balanced subset of 7,500)."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gramscope.errors import InputError, MissingExtraError
from gramscope_lab.data import sources
from gramscope_lab.data.dataset import DataSet
from gramscope_lab.data.load_request import LoadRequest
from gramscope_lab.data.pixels import Bytes, Scale, scaled

#: bytes of one packed picture; CelebA's have about 10,000
_MOST_PICTURE = 1 << 25


def celeba(
    request: LoadRequest,
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
        attribute: one of the 40 columns of ``list_attr_celeba.txt``.
        n_train, n_test: samples drawn from the official training and test partition; ``None``: as many as there are.
        balanced: as many samples with the attribute as without.
        image_size: side of the images: the central square of the 178×218 picture, reduced.
        grey: one channel instead of three.
        scale: see :mod:`gramscope_lab.data.pixels`.
    """
    paths = request.files(sources.CELEBA)
    labels = _attribute(paths["attributes"], attribute)
    partition = _partition(paths["partition"])
    generator = request.generator()
    parts: list[tuple[Bytes, Tensor]] = []
    with _pictures(paths["images"]) as open_picture:
        for number, part, count in ((0, "training", n_train), (2, "test", n_test)):
            names = [name for name in labels if partition.get(name) == number]
            values = torch.tensor([labels[name] for name in names], dtype=torch.int64)
            chosen = _choose(values, count, balanced, generator, f"CelebA's {part} partition, {attribute}")
            pictures = [_decode(open_picture(names[i]), names[i], image_size, grey) for i in chosen.tolist()]
            parts.append((np.stack(pictures), values[chosen]))
    (train, y_train), (test, y_test) = parts
    x_train, x_test = scaled(train, test, scale)
    return DataSet("celeba", x_train, y_train, x_test, y_test, 2)


def _attribute(path: Path, attribute: str) -> dict[str, int]:
    """File name → 0 or 1. The file: number of images, names of the attributes, then a name and ±1 for each."""
    lines = _read_text(path).splitlines()
    columns = lines[1].split() if len(lines) > 1 else []
    if not columns or not re.fullmatch(r"[0-9]{1,9}", lines[0].strip()):
        raise InputError(f"{path} is not CelebA's list of attributes: a count and a line of names come first")
    if attribute not in columns:
        raise InputError(f"attribute={attribute!r} is not one of CelebA's: {', '.join(columns)}")
    if len(lines) - 2 != int(lines[0]):
        raise InputError(f"{path} announces {lines[0].strip()} images and lists {len(lines) - 2}: it is truncated")
    rows = [line.split() for line in lines[2:]]
    wrong = next((number for number, row in enumerate(rows, start=3) if len(row) != len(columns) + 1), None)
    if wrong is not None:
        raise InputError(f"{path}, line {wrong} has no name and {len(columns)} values; fetch the file again")
    column = columns.index(attribute) + 1
    return {row[0]: int(row[column] == "1") for row in rows}


def _partition(path: Path) -> dict[str, int]:
    """File name → 0 (training), 1 (validation) or 2 (test)."""
    try:
        rows = (line.split() for line in _read_text(path).splitlines())
        return {name: int(number) for name, number in rows}
    except ValueError as error:
        raise InputError(f"{path} is not CelebA's partition: a file name and 0, 1 or 2 on each line") from error


def _read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _choose(values: Tensor, count: int | None, balanced: bool, generator: torch.Generator, what: str) -> Tensor:
    """Indices of ``count`` samples, drawn without replacement, half of each label if balanced; in random order."""
    order = torch.randperm(len(values), generator=generator)
    if balanced:
        groups = [order[values[order] == label] for label in (0, 1)]
        most = 2 * min(len(group) for group in groups)
    else:
        groups, most = [order], len(order)
    count = most if count is None else count
    if not 0 < count <= most:
        raise InputError(f"{what}: {count} {'balanced ' if balanced else ''}samples wanted, {most} are there")
    if balanced:
        order = torch.cat([groups[0][: count // 2], groups[1][: count - count // 2]])
        return order[torch.randperm(len(order), generator=generator)]
    return order[:count]


@contextmanager
def _pictures(path: Path) -> Iterator[Callable[[str], bytes]]:
    """A function from file name to the bytes of the picture, from the folder or straight from the zip file."""
    if path.is_dir():

        def from_folder(name: str) -> bytes:
            if Path(name).name != name or not (path / name).is_file():
                raise InputError(f"{path} has no {name}, which the list of attributes names; unpack it again")
            return (path / name).read_bytes()

        yield from_folder
        return
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise InputError(f"{path} is truncated or not a zip file ({error}); delete it and fetch it again") from error
    with archive:

        def from_archive(name: str) -> bytes:
            try:
                member = archive.getinfo(f"img_align_celeba/{name}")
                if member.file_size > _MOST_PICTURE:
                    raise zipfile.BadZipFile(f"it has {member.file_size} bytes")
                return archive.read(member)
            except (KeyError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                raise InputError(f"{path} has no good img_align_celeba/{name} ({error}); fetch it again") from error

        yield from_archive


def _decode(content: bytes, name: str, side: int, grey: bool) -> npt.NDArray[Any]:
    """A picture as bytes ``[channels, side, side]``: the central square, reduced."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError('CelebA\'s JPEG pictures need Pillow: pip install "gramscope[celeba]"') from error
    try:
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
            square = min(width, height)
            left, top = (width - square) // 2, (height - square) // 2
            converted = picture.convert("L" if grey else "RGB")
            reduced = converted.resize((side, side), Image.Resampling.BOX, (left, top, left + square, top + square))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{name} is not a readable picture ({error}); unpack or fetch the pictures again") from error
    pixels = np.asarray(reduced)
    return pixels[None] if grey else np.moveaxis(pixels, -1, 0)
