"""The result of a collection: sums of every layer, mergeable over parts of the data and over processes.

What merges batches merges processes, one layer after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange, Group, find_exchange
from gramscope.errors import InputError, LayerError, Note, no_such
from gramscope.layers.kinds import WeightAttribute
from gramscope.layers.losses import class_axis
from gramscope.linalg.arrays import row_norm
from gramscope.statistics.features import Features
from gramscope.statistics.matrix_sums import CenteredKernel, Covariance, Gradient, Kernel, ParameterGradient, SquareSum
from gramscope.statistics.sums import EVERY, OUTPUT, BatchResult, NotCollected, Sum

Part = TypeVar("Part")
CPU = torch.device("cpu")
OneSum = TypeVar("OneSum", bound=Sum)


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over samples and sites of one layer; ``layer[Covariance]`` is one of them.

    Args:
        name: the layer.
        weight: ``W [k, d]`` (``[groups, k, d]``) the sums belong to.
        n: samples seen.
        sums: the sums by their class.
        terms: what the mean loss divides by, ``D / terms`` is its gradient: samples, or positions with a loss of their own,
            or the sum of their class weights (a float).
        reached: samples of the batches in which the layer ran; 0 where that is not known.
    """

    name: str
    weight: Tensor
    n: int
    sums: dict[type[Sum], Sum] = field(default_factory=dict)
    terms: float = 0
    reached: int = 0

    def __repr__(self) -> str:
        kept = ", ".join(kind.__name__ for kind in self.sums)
        return (
            f"LayerStatistics({self.name!r}, weight {tuple(self.weight.shape)}, {self.n} samples, {kept or 'no sums'})"
        )

    def __getitem__(self, kind: type[OneSum]) -> OneSum:
        if kind not in self.sums:
            raise NotCollected(f"layer {self.name!r}: this was not collected; collect with {kind.ask}")
        return self.sums[kind]  # type: ignore[return-value]

    @property
    def loss_terms(self) -> float:
        """What the mean loss divides by."""
        return self.terms or self.n

    @cached_property
    def features(self) -> Features | None:
        """Moments of the layer's inputs and the targets."""
        return self[Features].whole() if Features in self.sums and self[Features].n else None

    @property
    def D(self) -> Tensor | None:
        """``Σ δ hᵀ [k, d]``, the weight gradient of the summed loss."""
        return self[Gradient].total if Gradient in self.sums else None

    @cached_property
    def Sigma(self) -> Tensor | None:
        """``Σ δ δᵀ [k, k]``; ``None`` where it is kept in another form."""
        return self[Covariance].whole() if Covariance in self.sums else None

    @cached_property
    def JtJ(self) -> Tensor | None:
        """``Σ_i J_iᵀJ_i [k, k]``; ``None`` where it is kept in another form."""
        return self[Kernel].whole() if Kernel in self.sums else None

    @property
    def autograd(self) -> Tensor | None:
        """The parameter's own gradient of the summed loss ``[k, d]``, for checking ``D``."""
        return self[ParameterGradient].total if ParameterGradient in self.sums else None

    @property
    def tied(self) -> bool:
        """Whether another module uses the same parameter, so that ``autograd`` has its part of the gradient too."""
        return ParameterGradient in self.sums and self[ParameterGradient].tied

    @property
    def gradient(self) -> Tensor:
        """``D``, or an error that says it was not collected."""
        return self[Gradient].total

    @property
    def covariance(self) -> Tensor:
        """``Σ``, or an error that says it was not collected."""
        return self._whole(Covariance, self.Sigma)

    @property
    def K(self) -> Tensor:
        """Tangent kernel ``K = (1/n) Σ J_iᵀJ_i``, ``[k, k]``."""
        return self._whole(Kernel, self.JtJ) / self.n

    @property
    def K_centered(self) -> Tensor:
        """``K̄ = (1/n) Σ (J_i − J_i⁰)ᵀ(J_i − J_i⁰)``, ``[k, k]``."""
        return self._whole(CenteredKernel, self[CenteredKernel].whole()) / self.n

    def _whole(self, kind: type[SquareSum], value: Tensor | None) -> Tensor:
        if value is None:
            raise NotCollected(f"layer {self.name!r}: {self[kind].missing or f'{kind.symbol} is kept at the inputs'}")
        return value

    def merge(self, other: LayerStatistics) -> LayerStatistics:
        """Statistics of the union of two samples seen by the same layer; a sum that is absent is zero."""
        if self.weight.shape != other.weight.shape:
            shapes = f"{tuple(self.weight.shape)} and {tuple(other.weight.shape)}"
            raise InputError(f"layer {self.name!r}: cannot merge statistics of weights {shapes}")
        if not torch.equal(self.weight, other.weight.to(self.weight)):
            raise InputError(f"layer {self.name!r}: the two statistics were collected with different weights")
        sums = {**self.sums, **other.sums}
        sums |= {kind: self.sums[kind].merge(other.sums[kind]) for kind in self.sums if kind in other.sums}
        return replace(self, n=self.n + other.n, sums=sums, reached=self.reached + other.reached)


