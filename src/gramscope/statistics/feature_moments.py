"""Moments of feature rows and their targets, added batch by batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gramscope.errors import InputError, NumericalError
from gramscope.linalg.arrays import to_double
from gramscope.linalg.moments import block_class_moments, block_moments
from gramscope.statistics.features import IGNORED, Unpaired
from gramscope.statistics.layer import FeatureStatistics, merge_features

#: largest d for which HᵀH is kept unless asked for
GRAM_LIMIT = 512
#: largest number of real target columns whose c×c moments are kept
TARGET_LIMIT = 4096
#: labels must be smaller than this: class means are kept for every label up to the largest
CLASS_LIMIT = 65_536
#: entries gathered before they are turned into moments: merging d×c moments for every small batch would cost more
BUFFER = 2**22


class FeatureAccumulator:
    """Gathers rows of one layer (or module output) and keeps their moments.

    Args:
        name: the layer, for messages.
        gram: keep ``HᵀH``: ``"auto"`` where d ≤ 512, ``True`` or ``False``.
        ignore_index: rows with this label are left out.
    """

    def __init__(self, name: str, gram: bool | str, ignore_index: int = IGNORED) -> None:
        self._name, self._gram, self._ignored = name, gram, ignore_index
        self._buffer: Tensor | None = None
        self._count = 0
        self._targets: list[Tensor] = []
        self._residuals: list[Tensor] | None = []  # None once a batch had none
        self._moments: FeatureStatistics | None = None
        self._eps = 0.0

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
        if self._buffer is not None and (self._count + m > self._buffer.shape[0] or d != self._buffer.shape[1]):
            self._flush()
        if self._buffer is None or m > self._buffer.shape[0]:
            self._buffer = to_double(rows[:0]).new_empty(max(m, min(BUFFER // d, 2048)), d)
        self._buffer[self._count : self._count + m] = rows.detach()
        self._eps = max(self._eps, torch.finfo(rows.dtype).eps)
        self._count += m
        self._targets.append(target)
        if residual is None:
            self._residuals = None
        elif self._residuals is not None:
            self._residuals.append(residual)

    def result(self) -> FeatureStatistics | None:
        """The moments of everything added, or ``None`` if nothing was."""
        self._flush()
        if self._moments is not None:
            means = self._moments.classes.means if self._moments.classes is not None else self._moments.joint.mean_h
            if not torch.isfinite(means).all():
                raise NumericalError(f"the features at {self._name!r} are NaN or infinite; look at the inputs")
            if not torch.isfinite(self._moments.joint.mean_y).all():
                raise NumericalError("the targets are NaN or infinite")
        return self._moments

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
                f"integer targets of shape {tuple(target.shape)} do not give one label to each of {m} rows; pass targets= "
                "or tokens="
            )
        return labels.long()

    def _flush(self) -> None:
        if self._count == 0 or self._buffer is None:
            return
        rows, target = self._buffer[: self._count], torch.cat(self._targets)
        residual = torch.cat(self._residuals) if self._residuals else None
        gram = rows.shape[1] <= GRAM_LIMIT if self._gram == "auto" else bool(self._gram)
        HtE = None if residual is None else rows.mT @ to_double(residual)
        if target.is_floating_point():
            new = FeatureStatistics(self._name, block_moments(rows, to_double(target), gram), None, HtE)
        else:
            low, high = (int(v) for v in torch.aminmax(target))
            if low < 0:
                raise InputError(
                    f"labels must not be negative, found {low}; ignore_index= ({self._ignored}) marks rows to leave out, "
                    "and targets=lambda x, y: (y > 0).long() makes classes of labels −1 and 1"
                )
            if high >= CLASS_LIMIT:
                raise InputError(
                    f"labels reach {high}, at least {CLASS_LIMIT}; number the classes from 0 with targets="
                )
            labels = target.to(rows.device)
            new = FeatureStatistics(self._name, None, block_class_moments(rows, labels, high + 1, gram), HtE)
        new = replace(new, eps=self._eps)
        self._moments = new if self._moments is None else merge_features(self._moments, new)
        self._count, self._targets = 0, []
        if self._residuals is not None:
            self._residuals = []
