"""Features of a layer as a sum: moments of its rows and their targets, and the rows themselves while they are few.

Labels count as one-hot rows. More than 1,024 of them (the tokens of a language model) are too many for a column each. Then
the targets are the one-hot labels times a fixed random matrix of signs with 64 columns, ``Y R / 8``: sums of squares over the
columns estimate those of all labels without bias, and their spread over the columns gives the standard error.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError, NumericalError
from gramscope.layers.kinds import EmbeddingLayer
from gramscope.linalg.arrays import shapes_of, to_double
from gramscope.linalg.budget import Budget
from gramscope.linalg.moments import ClassMoments, Moments, between, block_moments, label_moments, merge
from gramscope.linalg.psd import SymmetricSum, kept_entries
from gramscope.statistics.structure import Unpaired
from gramscope.statistics.sums import LeftOut, Plan, Seen, Sum

#: label values up to which every class has a column of its own
CLASSES = 1024
#: columns of the random projection of one-hot labels above
PROJECTION = 64


@dataclass(frozen=True)
class FeatureStatistics:
    """Moments of feature rows and their targets.

    Args:
        name: layer or module name.
        moments: of (row, target): real targets, one-hot labels of all classes up to the largest seen, or projected labels.
        HtE: ``Hᵀ E [d, c]`` with ``E = −∂L/∂f``, uncentred; present when rows are samples.
        eps: rounding of the rows as they came, relative to their size (1.2e-7 for float32).
        labelled: whether the targets are labels, projected or not.
        probabilities: whether real targets stand for classes, as those of a loss of classification do.
        labels: number of label values behind projected targets, 0 for targets that are not projected.
        rows: the rows ``[n, d]`` themselves in place of ``HᵀH``, where they are few.
        row_targets: their labels ``[n]`` or real targets ``[n, c]``.
        of_outputs: whether the rows are the layer's outputs and not its inputs, as those of an embedding are.
    """

    name: str
    moments: Moments
    HtE: Tensor | None = None
    eps: float = torch.finfo(torch.float64).eps
    labelled: bool = False
    probabilities: bool = False
    labels: int = 0
    rows: Tensor | None = None
    row_targets: Tensor | None = None
    of_outputs: bool = False

    def __repr__(self) -> str:
        return shapes_of(self)

    @property
    def joint(self) -> Moments:
        """Moments of rows and targets, without the columns of classes that were never seen."""
        m = self.moments
        if self.labels or not self.labelled:
            return m
        seen = m.mean_y > 0
        return m if bool(seen.all()) else m.with_targets(seen)

    @property
    def classes(self) -> ClassMoments | None:
        """Counts, means and scatter of every class; None where targets are no labels, or projected ones."""
        if self.labels or not self.labelled:
            return None
        return ClassMoments.of(self.moments)

    @property
    def centred(self) -> bool:
        """Whether measures take the targets less their mean, as they do where these stand for classes."""
        return self.labelled or self.probabilities

    @property
    def n(self) -> int:
        """Number of rows."""
        return self.moments.n

    def to(self, device: torch.device) -> FeatureStatistics:
        """The same with its tensors on ``device``."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in held.items() if isinstance(v, Tensor | Moments)}
        return replace(self, **moved)

    def with_gram(self, gram: Tensor) -> FeatureStatistics:
        """The same with ``C_hh``."""
        return replace(self, moments=replace(self.moments, C_hh=gram))

    def with_targets_like(self, other: FeatureStatistics) -> FeatureStatistics:
        """The same with as many columns of labels as ``other``, or projected labels where it has them."""
        if self.labelled != other.labelled:
            raise InputError(f"{self.name!r}: labels cannot be merged with real targets")
        if other.labels and not self.labels:
            return self.projected()
        extra = other.moments.mean_y.shape[0] - self.moments.mean_y.shape[0]
        if extra <= 0 or self.labels or not self.labelled:
            return self
        m, pad = self.moments, torch.nn.functional.pad
        mean_y, C_hy, C_yy = pad(m.mean_y, (0, extra)), pad(m.C_hy, (0, extra)), pad(m.C_yy, (0, extra, 0, extra))
        return replace(self, moments=replace(m, mean_y=mean_y, C_hy=C_hy, C_yy=C_yy))

    def projected(self) -> FeatureStatistics:
        """The same with projected labels, exactly."""
        if self.labels or not self.labelled:
            return self
        m = self.moments
        c = m.mean_y.shape[0]
        R = projected(torch.arange(c, device=m.mean_y.device, dtype=torch.int64))
        return replace(self, moments=replace(m, mean_y=m.mean_y @ R, C_hy=m.C_hy @ R, C_yy=R.mT @ m.C_yy @ R), labels=c)

    def without_rows(self, gram: bool = True) -> FeatureStatistics:
        """The same with ``HᵀH`` in place of the rows, or with neither."""
        if self.rows is None:
            return self
        part = replace(self, rows=None, row_targets=None)
        centred = to_double(self.rows) - self.moments.mean_h
        return part.with_gram(centred.mT @ centred) if gram else part