LayerStatistics.weight = WeightAttribute()  # type: ignore[assignment]


@dataclass(frozen=True)
class NetworkStatistics:
    """What is kept of the whole network.

    Args:
        n: samples seen.
        loss_sum: ``Σ_i L_i``.
        correct: correctly classified targets, out of ``counted``; ``None`` for real targets.
        counted: targets that count for the accuracy.
        terms: what the mean loss divides by: samples, or positions with a loss of their own, or the sum of their class
            weights (a float); 0 without a loss.
        has_loss: whether there was a loss.
    """

    n: int = 0
    loss_sum: float = 0.0
    correct: int | None = None
    counted: int = 0
    terms: float = 0
    has_loss: bool = False

    def with_batch(self, batch: BatchResult, ignore_index: int) -> NetworkStatistics:
        """The same with one batch more."""
        target = batch.target if isinstance(batch.target, Tensor) else None
        axis = class_axis(batch.output, target, batch.positions.lengths)
        correct, counted = None, 0
        if target is not None and axis is not None and batch.output.shape[axis] > 1:
            counts = (target >= 0) & (target != ignore_index)
            correct, counted = int(((batch.output.argmax(axis) == target) & counts).sum()), int(counts.sum())
        return self.merge(
            NetworkStatistics(batch.n, batch.loss or 0.0, correct, counted, batch.terms, batch.loss is not None)
        )

    @property
    def loss(self) -> float:
        """Mean loss of a sample, or of a position where each has its own (:mod:`gramscope.layers.losses`)."""
        return self.loss_sum / (self.terms or self.n or 1)

    @property
    def positions(self) -> float:
        """Positions that count where each has a loss of its own, else samples or fewer."""
        return self.terms if isinstance(self.terms, int) else self.counted

    @property
    def accuracy(self) -> float | None:
        """Fraction of correctly classified targets."""
        return None if self.correct is None else self.correct / max(self.counted, 1)

    def merge(self, other: NetworkStatistics) -> NetworkStatistics:
        """Network statistics of the union of two samples, of which one may be empty."""
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        if self.has_loss != other.has_loss:
            raise InputError("statistics were collected with different options: some have a loss and others none")
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        return NetworkStatistics(
            self.n + other.n,
            self.loss_sum + other.loss_sum,
            correct,
            self.counted + other.counted,
            self.terms + other.terms,
            self.has_loss,
        )


