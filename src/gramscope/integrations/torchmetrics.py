"""Measures of features as torchmetrics metrics: ``update`` with batches, ``compute`` at the end, exact across processes.

The state is one float64 vector that holds merged moments (:mod:`gramscope.linalg.moments`). Its size depends on the numbers
of features and targets, not on the data, and merging is exact under any split into batches and processes.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from gramscope.errors import InputError, load_extra
from gramscope.linalg.arrays import OneHotRows, Rows, as_nonempty_floats
from gramscope.linalg.moments import Moments, moments
from gramscope.linalg.ridge import fit_moments
from gramscope.measures.collapse import neural_collapse_from_moments
from gramscope.measures.linearity import as_labels, checked, surrogate_from_moments
from gramscope.measures.similarity import linear_cka_from_moments

Metric: Any = load_extra("torchmetrics", "torchmetrics").Metric


class _MomentsMetric(Metric):  # type: ignore[misc]
    """A function of the moments of features ``[n, d]`` and of targets, or one-hot labels, with c columns.

    Args:
        num_features: width d of the features.
        num_classes: number of classes c, for integer labels 0 to c−1; they become centred one-hot targets.
        num_targets: number of columns of float targets, where there are no classes.
        settings: keyword arguments of the measure, and those of ``torchmetrics.Metric``.
    """

    is_differentiable = False
    full_state_update = False
    higher_is_better = True
    #: defaults of the measure's keyword arguments
    SETTINGS: dict[str, Any] = {}  # noqa: RUF012
    moments: Tensor

    def __init__(
        self, num_features: int, num_classes: int | None = None, num_targets: int = 1, **settings: Any
    ) -> None:
        own = {name: settings.pop(name, default) for name, default in self.SETTINGS.items()}
        super().__init__(**settings)
        self.settings, self.labelled = own, num_classes is not None
        d, c = num_features, num_targets if num_classes is None else num_classes
        for name, size in (("num_features", d), ("number of targets or classes", c)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"{type(self).__name__}: {name} is {size!r}; give a positive whole number")
        self.d, self.c = d, c
        empty = torch.zeros(1 + (d + c) + d * d + d * c + c * c, dtype=torch.float64, device="cpu")
        self.add_state("moments", default=empty, dist_reduce_fx=partial(_merge_packed, d=d, c=c))

    def update(self, features: Tensor, targets: Tensor) -> None:
        """Add a batch: features ``[n, d]`` and labels ``[n]``, or float targets ``[n]`` or ``[n, c]``."""
        rows = Rows(features.detach(), "features")
        if rows.width != self.d:
            raise InputError(f"features have width {rows.width}, but {type(self).__name__} was made for {self.d}")
        if self.labelled:
            labels = as_labels(targets, "targets")
            values = torch.arange(self.c, dtype=torch.int64, device=labels.device)
            columns: Rows = OneHotRows(labels, values, torch.zeros_like(values).float(), "targets")
        else:
            floats = as_nonempty_floats(targets.detach(), "targets")
            columns = Rows(floats[:, None] if floats.dim() == 1 else floats, "targets")
            if columns.width != self.c:
                raise InputError(
                    f"targets have {columns.width} columns, but {type(self).__name__} was made for {self.c}"
                )
        packed = _pack(moments(rows, columns))
        self.moments = _merge_packed(torch.stack([self.moments, packed.to(self.moments.device)]), self.d, self.c)

    def _merged(self, centred: bool = False) -> Moments:
        merged = _unpack(self.moments, self.d, self.c)
        if merged.n == 0:
            raise InputError(f"{type(self).__name__} has seen no samples; call update(features, targets) first")
        return merged.with_centred_targets() if centred else merged

    @override
    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the value, or a sequence of values over time, with matplotlib; returns the figure and its axes."""
        return self._plot(val, ax)


