"""Neural collapse at a network's readout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError
from gramscope.layers.batches import NoBatchError
from gramscope.layers.kinds import effective_weight
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import model_device
from gramscope.linalg.arrays import Array, to_double
from gramscope.measures.collapse import NeuralCollapse, nearest_class, neural_collapse_from_rows
from gramscope.statistics.features import Features
from gramscope.statistics.result import LayerStatistics
from gramscope.statistics.run import run
from gramscope.statistics.sums import OUTPUT, Notes, Plan

#: weight [C, d], a pair of weight and bias, or a module with ``weight`` and ``bias``
Readout: TypeAlias = Array | Sequence[Array | None] | nn.Module


def neural_collapse(H: Array, labels: Array, readout: Readout | None = None) -> NeuralCollapse:
    """NC1–NC4 of penultimate features; see :func:`~gramscope.measures.collapse.neural_collapse_from_rows`.

    Args:
        H: features ``[n, d]``.
        labels: integers ``[n]``; with a readout its row numbers.
        readout: weight ``[C, d]``, a pair of weight and bias, or a module with both (its weight may be parametrised);
            needed for NC3 and NC4.

    >>> import torch
    >>> H = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    >>> neural_collapse(H, torch.tensor([0, 0, 1, 1]), nn.Linear(2, 2)).nc1
    0.0
    """
    return neural_collapse_from_rows(H, labels, *_weight_and_bias(readout))


def _weight_and_bias(readout: Any) -> tuple[Any, Any]:
    if isinstance(readout, nn.Module):
        if not isinstance(getattr(readout, "weight", None), Tensor):
            raise InputError(f"readout is a {type(readout).__name__}, which has no weight; give its last linear layer")
        return effective_weight(readout, "weight"), getattr(readout, "bias", None)
    if isinstance(readout, tuple) or (isinstance(readout, list) and isinstance(readout[0], Tensor | np.ndarray)):
        if len(readout) != 2:
            raise InputError(f"readout has {len(readout)} parts; give the weight [classes, features] and the bias")
        return readout[0], readout[1]
    return readout, None


def nearest_mean_agreement(
    layer: LayerStatistics, model: nn.Module, loader: Any, loss: Loss | None, plan: Plan, exchange: Exchange | None
) -> float:
    """Share of samples, or labelled tokens, whose nearest class mean is the class with the largest score.

    Args:
        layer: statistics of the readout, with the class means of its inputs.
        model, loader, loss, plan: what the statistics were collected with.
        exchange: the processes whose data they are of.
    """
    name, classes = layer.name, None if layer.features is None else layer.features.classes
    if classes is None:
        raise InputError("NC4 needs class labels")
    if (count := int((classes.mean_y > 0).sum())) < 2:
        raise InputError(f"NC4 needs at least two classes with samples, got {count}")
    again = replace(plan, sums=(Features,), layers=[name], outputs=[name], residuals=False, notes=Notes())

    def read() -> tuple[int, int]:
        if isinstance(loader, Iterator):
            raise InputError(
                "NC4 reads the data twice, and this loader can be read once; give a DataLoader or a list of batches"
            )
        agree = count = 0
        inputs = target = None
        with (
            suppress(*([] if exchange is None else [NoBatchError])),
            closing(run(model, loader, loss, again)) as stream,
        ):
            for seen in stream:
                if seen.record is not None:
                    inputs, target = seen.rows, seen.target
                elif seen.layer != OUTPUT and inputs is not None and target is not None and seen.rows is not None:
                    kept = target != plan.ignore_index
                    nearest = nearest_class(to_double(inputs[kept]), classes)
                    agree += int((nearest == seen.rows[kept].argmax(1).to(nearest.device)).sum())
                    count += len(nearest)
        return agree, count

    parts = [read()] if exchange is None else exchange.gather_objects(exchange.read_together(read, model_device(model)))
    agree, count = (sum(numbers) for numbers in zip(*parts, strict=True))
    return float(agree / count)