def statistics_of(name: str, double: Tensor, target: Tensor, gram: bool) -> FeatureStatistics:
    """Statistics of float64 rows ``[m, d]`` with labels ``[m]`` or real targets ``[m, c]``."""
    target = target.to(double.device)
    if target.is_floating_point():
        return FeatureStatistics(name, block_moments(double, to_double(target), gram))
    count = int(target.max()) + 1
    if count > CLASSES:
        return FeatureStatistics(name, block_moments(double, projected(target), gram), labelled=True, labels=count)
    return FeatureStatistics(name, label_moments(double, target, count, gram), labelled=True)


def projected(labels: Tensor) -> Tensor:
    """One-hot rows of ``labels [m]`` times a fixed random matrix of signs, over the root of its 64 columns, ``[m, 64]``.

    >>> projected(torch.tensor([7, 7, 70_000])).square().sum(1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    result = torch.empty(labels.shape[0], PROJECTION, dtype=torch.float64, device=labels.device)
    block = labels // 4096
    for number in set(block.tolist()):
        chosen = block == number
        result[chosen] = _signs(number).to(labels.device)[labels[chosen] - 4096 * number].double()
    return result.div_(PROJECTION**0.5)


@cache
def _signs(block: int) -> Tensor:
    """The rows of labels ``4096·block`` on, which do not depend on how many labels there are."""
    generator = torch.Generator(device="cpu").manual_seed(block)
    signs = torch.randint(2, (4096, PROJECTION), generator=generator, dtype=torch.int8, device="cpu")
    result: Tensor = signs.mul_(2).sub_(1)
    return result


def merge_features(a: FeatureStatistics, b: FeatureStatistics) -> FeatureStatistics:
    """Features of the union of two samples; classes that only one of them has seen are added."""
    if a.n == 0 or b.n == 0:
        return b if a.n == 0 else a
    a, b = a.with_targets_like(b), b.with_targets_like(a)
    a, b = _rows_alike(a, b)
    rows = row_targets = None
    if a.rows is not None and b.rows is not None and a.row_targets is not None and b.row_targets is not None:
        rows = torch.cat([a.rows, b.rows.to(a.rows)])
        row_targets = torch.cat([a.row_targets, b.row_targets.to(a.row_targets)])
    return replace(
        a,
        moments=merge(a.moments, b.moments),
        HtE=None if a.HtE is None or b.HtE is None else a.HtE + b.HtE.to(a.HtE.device),  # of all rows, or of none
        eps=max(a.eps, b.eps),
        labels=max(a.labels, b.labels),
        rows=rows,
        row_targets=row_targets,
    )


def _rows_alike(a: FeatureStatistics, b: FeatureStatistics) -> tuple[FeatureStatistics, FeatureStatistics]:
    """Both with their rows, if the union may keep them; else both without, with ``HᵀH`` if both can have it."""
    kept = [part.rows for part in (a, b) if part.rows is not None]
    if not kept:
        return a, b
    d, budget = kept[0].shape[1], Budget(max(Budget().memory, *(16 * rows.numel() for rows in kept)))
    if len(kept) == 2 and a.n + b.n <= budget.most_rows(d):
        return a, b
    gram = all(part.rows is not None or part.moments.C_hh is not None for part in (a, b)) and budget.keeps_gram(d)
    return a.without_rows(gram), b.without_rows(gram)


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
        self._count, self._most = 0, 0  # rows that wait, and how many may be kept as they are
        self._residuals: Tensor | None = None
        self._no_residuals = False  # True once a batch had none
        self._eps, self._of_outputs, self._classes = 0.0, False, plan.classes

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
        if not self._waiting:
            keeps = self._part is None and self._gram == "auto"
            self._most = self._budget.most_rows(rows.shape[1]) if keeps else 0
        self._waiting.append((rows, target))
        self._count += rows.shape[0]
        if self._count > self._most and self._count >= WAITING:
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

    def _flush(self) -> None:
        """Add what waits to the moments and to ``C_hh``."""
        if not self._waiting:
            return
        d = self._waiting[0][0].shape[1]
        if self._part is None and (self._budget.keeps_gram(d) if self._gram == "auto" else self._gram):
            device = self._waiting[0][0].device
            self._total = SymmetricSum(d, device="cpu" if device.type == "mps" else device)
        self._add_blocks(*self._taken())

    def _taken(self) -> tuple[Tensor, Tensor]:
        """What waited, which waits no more."""
        rows, target = zip(*self._waiting, strict=True)
        self._waiting, self._count = [], 0
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
        if self._waiting and self._count <= self._most:
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
            probabilities=self._classes and not self._part.labelled,
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
        with_targets = 8 * (d + PROJECTION) * (PROJECTION + 1)  # of as many columns
        return with_targets + (8 * kept_entries(d) if Budget(memory).keeps_gram(d) else memory)


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
