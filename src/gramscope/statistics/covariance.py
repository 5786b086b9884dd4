"""``Σ = Σ δδᵀ``: the covariance of the gradients at a layer's outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.statistics.square_sum import SquareSum, times_probes
from gramscope.statistics.sums import Seen

if TYPE_CHECKING:
    from gramscope.statistics.plan import Plan

#: entries of output gradients that are kept until they are added: one product of many rows costs less than many of few
WAITING = 2**17


class Covariance(SquareSum):
    """``Σ [k, k]`` over all samples and sites."""

    needs: ClassVar[frozenset[str]] = frozenset({"delta"})
    symbol: ClassVar[str] = "Σ"

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._waiting: list[Tensor] = []

    @override
    def add(self, seen: Seen) -> None:
        assert seen.record is not None
        for delta in seen.record.deltas():
            rows = seen.positions.without_padding(delta).flatten(-3, -2)
            if self.estimated:
                self.add_rows(seen, rows)
            else:
                self._waiting.append(self.in_basis(rows))
        if sum(rows.numel() for rows in self._waiting) >= WAITING:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self.add_gram(torch.cat(self._waiting, -2) if len(self._waiting) > 1 else self._waiting[0])
            self._waiting = []

    @override
    def finish(self) -> None:
        self._flush()
        super().finish()

    @override
    def thin(self, seen: Seen) -> Tensor:
        W = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return torch.cat([times_probes(W, self.budget.probes(W.shape[-1])), W.sum(-1, keepdim=True)], -1)  # WΩ, W1
