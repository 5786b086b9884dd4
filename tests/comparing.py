"""Two collections of statistics, number by number."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from gramscope.linalg.budget import Budget
from gramscope.statistics.collect import collect_planned
from gramscope.statistics.matrix_sums import SquareSum
from gramscope.statistics.result import LayerStatistics, Statistics
from gramscope.statistics.sums import Notes, Plan


def tensors(statistics: Statistics) -> dict[str, Tensor]:
    """Every tensor of the statistics under a flat name."""
    found: dict[str, Tensor] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, LayerStatistics):
            for name in ("n", "terms", "weight", "D", "autograd", "features"):
                walk(f"{prefix}.{name}", getattr(value, name))
            for kind, total in value.sums.items():
                if isinstance(total, SquareSum):
                    walk(f"{prefix}.{kind.__name__}", total.numbers)
        elif isinstance(value, Tensor):
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


def collected(
    model: nn.Module, data: Any, loss: Any, plan: Plan, reference: nn.Module | None = None, **options: Any
) -> Statistics:
    """The statistics of a plan, with some of its options changed; ``memory`` stands for its budget."""
    if "memory" in options:
        options["budget"] = Budget(options.pop("memory"))
    plan = replace(plan, notes=Notes(), **options)
    return collect_planned(model, data, loss, plan, reference, None, progress=False)


def held_bytes(value: object, first: bool = True) -> int:
    """Bytes of the tensors of a sum, without the weight."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        return sum(held_bytes(item, False) for item in value)
    if first or hasattr(value, "strips") or hasattr(value, "__dataclass_fields__"):
        return sum(held_bytes(item, False) for name, item in vars(value).items() if name not in ("weight", "budget"))
    return 0
