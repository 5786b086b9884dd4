"""Random numbers of a run: data orders, and a private state of torch's global generators.

Each purpose has a generator of its own, derived from the run's seed, so that the order of epoch 7 needs none of the six
before it. Nets with dropout draw from torch's global generator; :class:`PrivateRandomState` gives the run its own state of
that generator and restores the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gramscope_lab.data.seeds import derive_seed, generator


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
