"""Measures of features as torchmetrics metrics: ``update`` with batches, ``compute`` at the end, exact across processes.

The state is one float64 vector that holds merged moments (:mod:`gramscope.linalg.moments`). Its size depends on the numbers
of features and targets, not on the data, and merging is exact under any split into batches and processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError, load_extra
from gramscope.linalg.arrays import OneHotRows, Rows, as_nonempty_floats
from gramscope.linalg.moments import ClassMoments, Moments, class_moments, merge, moments
from gramscope.measures.collapse import neural_collapse_from_moments
from gramscope.measures.linearity import as_labels, surrogate_from_moments, target_linearity_from_moments
from gramscope.measures.similarity import linear_cka_from_moments

Metric: Any = load_extra("torchmetrics", "torchmetrics").Metric
#: sizes d and c, and whether the moments are those of classes
Layout = tuple[int, int, bool]


class _MomentsMetric(Metric):  # type: ignore[misc]
    """A function of the moments of features ``[n, d]`` and of targets or labels with c columns."""

    is_differentiable = False
    full_state_update = False
    moments: Tensor

    def __init__(self, features: int, columns: int, labels: bool, **options: Any) -> None:
        super().__init__(**options)
        for name, size in (("num_features", features), ("number of targets or classes", columns)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"{type(self).__name__}: {name} is {size!r}; give a positive whole number")
        self._layout: Layout = (features, columns, labels)
        length = sum(math.prod(shape) for shape in _shapes(self._layout))
        empty = torch.zeros(length, dtype=torch.float64, device="cpu")
        self.add_state("moments", default=empty, dist_reduce_fx=partial(_merge_packed, layout=self._layout))

    def update(self, features: Tensor, targets: Tensor) -> None:
        """Add a batch: features ``[n, d]`` and labels ``[n]``, or float targets ``[n]`` or ``[n, c]``."""
        d, c, labels = self._layout
        rows = Rows(features.detach(), "features")
        if rows.width != d:
            raise InputError(f"features have width {rows.width}, but {type(self).__name__} was made for {d}")
        batch: Moments | ClassMoments
        if labels:
            given = as_labels(targets, "targets")
            values = torch.arange(c, dtype=torch.int64, device=given.device)
            batch = class_moments(
                rows, OneHotRows(given, values, torch.zeros(c, dtype=torch.float32, device=given.device), "targets")
            )
        else:
            floats = as_nonempty_floats(targets.detach(), "targets")
            columns = Rows(floats[:, None] if floats.dim() == 1 else floats, "targets")
            if columns.width != c:
                raise InputError(f"targets have {columns.width} columns, but {type(self).__name__} was made for {c}")
            batch = moments(rows, columns)
        packed = _pack(batch).to(self.moments.device)
        self.moments = _merge_packed(torch.stack([self.moments, packed]), self._layout)

    def _merged(self) -> Moments | ClassMoments:
        merged = _unpack(self.moments, self._layout)
        if merged.n == 0:
            raise InputError(f"{type(self).__name__} has seen no samples; call update(features, targets) first")
        return merged

    def _target_moments(self) -> Moments:
        merged = self._merged()
        return merged.to_moments().with_centred_targets() if isinstance(merged, ClassMoments) else merged

    @override
    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value, or a sequence of values over time, with matplotlib; returns the figure and its axes."""
        return self._plot(val, ax)


class TargetLinearity(_MomentsMetric):
    """:func:`gramscope.target_linearity` of all batches: the share of the targets that a linear map of features explains.

    Args:
        num_features: width d of the features.
        num_classes: number of classes c, for integer labels 0 to c−1; they become centred one-hot targets.
        num_targets: number of columns of float targets, where there are no classes.
        ridge: λ, on the scale of ``HᵀH``.
        intercept: fit a constant as well.
        options: those of ``torchmetrics.Metric``.

    >>> metric = TargetLinearity(num_features=1)
    >>> metric.update(torch.tensor([[1.0], [2.0]]), torch.tensor([2.0, 4.0]))
    >>> metric.update(torch.tensor([[3.0], [5.0]]), torch.tensor([6.0, 10.0]))
    >>> round(metric.compute().item(), 6)
    1.0
    """

    higher_is_better = True

    def __init__(
        self,
        num_features: int,
        num_classes: int | None = None,
        num_targets: int = 1,
        ridge: float = 0.0,
        intercept: bool = False,
        **options: Any,
    ) -> None:
        columns, labels = (num_targets, False) if num_classes is None else (num_classes, True)
        super().__init__(num_features, columns, labels, **options)
        self.ridge, self.intercept = ridge, intercept

    def compute(self) -> Tensor:
        """A float64 number."""
        return target_linearity_from_moments(self._target_moments(), self.ridge, self.intercept)


