"""Numbers that know their standard error, and keep it in arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import count

import torch
from torch import Tensor

_given = count()


class Measured(float):
    """A float with a standard error (``None`` where it is exact) and a remark.

    Where a number comes from independent random groups (groups of probes, parts of a sketch), it also holds its value without
    each of the groups, by source of randomness. Arithmetic is carried out on these values too, so that the result has the
    jackknife error, however its terms depend on each other. An error that is given enters in the same way.

    Args:
        value: the number.
        error: its standard error.
        remark: what a reader should know.
        replicates: in place of ``error``, the values without each group, by source.

    >>> x = Measured(2.0, 0.1)
    >>> y = x / 4 + 1
    >>> float(y), round(y.error, 6), (x - x).error
    (1.5, 0.025, 0.0)
    """

    error: float | None
    remark: str
    replicates: Mapping[str, Tensor]

    def __new__(
        cls,
        value: float | Tensor,
        error: float | None = None,
        remark: str = "",
        replicates: Mapping[str, Tensor] | None = None,
    ) -> Measured:
        """A float with its remark and replicates."""
        self = super().__new__(cls, float(value))
        self.remark = remark
        self.replicates = dict(replicates or {})
        self.error = error
        if error is None and self.replicates:
            self.error = math.hypot(*(_jackknife_error(values) for values in self.replicates.values()))
        elif error is not None:  # two replicates at this distance have this jackknife error
            around = torch.tensor([-error, error], dtype=torch.float64, device="cpu")
            self.replicates[f"given {next(_given)}"] = float(value) + around
        return self

    def with_remark(self, *remarks: str) -> Measured:
        """The same number with remarks before its own."""
        return Measured(self, remark=_joined(*remarks, self.remark), replicates=self.replicates)

    def at_least(self, limit: float) -> Measured:
        """The larger of it and ``limit``."""
        return combine(lambda x: x.clamp(min=limit), self)

    def __add__(self, other: float) -> Measured:
        return _binary(torch.add, self, other)

    def __sub__(self, other: float) -> Measured:
        return _binary(torch.sub, self, other)

    def __mul__(self, other: float) -> Measured:
        return _binary(torch.mul, self, other)

    def __truediv__(self, other: float) -> Measured:
        return _binary(torch.div, self, other)

    def __rsub__(self, other: float) -> Measured:
        return _binary(torch.sub, other, self)

    def __rtruediv__(self, other: float) -> Measured:
        return _binary(torch.div, other, self)

    def __pow__(self, power: float) -> Measured:  # type: ignore[override]
        return combine(torch.pow, self, power)

    def __neg__(self) -> Measured:
        return combine(torch.neg, self)

    __radd__, __rmul__ = __add__, __mul__


def combine(function: Callable[..., Tensor], *numbers: float) -> Measured:
    """``function(*numbers)`` with the error that follows; the function maps float64 tensors entry by entry.

    >>> combine(torch.exp, Measured(0.0, 0.01)).error < 0.0101
    True
    """
    values = [_tensor(float(x)) for x in numbers]
    own = [x.replicates if isinstance(x, Measured) else {} for x in numbers]
    sources = dict.fromkeys(source for replicates in own for source in replicates)
    replicates = {
        source: function(*(mine.get(source, value) for mine, value in zip(own, values, strict=True)))
        for source in sources
    }
    remark = _joined(*(x.remark for x in numbers if isinstance(x, Measured)))
    return Measured(function(*values), remark=remark, replicates=replicates)


def jackknife(source: str, groups: int, value_of: Callable[[Tensor], float | Tensor]) -> Measured:
    """The value of all groups, and without each.

    Args:
        source: of the randomness.
        groups: how many independent groups of equal size there are.
        value_of: the value of the groups whose numbers it gets; its size must not depend on how many these are.

    >>> round(jackknife("draws", 4, lambda kept: kept.double().mean()).error, 6)   # of 0, 1, 2, 3: √(5/3) / √4
    0.645497
    """
    numbers = torch.arange(groups, dtype=torch.int64, device="cpu")
    value = value_of(numbers)
    if groups < 2:
        return Measured(value)
    others = torch.stack([_tensor(float(value_of(numbers[numbers != group]))) for group in range(groups)])
    return Measured(value, replicates={source: others})


def mean(values: Tensor, source: str) -> Measured:
    """The mean of independent ``values``.

    >>> round(mean(torch.tensor([0.0, 1.0, 2.0, 3.0]), "draws").error, 6)
    0.645497
    """
    values = values.to("cpu", torch.float64)
    if values.numel() < 2:
        return Measured(values.mean())
    return Measured(values.mean(), replicates={source: (values.sum() - values) / (values.numel() - 1)})


def ratio(numerators: Tensor, denominators: Tensor) -> Measured:
    """``Σ a / Σ b`` over independent random columns.

    >>> float(ratio(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])))
    0.5
    """
    return mean(numerators, "columns") / mean(denominators, "columns")


def _binary(function: Callable[..., Tensor], first: float, second: float) -> Measured:
    if not (isinstance(first, float | int) and isinstance(second, float | int)):
        return NotImplemented  # tensors and arrays take the number alone
    return combine(function, first, second)


def _jackknife_error(others: Tensor) -> float:
    groups = others.numel()
    return math.sqrt((groups - 1) / groups * float((others - others.mean()).square().sum()))


def _tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def _joined(*remarks: str) -> str:
    """Remarks in one text, each once."""
    parts = dict.fromkeys(part for remark in remarks for part in remark.split("; ") if part)
    return "; ".join(parts)
