"""Two collections of statistics, number by number."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from gramscope.statistics.result import Statistics


def tensors(statistics: Statistics) -> dict[str, Tensor]:
    """Every tensor of the statistics under a flat name."""
    found: dict[str, Tensor] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}/{key}", item)
        elif hasattr(value, "__dataclass_fields__"):
            for f in fields(value):  # type: ignore[arg-type]
                walk(f"{prefix}.{f.name}", getattr(value, f.name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix] = torch.tensor(float(value), dtype=torch.float64)

    walk("", statistics)
    return found


def assert_same(a: Statistics, b: Statistics, tolerance: float = 1e-9) -> None:
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    assert left
    for key, value in left.items():
        torch.testing.assert_close(
            value, right[key], rtol=tolerance, atol=tolerance, msg=lambda m, key=key: f"{key}: {m}"
        )
