"""Memory below tensors that are alive goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from gramscope.linalg import budget
from gramscope.linalg.budget import trim_malloc


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps freed memory"
)
def test_freed_memory_goes_back_to_the_system_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_next", 0.0)
    tensors = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each, too small to be returned one by one
    del tensors[:-1]
    before = resident()
    trim_malloc()
    assert before - resident() > 100e6
    assert float(tensors[0].sum()) == 25_000
    pause = budget._next
    trim_malloc()  # too early
    assert budget._next == pause