class TargetLinearity(_MomentsMetric):
    """:func:`gramscope.target_linearity` of all batches: the share of the targets that a linear map of features explains.

    ``ridge=`` is λ, on the scale of ``HᵀH``; ``intercept=True`` fits a constant as well.

    >>> metric = TargetLinearity(num_features=1)
    >>> metric.update(torch.tensor([[1.0], [2.0]]), torch.tensor([2.0, 4.0]))
    >>> metric.update(torch.tensor([[3.0], [5.0]]), torch.tensor([6.0, 10.0]))
    >>> round(metric.compute().item(), 6)
    1.0
    """

    SETTINGS = {"ridge": 0.0, "intercept": False}  # noqa: RUF012

    def compute(self) -> Tensor:
        """A float64 number."""
        return checked(fit_moments(self._merged(self.labelled), **self.settings)).explained()


class Surrogate(_MomentsMetric):
    """:func:`gramscope.surrogate` of all batches, ``tr(YᵀHHᵀY)``.

    ``normalized=True`` divides by ``‖HHᵀ‖ ‖YYᵀ‖``; ``center=True`` subtracts the mean of the features first.

    >>> metric = Surrogate(num_features=2)
    >>> metric(torch.eye(2), torch.tensor([3.0, 4.0])).item()
    25.0
    """

    SETTINGS = {"normalized": False, "center": False}  # noqa: RUF012

    def compute(self) -> Tensor:
        """A float64 number."""
        return surrogate_from_moments(self._merged(self.labelled), **self.settings)


class NeuralCollapse(_MomentsMetric):
    """NC1 and NC2 of all batches; NC3 and NC4 need a readout: :func:`gramscope.neural_collapse`.

    >>> metric = NeuralCollapse(num_features=1, num_classes=2)
    >>> metric.update(torch.tensor([[2.0], [2.0], [-1.0]]), torch.tensor([0, 0, 1]))
    >>> metric.compute()["nc1"].item()
    0.0
    """

    higher_is_better = False
    NAMES = ("nc1", "nc2_equinorm", "nc2_equiangular", "nc2_simplex")

    def __init__(self, num_features: int, num_classes: int, **options: Any) -> None:
        super().__init__(num_features, num_classes, **options)

    def compute(self) -> dict[str, Tensor]:
        """Float64 numbers by name, see :class:`gramscope.measures.collapse.NeuralCollapse`."""
        result = neural_collapse_from_moments(self._merged())
        return {name: self.moments.new_tensor(getattr(result, name)) for name in self.NAMES}


class LinearCKA(_MomentsMetric):
    """:func:`gramscope.linear_cka` between two sets of features of the same samples, the second of width ``num_reference``.

    >>> metric = LinearCKA(num_features=1)
    >>> metric(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [5.0]])).item()
    1.0
    """

    def __init__(self, num_features: int, num_reference: int | None = None, **options: Any) -> None:
        columns = num_features if num_reference is None else num_reference
        super().__init__(num_features, num_targets=columns, **options)

    def compute(self) -> Tensor:
        """A float64 number between 0 and 1."""
        return linear_cka_from_moments(self._merged())


def _pack(m: Moments) -> Tensor:
    """All numbers of the moments as one vector."""
    tensors = [m.mean_h.new_tensor([m.n]), m.mean_h, m.mean_y, m.require_gram(), m.C_hy, m.C_yy]
    return torch.cat([tensor.flatten() for tensor in tensors])


def _unpack(vector: Tensor, d: int, c: int) -> Moments:
    shapes = ((1,), (d,), (c,), (d, d), (d, c), (c, c))
    n, *rest = torch.split(vector, [math.prod(shape) for shape in shapes])
    return Moments(int(n), *(part.reshape(shape) for part, shape in zip(rest, shapes[1:], strict=True)))


def _merge_packed(stacked: Tensor, d: int, c: int) -> Tensor:
    """Merge packed states ``[states, length]`` into one, as ``dist_reduce_fx`` of torchmetrics does."""
    return _pack(reduce(Moments.merge, [_unpack(vector, d, c) for vector in stacked]))
