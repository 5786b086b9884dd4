"""Target linearity of layers whose features neither fit as rows nor as ``HᵀH``: fitted by reading the data again and again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError, ResultWarning
from gramscope.layers.batches import NoBatchError
from gramscope.linalg.arrays import to_double
from gramscope.linalg.conjugate_gradients import IterativeFit
from gramscope.linalg.row_blocks import spans
from gramscope.measures.linearity import IterativeResult
from gramscope.statistics.layer import LayerStatistics
from gramscope.statistics.result import Statistics

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


def fitted_by_passes(
    layers: Iterable[LayerStatistics],
    read: Callable[..., object],
    loader: Any,
    ridge: float,
    intercept: bool,
    exchange: Exchange | None,
) -> dict[str, IterativeResult]:
    """Linear fits on the inputs of layers, by name, from one reading of all data for each step of conjugate gradients.

    Args:
        layers: with moments of their features with the targets.
        read: ``read(visit=…, layers=…)`` runs the model over the data of this process and calls ``visit(name, rows)``.
        loader: what it reads; it must give the same samples each time.
        ridge, intercept: of the fit.
        exchange: the processes whose data are one sample.
    """
    problems = {layer.name: _Problem(layer, ridge, intercept) for layer in layers}
    for _ in range(PASSES):
        going = {name: problem for name, problem in problems.items() if not problem.done}
        if not going:
            break
        _pass(going, read, loader, exchange)
    return {name: problem.result() for name, problem in problems.items()}


def _pass(problems: dict[str, _Problem], read: Callable[..., object], loader: Any, exchange: Exchange | None) -> None:
    """One step of every problem."""
    error: Exception | None = None
    try:
        if isinstance(loader, Iterator):
            raise InputError(
                "target linearity of so many features reads the data many times, and this loader can be read once; give a "
                "DataLoader or a list of batches"
            )

        def visit(name: str, rows: Tensor) -> None:
            if name in problems:
                problems[name].add(rows)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResultWarning)
            read(visit=visit, layers=list(problems), process_group=False, mesh=None, progress=False)
    except NoBatchError:
        pass
    except Exception as raised:
        error = raised
    device = next(iter(problems.values())).product.device
    if exchange is not None:
        exchange.raise_together(error, device)
    elif error is not None:
        raise error
    for problem in problems.values():
        if exchange is not None:
            exchange.add(problem.product)
            exchange.add(problem.rows)
        problem.step()


class _Problem:
    """The fit of one layer."""

    def __init__(self, layer: LayerStatistics, ridge: float, intercept: bool) -> None:
        part = layer.features
        assert part is not None
        joint = part.joint.with_centred_targets() if part.labelled else part.joint
        self._joint, self._intercept, self._passes = joint, intercept, 0
        cross, squares = (joint.C_hy, joint.C_yy) if intercept else (joint.HtY, joint.YtY)
        self._fit = IterativeFit(cross, squares.diagonal().clone(), ridge)
        self._name, self._total = layer.name, float(joint.C_yy.trace())
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
        if int(self.rows) != self._joint.n:
            raise InputError(
                f"layer {self._name!r}: the data had {self._joint.n} rows at first and {int(self.rows)} later; target "
                "linearity of so many features needs a loader that gives the same samples each time"
            )
        if self._intercept:
            mean = self._joint.mean_h.unsqueeze(1)
            self.product -= self._joint.n * mean @ (mean.mT @ self._fit.direction)
        self._fit.step(self.product)
        self._passes += 1
        self._reset()

    def result(self) -> IterativeResult:
        """The fit as it is now."""
        return IterativeResult(self._fit.residuals, self._fit.remaining(), self._passes)
