"""Statistics of several processes as one: each sum is reduced over them, or its parts are sent and merged in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.errors import InputError
from gramscope.linalg.row_blocks import row_norm
from gramscope.statistics.feature_statistics import FeatureStatistics, all_reduce, merge_features, outline
from gramscope.statistics.result import LayerStatistics, Statistics, drop_refuted, merge_orders
from gramscope.statistics.sums import Sum

Part = TypeVar("Part")
CPU = torch.device("cpu")


def over_processes(own: Statistics, exchange: Exchange, device: torch.device) -> Statistics:
    """Statistics of all processes together, the same in each of them.

    Every process must have collected with the same options and the same weights; a process without data takes part with none.
    One sum after the other is reduced, so that no process holds two copies of more than one.

    Args:
        own: of this process.
        exchange: the processes.
        device: where the results are kept, and where the group's operations work.
    """
    outlines = exchange.gather_objects({layer.name: _outline(layer) for layer in own})
    heads = exchange.gather_objects(moved(replace(own, layers={}, outputs={}), CPU))
    whole: Statistics = reduce(Statistics.merge, heads)
    layers = {}
    for name in reduce(merge_orders, map(list, outlines)):
        known = [found.get(name) for found in outlines]
        layers[name] = _layer(name, own.layers.get(name), known, exchange, device)
    outputs = {}
    found = exchange.gather_objects({name: outline(part) for name, part in own.outputs.items()})
    for name in reduce(merge_orders, map(list, found)):
        outputs[name] = _features(own.outputs.get(name), [part.get(name) for part in found], exchange, device)
    notes: dict[str, Any] = {}
    for head in heads:
        notes |= drop_refuted(head.notes, layers)
    whole = replace(moved(whole, device), layers=layers, outputs=outputs, notes=notes, processes=exchange.size)
    return whole.with_totals()


def _outline(layer: LayerStatistics) -> dict[str, Any]:
    """What must be known of a layer before its sums are added: two numbers tell its weights apart."""
    weight = (tuple(layer.weight.shape), float(layer.weight.sum(dtype=torch.float64)), float(row_norm(layer.weight)))
    return {"weight": weight, "sums": {kind: total.outline() for kind, total in layer.sums.items()}}


def _layer(
    name: str,
    own: LayerStatistics | None,
    outlines: Sequence[dict[str, Any] | None],
    exchange: Exchange,
    device: torch.device,
) -> LayerStatistics:
    known = [found for found in outlines if found is not None]
    if len({found["weight"] for found in known}) > 1:
        raise InputError(f"layer {name!r}: the processes collected with different weights")
    if len(known) == len(outlines) and own is not None:
        weight = own.weight
    else:  # some process has not seen it
        weight = _merged(None if own is None else own.weight, lambda a, b: a, exchange, device)
    sums: dict[type[Sum], Sum] = {}
    for kind in dict.fromkeys(kind for found in known for kind in found["sums"]):
        mine = None if own is None else own.sums.get(kind)
        of_all = [None if found is None else found["sums"].get(kind) for found in outlines]
        total = kind.all_reduce(mine, of_all, exchange, device) if _all_have(kind, outlines) else None
        if total is None:
            total = _merged(mine, lambda a, b: a.merge(b), exchange, device)
        sums[kind] = total
    return LayerStatistics(name, weight, 0, sums)


def _all_have(kind: type[Sum], outlines: Sequence[dict[str, Any] | None]) -> bool:
    """Whether every process has a sum, so that all of them decide alike how it is reduced."""
    return all(found is not None and kind in found["sums"] for found in outlines)


def _features(
    own: FeatureStatistics | None,
    outlines: Sequence[dict[str, Any] | None],
    exchange: Exchange,
    device: torch.device,
) -> FeatureStatistics:
    """The features of all processes together."""
    found = all_reduce(None if own is None else own.to(device), outlines, exchange)
    return _merged(own, merge_features, exchange, device) if found is None else found


def _merged(mine: Part | None, merge: Callable[[Part, Part], Part], exchange: Exchange, device: torch.device) -> Part:
    """The parts of all processes merged in their order, one after the other; ``None`` counts as no part."""
    result: Part | None = None
    for rank in range(exchange.size):
        part = exchange.object_from(rank, moved(mine, CPU) if rank == exchange.rank else None)
        if part is not None:
            result = part if result is None else merge(result, part)
    assert result is not None
    return moved(result, device)


def moved(value: Part, device: torch.device) -> Part:
    """A statistic, or a dictionary of them, with its tensors on ``device``."""
    if isinstance(value, Tensor | Sum | FeatureStatistics):
        return value.to(device)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value
