"""Memory that tensors have freed, back to the system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Let the C library give freed memory back; glibc keeps what lies below tensors that are still alive."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
