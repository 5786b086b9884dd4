"""Threads and cuDNN settings of torch while a run trains; the user's settings return afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gramscope_lab.training.job import Job

#: floating-point operations a step below which one thread is fastest, and one stacked step beats separate ones on a CPU
SMALL_STEP = 5e7


def operations_per_step(job: Job) -> float:
    """Rough floating-point operations of one step of a fully connected net: 6 per parameter and sample."""
    return 6.0 * sum(p.numel() for p in job.model.parameters()) * job.plan.batch_size


@contextmanager
def torch_settings(jobs: Sequence[Job]) -> Iterator[None]:
    """One thread for small steps on a CPU, where synchronising threads costs more than they gain; deterministic cuDNN
    kernels on a GPU."""
    if jobs[0].device.type == "cpu":
        threads = torch.get_num_threads()
        try:
            if sum(map(operations_per_step, jobs)) <= SMALL_STEP:
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
