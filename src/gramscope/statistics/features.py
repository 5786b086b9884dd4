"""Features of a layer as a sum: moments of its rows and their targets, and the rows themselves while they are few.

Labels count as one-hot rows. More than 1,024 of them (the tokens of a language model) are too many for a column each. Then
the targets are the one-hot labels times a fixed random matrix of signs with 64 columns, ``Y R / 8``: sums of squares over the
columns estimate those of all labels without bias, and their spread over the columns gives the standard error.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError, NumericalError
from gramscope.layers.kinds import EmbeddingLayer
from gramscope.linalg.arrays import to_double
from gramscope.linalg.budget import Budget
from gramscope.linalg.moments import Moments, between, block_moments, label_moments
from gramscope.linalg.psd import SymmetricSum, kept_entries
from gramscope.statistics.structure import Unpaired
from gramscope.statistics.sums import LeftOut, NotCollected, Plan, Seen, Sum

#: label values up to which every class has a column of its own
CLASSES = 1024
#: columns of the random projection of one-hot labels above
PROJECTION = 64


def projected(labels: Tensor) -> Tensor:
    """One-hot rows of ``labels [m]`` times a fixed random matrix of signs, over the root of its 64 columns, ``[m, 64]``.

    >>> projected(torch.tensor([7, 7, 70_000])).square().sum(1)
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    signs = _signs(int(labels.max()) // 4096 + 1, labels.device)
    return signs[labels].double().div_(PROJECTION**0.5)


@cache
def _signs(blocks: int, device: torch.device) -> Tensor:
    """The rows of the first ``4096·blocks`` labels, each block from a seed of its own: no row depends on how many there are."""
    found = []
    for block in range(blocks):
        generator = torch.Generator(device="cpu").manual_seed(block)
        found.append(torch.randint(2, (4096, PROJECTION), generator=generator, dtype=torch.int8, device="cpu"))
    return torch.cat(found).mul_(2).sub_(1).to(device)


#: largest number of real target columns whose c×c moments are kept
TARGET_LIMIT = 4096
#: labels must be smaller than this: a table of signs is kept for every 4,096 of them
CLASS_LIMIT = 2**20
#: rows that are gathered before they are added: merging d×c moments for every small batch would cost more
WAITING = 256
#: entries turned into moments at once, at least 256 rows
BLOCK = 2**18


class Features(Sum):
    """Moments of feature rows and their targets, and the rows themselves while they are few.

    Columns read what :meth:`whole` gives.

    Attributes:
        moments: of (row, target): real targets, one-hot labels of all classes up to the largest seen, or projected labels.
        HtE: ``Hᵀ E [d, c]`` with ``E = −∂L/∂f``, uncentred; present when rows are samples.
        eps: rounding of the rows as they came, relative to their size (1.2e-7 for float32).
        labelled: whether the targets are labels, projected or not.
        probabilities: whether real targets stand for classes, as those of a loss of classification do.
        labels: number of label values behind projected targets, 0 for targets that are not projected.
        unpaired: why there are no targets although the loader gave some; empty where it does not matter.
        rows: the rows ``[n, d]`` themselves in place of ``HᵀH``, where they are few.
        row_targets: their labels ``[n]`` or real targets ``[n, c]``.
        of_outputs: whether the rows are the layer's outputs and not its inputs, as those of an embedding are.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"rows"})
    of_single_samples: ClassVar[bool] = True
    ask: ClassVar[str] = "features=True"

    def __init__(self, layer: str, weight: Tensor, plan: Plan) -> None:
        super().__init__(layer, weight, plan)
        self._gram, self._ignored, self._budget, self._classes = plan.gram, plan.ignore_index, plan.budget, plan.classes
        self._moments: Moments | None = None  # without what waits and, with a total, without C_hh
        self._total: SymmetricSum | None = None  # C_hh, which grows in place
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._count, self._most = 0, 0  # rows that wait, and how many may be kept as they are
        self.HtE: Tensor | None = None
        self._no_residuals = False  # True once a batch had none
        self.eps, self.labels = 0.0, 0
        self.labelled = self.probabilities = self.of_outputs = False
        self.unpaired = ""
        self.rows: Tensor | None = None
        self.row_targets: Tensor | None = None

    @override
    def add(self, seen: Seen) -> None:
        assert seen.rows is not None
        self.of_outputs = seen.record is not None and isinstance(seen.record.layer, EmbeddingLayer)
        self._add(seen.rows.detach(), seen.target, seen.residual)

    def _add(self, rows: Tensor, target: Tensor | None, residual: Tensor | None) -> None:
        if rows.shape[0] == 0:
            return
        kept, problem = None, ""
        try:
            if target is not None:
                target, kept = _checked(target, rows.shape[0], self._ignored)
        except Unpaired as reason:
            target, problem = None, str(reason)
        if bool(problem) != bool(self.unpaired) and (self._waiting or self._moments is not None):
            raise LeftOut(f"no features: in a part of the batches {problem or self.unpaired}")
        self.unpaired = problem
        if target is None:
            target = rows.new_zeros(rows.shape[0], 0)
        if kept is not None:
            rows, target, residual = rows[kept], target[kept], None if residual is None else residual[kept]
        if rows.shape[0] == 0:
            return
        self.eps = torch.finfo(rows.dtype).eps
        self._add_residual(rows, residual)
        if self._waiting and self._waiting[0][0].shape[1] != rows.shape[1]:
            self._flush()
        if not self._waiting:
            keeps = self._moments is None and self._gram == "auto"
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
            self.HtE = None
            return
        product = to_double(rows).mT @ to_double(residual)
        self.HtE = product if self.HtE is None else self.HtE + product

    def _flush(self) -> None:
        """Add what waits to the moments and to ``C_hh``."""
        if not self._waiting:
            return
        d = self._waiting[0][0].shape[1]
        if self._moments is None and (self._budget.keeps_gram(d) if self._gram == "auto" else self._gram):
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
            double, old = to_double(block), self._moments
            new = self._of_block(double, of_block.to(double.device))
            if old is None:
                self._moments, self.labelled, self.labels = new.moments, new.labelled, new.labels
            else:
                alike, new = self._coded_like(new), new._coded_like(self)
                self._moments, self.labels = alike.moments.merge(new.moments), max(alike.labels, new.labels)
            if self._total is not None:
                self._total.add_gram(double - new.moments.mean_h)
                if old is not None:  # what merging adds to the sums of both
                    self._total.add_gram(between(old, new.moments))

    def _of_block(self, double: Tensor, target: Tensor) -> Features:
        """The moments of float64 rows ``[m, d]`` with labels ``[m]`` or real targets ``[m, c]``, without ``C_hh``."""
        if target.is_floating_point():
            return self._with(_moments=block_moments(double, to_double(target), False), labelled=False, labels=0)
        count = int(target.max()) + 1
        if count > CLASSES:
            return self._with(_moments=block_moments(double, projected(target), False), labelled=True, labels=count)
        return self._with(_moments=label_moments(double, target, count, False), labelled=True, labels=0)

    @override
    def finish(self) -> None:
        rows = target = None
        if self._waiting and self._count <= self._most:
            rows, target = self._taken()
            self._add_blocks(rows, target)
        self._flush()
        if self._moments is None:
            return
        self.rows, self.row_targets = rows, target
        self.probabilities = self._classes and not self.labelled
        if not torch.isfinite(self._moments.mean_h).all():
            raise NumericalError(f"the features at {self.layer!r} are NaN or infinite; look at the inputs")
        if not torch.isfinite(self._moments.mean_y).all():
            raise NumericalError("the targets are NaN or infinite")

    # --- what columns read ----------------------------------------------------------------------------------------

    def _with(self, **values: Any) -> Self:
        """A copy with some attributes replaced."""
        other = copy.copy(self)
        vars(other).update(values)
        return other

    @property
    def moments(self) -> Moments:
        """Moments of rows and targets."""
        assert self._moments is not None
        return self._moments

    def whole(self) -> Self:
        """The same, after :meth:`finish`, with ``C_hh`` put together, of which a half is kept."""
        if self._total is None:
            return self
        return self._with(_moments=replace(self.moments, C_hh=self._total.dense()), _total=None)

    @property
    def n(self) -> int:
        """Number of rows."""
        return 0 if self._moments is None else self._moments.n

    @property
    def joint(self) -> Moments:
        """Moments of rows and targets, without the columns of classes that were never seen."""
        m = self.moments
        if self.labels or not self.labelled:
            return m
        seen = m.mean_y > 0
        return m if bool(seen.all()) else m.with_targets(seen)

    @property
    def classes(self) -> Moments | None:
        """Moments of rows and one-hot labels; None where targets are no labels, or projected ones."""
        return self.moments if self.labelled and not self.labels else None

    @property
    def no_targets(self) -> InputError:
        """Why the targets have no columns."""
        return NotCollected(self.unpaired) if self.unpaired else InputError("the loader gave no targets")

    @property
    def centred(self) -> bool:
        """Whether measures take the targets less their mean, as they do where these stand for classes."""
        return self.labelled or self.probabilities

    def _coded_like(self, other: Features) -> Self:
        """The same with as many columns of labels as ``other``, or projected labels where it has them."""
        if self.labelled != other.labelled:
            raise InputError(f"{self.layer!r}: labels cannot be merged with real targets")
        m, c = self.moments, len(self.moments.mean_y)
        if self.labels or not self.labelled:
            return self
        if other.labels:
            R = projected(torch.arange(c, device=m.mean_y.device, dtype=torch.int64))
            coded = replace(m, mean_y=m.mean_y @ R, C_hy=m.C_hy @ R, C_yy=R.mT @ m.C_yy @ R)
            return self._with(_moments=coded, labels=c)
        extra, pad = len(other.moments.mean_y) - c, torch.nn.functional.pad
        if extra <= 0:
            return self
        mean_y, C_hy, C_yy = pad(m.mean_y, (0, extra)), pad(m.C_hy, (0, extra)), pad(m.C_yy, (0, extra, 0, extra))
        return self._with(_moments=replace(m, mean_y=mean_y, C_hy=C_hy, C_yy=C_yy))

    def coded_alike(self, other: Features) -> tuple[Self, Features]:
        """Both with the same columns of targets; classes that only one of them has seen are added."""
        return self._coded_like(other), other._coded_like(self)

    def without_rows(self, gram: bool = True) -> Self:
        """The same with ``HᵀH`` in place of the rows, or with neither."""
        if self.rows is None:
            return self
        m = self.moments
        centred = to_double(self.rows) - m.mean_h if gram else None
        C_hh = m.C_hh if centred is None else centred.mT @ centred
        return self._with(_moments=replace(m, C_hh=C_hh), rows=None, row_targets=None)

    @override
    def merge(self, other: Self) -> Self:
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        if bool(self.unpaired) != bool(other.unpaired):
            raise InputError(
                f"{self.layer!r}: {self.unpaired or other.unpaired}; in the other part of the data they fit"
            )
        a, b = self.whole().coded_alike(other.whole())
        a, b = _rows_alike(a, b)  # type: ignore[assignment]
        rows = targets = None
        if a.rows is not None and b.rows is not None and a.row_targets is not None and b.row_targets is not None:
            rows, targets = (
                torch.cat([a.rows, b.rows.to(a.rows)]),
                torch.cat([a.row_targets, b.row_targets.to(a.rows.device)]),
            )
        return a._with(
            _moments=a.moments.merge(b.moments),
            HtE=None if a.HtE is None or b.HtE is None else a.HtE + b.HtE.to(a.HtE.device),  # of all rows, or of none
            eps=max(a.eps, b.eps),
            labels=max(a.labels, b.labels),
            rows=rows,
            row_targets=targets,
        )

    @override
    @classmethod
    def size(cls, shape: Sequence[int], memory: int) -> int:
        d = int(torch.Size(shape[:-2]).numel() * shape[-1])
        with_targets = 8 * (d + PROJECTION) * (PROJECTION + 1)  # of as many columns
        return with_targets + (8 * kept_entries(d) if Budget(memory).keeps_gram(d) else memory)


def _rows_alike(a: Features, b: Features) -> tuple[Features, Features]:
    """Both with their rows, if the union may keep them; else both without, with ``HᵀH`` if both can have it."""
    kept = [part.rows for part in (a, b) if part.rows is not None]
    if not kept:
        return a, b
    d, budget = kept[0].shape[1], Budget(max(Budget().memory, *(16 * rows.numel() for rows in kept)))
    if len(kept) == 2 and a.n + b.n <= budget.most_rows(d):
        return a, b
    gram = all(part.rows is not None or part.moments.C_hh is not None for part in (a, b)) and budget.keeps_gram(d)
    return a.without_rows(gram), b.without_rows(gram)


def _checked(target: Tensor, m: int, ignored: int) -> tuple[Tensor, Tensor | None]:
    """Real targets ``[m, c]`` or labels ``[m]``, and which of them count where some are ignored."""
    if target.is_floating_point():
        target = target.reshape(m, -1)
        if target.shape[1] > TARGET_LIMIT:
            raise Unpaired(
                f"the target has {target.shape[1]} columns, more than {TARGET_LIMIT}; choose some with targets="
            )
        return target, None
    if target.dim() > 2:
        raise Unpaired(
            f"the target has one label per position, {tuple(target.shape)}; tokens='each' pairs them with the layers that have "
            "as many sites, targets= gives one label per sample"
        )
    labels = target[:, 0] if target.dim() == 2 and target.shape[1] == 1 else target
    if labels.dim() != 1:
        raise Unpaired(
            f"integer targets of shape {tuple(target.shape)} do not give one label to each of {m} rows: labels of "
            "positions need a layer that has these positions; targets= gives each sample one label"
        )
    kept = labels != ignored
    counted = torch.where(kept, labels, 0)
    low, high, all_kept = torch.stack(
        [counted.amin(), counted.amax(), kept.all()]
    ).tolist()  # at once: a GPU is waited for
    if low < 0:
        raise InputError(
            f"labels must not be negative, found {low}; ignore_index= ({ignored}) marks rows to leave out, "
            "and targets=lambda x, y: (y > 0).long() makes classes of labels −1 and 1"
        )
    if high >= CLASS_LIMIT:
        raise InputError(f"labels reach {high}, at least {CLASS_LIMIT}; number the classes from 0 with targets=")
    return labels.long(), None if all_kept else kept
