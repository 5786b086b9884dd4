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
from gramscope_lab.data.unpacking import inflate, unpacked_limit

#: data type numbers of the format -> dtype
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
#: elements in a buffer; SVHN's files have two, and each of them at most six
_MOST_ELEMENTS = 10_000
#: array classes 6 to 15 are double, single, int8 to uint64
_NUMERIC_CLASSES = range(6, 16)


class _Malformed(Exception):
    """The bytes are not what the format says."""


def read_mat(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every numeric array of a MATLAB 5 file by name, in MATLAB's shape; everything else in the file is skipped."""
    content = path.read_bytes()
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if len(content) < 128 or order is None:
        raise InputError(
            f"{path} is not a MATLAB 5 file (it starts with {content[:20]!r}); fetch it again, or save it with -v7"
        )
    arrays: dict[str, npt.NDArray[Any]] = {}
    left = unpacked_limit(path)
    try:
        for kind, data in _elements(memoryview(content)[128:], order):
            matrices = [(kind, data)]
            if kind == _COMPRESSED:
                inflated = inflate(path, data, left, gzipped=False)
                left -= len(inflated)
                matrices = list(_elements(memoryview(inflated), order))
            for inner, matrix in matrices:
                if inner == _MATRIX:
                    arrays.update(_matrix(matrix, order))
    except (_Malformed, EOFError, zlib.error, struct.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is truncated or damaged ({error}); delete it and fetch it again") from error
    return arrays


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The elements in a buffer: type and size, 4 bytes each, then the data, padded to 8 bytes unless compressed.

    Elements of at most 4 bytes may be packed: type and size in 2 bytes each, then the data, 8 bytes in all.
    """
    position = count = 0
    while position < len(data):
        count += 1
        if count > _MOST_ELEMENTS:
            raise _Malformed(f"it has more than {_MOST_ELEMENTS} elements")
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
    elements = list(_elements(data, order))
    if len(elements) < 1:
        raise _Malformed("an array without flags")
    flags = _numbers(*elements[0], order)
    if not len(flags) or int(flags[0]) & 0xFF not in _NUMERIC_CLASSES:
        return {}
    if len(elements) < 4:
        raise _Malformed("an array without sizes, name or values")
    sizes, values = _numbers(*elements[1], order), _numbers(*elements[3], order)
    name = bytes(elements[2][1]).decode("ascii", "replace")
    shape = tuple(int(size) for size in sizes)
    if min(shape, default=0) < 0 or len(shape) > 32:
        raise _Malformed(f"an array of shape {shape[:4]}")
    return {name: values.reshape(shape, order="F")}


def _numbers(kind: int, data: memoryview, order: str) -> npt.NDArray[Any]:
    if kind not in _DTYPES:
        raise _Malformed(f"unknown data type {kind}")
    return np.frombuffer(data, np.dtype(order + _DTYPES[kind]))
