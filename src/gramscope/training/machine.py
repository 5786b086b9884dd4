"""Settings of torch that a run needs while it goes on, given back afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gramscope.training.job import Job

#: operations in a step below which a second thread costs more than it gives, and a stack of runs pays on a CPU
SMALL_STEP = 5e7


def arithmetic(job: Job) -> float:
    """Roughly, the floating-point operations of one step of a fully connected net: 6 per parameter and sample."""
    return 6.0 * sum(p.numel() for p in job.model.parameters()) * job.plan.batch_size


@contextmanager
def machine_settings(jobs: Sequence[Job]) -> Iterator[None]:
    """One thread for small steps on a CPU (threads that wait for each other are slow, above all on a busy machine);
    deterministic kernels of cuDNN on a GPU."""
    if jobs[0].device.type == "cpu":
        threads = torch.get_num_threads()
        try:
            if sum(map(arithmetic, jobs)) <= SMALL_STEP:
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)
        return
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


class Stopwatch:
    """Time spent training; evaluating, measuring and saving do not count."""

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
        """What is done inside does not count, work still queued on a GPU before it does."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._before, self._began = self.seconds, None
        try:
            yield
        finally:
            self._began = time.perf_counter()
