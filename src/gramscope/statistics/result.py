"""The result of a collection: statistics of every layer, mergeable and reducible over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gramscope.errors import InputError, LayerError
from gramscope.linalg.moments import ClassMoments, Moments
from gramscope.statistics.layer import (
    FeatureStatistics,
    LayerStatistics,
    NetworkStatistics,
    merge_features,
    merge_layers,
    merge_networks,
    widen,
)


@dataclass(frozen=True)
class Statistics:
    """Everything collected in one pass.

    Args:
        layers: per linear-like layer, in order of execution.
        outputs: features of module outputs that were asked for.
        network: loss, accuracy and output moments of the whole network.
        notes: what was left out and why, by layer or module name.
    """

    layers: dict[str, LayerStatistics]
    outputs: dict[str, FeatureStatistics] = field(default_factory=dict)
    network: NetworkStatistics = field(default_factory=NetworkStatistics)
    notes: dict[str, str] = field(default_factory=dict)

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
        """Statistics of both samples together; exact under any split and order."""
        if self.layers.keys() != other.layers.keys() or self.outputs.keys() != other.outputs.keys():
            raise InputError(
                f"cannot merge statistics of different layers: {sorted(self.layers)} and {sorted(other.layers)}"
            )
        return Statistics(
            {name: merge_layers(mine, other.layers[name]) for name, mine in self.layers.items()},
            {name: merge_features(mine, other.outputs[name]) for name, mine in self.outputs.items()},
            merge_networks(self.network, other.network),
            self.notes | other.notes,
        )

    def all_reduce(self) -> Statistics:
        """Statistics of all processes of the default ``torch.distributed`` group; unchanged when there is none.

        Every process must have collected with the same options. Sums are reduced as they are; moments around the common
        mean, so that nothing cancels.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self
        return Statistics(
            {name: _reduce_layer(layer) for name, layer in self.layers.items()},
            {name: _reduce_features(part) for name, part in self.outputs.items()},
            _reduce_network(self.network),
            self.notes,
        )


def _sum(value: Tensor) -> Tensor:
    value = value.clone()
    torch.distributed.all_reduce(value)
    return value


def _sum_optional(value: Tensor | None) -> Tensor | None:
    return None if value is None else _sum(value)


def _sum_numbers(device: torch.device, *values: float) -> list[float]:
    return _sum(torch.tensor(values, dtype=torch.float64, device=device)).tolist()


def _reduce_layer(layer: LayerStatistics) -> LayerStatistics:
    (n,) = _sum_numbers(layer.weight.device, layer.n)
    return replace(
        layer,
        n=int(n),
        D=_sum_optional(layer.D),
        Sigma=_sum_optional(layer.Sigma),
        autograd=_sum_optional(layer.autograd),
        JtJ=_sum_optional(layer.JtJ),
        JtJ_centered=_sum_optional(layer.JtJ_centered),
        features=None if layer.features is None else _reduce_features(layer.features),
    )


def _reduce_features(part: FeatureStatistics) -> FeatureStatistics:
    return replace(
        part,
        moments=None if part.moments is None else _reduce_moments(part.moments),
        classes=None if part.classes is None else _reduce_classes(part.classes),
        HtE=_sum_optional(part.HtE),
    )


def _reduce_moments(m: Moments) -> Moments:
    """Around the mean of all processes, ``Σ_r C_r + n_r (m_r − m)(m_r − m)ᵀ``."""
    (n,) = _sum_numbers(m.mean_h.device, m.n)
    mean_h, mean_y = _sum(m.n * m.mean_h) / n, _sum(m.n * m.mean_y) / n
    dh, dy = m.mean_h - mean_h, m.mean_y - mean_y
    C_hh = None if m.C_hh is None else _sum(m.C_hh + m.n * torch.outer(dh, dh))
    C_hy = _sum(m.C_hy + m.n * torch.outer(dh, dy))
    return Moments(int(n), mean_h, mean_y, C_hh, C_hy, _sum(m.C_yy + m.n * torch.outer(dy, dy)))


def _reduce_classes(m: ClassMoments) -> ClassMoments:
    c = torch.tensor(m.counts.shape[0], device=m.counts.device)
    torch.distributed.all_reduce(c, op=torch.distributed.ReduceOp.MAX)
    m = widen(m, int(c))
    counts = _sum(m.counts)
    means = _sum(m.counts[:, None] * m.means) / counts.clamp(min=1)[:, None]
    if m.within is None:
        return ClassMoments(counts, means, None)
    delta = m.means - means
    return ClassMoments(counts, means, _sum(m.within + delta.mT @ (m.counts[:, None] * delta)))


def _reduce_network(network: NetworkStatistics) -> NetworkStatistics:
    if network.output is None:
        device = torch.device("cpu")
    else:
        part = network.output.classes or network.output.moments
        device = (
            torch.device("cpu")
            if part is None
            else (part.means if isinstance(part, ClassMoments) else part.mean_h).device
        )
    n, loss, correct, counted = _sum_numbers(device, network.n, network.loss_sum, network.correct or 0, network.counted)
    return NetworkStatistics(
        int(n),
        loss,
        None if network.correct is None else int(correct),
        int(counted),
        None if network.output is None else _reduce_features(network.output),
    )