class Surrogate(_MomentsMetric):
    """:func:`gramscope.surrogate` of all batches, ``tr(YᵀHHᵀY)``.

    Args:
        num_features, num_classes, num_targets, options: as in :class:`TargetLinearity`.
        normalized: divide by ``‖HHᵀ‖ ‖YYᵀ‖``, which gives a number between 0 and 1.
        center: subtract the mean of the features first.

    >>> metric = Surrogate(num_features=2)
    >>> metric(torch.eye(2), torch.tensor([3.0, 4.0])).item()
    25.0
    """

    higher_is_better = True

    def __init__(
        self,
        num_features: int,
        num_classes: int | None = None,
        num_targets: int = 1,
        normalized: bool = False,
        center: bool = False,
        **options: Any,
    ) -> None:
        columns, labels = (num_targets, False) if num_classes is None else (num_classes, True)
        super().__init__(num_features, columns, labels, **options)
        self.normalized, self.center = normalized, center

    def compute(self) -> Tensor:
        """A float64 number."""
        return surrogate_from_moments(self._target_moments(), self.normalized, self.center)


class NeuralCollapse(_MomentsMetric):
    """NC1 and NC2 of all batches, and the normalised surrogate; NC3 and NC4 need a readout: :func:`gramscope.neural_collapse`.

    Args:
        num_features: width d of the features.
        num_classes: number of classes; labels are 0 to ``num_classes`` − 1.
        options: those of ``torchmetrics.Metric``.

    >>> metric = NeuralCollapse(num_features=1, num_classes=2)
    >>> metric.update(torch.tensor([[1.0], [1.0], [-1.0]]), torch.tensor([0, 0, 1]))
    >>> metric.compute()["nc1"].item()
    0.0
    """

    higher_is_better = False
    NAMES = ("nc1", "nc2_equinorm", "nc2_equiangular", "nc2_simplex", "normalized_surrogate")

    def __init__(self, num_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(num_features, num_classes, True, **options)

    def compute(self) -> dict[str, Tensor]:
        """Float64 numbers by name, see :class:`gramscope.measures.collapse.NeuralCollapse`."""
        classes = self._merged()
        assert isinstance(classes, ClassMoments)
        result = neural_collapse_from_moments(classes)
        return {name: self.moments.new_tensor(getattr(result, name)) for name in self.NAMES}


class LinearCKA(_MomentsMetric):
    """:func:`gramscope.linear_cka` between two sets of features of the same samples.

    Args:
        num_features: width of the first features.
        num_reference: width of the others; by default the same.
        options: those of ``torchmetrics.Metric``.

    >>> metric = LinearCKA(num_features=1)
    >>> metric(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]])).item()
    1.0
    """

    higher_is_better = True

    def __init__(self, num_features: int, num_reference: int | None = None, **options: Any) -> None:
        super().__init__(num_features, num_features if num_reference is None else num_reference, False, **options)

    def compute(self) -> Tensor:
        """A float64 number between 0 and 1."""
        merged = self._merged()
        assert isinstance(merged, Moments)
        return linear_cka_from_moments(merged)


def _shapes(layout: Layout) -> Sequence[tuple[int, ...]]:
    """Shapes of the parts of a packed state."""
    d, c, labels = layout
    return ((c,), (c, d), (d, d)) if labels else ((1,), (d,), (c,), (d, d), (d, c), (c, c))


def _pack(m: Moments | ClassMoments) -> Tensor:
    """All numbers of the moments as one vector."""
    if isinstance(m, ClassMoments):
        assert m.within is not None
        tensors = [m.counts, m.means, m.within]
    else:
        tensors = [m.mean_h.new_tensor([m.n]), m.mean_h, m.mean_y, m.require_gram(), m.C_hy, m.C_yy]
    return torch.cat([tensor.flatten() for tensor in tensors])


def _unpack(vector: Tensor, layout: Layout) -> Moments | ClassMoments:
    shapes = _shapes(layout)
    pieces = torch.split(vector, [math.prod(shape) for shape in shapes])
    tensors = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    if layout[2]:
        return ClassMoments(*tensors)
    return Moments(int(tensors[0]), *tensors[1:])


def _merge_packed(stacked: Tensor, layout: Layout) -> Tensor:
    """Merge packed states ``[states, length]`` into one, as ``dist_reduce_fx`` of torchmetrics does."""
    unpacked: list[Any] = [_unpack(vector, layout) for vector in stacked]
    return _pack(reduce(merge, unpacked))
