"""What a run has for itself in torch: data orders, a private state of the global generators, threads and cuDNN settings.

Each purpose has a generator of its own, derived from the run's seed, so that the order of epoch 7 needs none of the six
before it. Nets with dropout draw from torch's global generator; :class:`PrivateRandomState` gives the run its own state of
that generator and restores the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gramscope_lab.data.dataset import derive_seed, generator

if TYPE_CHECKING:
    from gramscope_lab.training.job import Job

#: floating-point operations a step below which one thread is fastest, and one stacked step beats separate ones on a CPU
SMALL_STEP = 5e7
#: the same for one stacked step on a GPU, of nets that are all held there
SMALL_STEP_ON_GPU = 1e9


def epoch_order(seed: int, epoch: int, n: int) -> Tensor:
    """The order of the ``n`` samples in an epoch, ``[n]`` on the CPU; the same for every device."""
    return torch.randperm(n, generator=generator(seed, "order", epoch))


class PrivateRandomState:
    """A run's own state of torch's global generators (dropout, user factories), on the CPU and one device."""

    def __init__(self, seed: int, purpose: str, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._seed = derive_seed(seed, purpose)
        self._states: dict[str, Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the run's state in, and the caller's back afterwards, also after an exception."""
        cuda = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            if self._states:
                self._set(self._states)
            else:
                torch.default_generator.manual_seed(self._seed)
                for device in cuda:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(self._seed)
            try:
                yield
            finally:
                self._states = self.current()

    def current(self) -> dict[str, Tensor]:
        """The states as they are now, while active; what a checkpoint stores."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def load(self, states: dict[str, Tensor]) -> None:
        """Continue from stored states the next time it is active."""
        self._states = {name: state.cpu() for name, state in states.items()}
        torch.Generator().set_state(self._states["cpu"])  # raises now if it is none

    def _set(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)


def operations_per_step(job: Job) -> float:
    """Rough floating-point operations of one step of a fully connected net: 6 per parameter and sample."""
    return 6.0 * sum(p.numel() for p in job.model.parameters()) * job.plan.batch_size


@contextmanager
def torch_settings(jobs: Sequence[Job]) -> Iterator[None]:
    """One thread for small steps on a CPU, where synchronising threads costs more than they gain; deterministic cuDNN
    kernels on a GPU. The user's settings return afterwards."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    before = cudnn.deterministic, cudnn.benchmark
    try:
        if jobs[0].device.type != "cpu":
            cudnn.deterministic, cudnn.benchmark = True, False
        elif sum(map(operations_per_step, jobs)) <= SMALL_STEP:
            torch.set_num_threads(1)
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
