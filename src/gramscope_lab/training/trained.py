"""What training returns: nets with their final weights, and their records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gramscope_lab.training.config import TrainConfig


@dataclass(frozen=True)
class Member:
    """One trained run: its net with the final weights, on the training device or the CPU, and its records."""

    name: str
    config: TrainConfig
    model: nn.Module = field(repr=False)
    records: Sequence[dict[str, Any]] = field(repr=False)

    def last(self, key: str) -> Any:
        """The newest recorded value of ``key``, such as ``test_accuracy``; ``None`` if it was never recorded."""
        return next((record[key] for record in reversed(self.records) if key in record), None)


@dataclass(frozen=True)
class Trained:
    """The outcome of :func:`train`."""

    members: dict[str, Member]
    execution: str
    path: Path | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records of all members, each with the member's name as ``run``."""
        return [{"run": name, **record} for name, member in self.members.items() for record in member.records]
