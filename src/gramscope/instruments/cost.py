"""``gs.estimate``: the time and memory of a measurement, before it is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from gramscope.errors import InputError
from gramscope.instruments.live_bytes import LiveBytes
from gramscope.instruments.measure import evaluate, given_by, names_of, what_to_collect
from gramscope.instruments.passes import without_gram
from gramscope.instruments.resized import GrownFeatures, corner, kept_bytes, shapes_of, square_bytes, wait
from gramscope.layers.batches import batch_size, batches, head
from gramscope.layers.jacobians import MEMORY
from gramscope.layers.losses import Loss
from gramscope.layers.model_call import model_dtype
from gramscope.layers.modules import unwrap
from gramscope.layers.select import LayerSelector
from gramscope.measures.column import Context, LayerView
from gramscope.statistics.collect import batch_count, collect
from gramscope.statistics.layer import LayerStatistics
from gramscope.statistics.result import Statistics

#: a probe is made larger until it takes so many seconds
PROBE_SECONDS = 0.2
#: sides of layers up to which they are evaluated whole
SIDE = 768
#: usual number of further readings of the data where neither rows nor HᵀH are kept
FURTHER_READINGS = {"target_linearity": 25, "nc1": 1}
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Cost:
    """Seconds, and bytes of memory at the peak beyond the model and the data."""

    seconds: float
    bytes: int


@dataclass(frozen=True)
class Costs:
    """Result of :func:`estimate`.

    Args:
        rows: of ``collecting``, which all measures share, and of each measure's evaluation over all layers.
        samples: that will be measured.
        batch: samples of a batch.
    """

    rows: dict[str, Cost] = field(default_factory=dict)
    samples: int = 0
    batch: int = 0

    @property
    def total(self) -> Cost:
        """Of the whole measurement: the times add up, and the largest peak counts."""
        costs = self.rows.values()
        return Cost(sum(cost.seconds for cost in costs), max((cost.bytes for cost in costs), default=0))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = {name: {"seconds": cost.seconds, "bytes": cost.bytes} for name, cost in self.rows.items()}
        total = {"seconds": self.total.seconds, "bytes": self.total.bytes}
        return {"samples": self.samples, "batch": self.batch, "rows": rows, "total": total}

    def __str__(self) -> str:
        width = max(map(len, [*self.rows, "total"]))
        rows = {**self.rows, "total": self.total}
        lines = [f"{self.samples:,} samples in batches of {self.batch:,}", f"{'':{width}}   seconds   peak MiB"]
        return "\n".join(
            lines + [f"{name:{width}}  {c.seconds:8.3g}  {c.bytes / MEBIBYTE:9,.0f}" for name, c in rows.items()]
        )

    __repr__ = __str__


def estimate(
    model: nn.Module,
    loader: Any,
    loss: Loss | None = None,
    *,
    measures: str | Iterable[str] | None = None,
    layers: LayerSelector = None,
    samples: int | None = None,
    **collecting: Any,
) -> Costs:
    """What :func:`gramscope.measure` with the same arguments will take, from a few samples and one layer of each shape.

    A few samples of the first batch are collected, with a count of the bytes that are alive and without it. Time grows with
    samples and batches, memory with the batch; features of all samples are replaced by random ones of the same size. Then each
    measure is evaluated at one layer of each shape, or at two corners of its matrices where they are large. ``reference`` and
    ``held_out`` are not supported, and ``nc4``, which reads the data again, counts too little. Expect a factor of two.

    Args:
        model, loader, loss, measures, layers, **collecting: as in :func:`gramscope.measure`; the model is left as it was.
        samples: how many will be measured, where the loader does not tell.

    >>> import torch, gramscope as gs
    >>> net = torch.nn.Linear(3, 2)
    >>> costs = gs.estimate(net, (torch.rand(20, 3), torch.arange(20) % 2), measures=["weight_norm", "nfa"])
    >>> list(costs.rows), costs.samples
    (['collecting', 'weight_norm', 'nfa'], 20)
    """
    names = names_of(measures, given_by(model, loss))
    inputs, target = next(iter(batches(loader, collecting.get("unpack"), model_dtype(unwrap(model)))))
    n = batch_size(inputs)
    if n is None:
        raise InputError("the first batch has no tensor whose first axis counts samples; pass tensors")
    count = batch_count(loader)
    if samples is None:
        if count is None and not isinstance(loader, tuple | Tensor):
            raise InputError("the loader does not tell how many samples it has; pass samples=")
        samples = n * (count or 1)
    options = {**what_to_collect(names), "layers": layers, **collecting, "progress": False}
    options.pop("unpack", None)

    def run(size: int, times: int = 1, **changes: Any) -> Statistics:
        part = (head(inputs, size, n), head(target, size, n))
        return collect(model, [part] * times, loss, unpack=_pair, **options | changes)

    size = _probe_size(run, n)
    statistics = run(size)
    grown = GrownFeatures(samples / size, options)
    full = {layer.name: grown.layer(layer) for layer in statistics}
    collecting_cost = _collecting(run, size, min(n, samples), samples, options, grown)
    rows = {"collecting": collecting_cost}
    kept = sum(map(kept_bytes, full.values())) + max(map(square_bytes, full.values()), default=0)
    whole = replace(statistics, layers=full)
    context = Context(whole, memory=collecting.get("memory", MEMORY))
    for name, cost in _evaluations(names, context).items():
        rows[name] = Cost(cost.seconds, kept + cost.bytes)
    again = {name: count for name, count in FURTHER_READINGS.items() if name in names}
    if again and without_gram(whole):
        forward = _seconds(lambda: run(size, gradients=False, residuals=False, autograd=False, jacobians=False))
        for name, count in again.items():
            rows[name] = replace(rows[name], seconds=rows[name].seconds + count * forward * samples / size)
    return Costs(rows, samples, min(n, samples))


def _pair(batch: Any) -> tuple[Any, Any]:
    return batch[0], batch[1]


def _seconds(work: Callable[[], object]) -> float:
    """The shorter time of two calls."""
    times = []
    for _ in range(2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times)


def _probe_size(run: Callable[..., object], n: int) -> int:
    """Samples of the probe: an even number, until it takes a while, at most a half of a batch."""
    size = min(2, n)
    run(size)  # warm up
    while 4 * size <= n and _seconds(partial(run, size)) < PROBE_SECONDS:
        size *= 2
    return size


def _collecting(
    run: Callable[..., object], size: int, batch: int, samples: int, options: dict[str, Any], grown: GrownFeatures
) -> Cost:
    """Time ``fixed + batches · a + samples · b`` and memory ``fixed + batch · c``, from two sizes and one split."""
    half = max(1, size // 2)
    whole, part = _seconds(lambda: run(size)), _seconds(lambda: run(half))
    split = _seconds(lambda: run(half, 2)) if half < size else whole
    each = max(whole - part, 0.0) / max(size - half, 1) if half < size else whole
    overhead = min(max(split - whole, 0.0), whole)
    fixed = max(whole - overhead - size * each, 0.0)
    seconds = fixed + -(-samples // batch) * overhead + samples * each + grown.seconds
    plain = {"jacobians": False} if options["jacobians"] else {}
    peak = _extrapolated(lambda m: _peak(lambda: run(m, **plain)), half, size, batch)
    if plain:
        with_jacobians = _extrapolated(lambda m: _peak(lambda: run(m)), half, size, batch)
        fixed_part = _peak(lambda: run(half)) - _peak(lambda: run(half, **plain))
        peak += min(with_jacobians - peak, max(fixed_part, 0) + options.get("memory", MEMORY))
    return Cost(seconds, int(peak + grown.bytes))


def _extrapolated(peak: Callable[[int], int], half: int, size: int, batch: int) -> float:
    low, high = peak(half), peak(size)
    return high + max(high - low, 0) / max(size - half, 1) * (batch - size)


def _peak(work: Callable[[], object]) -> int:
    with LiveBytes() as live:
        work()
    return int(live.peak)


def _evaluations(names: list[str], context: Context) -> dict[str, Cost]:
    """Seconds of each measure over all layers, and its bytes, from one layer of each shape.

    Of a large layer two corners of its matrices are taken, one twice as large as the other, and both costs are continued as
    sums of two powers of the side.
    """
    alike: dict[Any, list[LayerStatistics]] = {}
    for layer in context.statistics:
        alike.setdefault(shapes_of(layer), []).append(layer)
    costs = {name: Cost(0.0, 0) for name in names}
    for group in alike.values():
        shrink = max(group[0].weight.shape[-2:]) / SIDE
        found = _evaluated(names, context, group[0], max(shrink, 1.0))
        smaller = _evaluated(names, context, group[0], 2 * shrink) if shrink > 1 else found
        for name in names:
            seconds = _continued(smaller[name].seconds, found[name].seconds, shrink, 3)
            size = _continued(smaller[name].bytes, found[name].bytes, shrink, 2)
            costs[name] = Cost(costs[name].seconds + len(group) * seconds, max(costs[name].bytes, int(size)))
    return costs


def _evaluated(names: list[str], context: Context, layer: LayerStatistics, shrink: float) -> dict[str, Cost]:
    """The costs of measures at a corner of a layer, ``1/shrink`` of each side."""
    layer = corner(layer, shrink)
    layers = {**context.statistics.layers, layer.name: layer}
    statistics = replace(context.statistics, layers=layers)
    context = replace(context, statistics=statistics, memory=int(context.memory / shrink**2))
    view = LayerView(layer, context)
    costs = {}
    with LiveBytes() as live:
        for name in names:
            live.peak = live.now
            start = time.perf_counter()
            evaluate(name, view, {})
            wait()
            costs[name] = Cost(time.perf_counter() - start, live.peak)
    return costs


def _continued(small: float, large: float, shrink: float, power: int) -> float:
    """The cost at ``shrink`` times the side of ``large``, which has twice that of ``small``.

    It has a part that grows with ``power`` and one that grows with one less, neither of them negative.

    >>> _continued(1.0, 8.0, 2.0, 3), _continued(1.0, 4.0, 2.0, 3), _continued(1.0, 4.0, 3.0, 2)
    (64.0, 16.0, 36.0)
    """
    if shrink <= 1:
        return large
    high = min(max(2 * large - 2**power * small, 0.0), large)
    return float(high * shrink**power + (large - high) * shrink ** (power - 1))
