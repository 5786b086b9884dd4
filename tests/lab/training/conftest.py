"""Small problems that the training tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gramscope_lab.data import DataSet
from gramscope_lab.training.config import TrainConfig
from lab.training.helpers import Config


@pytest.fixture
def blobs() -> DataSet:
    """Three classes in eight dimensions, 70 training and 30 test samples."""
    g = torch.Generator().manual_seed(5)
    y = torch.randint(3, (100,), generator=g)
    x = torch.randn(100, 8, generator=g) + 2 * torch.nn.functional.one_hot(y, 8)
    return DataSet("blobs", x[:70], y[:70], x[70:], y[70:], classes=3)


@pytest.fixture
def config() -> Config:
    """Makes a configuration of a small net; ``method`` takes a name or a table."""

    def build(method: str | dict[str, Any] = "sgd", **changes: Any) -> TrainConfig:
        table = {"name": method} if isinstance(method, str) else method
        tree: dict[str, Any] = {
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [6, 5]},
            "method": table,
            "batch_size": 16,
            "epochs": 3,
            "device": "cpu",
            "measure": {"samples": 0},
        }
        return TrainConfig.from_dict(tree | changes)

    return build
