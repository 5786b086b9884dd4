"""The result of a collection: statistics of every layer, mergeable over parts of the data and over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gramscope.distributed.exchange import Group, find_exchange
from gramscope.errors import InputError, LayerError
from gramscope.notes import Note
from gramscope.statistics.feature_statistics import FeatureStatistics, merge_features
from gramscope.statistics.layer import (
    SUMS,
    LayerStatistics,
    NetworkStatistics,
    merge_layers,
    merge_networks,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: stands for every layer in ``Statistics.left_out``
EVERY = "*"

Part = TypeVar("Part")


@dataclass(frozen=True, repr=False)
class Statistics:
    """Everything collected in one pass.

    Args:
        layers: per linear-like layer, in order of execution; with ``snapshot=False`` each is put together when asked for.
        outputs: features of module outputs that were asked for.
        network: loss, accuracy and output moments of the whole network.
        notes: what was left out and why, by layer or module name.
        left_out: pairs of a layer (``"<module> (output)"`` for a module's output, ``"*"`` for every layer) and the field
            that some part of the data cannot have, so that none has it.
        options: what was asked for; only statistics of the same options can be merged.
        processes: how many processes of ``torch.distributed`` these are the statistics of.
    """

    layers: Mapping[str, LayerStatistics]
    outputs: dict[str, FeatureStatistics] = field(default_factory=dict)
    network: NetworkStatistics = field(default_factory=NetworkStatistics)
    notes: dict[str, tuple[Note, ...]] = field(default_factory=dict)
    left_out: frozenset[tuple[str, str]] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    processes: int = 1

    def __repr__(self) -> str:
        """Its size, without the tensors."""
        kept = [f"{len(self)} layers", *([f"{len(self.outputs)} module outputs"] if self.outputs else [])]
        fields_ = {what for layer in self for what in (*SUMS, "features") if getattr(layer, what) is not None}
        kept.append("with " + ", ".join(sorted(fields_)) if fields_ else "without sums")
        return f"Statistics({self.n} samples, {', '.join(kept)})"

    def __getitem__(self, name: str) -> LayerStatistics:
        if name not in self.layers:
            raise LayerError(f"no statistics of layer {name!r}; there are: {', '.join(self.layers)}")
        return self.layers[name]

    def __iter__(self) -> Iterator[LayerStatistics]:
        return iter(self.layers.values())

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def n(self) -> int:
        """Samples seen."""
        return self.network.n

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both samples together, as one pass over both gives them; exact under any split and order.

        A layer that one part has not seen (an expert that got no sample there) is taken from the other.
        """
        _check_options(self.options, other.options)
        layers = _merge_named(self.layers, other.layers, merge_layers)
        outputs = _merge_named(self.outputs, other.outputs, merge_features)
        network = merge_networks(self.network, other.network)
        notes = drop_refuted(self.notes, layers) | drop_refuted(other.notes, layers)
        return Statistics(layers, outputs, network, notes, self.left_out | other.left_out, self.options).with_totals()

    def all_reduce(self, process_group: Group = None, mesh: DeviceMesh | None = None) -> Statistics:
        """Statistics of all processes, the same in each; unchanged where there is one, or where they are those of all already.

        ``gs.collect`` does this itself; it is for statistics that were collected with ``process_group=False``, or loaded. All
        processes must have collected with the same options and the same weights.

        Args:
            process_group, mesh: as for :func:`gramscope.collect`.
        """
        from gramscope.statistics.processes import over_processes

        exchange = find_exchange(process_group, mesh)
        if exchange is None or self.processes > 1:
            return self
        return over_processes(self, exchange, next((layer.weight.device for layer in self), torch.device("cpu")))

    def with_totals(self) -> Statistics:
        """The same, with all samples counted in every layer; a statistic missing in one part is dropped for all."""
        layers = {layer.name: layer_with_totals(layer, self.network, self.left_out) for layer in self}
        outputs = {
            name: part for name, part in self.outputs.items() if (output_of(name), "features") not in self.left_out
        }
        network = self.network
        if (output_of(), "features") in self.left_out:
            network = replace(network, output=None)
        return replace(self, layers=layers, outputs=outputs, network=network)


class MadeWhenAsked(Mapping[str, Part]):
    """A dictionary whose values are made each time they are asked for, so that one of them at a time takes memory.

    >>> made = MadeWhenAsked({"three": lambda: [0, 0, 0]})
    >>> made["three"], made["three"] is made["three"]
    ([0, 0, 0], False)
    """

    def __init__(self, make: dict[str, Callable[[], Part]]) -> None:
        self._make = make

    def __getitem__(self, name: str) -> Part:
        return self._make[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


def layer_with_totals(
    layer: LayerStatistics, network: NetworkStatistics, left_out: Iterable[tuple[str, str]]
) -> LayerStatistics:
    """The layer with all samples counted, without what is left out."""
    gone: dict[str, Any] = {what: None for who, what in left_out if who in (layer.name, EVERY)}
    return replace(layer, **(gone | {"n": network.n, "terms": network.terms}))


def output_of(module: str = "") -> str:
    """How the output of a module, or of the network, is named in ``left_out`` and in notes.

    >>> output_of("block"), output_of()
    ('block (output)', '(output)')
    """
    return f"{module} (output)".strip()


def merge_orders(known: Sequence[str], seen: Sequence[str]) -> list[str]:
    """Two orders of execution as one: a new name follows the name that precedes it in ``seen``.

    >>> merge_orders(["embed", "expert 1", "readout"], ["embed", "expert 2", "readout"])
    ['embed', 'expert 2', 'expert 1', 'readout']
    """
    result, place = list(known), 0
    for name in seen:
        if name in result:
            place = result.index(name) + 1
        else:
            result.insert(place, name)
            place += 1
    return result


def drop_refuted(
    notes: dict[str, tuple[Note, ...]], layers: Mapping[str, LayerStatistics]
) -> dict[str, tuple[Note, ...]]:
    """The notes without those that ``layers`` refute: a layer not reached by one batch may be reached by another."""
    kept = {}
    for name, found in notes.items():
        layer, refuted = layers.get(name), set[str]()
        if layer is not None:
            refuted = {"not applied"}
            refuted |= {"no gradient"} if layer.D is not None else set()
            refuted |= (
                {"no Jacobians"}
                if (layer.JtJ, layer.kernel_parts, layer.kernel_probes) != (None, None, None)
                else set()
            )
        kept[name] = tuple(note for note in found if note.kind not in refuted)
    return {name: found for name, found in kept.items() if found}


def _check_options(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in {**a, **b}:
        mine, theirs = a.get(name), b.get(name)
        if mine == theirs:
            continue
        if name == "layers":
            raise InputError(f"cannot merge statistics of different layers: {mine} and {theirs}")
        raise InputError(
            f"cannot merge statistics that were collected with different options: {name}={mine!r} and {name}={theirs!r}"
        )


def _merge_named(a: Mapping[str, Part], b: Mapping[str, Part], merge: Callable[[Part, Part], Part]) -> dict[str, Part]:
    return {
        name: merge(a[name], b[name]) if name in a and name in b else a[name] if name in a else b[name]
        for name in merge_orders(list(a), list(b))
    }
