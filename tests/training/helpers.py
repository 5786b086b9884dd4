"""What several training tests need."""

from __future__ import annotations

import signal
from typing import Any

import torch

from gramscope.training.reporter import Reporter
from gramscope.training.trained import Trained


def weights(trained: Trained) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trained.members.values() for p in m.model.parameters()])


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


class StopAfter(Reporter):
    """Interrupts as a user would, during step ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, done: int) -> None:
        if done == self.step:
            signal.raise_signal(signal.SIGINT)
