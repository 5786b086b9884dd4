"""Statistics of a layer as they would be with smaller matrices, or with features of more samples, to learn what they cost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gramscope.layers.jacobians import MEMORY
from gramscope.linalg.symmetric_sum import kept_entries
from gramscope.statistics.feature_moments import FeatureAccumulator
from gramscope.statistics.feature_statistics import FeatureStatistics, keeps_gram
from gramscope.statistics.layer import SUMS, SYMMETRIC, LayerStatistics

#: rows of features whose HᵀH is timed
ROWS = 1024


def corner(layer: LayerStatistics, shrink: float) -> LayerStatistics:
    """The layer with the first part of its inputs, outputs and rows."""
    if shrink <= 1:
        return layer
    k, d = (max(1, round(side / shrink)) for side in layer.weight.shape[-2:])
    sums = {}
    for what in SUMS:
        value = getattr(layer, what)
        if value is not None:
            rows, columns = value.shape[-2:]
            kept = [k if side == layer.weight.shape[-2] else d for side in (rows, columns)]
            if what in ("D", "autograd"):
                kept = [k, d]
            elif what.endswith("_probes"):
                kept = [k, columns]
            value = value[..., : kept[0], : kept[1]].contiguous()
        sums[what] = value
    part = layer.features
    features = None if part is None else _corner_of_features(part, shrink)
    return replace(layer, weight=layer.weight[..., :k, :d].contiguous(), features=features, **sums)


def _corner_of_features(part: FeatureStatistics, shrink: float) -> FeatureStatistics:
    d = max(1, round((part.joint.mean_h.shape[-1]) / shrink))
    changes: dict[str, Any] = {}
    if part.moments is not None:
        m = part.moments
        C_hh = None if m.C_hh is None else m.C_hh[..., :d, :d]
        changes["moments"] = replace(m, mean_h=m.mean_h[..., :d], C_hh=C_hh, C_hy=m.C_hy[..., :d, :])
    if part.classes is not None:
        within = None if part.classes.within is None else part.classes.within[:d, :d]
        changes["classes"] = replace(part.classes, means=part.classes.means[:, :d], within=within)
    if part.rows is not None and part.row_targets is not None:
        n = max(2, round(part.rows.shape[0] / shrink))
        changes |= {"rows": part.rows[:n, :d], "row_targets": part.row_targets[:n]}
    changes["HtE"] = None if part.HtE is None else part.HtE[:d]
    changes["frequent"] = None if part.frequent is None else part.frequent[:, :d]
    return replace(part, **changes)


def _squares(layer: LayerStatistics) -> list[Tensor]:
    """Symmetric sums, which are kept once."""
    part = layer.features
    of_features = [] if part is None else [getattr(part.moments, "C_hh", None), getattr(part.classes, "within", None)]
    found = [*(getattr(layer, what) for what in SYMMETRIC), *of_features]
    return [tensor for tensor in found if tensor is not None]


def _others(layer: LayerStatistics) -> list[Tensor]:
    """Everything else but the weight, which is the model's own."""
    found = [getattr(layer, what) for what in SUMS if what not in SYMMETRIC]
    part = layer.features
    if part is not None:
        of_moments = [getattr(part.moments, what, None) for what in ("C_hy", "C_yy", "mean_h")]
        found += [*of_moments, getattr(part.classes, "means", None), part.rows, part.HtE, part.frequent]
    return [tensor for tensor in found if tensor is not None]


def kept_bytes(layer: LayerStatistics) -> int:
    """What is kept of a layer until its row of the table is computed."""
    kept = sum(x.nbytes * kept_entries(x.shape[-1]) // x.shape[-1] ** 2 for x in _squares(layer))
    return kept + sum(x.nbytes for x in _others(layer))


def square_bytes(layer: LayerStatistics) -> int:
    """What its symmetric sums take as whole matrices, while its row is computed."""
    return sum(x.nbytes for x in _squares(layer))


def shapes_of(layer: LayerStatistics) -> tuple[Any, ...]:
    """The same for layers whose statistics cost the same."""
    tensors = [layer.weight, *_squares(layer), *_others(layer)]
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def wait() -> None:
    """Wait for queued work of a CUDA device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class GrownFeatures:
    """Layers with features of all samples in place of the probe's, and what adding the others will take.

    Args:
        factor: all samples over those of the probe.
        options: of the collection.
    """

    def __init__(self, factor: float, options: dict[str, Any]) -> None:
        self._factor, self._options = factor, options
        self.seconds, self.bytes = 0.0, 0

    def layer(self, layer: LayerStatistics) -> LayerStatistics:
        """The layer as it will be."""
        part = layer.features
        if part is None or part.rows is None or part.row_targets is None or self._factor <= 1:
            return layer
        rows = round(part.n * self._factor)
        grown = replace(layer, features=self._grown(part, part.rows, part.row_targets, rows))
        self.bytes += kept_bytes(grown) - kept_bytes(layer)
        return grown

    def _grown(self, part: FeatureStatistics, rows: Tensor, targets: Tensor, n: int) -> FeatureStatistics:
        memory = self._options.get("memory", MEMORY)
        d = rows.shape[1]
        keeps = FeatureAccumulator(part.name, self._options["gram"], memory=memory).keeps_rows(n, d)
        gram = self._options["gram"] if keeps else keeps_gram(d, memory)
        added = FeatureAccumulator(part.name, gram, memory=memory)
        count = n if keeps else min(n, ROWS)
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(count, d, generator=generator).to(rows)
        chosen = torch.randint(targets.shape[0], (count,), generator=generator).to(targets.device)
        start = time.perf_counter()
        added.add(block, targets[chosen])
        added.finish()
        found = added.result()
        wait()
        self.seconds += (time.perf_counter() - start) * n / count
        return part if found is None else replace(_full_rank(found, n), of_outputs=part.of_outputs)


def _full_rank(part: FeatureStatistics, n: int) -> FeatureStatistics:
    """Moments of few random rows, as those of many have them."""

    def filled(C: Tensor | None) -> Tensor | None:
        if C is None:
            return None
        return C + C.diagonal().mean() * torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)

    if part.moments is not None and part.moments.C_hh is not None:
        return replace(part, moments=replace(part.moments, n=max(n, part.n), C_hh=filled(part.moments.C_hh)))
    if part.classes is not None and part.classes.within is not None:
        return replace(part, classes=replace(part.classes, within=filled(part.classes.within)))
    return part
