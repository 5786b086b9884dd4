"""Features of a layer as a sum: moments of its rows and their targets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.distributed.exchange import Exchange
from gramscope.layers.kinds import EmbeddingKind
from gramscope.linalg.budget import Budget
from gramscope.statistics.feature_moments import FeatureAccumulator
from gramscope.statistics.feature_reduction import can_add, outline, reduced
from gramscope.statistics.feature_statistics import FeatureStatistics, merge_features
from gramscope.statistics.features import Unpaired
from gramscope.statistics.sums import LeftOut, Seen, Sum

if TYPE_CHECKING:
    from gramscope.statistics.plan import Plan


class Features(Sum):
    """Moments of feature rows and their targets."""

    needs: ClassVar[frozenset[str]] = frozenset({"rows"})
    of_single_samples: ClassVar[bool] = True

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._growing: FeatureAccumulator | None = FeatureAccumulator(
            layer, plan.gram, plan.ignore_index, plan.budget.memory
        )
        self._merged: FeatureStatistics | None = None
        self._of_outputs = False

    @override
    def add(self, seen: Seen) -> None:
        assert seen.rows is not None
        assert self._growing is not None
        self._of_outputs = seen.record is not None and isinstance(seen.record.layer.kind, EmbeddingKind)
        try:
            self._growing.add(seen.rows, seen.target, seen.residual)
        except Unpaired as reason:
            raise LeftOut(f"no features: {reason}") from reason

    @override
    def finish(self) -> None:
        assert self._growing is not None
        self._growing.finish()

    @property
    def statistics(self) -> FeatureStatistics | None:
        """The moments; a d×d sum that is kept once is put together when asked for."""
        if self._growing is None:
            return self._merged
        part = self._growing.result()
        return None if part is None else replace(part, of_outputs=self._of_outputs)

    @classmethod
    def of(cls, part: FeatureStatistics) -> Features:
        """The sum that some statistics are."""
        return cls._of(part, None)

    @classmethod
    def _of(cls, part: FeatureStatistics | None, like: Features | None) -> Features:
        whole = copy.copy(like) if like is not None else cls.__new__(cls)
        whole._growing, whole._merged = None, part
        return whole

    @override
    def merge(self, other: Self) -> Self:
        a, b = self.statistics, other.statistics
        return self._of(merge_features(a, b) if a is not None and b is not None else b if a is None else a, self)  # type: ignore[return-value]

    @override
    def outline(self) -> Any:
        return outline(self.statistics)

    @override
    @classmethod
    def all_reduce(
        cls, own: Self | None, outlines: Sequence[Any], exchange: Exchange, device: torch.device
    ) -> Self | None:
        if not any(outlines) or not can_add(outlines):
            return None
        part = None if own is None else own.statistics
        name = "" if own is None else own.layer
        return cls._of(reduced(name, part, outlines, exchange, device), own)  # type: ignore[return-value]

    @override
    @classmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        d = int(torch.Size(shape[:-2]).numel() * shape[-1])
        return 8 * d**2 if Budget(memory).keeps_gram(d) else memory

    @override
    def to(self, device: torch.device) -> Self:
        from gramscope.statistics.processes import moved

        return self._of(moved(self.statistics, device), self)  # type: ignore[return-value]
