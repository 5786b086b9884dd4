"""What is kept of feature rows and their targets: moments, and rows themselves where those are smaller.

Labels of more than 1,024 values (the tokens of a language model) are too many for a mean each. Then the targets are the one-hot
labels times a fixed random matrix of signs with 64 columns, ``Y R / 8``: sums of squares over the columns estimate those of all
labels without bias, and their spread over the columns gives the standard error. Neural collapse takes rows of the
most frequent labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, reduce

import torch
from torch import Tensor

from gramscope.errors import InputError
from gramscope.linalg.arrays import shapes_of, to_double
from gramscope.linalg.moments import (
    ClassMoments,
    Moments,
    between,
    between_classes,
    block_class_moments,
    block_moments,
    merge,
)
from gramscope.linalg.symmetric_sum import SymmetricSum

#: label values up to which every class has a mean of its own
CLASSES = 1024
#: columns of the random projection of one-hot labels above
PROJECTION = 64
#: most frequent labels, and rows of them, that are kept for neural collapse then
FREQUENT, FREQUENT_ROWS = 64, 2048
#: d up to which HᵀH is kept from the first row on
SMALL = 512
#: d up to which HᵀH is kept unless asked for
GRAM_LIMIT = 4096
#: entries of rows that are kept, with the default memory budget
ROW_ENTRIES = 2**24


@dataclass(frozen=True)
class FeatureStatistics:
    """Moments of feature rows and their targets.

    Args:
        name: layer or module name.
        moments: of (row, target) for real or projected targets; ``None`` when the targets are labels.
        classes: per class, when the targets are labels.
        HtE: ``Hᵀ E [d, c]`` with ``E = −∂L/∂f``, uncentred; present when rows are samples.
        eps: rounding of the rows as they came, relative to their size (1.2e-7 for float32).
        labels: number of label values behind projected targets, 0 for targets that are not projected.
        rows: the rows ``[n, d]`` themselves in place of ``HᵀH``, where they are few (:func:`keeps_rows`).
        row_targets: their labels ``[n]`` or real targets ``[n, c]``.
        frequent: rows of the most frequent labels, with projected targets.
        frequent_labels: their labels.
        of_outputs: whether the rows are the layer's outputs and not its inputs, as those of an embedding are.
    """

    name: str
    moments: Moments | None = None
    classes: ClassMoments | None = None
    HtE: Tensor | None = None
    eps: float = torch.finfo(torch.float64).eps
    labels: int = 0
    rows: Tensor | None = None
    row_targets: Tensor | None = None
    frequent: Tensor | None = None
    frequent_labels: Tensor | None = None
    of_outputs: bool = False

    def __repr__(self) -> str:
        return shapes_of(self)

    @property
    def joint(self) -> Moments:
        """Moments of rows and targets; labels count as one-hot rows (classes never seen are left out)."""
        if self.moments is not None:
            return self.moments
        if self.classes is None:
            raise InputError(f"no features were collected at {self.name!r}")
        return present_classes(self.classes).to_moments()

    @property
    def n(self) -> int:
        """Number of rows."""
        part = self.moments if self.moments is not None else self.classes
        return 0 if part is None else part.n

    @property
    def labelled(self) -> bool:
        """Whether the targets are labels, projected or not."""
        return self.classes is not None or self.labels > 0


def statistics_of(name: str, rows: Tensor, target: Tensor, gram: bool) -> FeatureStatistics:
    """Statistics of rows ``[m, d]`` with labels ``[m]`` or real targets ``[m, c]``."""
    double = to_double(rows)
    target = target.to(double.device)
    if target.is_floating_point():
        return FeatureStatistics(name, block_moments(double, to_double(target), gram))
    count = int(target.max()) + 1
    if count > CLASSES:
        return FeatureStatistics(name, block_moments(double, projected(target), gram), labels=count)
    return FeatureStatistics(name, None, block_class_moments(double, target, count, gram))


def add_rows(
    old: FeatureStatistics | None, total: SymmetricSum | None, name: str, rows: Tensor, target: Tensor
) -> FeatureStatistics:
    """Statistics of the old rows and new ones, without their d×d sum; ``total`` is that sum and grows in place.

    What merging adds to the sums of both is the Gram matrix of a few rows.
    """
    double, target = to_double(rows), target.to(to_double(rows[:0]).device)
    new = statistics_of(name, double, target, False)
    parts = [new] if old is None else [old, new]
    further = []
    if any(part.labels for part in parts):  # the sum is around the mean of all rows then, not around those of classes
        further = [between_classes(part.classes) for part in parts if part.classes is not None]
        parts = [projected_classes(part) for part in parts]
    whole = reduce(merge_features, parts)
    if total is not None:
        further += [_between(*parts)] if len(parts) > 1 else []
        # the signs do not matter, and the means of the rows' classes are a tensor of our own
        centred = new.joint.mean_h - double if new.classes is None else new.classes.means[target].sub_(double)
        total.add_gram(centred)
        if further:
            total.add_gram(torch.cat(further))
    return whole


def _between(a: FeatureStatistics, b: FeatureStatistics) -> Tensor:
    if a.moments is not None and b.moments is not None:
        return between(a.moments, b.moments)
    assert a.classes is not None
    assert b.classes is not None
    c = max(a.classes.counts.shape[0], b.classes.counts.shape[0])
    return between(widen(a.classes, c), widen(b.classes, c))


def with_gram(part: FeatureStatistics, gram: Tensor) -> FeatureStatistics:
    """The same with the d×d sum that :func:`add_rows` has formed."""
    if part.moments is not None:
        return replace(part, moments=replace(part.moments, C_hh=gram))
    assert part.classes is not None
    return replace(part, classes=replace(part.classes, within=gram))


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
    generator = torch.Generator().manual_seed(block)
    signs = torch.randint(2, (4096, PROJECTION), generator=generator, dtype=torch.int8)
    result: Tensor = signs.mul_(2).sub_(1)
    return result


def present_classes(classes: ClassMoments) -> ClassMoments:
    """Without the classes that have no sample."""
    seen = classes.counts > 0
    return ClassMoments(classes.counts[seen], classes.means[seen], classes.within)


def widen(classes: ClassMoments, c: int) -> ClassMoments:
    """The same moments with room for ``c`` classes."""
    extra = c - classes.counts.shape[0]
    if extra <= 0:
        return classes
    pad = torch.nn.functional.pad
    return ClassMoments(pad(classes.counts, (0, extra)), pad(classes.means, (0, 0, 0, extra)), classes.within)


def keeps_rows(n: int, d: int, entries: int = ROW_ENTRIES) -> bool:
    """Whether n rows are kept as they are: few of many features, so that ``HᵀH`` would be larger, or is not kept at all."""
    return d > SMALL and (n < d or d > GRAM_LIMIT) and n * d <= entries


def keeps_gram(d: int, memory: int) -> bool:
    """Whether ``HᵀH`` is kept unless asked for: d ≤ 4096, or three such matrices fit the memory budget."""
    return d <= GRAM_LIMIT or 24 * d**2 <= memory


def merge_features(a: FeatureStatistics, b: FeatureStatistics) -> FeatureStatistics:
    """Features of the union of two samples; classes that only one of them has seen are added."""
    if a.n == 0 or b.n == 0:
        return b if a.n == 0 else a
    HtE = None if a.HtE is None or b.HtE is None else _sum(a.HtE, b.HtE)  # of all rows, or of none
    labels, eps = max(a.labels, b.labels), max(a.eps, b.eps)
    if a.labelled != b.labelled:
        raise InputError(f"{a.name!r}: labels cannot be merged with real targets")
    a, b = _rows_alike(a, b)
    a, b = (projected_classes(part) if labels else part for part in (a, b))
    whole = FeatureStatistics(a.name, HtE=HtE, eps=eps, labels=labels, of_outputs=a.of_outputs)
    if a.rows is not None and b.rows is not None and a.row_targets is not None and b.row_targets is not None:
        whole = replace(
            whole, rows=torch.cat([a.rows, b.rows.to(a.rows)]), row_targets=torch.cat([a.row_targets, b.row_targets])
        )
    whole = _with_frequent(whole, a, b)
    if a.moments is not None and b.moments is not None:
        return replace(whole, moments=merge(a.moments, b.moments))
    assert a.classes is not None
    assert b.classes is not None
    c = max(a.classes.counts.shape[0], b.classes.counts.shape[0])
    classes = merge(widen(a.classes, c), widen(b.classes, c))
    if c <= CLASSES:
        return replace(whole, classes=classes)
    return projected_classes(replace(whole, classes=classes, labels=c))


def _rows_alike(a: FeatureStatistics, b: FeatureStatistics) -> tuple[FeatureStatistics, FeatureStatistics]:
    """Both with their rows, if the union may keep them; else both without, with ``HᵀH`` if both can have it."""
    if a.rows is None and b.rows is None:
        return a, b
    both = a.rows is not None and b.rows is not None
    d = (a.rows if a.rows is not None else b.rows).shape[1]  # type: ignore[union-attr]
    if both and keeps_rows(a.n + b.n, d, max(ROW_ENTRIES, *(p.rows.numel() for p in (a, b) if p.rows is not None))):
        return a, b
    gram = all(part.rows is not None or part.joint.C_hh is not None for part in (a, b)) and d <= GRAM_LIMIT
    return without_rows(a, gram), without_rows(b, gram)


def without_rows(part: FeatureStatistics, gram: bool) -> FeatureStatistics:
    """The same with ``HᵀH`` in place of the rows, or with neither."""
    if part.rows is None or part.row_targets is None:
        return part
    if gram:
        found = statistics_of(part.name, part.rows, part.row_targets, True)
        part = replace(part, moments=found.moments, classes=found.classes, labels=found.labels)
    return replace(part, rows=None, row_targets=None)


def projected_classes(part: FeatureStatistics) -> FeatureStatistics:
    """Class moments as those of projected labels, exactly."""
    if part.classes is None:
        return part
    joint = part.classes.to_moments()
    R = projected(torch.arange(joint.mean_y.shape[0], device=joint.mean_y.device))
    moments = Moments(joint.n, joint.mean_h, joint.mean_y @ R, joint.C_hh, joint.C_hy @ R, R.mT @ joint.C_yy @ R)
    return replace(part, moments=moments, classes=None, labels=max(part.labels, R.shape[0]))


def _with_frequent(whole: FeatureStatistics, a: FeatureStatistics, b: FeatureStatistics) -> FeatureStatistics:
    """The rows of frequent labels of both; none where they are of different labels."""
    if a.frequent is None or b.frequent is None or a.frequent_labels is None or b.frequent_labels is None:
        return whole
    rows = torch.cat([a.frequent, b.frequent.to(a.frequent)])[:FREQUENT_ROWS]
    labels = torch.cat([a.frequent_labels, b.frequent_labels.to(a.frequent_labels)])[:FREQUENT_ROWS]
    return replace(whole, frequent=rows, frequent_labels=labels)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        raise InputError(f"cannot merge sums of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return a + b.to(a.device)
