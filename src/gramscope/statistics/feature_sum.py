"""Features of a layer as a sum: moments of its rows and their targets, added batch by batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError, NumericalError
from gramscope.layers.kinds import EmbeddingLayer
from gramscope.linalg.arrays import to_double
from gramscope.linalg.budget import Budget
from gramscope.linalg.moments import between
from gramscope.linalg.psd import SymmetricSum, kept_entries
from gramscope.statistics.feature_statistics import (
    FeatureStatistics,
    merge_features,
    statistics_of,
)
from gramscope.statistics.features import Unpaired
from gramscope.statistics.sums import LeftOut, Seen, Sum

if TYPE_CHECKING:
    from gramscope.statistics.sums import Plan

#: largest number of real target columns whose c×c moments are kept
TARGET_LIMIT = 4096
#: labels must be smaller than this: a table of signs is kept for every 4,096 of them
CLASS_LIMIT = 2**20
#: rows that are gathered before they are added: merging d×c moments for every small batch would cost more
WAITING = 256
#: entries turned into moments at once, at least 256 rows
BLOCK = 2**18


class Features(Sum):
    """Moments of feature rows and their targets, and the rows themselves while they are few."""

    needs: ClassVar[frozenset[str]] = frozenset({"rows"})
    of_single_samples: ClassVar[bool] = True
    ask: ClassVar[str] = "features=True"

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._gram, self._ignored, self._budget = plan.gram, plan.ignore_index, plan.budget
        self._part: FeatureStatistics | None = None  # without what waits and, with a total, without C_hh
        self._total: SymmetricSum | None = None  # C_hh, which grows in place
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._residuals: Tensor | None = None
        self._no_residuals = False  # True once a batch had none
        self._eps, self._of_outputs = 0.0, False

    @override
    def add(self, seen: Seen) -> None:
        assert seen.rows is not None
        self._of_outputs = seen.record is not None and isinstance(seen.record.layer, EmbeddingLayer)
        try:
            self._add(seen.rows.detach(), seen.target, seen.residual)
        except Unpaired as reason:
            raise LeftOut(f"no features: {reason}") from reason

    def _add(self, rows: Tensor, target: Tensor | None, residual: Tensor | None) -> None:
        if rows.shape[0] == 0:
            return
        if target is None:
            target = rows.new_zeros(rows.shape[0], 0)
        target = _checked(target, rows.shape[0], self._ignored)
        if not target.is_floating_point() and bool((target == self._ignored).any()):
            kept = target != self._ignored
            rows, target, residual = rows[kept], target[kept], None if residual is None else residual[kept]
        if rows.shape[0] == 0:
            return
        self._eps = max(self._eps, torch.finfo(rows.dtype).eps)
        self._add_residual(rows, residual)
        if self._waiting and self._waiting[0][0].shape[1] != rows.shape[1]:
            self._flush()
        self._waiting.append((rows, target))
        if not self._keeps_rows() and sum(len(part) for part, _ in self._waiting) >= WAITING:
            self._flush()
        else:
            self._waiting[-1] = (rows.clone(), target)

    def _add_residual(self, rows: Tensor, residual: Tensor | None) -> None:
        """Add to ``HᵀE``; without a residual in one batch there is none at all."""
        self._no_residuals |= residual is None
        if residual is None or self._no_residuals:
            self._residuals = None
            return
        product = to_double(rows).mT @ to_double(residual)
        self._residuals = product if self._residuals is None else self._residuals + product

    def _keeps_rows(self) -> bool:
        """Whether the rows that wait are all there are and may be kept as they are."""
        n, d = sum(len(part) for part, _ in self._waiting), self._waiting[0][0].shape[1]
        return self._part is None and self._gram == "auto" and self._budget.keeps_rows(n, d)

    def _flush(self) -> None:
        """Add what waits to the moments and to ``C_hh``."""
        if not self._waiting:
            return
        d = self._waiting[0][0].shape[1]
        if self._part is None and (self._budget.keeps_gram(d) if self._gram == "auto" else self._gram):
            self._total = SymmetricSum(d, device=to_double(self._waiting[0][0][:0]).device)
        self._add_blocks(*self._taken())

    def _taken(self) -> tuple[Tensor, Tensor]:
        """What waited, which waits no more."""
        rows, target = zip(*self._waiting, strict=True)
        self._waiting = []
        return (rows[0], target[0]) if len(rows) == 1 else (torch.cat(rows), torch.cat(target))

    def _add_blocks(self, rows: Tensor, target: Tensor) -> None:
        size = max(WAITING, BLOCK // rows.shape[1])
        for block, of_block in zip(torch.split(rows, size), torch.split(target, size), strict=True):
            double, old = to_double(block), self._part
            new = statistics_of(self.layer, double, of_block, False)
            self._part = new if old is None else merge_features(old, new)
            if self._total is not None:
                self._total.add_gram(double - new.moments.mean_h)
                if old is not None:  # what merging adds to the sums of both
                    self._total.add_gram(between(old.moments, new.moments))

    @override
    def finish(self) -> None:
        rows = target = None
        if self._waiting and self._keeps_rows():
            rows, target = self._taken()
            self._add_blocks(rows, target)
        self._flush()
        if self._part is None:
            return
        self._part = replace(
            self._part,
            HtE=self._residuals,
            eps=self._eps,
            rows=rows,
            row_targets=target,
            of_outputs=self._of_outputs,
        )
        if not torch.isfinite(self._part.moments.mean_h).all():
            raise NumericalError(f"the features at {self.layer!r} are NaN or infinite; look at the inputs")
        if not torch.isfinite(self._part.moments.mean_y).all():
            raise NumericalError("the targets are NaN or infinite")

    @property
    def statistics(self) -> FeatureStatistics | None:
        """The moments, after :meth:`finish`; ``C_hh``, of which a half is kept, is put together when asked for."""
        if self._part is None or self._total is None:
            return self._part
        return self._part.with_gram(self._total.dense())

    @classmethod
    def of(cls, part: FeatureStatistics | None, like: Features | None = None) -> Features:
        """The sum that some statistics are."""
        whole = copy.copy(like) if like is not None else cls.__new__(cls)
        whole._part, whole._total = part, None
        return whole

    @override
    def merge(self, other: Self) -> Self:
        parts = [part for part in (self.statistics, other.statistics) if part is not None]
        whole = merge_features(*parts) if len(parts) == 2 else next(iter(parts), None)
        return self.of(whole, self)  # type: ignore[return-value]

    @override
    @classmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        d = int(torch.Size(shape[:-2]).numel() * shape[-1])
        return 8 * kept_entries(d) if Budget(memory).keeps_gram(d) else memory


def _checked(target: Tensor, m: int, ignored: int) -> Tensor:
    """Real targets ``[m, c]`` or labels ``[m]``."""
    if target.is_floating_point():
        target = target.reshape(m, -1)
        if target.shape[1] > TARGET_LIMIT:
            raise Unpaired(
                f"the target has {target.shape[1]} columns, more than {TARGET_LIMIT}; choose some with targets="
            )
        return target
    labels = target[:, 0] if target.dim() == 2 and target.shape[1] == 1 else target
    if labels.dim() != 1:
        raise Unpaired(
            f"integer targets of shape {tuple(target.shape)} do not give one label to each of {m} rows: labels of "
            "positions need a layer that has these positions; targets= gives each sample one label"
        )
    seen = labels[labels != ignored]
    if seen.numel() == 0:
        return labels.long()
    low, high = (int(v) for v in torch.aminmax(seen))
    if low < 0:
        raise InputError(
            f"labels must not be negative, found {low}; ignore_index= ({ignored}) marks rows to leave out, "
            "and targets=lambda x, y: (y > 0).long() makes classes of labels −1 and 1"
        )
    if high >= CLASS_LIMIT:
        raise InputError(f"labels reach {high}, at least {CLASS_LIMIT}; number the classes from 0 with targets=")
    return labels.long()
