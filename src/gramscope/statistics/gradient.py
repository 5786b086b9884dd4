"""``D = Σ δhᵀ``: the weight gradient of the summed loss, from what a layer saw; and the parameter's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.statistics.sums import Seen, Sum, added, finite

if TYPE_CHECKING:
    from gramscope.statistics.sums import Plan

#: samples whose gradients are summed in the model's precision
SAMPLES = 4096


class Gradient(Sum):
    """``D [..., k, d]``.

    It is summed in the model's precision over a limited number of samples, then in the precision of the sums: one float32
    product over 4,096 samples rounds like several that add up to it, and adding inside the product saves a pass over a matrix
    as large as the weight for every batch. Of a large layer it stays in the model's precision.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"delta"})
    symbol: ClassVar[str] = "D"
    ask: ClassVar[str] = "a loss"

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._dtype, self._copied = plan.dtype, plan.snapshot
        self._one_precision = plan.is_estimated(weight)
        self._samples = 0
        self._recent: Tensor | None = None
        self._total: Tensor | None = None

    @override
    def add(self, seen: Seen) -> None:
        assert seen.record is not None
        if self._recent is None:
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            self._recent = torch.zeros_like(self.weight, dtype=dtype)
        seen.record.add_gradient(self._recent)
        self._samples += seen.batch.n
        if self._samples >= SAMPLES and not self._one_precision:
            self._flush()

    def _add(self, value: Tensor) -> None:
        if self._total is None:
            dtype = value.dtype if self._one_precision else self._dtype
            self._total = value.to("cpu" if value.device.type == "mps" else value.device, dtype)
        else:
            self._total.add_(value)

    def _flush(self) -> None:
        if self._recent is not None:
            self._add(self._recent)
        self._recent, self._samples = None, 0

    @override
    def finish(self) -> None:
        if self._copied or self._total is not None:
            self._flush()
        elif self._recent is not None:  # read before the next step, so it need not be copied
            self._total, self._recent = self._recent, None
        if self._total is not None:
            finite(self.symbol, self.layer, self._total)

    @property
    def total(self) -> Tensor:
        """The sum, ``[..., k, d]``."""
        assert self._total is not None
        return self._total

    @override
    def merge(self, other: Self) -> Self:
        return self._with(added(self.total, other.total))

    def _with(self, total: Tensor) -> Self:
        whole = copy.copy(self)
        whole._total = total
        return whole

    @override
    @classmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        return 8 * math.prod(shape)


class ParameterGradient(Gradient):
    """The parameter's own gradient of the summed loss, to check ``D`` against.

    ``tied`` says whether another module uses the parameter, whose part of the gradient it has too.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"parameter_gradient"})
    symbol: ClassVar[str] = "the parameter's gradient"
    ask: ClassVar[str] = "a loss and autograd=True"
    tied = False

    @override
    def add(self, seen: Seen) -> None:
        assert seen.parameter_gradient is not None
        self.tied = seen.tied
        self._add(seen.parameter_gradient.clone() if seen.tied else seen.parameter_gradient)
