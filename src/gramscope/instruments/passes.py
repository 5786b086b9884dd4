"""What further readings of the data tell of layers whose features fit neither as rows nor as ``HᵀH``.

Target linearity is fitted by one reading for each step of conjugate gradients. NC1 takes one reading, and target linearity on
held-out data one reading of these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError, ResultWarning
from gramscope.layers.batches import NoBatchError
from gramscope.linalg.arrays import to_double
from gramscope.linalg.conjugate_gradients import IterativeFit
from gramscope.linalg.moments import ClassMoments
from gramscope.linalg.row_blocks import spans
from gramscope.measures.linearity import IterativeResult
from gramscope.statistics.feature_statistics import FeatureStatistics, present_classes
from gramscope.statistics.result import LayerStatistics, Statistics

#: passes over the data at most
PASSES = 40
#: part of the targets' variance that a further pass must be expected to explain
ENOUGH = 1e-4


def without_gram(statistics: Statistics) -> list[LayerStatistics]:
    """The layers whose features are kept neither as rows nor as ``HᵀH``."""
    found = []
    for layer in statistics:
        part = layer.features
        if part is not None and part.rows is None and part.joint.C_hh is None and part.joint.C_hy.shape[-1]:
            found.append(layer)
    return found


@dataclass(frozen=True)
class Source:
    """Data that can be read again.

    Args:
        statistics: what was collected of them.
        read: ``read(visit=…, layers=…)`` runs the model over the data of this process and calls ``visit(name, rows)``.
        loader: what it reads; it must give the same samples each time.
        exchange: the processes whose data are one sample.
    """

    statistics: Statistics
    read: Callable[..., object]
    loader: Any
    exchange: Exchange | None


class FurtherReadings:
    """:class:`gramscope.measures.column.Readings`: each answer is found once, for all layers together.

    Args:
        data: on which the layers were measured.
        held_out: further data, if any.
        ridge, intercept: of the fits.
    """

    def __init__(self, data: Source, held_out: Source | None, ridge: float, intercept: bool) -> None:
        self._data, self._held_out, self._ridge, self._intercept = data, held_out, ridge, intercept
        self.fits = cache(self._fits)
        self.class_moments = cache(self._class_moments)
        self.held_out_spreads = cache(self._held_out_spreads)

    def _fits(self) -> Mapping[str, IterativeResult]:
        """Linear fits on the inputs of layers, from one reading for each step of conjugate gradients."""
        layers = without_gram(self._data.statistics)
        problems = {layer.name: _Fit(layer, self._ridge, self._intercept) for layer in layers}
        for _ in range(PASSES):
            going = {name: problem for name, problem in problems.items() if not problem.done}
            if not going:
                break
            _read(going, self._data)
            for problem in going.values():
                problem.step()
        return {name: problem.result() for name, problem in problems.items()}

    def _class_moments(self) -> Mapping[str, ClassMoments]:
        """Class moments in the span of the centred class means."""
        layers = [layer for layer in without_gram(self._data.statistics) if _features(layer).classes is not None]
        problems = {layer.name: _Classes(_features(layer)) for layer in layers}
        _read(problems, self._data)
        return {name: problem.result() for name, problem in problems.items()}

    def _held_out_spreads(self) -> Mapping[str, Tensor]:
        """``‖Hβ‖²`` of the centred held-out features and both coefficients of the fits, ``[2]``."""
        assert self._held_out is not None
        there = self._held_out.statistics.layers
        found = {}
        for name, fit in self.fits().items():
            if name in there:
                found[name] = _Predictions(_features(there[name]), torch.cat(fit.coefficients, 1))
        _read(found, self._held_out)
        return {name: problem.product.reshape(2, -1).sum(1) for name, problem in found.items()}


class _Sum(Protocol):
    """A sum over all rows of a layer."""

    name: str
    n: int
    product: Tensor
    rows: Tensor

    def add(self, rows: Tensor) -> None:
        """Add some rows."""


def _read(sums: Mapping[str, _Sum], data: Source) -> None:
    """Add all rows of all processes to the sums of some layers."""
    if not sums:
        return
    error: Exception | None = None
    try:
        if isinstance(data.loader, Iterator):
            raise InputError(
                "it reads the data again, because neither rows nor HᵀH of so many features fit memory=, and this loader can be "
                "read once; give a DataLoader or a list of batches"
            )

        def visit(name: str, rows: Tensor) -> None:
            if name in sums:
                sums[name].add(rows)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResultWarning)
            data.read(visit=visit, layers=list(sums), process_group=False, mesh=None, progress=False)
    except NoBatchError:
        pass
    except Exception as raised:
        error = raised
    if data.exchange is not None:
        data.exchange.raise_together(error, next(iter(sums.values())).product.device)
    elif error is not None:
        raise error
    for each in sums.values():
        if data.exchange is not None:
            data.exchange.add(each.product)
            data.exchange.add(each.rows)
        if int(each.rows) != each.n:
            raise InputError(
                f"layer {each.name!r}: the data had {each.n} rows at first and {int(each.rows)} later; so many features need a "
                "loader that gives the same samples each time"
            )


def _features(layer: LayerStatistics) -> FeatureStatistics:
    assert layer.features is not None
    return layer.features


class _Fit:
    """The fit of one layer."""

    def __init__(self, layer: LayerStatistics, ridge: float, intercept: bool) -> None:
        part = _features(layer)
        joint = part.joint.with_centred_targets() if part.labelled else part.joint
        self._joint, self._intercept, self._passes = joint, intercept, 0
        cross, squares = (joint.C_hy, joint.C_yy) if intercept else (joint.HtY, joint.YtY)
        self._fit = IterativeFit(cross, squares.diagonal().clone(), ridge)
        self.name, self.n, self._total = layer.name, joint.n, float(joint.C_yy.trace())
        self._reset()

    def _reset(self) -> None:
        self.product = torch.zeros_like(self._fit.direction)
        self.rows = torch.zeros((), dtype=torch.float64, device=self.product.device)

    @property
    def done(self) -> bool:
        return self._fit.remaining() <= ENOUGH * self._total

    def add(self, rows: Tensor) -> None:
        """Add ``hᵀ(hP)`` of some rows."""
        for start, stop in spans(*rows.shape):
            block = to_double(rows[start:stop])
            self.product.addmm_(block.mT, block @ self._fit.direction)
        self.rows += rows.shape[0]

    def step(self) -> None:
        """Go on with the products of all rows."""
        if self._intercept:
            mean = self._joint.mean_h.unsqueeze(1)
            self.product -= self._joint.n * mean @ (mean.mT @ self._fit.direction)
        self._fit.step(self.product)
        self._passes += 1
        self._reset()

    def result(self) -> IterativeResult:
        """The fit as it is now."""
        return IterativeResult(self._fit.residuals, self._fit.remaining(), self._passes, self._fit.coefficients)


class _Classes:
    """The scatter of one layer's features along the centred means of its classes."""

    def __init__(self, part: FeatureStatistics) -> None:
        assert part.classes is not None
        self._classes = present_classes(part.classes)
        self._mean = self._classes.mean
        self._basis: Tensor = torch.linalg.qr((self._classes.means - self._mean).mT)[0]
        self.name, self.n = part.name, part.n
        self.product = self._basis.new_zeros(self._basis.shape[1], self._basis.shape[1])
        self.rows = self._basis.new_zeros(())

    def add(self, rows: Tensor) -> None:
        """Add the squares of some rows."""
        for start, stop in spans(*rows.shape):
            along = (to_double(rows[start:stop]) - self._mean) @ self._basis
            self.product.addmm_(along.mT, along)
        self.rows += rows.shape[0]

    def result(self) -> ClassMoments:
        """Counts, means and the scatter around them, in the span."""
        means = (self._classes.means - self._mean) @ self._basis
        within = self.product - means.mT @ (self._classes.counts.unsqueeze(1) * means)
        return ClassMoments(self._classes.counts, means, within)


class _Predictions:
    """The squares of what a fit predicts for one layer's centred features."""

    def __init__(self, part: FeatureStatistics, coefficients: Tensor) -> None:
        self._mean, self._coefficients = part.joint.mean_h, coefficients
        self.name, self.n = part.name, part.n
        self.product = coefficients.new_zeros(coefficients.shape[1])
        self.rows = coefficients.new_zeros(())

    def add(self, rows: Tensor) -> None:
        """Add the squares of some rows."""
        for start, stop in spans(*rows.shape):
            predicted = (to_double(rows[start:stop]) - self._mean) @ self._coefficients
            self.product += predicted.square().sum(0)
        self.rows += rows.shape[0]
