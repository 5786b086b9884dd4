"""Many captures and many steps of a monitor leave no memory behind."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramscope as gs

CAPTURES, STEPS = 150, 2000
#: bytes that may be left: of Python objects, and of the whole process
OBJECTS, RESIDENT = 100_000, 8 << 20
STATUS = Path("/proc/self/statm")
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
Y = torch.arange(64) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def resident() -> int:
    return int(STATUS.read_text().split()[1]) * 4096 if STATUS.exists() else 0


def growth(call: Callable[[], object], times: int) -> tuple[int, int]:
    """Python's and the process's bytes after ``times`` calls, beyond those after the first tenth of them."""
    for _ in range(times // 10):
        call()
    gc.collect()
    tracemalloc.start()
    try:
        objects, pages = tracemalloc.get_traced_memory()[0], resident()
        for _ in range(times - times // 10):
            call()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - objects, resident() - pages
    finally:
        tracemalloc.stop()


def stays_flat(once: Callable[[], object], times: int, what: str, record_property: Any) -> None:
    """Repeat something, hand its growth over to the page of reliability, and check it."""
    objects, pages = growth(once, times)
    record_property("side effect", f"{what}|{times}|{objects} bytes of Python objects, {pages} bytes of the process")
    assert objects < OBJECTS
    assert pages < RESIDENT


@pytest.fixture
def model() -> nn.Module:
    return network()


def test_captures(model: nn.Module, record_property: Any) -> None:
    def once() -> None:
        with gs.capture(model) as tape:
            tape.backward(F.cross_entropy(model(X), Y))

    stays_flat(once, CAPTURES, "captures", record_property)


def test_steps_of_a_monitor(model: nn.Module, record_property: Any) -> None:
    monitor = gs.Monitor(model, (X, Y), F.cross_entropy, measures=["weight_norm"], every=100)

    def once() -> None:
        monitor.step()
        monitor.records.clear()  # records are kept on purpose

    stays_flat(once, STEPS, "steps of a monitor", record_property)
