"""Reading numeric arrays from MATLAB 5 files (SVHN), compressed or not: only what is needed, and no code is run."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gramscope.errors import InputError

#: data type numbers of the format -> dtype
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
#: array classes 6 to 15 are double, single, int8 to uint64
_NUMERIC_CLASSES = range(6, 16)


class _Malformed(Exception):
    """The bytes are not what the format says."""


def read_mat(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every numeric array of a MATLAB 5 file by name, in MATLAB's shape; other things in the file are passed over."""
    content = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if len(content) < 128 or order is None:
        raise InputError(
            f"{path} is not a MATLAB 5 file (it starts with {content[:20]!r}); fetch it again, or save it with -v7"
        )
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        for kind, data in _elements(memoryview(content)[128:], order):
            for inner, matrix in _elements(_inflate(data), order) if kind == _COMPRESSED else [(kind, data)]:
                if inner == _MATRIX:
                    arrays.update(_matrix(matrix, order))
    except (_Malformed, zlib.error, struct.error, ValueError) as error:
        raise InputError(f"{path} is truncated or damaged ({error}); delete it and fetch it again") from error
    return arrays


def _inflate(data: memoryview) -> memoryview:
    inflater = zlib.decompressobj()
    content = inflater.decompress(data)
    if not inflater.eof:
        raise _Malformed("a compressed element ends too early")
    return memoryview(content)


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The elements in a buffer: type and size, 4 bytes each, then the data, padded to 8 bytes unless compressed.

    Elements of at most 4 bytes may be packed: type and size in 2 bytes each, then the data, 8 bytes in all.
    """
    position = 0
    while position < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, position)
        if kind >> 16:
            kind, size, start, end = kind & 0xFFFF, kind >> 16, position + 4, position + 8
        else:
            start = position + 8
            end = start + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > len(data):
            raise _Malformed(f"an element of {size} bytes ends beyond the file")
        yield kind, data[start : start + size]
        position = end


def _matrix(data: memoryview, order: str) -> dict[str, npt.NDArray[Any]]:
    """A numeric array: its elements are flags, sizes, name and real part, in this order."""
    elements = _elements(data, order)
    flags = _numbers(*next(elements), order)
    if int(flags[0]) & 0xFF not in _NUMERIC_CLASSES:
        return {}
    sizes = _numbers(*next(elements), order)
    name = bytes(next(elements)[1]).decode("ascii", "replace")
    values = _numbers(*next(elements), order)
    return {name: values.reshape(tuple(int(size) for size in sizes), order="F")}


def _numbers(kind: int, data: memoryview, order: str) -> npt.NDArray[Any]:
    if kind not in _DTYPES:
        raise _Malformed(f"unknown data type {kind}")
    return np.frombuffer(data, np.dtype(order + _DTYPES[kind]))
