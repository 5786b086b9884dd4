"""A number with its standard error, where it was estimated at random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Measured(NamedTuple):
    """A value, its standard error (``None`` where it is exact) and a remark on it.

    >>> float(Measured(0.5, 0.01))
    0.5
    """

    value: float
    error: float | None = None
    remark: str = ""

    def __float__(self) -> float:
        return self.value


def jackknife(parts: int, value_of: Callable[[Tensor], float]) -> Measured:
    """The value of all parts, with the standard error of leaving out one part at a time.

    Args:
        parts: number of independent parts of equal size.
        value_of: the value of the parts whose numbers it gets; it does not depend on their number.

    >>> jackknife(4, lambda kept: float(kept.double().mean()))   # of 0, 1, 2, 3: √(5/3) / √4
    Measured(value=1.5, error=0.6454972243679028, remark='')
    """
    everything = torch.arange(parts)
    value = value_of(everything)
    if parts < 2:
        return Measured(value)
    others = [value_of(everything[everything != part]) for part in range(parts)]
    mean = math.fsum(others) / parts
    return Measured(value, math.sqrt((parts - 1) / parts * math.fsum((x - mean) ** 2 for x in others)))


def ratio(numerators: Tensor, denominators: Tensor) -> Measured:
    """``Σ a / Σ b`` over random columns, with the standard error of a ratio of means.

    Args:
        numerators: ``a [c]``, one per independent random column.
        denominators: ``b [c]``.

    >>> ratio(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]))
    Measured(value=0.5, error=0.0, remark='')
    """
    c, total = numerators.numel(), denominators.sum()
    value = numerators.sum() / total
    spread = (numerators - value * denominators).square().sum() * c / max(c - 1, 1)
    return Measured(float(value), float(spread.sqrt() / total.abs()))
