"""Statistics of several processes as one: what merges batches merges processes, one layer after the other."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError
from gramscope.linalg.arrays import row_norm
from gramscope.statistics.feature_statistics import FeatureStatistics
from gramscope.statistics.result import LayerStatistics, Statistics, check_options, drop_refuted, merge_orders
from gramscope.statistics.sums import Sum

Part = TypeVar("Part")
CPU = torch.device("cpu")


def over_processes(own: Statistics, exchange: Exchange, device: torch.device) -> Statistics:
    """Statistics of all processes together, the same in each of them.

    Every process must have collected with the same options and the same weights; a process without data takes part with none.
    No process holds more than two copies of one layer.

    Args:
        own: of this process.
        exchange: the processes.
        device: where the results are kept.
    """
    known = exchange.gather_objects((own.options, {layer.name: _weight(layer) for layer in own}, list(own.outputs)))
    weights: dict[str, Any] = {}
    for options, found, _ in known:
        check_options(own.options, options)
        for name, weight in found.items():
            if weights.setdefault(name, weight) != weight:
                raise InputError(f"layer {name!r}: the processes collected with different weights")

    def merged(mine: LayerStatistics | None, has_weight: bool) -> LayerStatistics:
        if mine is not None and has_weight:
            mine = replace(mine, weight=mine.weight[..., :0, :0])
        return moved(exchange.merged(None if mine is None else moved(mine, CPU), LayerStatistics.merge), device)

    layers = {}
    for name in reduce(merge_orders, (list(found) for _, found, _ in known)):
        everywhere = all(name in found for _, found, _ in known)
        whole = merged(own.layers.get(name), everywhere)  # where all have the weight, it is not sent
        layers[name] = replace(whole, weight=own.layers[name].weight) if everywhere else whole
    names = reduce(merge_orders, (found for *_, found in known))
    outputs = {name: merged(own.outputs.get(name), False) for name in names}
    head = exchange.merged(replace(own, layers={}, outputs={}), Statistics.merge)
    notes = drop_refuted(head.notes, layers)
    return replace(head, layers=layers, outputs=outputs, notes=notes, processes=exchange.size).with_totals()


def _weight(layer: LayerStatistics) -> tuple[Any, ...]:
    """What tells two weights apart."""
    return tuple(layer.weight.shape), float(layer.weight.sum(dtype=torch.float64)), float(row_norm(layer.weight))


def moved(value: Part, device: torch.device) -> Part:
    """A statistic, or a dictionary of them, with its tensors on ``device``."""
    if isinstance(value, Tensor | Sum | FeatureStatistics):
        return value.to(device)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value
