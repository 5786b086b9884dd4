"""Memory below tensors that are alive goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from gramscope.statistics import freed_memory
from gramscope.statistics.freed_memory import return_freed_memory, return_now_and_then


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps freed memory"
)
def test_freed_memory_goes_back_to_the_system() -> None:
    tensors = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each, too small to be returned one by one
    del tensors[:-1]
    before = resident()
    return_freed_memory()
    assert before - resident() > 100e6
    assert float(tensors[0].sum()) == 25_000


def test_it_is_done_so_seldom_that_it_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [100.0], []

    def slow() -> None:
        times.append(now[0])
        now[0] += 0.2

    monkeypatch.setattr(freed_memory, "_next", 0.0)
    monkeypatch.setattr(freed_memory, "return_freed_memory", slow)
    monkeypatch.setattr(freed_memory.time, "monotonic", lambda: now[0])
    for _ in range(100):
        return_now_and_then()
        now[0] += 0.1
    assert times[0] == 100.0
    assert len(times) == 5  # every 2.2 s of 10 s
