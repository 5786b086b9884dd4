"""What is kept of feature rows and their targets: moments, and the rows themselves while they are fewer than features.

Labels count as one-hot rows. More than 1,024 of them (the tokens of a language model) are too many for a column each. Then
the targets are the one-hot labels times a fixed random matrix of signs with 64 columns, ``Y R / 8``: sums of squares over the
columns estimate those of all labels without bias, and their spread over the columns gives the standard error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import shapes_of, to_double
from gramscope.linalg.budget import Budget
from gramscope.linalg.moments import ClassMoments, Moments, block_moments, label_moments, merge

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


def statistics_of(name: str, rows: Tensor, target: Tensor, gram: bool) -> FeatureStatistics:
    """Statistics of rows ``[m, d]`` with labels ``[m]`` or real targets ``[m, c]``."""
    double = to_double(rows)
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
    if len(kept) == 2 and budget.keeps_rows(a.n + b.n, d):
        return a, b
    gram = all(part.rows is not None or part.moments.C_hh is not None for part in (a, b)) and budget.keeps_gram(d)
    return a.without_rows(gram), b.without_rows(gram)
