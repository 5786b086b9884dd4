"""Layer measurements of a net in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from gramscope.training.job import Job


def measure_layers(model: nn.Module, job: Job, step: int) -> Iterable[Mapping[str, Any]]:
    """One record a layer."""
    return []
