"""A net whose training waits until a file is there, so that a test of processes acts while they train, on any machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from gramscope_lab.training import sweep


class Gated(nn.Module):
    """A linear net that waits in step ``step`` of training."""

    def __init__(self, gates: list[str], step: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.gates, self.left = [Path(gate) for gate in gates], step

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        while self.left < 0 and not any(gate.exists() for gate in self.gates):
            time.sleep(0.01)
        return self.layer(x.flatten(1))


def build(gates: list[str], parent: int, step: int = 6) -> nn.Module:
    """The net; a process other than the ``parent`` looks after every step whether it is to stop."""
    if os.getpid() != parent:
        sweep.LOOK_EVERY = 0.0
    return Gated(gates, step)
