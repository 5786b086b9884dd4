"""Memory that tensors have freed, back to the system."""

from __future__ import annotations

import ctypes
import sys
import time

#: seconds between two times that :func:`return_now_and_then` does it, and how many times longer than it takes
PAUSE, SHARE = 0.5, 10

_next = 0.0


def return_freed_memory() -> None:
    """Let the C library give freed memory back; glibc keeps what lies below tensors that are still alive."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def return_now_and_then() -> None:
    """The same at points where much has been freed, so seldom that it takes a small part of the time."""
    global _next
    start = time.monotonic()
    if start >= _next:
        return_freed_memory()
        stop = time.monotonic()
        _next = stop + max(PAUSE, SHARE * (stop - start))
