"""Unpacking compressed data with a limit, so that a small file cannot fill the memory."""

from __future__ import annotations

import zlib
from pathlib import Path

from gramscope.errors import InputError

#: a compressed file may unpack to this many bytes, or to this many times its own size if that is more
LEAST_LIMIT, MOST_RATIO = 1 << 28, 100
#: compressed streams one after the other in a file; usually there is one
MOST_STREAMS = 100


def unpacked_limit(path: Path) -> int:
    """Most bytes that the content of a compressed file may have."""
    return max(LEAST_LIMIT, MOST_RATIO * path.stat().st_size)


def too_large(path: Path) -> InputError:
    """The error for a file that holds more than its limit."""
    return InputError(
        f"{path} unpacks to more than {unpacked_limit(path):,} bytes, {MOST_RATIO} times its size; unpack it yourself if "
        "you trust it"
    )


def inflate(path: Path, content: bytes | memoryview, limit: int, *, gzipped: bool) -> bytes:
    """The bytes that one or more streams of zlib or gzip data in ``content`` unpack to, at most ``limit`` of them."""
    parts: list[bytes] = []
    rest = bytes(content)
    while rest:
        if len(parts) == MOST_STREAMS:
            raise EOFError(f"it has more than {MOST_STREAMS} compressed parts")
        stream = zlib.decompressobj(31 if gzipped else 15)
        parts.append(stream.decompress(rest, limit + 1))
        limit -= len(parts[-1])
        if limit < 0:
            raise too_large(path)
        if not stream.eof:
            raise EOFError("the compressed data end too early")
        rest = stream.unused_data.lstrip(b"\0") if gzipped else b""
    return b"".join(parts)
