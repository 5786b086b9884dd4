"""Moments of feature rows and their targets, added batch by batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError
from gramscope.linalg.arrays import to_double
from gramscope.linalg.symmetric_sum import SymmetricSum
from gramscope.statistics.feature_statistics import (
    CLASSES,
    FREQUENT,
    FREQUENT_ROWS,
    GRAM_LIMIT,
    ROW_ENTRIES,
    FeatureStatistics,
    add_rows,
    keeps_gram,
    keeps_rows,
    with_gram,
)
from gramscope.statistics.features import IGNORED, Unpaired

#: largest number of real target columns whose c×c moments are kept
TARGET_LIMIT = 4096
#: labels must be smaller than this: a table of signs is kept for every 4,096 of them
CLASS_LIMIT = 2**20
#: entries gathered before they are turned into moments: merging d×c moments for every small batch would cost more
BUFFER = 2**18
#: entries turned into moments at once, at least 256 rows
BLOCK = 2**18
#: rows of a batch from which they are not gathered
DIRECT = 256


class FeatureAccumulator:
    """Gathers rows of one layer (or module output) and keeps their moments.

    Args:
        name: the layer, for messages.
        gram: keep ``HᵀH``: ``"auto"`` where d ≤ 4096 (for d > 512 the rows themselves while they are fewer than d),
            ``True`` or ``False``.
        ignore_index: rows with this label are left out.
        memory: bytes for ``HᵀH`` and its decomposition (three matrices) where d > 4096, and sixteen for each entry of rows.
    """

    def __init__(
        self, name: str, gram: bool | str, ignore_index: int = IGNORED, memory: int = 16 * ROW_ENTRIES
    ) -> None:
        self._name, self._gram, self._ignored, self._memory = name, gram, ignore_index, memory
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._residuals = True  # False once a batch had none
        self._moments: FeatureStatistics | None = None
        self._total: SymmetricSum | None = None
        self._eps = 0.0
        self._kept: list[tuple[Tensor, Tensor]] | None = [] if gram == "auto" else None  # None once they are too many
        self._HtE: Tensor | None = None
        self._popular: Tensor | None = None
        self._frequent: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: Tensor, target: Tensor | None, residual: Tensor | None = None) -> None:
        """Add rows ``[m, d]``, their targets (``None`` for all batches or for none) and residuals ``[m, c]``."""
        if rows.shape[0] == 0:
            return
        target = rows.new_zeros(rows.shape[0], 0) if target is None else self._checked(target, rows.shape[0])
        if not target.is_floating_point() and bool((target == self._ignored).any()):
            kept = target != self._ignored
            rows, target, residual = rows[kept], target[kept], None if residual is None else residual[kept]
        m, d = rows.shape
        if m == 0:
            return
        self._eps = max(self._eps, torch.finfo(rows.dtype).eps)
        self._keep_frequent(rows, target)
        self._add_residual(rows, residual)
        if self._kept is not None:
            if self.keeps_rows(_count(self._kept) + m, d) and all(part.shape[1] == d for part, _ in self._kept):
                self._kept.append((rows.detach().clone(), target))
                return
            before, self._kept = self._kept, None
            while before:
                self._gather(*before.pop(0))
        self._gather(rows, target)

    def keeps_rows(self, n: int, d: int) -> bool:
        """Whether n rows are kept as they are."""
        instead = n >= d and keeps_gram(d, self._memory)
        return not instead and keeps_rows(n, d, self._memory // 16 if d > GRAM_LIMIT else ROW_ENTRIES)

    def _gather(self, rows: Tensor, target: Tensor) -> None:
        """Add rows to the moments, few at a time together with further ones."""
        m, d = rows.shape
        if self._waiting and self._waiting[0][0].shape[1] != d:
            self._flush()
        if m >= DIRECT and not self._waiting:
            self._add_block(rows.detach(), target)
            return
        self._waiting.append((rows.detach().clone(), target))
        if _count(self._waiting) >= min(max(BUFFER // d, DIRECT), 2048):
            self._flush()

    def _add_residual(self, rows: Tensor, residual: Tensor | None) -> None:
        """Add to ``HᵀE``; without a residual in one batch there is none at all."""
        if residual is None:
            self._HtE, self._residuals = None, False
        elif self._residuals:
            product = to_double(rows).mT @ to_double(residual)
            self._HtE = product if self._HtE is None else self._HtE + product

    def _keep_frequent(self, rows: Tensor, target: Tensor) -> None:
        """Keep rows of the labels most frequent in the first batch, where labels are too many for a mean each."""
        if target.is_floating_point():
            return
        if self._popular is None:
            labels, counts = torch.unique(target, return_counts=True)
            many = int(labels.max()) >= CLASSES
            self._popular = labels[counts.argsort(descending=True, stable=True)][: FREQUENT * many]
        room = FREQUENT_ROWS - _count(self._frequent)
        if room > 0 and self._popular.numel():
            chosen = torch.isin(target, self._popular).nonzero().flatten()[:room]
            self._frequent.append((rows.detach()[chosen.to(rows.device)].clone(), target[chosen]))

    def finish(self) -> None:
        """Add what still waits; NaN or infinity among features or targets is an error."""
        self._flush()
        rows = target = None
        if self._kept:
            rows, target = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
            self._merge(rows, target)
        self._kept = None
        if self._moments is None:
            return
        self._moments = replace(self._moments, HtE=self._HtE, eps=self._eps, rows=rows, row_targets=target)
        if self._moments.labels and self._frequent:
            rows, target = (torch.cat(parts) for parts in zip(*self._frequent, strict=True))
            self._moments = replace(self._moments, frequent=rows, frequent_labels=target)
        self._frequent = []
        moments, classes = self._moments.moments, self._moments.classes
        means = classes.means if classes is not None else self._moments.joint.mean_h
        if not torch.isfinite(means).all():
            raise NumericalError(f"the features at {self._name!r} are NaN or infinite; look at the inputs")
        if moments is not None and not torch.isfinite(moments.mean_y).all():
            raise NumericalError("the targets are NaN or infinite")

    def result(self) -> FeatureStatistics | None:
        """The moments of everything added, after :meth:`finish`; ``None`` if nothing was."""
        if self._moments is None or self._total is None:
            return self._moments
        return with_gram(self._moments, self._total.dense())

    def _checked(self, target: Tensor, m: int) -> Tensor:
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
        return labels.long()

    def _flush(self) -> None:
        if self._waiting:
            self._add_block(*(torch.cat(parts) for parts in zip(*self._waiting, strict=True)))
            self._waiting = []

    def _add_block(self, rows: Tensor, target: Tensor) -> None:
        d = rows.shape[1]
        if self._moments is None and (keeps_gram(d, self._memory) if self._gram == "auto" else self._gram):
            self._total = SymmetricSum(d, device=to_double(rows[:0]).device)
        self._merge(rows, target)

    def _merge(self, rows: Tensor, target: Tensor) -> None:
        _check_labels(target, self._ignored)
        size = max(256, BLOCK // rows.shape[1])
        for start in range(0, rows.shape[0], size):
            block = slice(start, start + size)
            self._moments = add_rows(self._moments, self._total, self._name, rows[block], target[block])


def _count(parts: list[tuple[Tensor, Tensor]]) -> int:
    return sum(rows.shape[0] for rows, _ in parts)


def _check_labels(target: Tensor, ignored: int) -> None:
    if target.is_floating_point():
        return
    low, high = (int(v) for v in torch.aminmax(target))
    if low < 0:
        raise InputError(
            f"labels must not be negative, found {low}; ignore_index= ({ignored}) marks rows to leave out, "
            "and targets=lambda x, y: (y > 0).long() makes classes of labels −1 and 1"
        )
    if high >= CLASS_LIMIT:
        raise InputError(f"labels reach {high}, at least {CLASS_LIMIT}; number the classes from 0 with targets=")