@dataclass(frozen=True, repr=False)
class Statistics:
    """Everything collected in one run.

    Args:
        layers: per linear-like layer, in order of execution.
        outputs: features of the outputs of modules that were asked for, and of the network's own, ``"(output)"``.
        network: loss and accuracy of the whole network.
        notes: what was left out and why, by layer or module name.
        left_out: pairs of a layer (``"<module> (output)"`` for a module's output, ``"*"`` for every layer) and the name of a
            sum that some part of the data cannot have, so that none has it.
        options: what was asked for; only statistics of the same options can be merged.
        processes: how many processes of ``torch.distributed`` these are the statistics of.
        order: all layers that ran, in order of execution, also those that were not measured.
    """

    layers: dict[str, LayerStatistics]
    outputs: dict[str, LayerStatistics] = field(default_factory=dict)
    network: NetworkStatistics = field(default_factory=NetworkStatistics)
    notes: dict[str, tuple[Note, ...]] = field(default_factory=dict)
    left_out: frozenset[tuple[str, str]] = frozenset()
    options: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    order: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Its size, without the tensors."""
        outputs = len(self.outputs.keys() - {OUTPUT})
        kept = [f"{len(self)} layers", *([f"{outputs} module outputs"] if outputs else [])]
        sums = {kind.__name__ for layer in self for kind in layer.sums}
        kept.append("with " + ", ".join(sorted(sums)) if sums else "without sums")
        return f"Statistics({self.n} samples, {', '.join(kept)})"

    def __getitem__(self, name: str) -> LayerStatistics:
        if name not in self.layers:
            raise LayerError(no_such("layer", name, self.layers))
        return self.layers[name]

    def __iter__(self) -> Iterator[LayerStatistics]:
        return iter(self.layers.values())

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def n(self) -> int:
        """Samples seen."""
        return self.network.n

    @property
    def output(self) -> Features | None:
        """Moments of the network's output and the targets."""
        found = self.outputs.get(OUTPUT)
        return None if found is None else found.features

    def merge(self, other: Statistics) -> Statistics:
        """Statistics of both samples together, as one run over both gives them; exact under any split and order.

        A layer that one part has not seen (an expert that got no sample there) is taken from the other.
        """
        check_options(self.options, other.options)
        if self.processes != other.processes:
            raise InputError(
                f"cannot merge statistics of {self.processes} and of {other.processes} processes: the data of some would count "
                "twice, or only here; merge those of each process and take all_reduce() of the result"
            )
        layers = _merge_named(self.layers, other.layers, LayerStatistics.merge)
        outputs = _merge_named(self.outputs, other.outputs, LayerStatistics.merge)
        network = self.network.merge(other.network)
        names = dict.fromkeys((*self.notes, *other.notes))
        both = {name: tuple(dict.fromkeys((*self.notes.get(name, ()), *other.notes.get(name, ())))) for name in names}
        notes = drop_refuted(both, layers)
        left_out, order = self.left_out | other.left_out, tuple(merge_orders(self.order, other.order))
        merged = Statistics(layers, outputs, network, notes, left_out, self.options, self.processes, order)
        return merged.with_totals()

    def all_reduce(self, process_group: Group = None) -> Statistics:
        """Statistics of all processes, the same in each; unchanged where there is one, or where they are those of all already.

        ``gs.collect`` does this itself; it is for statistics that were collected with ``process_group=False``, or loaded. All
        processes must have collected with the same options and the same weights.

        Args:
            process_group: as for :func:`gramscope.collect`.
        """
        exchange = find_exchange(process_group)
        if exchange is None or self.processes > 1:
            return self
        return over_processes(self, exchange, next((layer.weight.device for layer in self), torch.device("cpu")))

    def with_totals(self) -> Statistics:
        """The same, with all samples counted in every layer; a sum missing in one part is dropped for all."""

        def counted(key: str, layer: LayerStatistics) -> LayerStatistics:
            gone = {kind for who, kind in self.left_out if who in (key, EVERY)}
            sums = {kind: total for kind, total in layer.sums.items() if kind.__name__ not in gone}
            return replace(layer, n=self.n, terms=self.network.terms, sums=sums)

        layers = {name: counted(name, layer) for name, layer in self.layers.items()}
        found = {
            name: counted(f"{name.removesuffix(OUTPUT)} {OUTPUT}".strip(), part) for name, part in self.outputs.items()
        }
        return replace(self, layers=layers, outputs={name: part for name, part in found.items() if part.sums})


def merge_orders(known: Sequence[str], seen: Iterable[str]) -> list[str]:
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
    notes: Mapping[str, Sequence[Note]], layers: Mapping[str, LayerStatistics]
) -> dict[str, tuple[Note, ...]]:
    """The notes without those that ``layers`` refute: a layer not reached by one batch may be reached by another."""
    kept = {}
    for name, found in notes.items():
        refuted = set[str]()
        if name in layers:
            sums = layers[name].sums
            refuted = {"not applied"}
            refuted |= {"no gradient"} if Gradient in sums else set()
            refuted |= {"no Jacobians"} if Kernel in sums else set()
        kept[name] = tuple(note for note in found if note.kind not in refuted)
    return {name: found for name, found in kept.items() if found}


def check_options(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Raise unless two collections asked for the same."""
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
        for name in merge_orders(list(a), b)
    }


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
    if isinstance(value, Tensor | Sum):
        return value.to(device)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value
