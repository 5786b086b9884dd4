"""The time spent training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds of training; :meth:`paused` leaves out evaluating, measuring and saving."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self._before = seconds
        self._began: float | None = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before if self._began is None else self._before + time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside; GPU work queued before still counts."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._before, self._began = self.seconds, None
        try:
            yield
        finally:
            self._began = time.perf_counter()
