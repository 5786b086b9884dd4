"""Give memory that tensors have freed back to the system."""

from __future__ import annotations

import ctypes
import sys
import time

#: seconds between two calls of the C library, and how many times longer than a call takes
PAUSE, SHARE = 0.5, 10

_next = 0.0


def trim_malloc() -> None:
    """Let the C library return freed memory, so seldom that it takes a small part of the time.

    glibc keeps what lies below tensors that are still alive.
    """
    global _next
    start = time.monotonic()
    if start < _next or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
    stop = time.monotonic()
    _next = stop + max(PAUSE, SHARE * (stop - start))
