"""Statistics of several processes as one: sums and moments are added by all-reduce, kept rows are sent and merged."""

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
from gramscope.statistics.feature_reduction import can_add, outline, reduced
from gramscope.statistics.feature_statistics import FeatureStatistics, merge_features
from gramscope.statistics.layer import SUMS, LayerStatistics, merge_layers
from gramscope.statistics.result import Statistics, drop_refuted, merge_orders

Part = TypeVar("Part")
CPU = torch.device("cpu")


def over_processes(own: Statistics, exchange: Exchange, device: torch.device) -> Statistics:
    """Statistics of all processes together, the same in each of them.

    Every process must have collected with the same options and the same weights; a process without data takes part with none.
    One layer after the other is reduced, so that no process holds more than two copies of a layer's features.

    Args:
        own: of this process.
        exchange: the processes.
        device: where the results are kept, and where the group's operations work.
    """
    outlines = exchange.gather_objects([_outline(layer) for layer in own])
    heads = exchange.gather_objects(moved(replace(own, layers={}, outputs={}), CPU))
    whole: Statistics = reduce(Statistics.merge, heads)
    layers = {}
    for name in reduce(merge_orders, [[known["name"] for known in found] for found in outlines]):
        same = [known for found in outlines for known in found if known["name"] == name]
        _check_alike(name, same)
        layers[name] = _layer(name, own.layers.get(name), same, exchange, device)
    outputs = {}
    found = exchange.gather_objects({name: outline(part) for name, part in own.outputs.items()})
    for name in reduce(merge_orders, map(list, found)):
        part = _features(name, own.outputs.get(name), [known.get(name) for known in found], exchange, device)
        if part is not None:
            outputs[name] = part
    notes: dict[str, Any] = {}
    for head in heads:
        notes |= drop_refuted(head.notes, layers)
    return replace(
        moved(whole, device), layers=layers, outputs=outputs, notes=notes, processes=exchange.size
    ).with_totals()


def _outline(layer: LayerStatistics) -> dict[str, Any]:
    """What must be known of a layer before its sums are added: shapes, and two numbers that tell its weights apart."""
    sums = {what: getattr(layer, what) for what in SUMS}
    return {
        "name": layer.name,
        "shape": tuple(layer.weight.shape),
        "weight": (float(layer.weight.sum(dtype=torch.float64)), float(row_norm(layer.weight))),
        "shared": layer.shared,
        "sums": {what: (tuple(value.shape), value.dtype) for what, value in sums.items() if value is not None},
        "features": outline(layer.features),
    }


def _check_alike(name: str, outlines: Sequence[dict[str, Any]]) -> None:
    if len({(known["shape"], known["weight"]) for known in outlines}) > 1:
        raise InputError(f"layer {name!r}: the processes collected with different weights")


def _layer(
    name: str,
    own: LayerStatistics | None,
    outlines: Sequence[dict[str, Any]],
    exchange: Exchange,
    device: torch.device,
) -> LayerStatistics:
    if len(outlines) < exchange.size:  # some process has not seen it
        weight = _merged(None if own is None else own.weight, lambda a, b: a, exchange, device)
    else:
        assert own is not None
        weight = own.weight
    sums: dict[str, Any] = {}
    for what in SUMS:
        kinds = {found["sums"][what] for found in outlines if what in found["sums"]}
        mine = None if own is None else getattr(own, what)
        if len(kinds) == 1:
            shape, dtype = kinds.pop()
            total = (
                torch.zeros(shape, dtype=dtype, device=device)
                if mine is None
                else mine.to(device, copy=True).contiguous()
            )
            exchange.add(total)
            sums[what] = total
        elif kinds:  # parts of different numbers
            kept: dict[str, Any] = {what: mine}
            part = None if own is None else replace(LayerStatistics(name, weight[:0], 0), **kept)
            found = _merged(part, merge_layers, exchange, device)
            sums[what] = getattr(found, what)
    features = _features(
        name, None if own is None else own.features, [f["features"] for f in outlines], exchange, device
    )
    shared = any(found["shared"] for found in outlines)
    return replace(LayerStatistics(name, weight, 0, features=features, shared=shared), **sums)


def _features(
    name: str,
    own: FeatureStatistics | None,
    outlines: Sequence[dict[str, Any] | None],
    exchange: Exchange,
    device: torch.device,
) -> FeatureStatistics | None:
    """The features of all processes together, None where none has any."""
    if all(known is None for known in outlines):
        return None
    if can_add(outlines):
        return reduced(name, own, outlines, exchange, device)
    return _merged(own, merge_features, exchange, device)


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
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value
