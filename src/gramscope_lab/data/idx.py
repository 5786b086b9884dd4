"""Reading idx files, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gramscope.errors import InputError
from gramscope_lab.data.unpacking import inflate, unpacked_limit


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An idx file of unsigned bytes, gzipped or not: magic number ``00 00 08 D``, D big-endian sizes, then the bytes."""
    content = path.read_bytes()
    try:
        if path.suffix == ".gz":
            content = inflate(path, content, unpacked_limit(path), gzipped=True)
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path} is truncated or not a gzip file ({error}); delete it and fetch it again") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise InputError(
            f"{path} is not an idx file of bytes with {dimensions} dimensions: it starts with {content[:4].hex(' ')} "
            f"instead of 00 00 08 0{dimensions}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape) or (0 in shape and max(shape) > 1 << 31):  # NumPy's limit, if empty
        raise InputError(
            f"{path} holds {len(content) - header} bytes for {' × '.join(map(str, shape))} values: it is truncated or "
            "damaged; delete it and fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
