"""Moments of features of several processes by all-reduce: what is sent does not grow with their number.

Every process moves its co-moments to the common mean, ``C + n (h̄ − m)(ȳ − m_y)ᵀ`` (Chan, Golub and LeVeque 1979), and these
add up. Where some process has kept rows, or targets of another kind, the parts are sent and merged in turn instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gramscope.distributed.exchange import Exchange
from gramscope.linalg.moments import ClassMoments, Moments
from gramscope.statistics.feature_statistics import CLASSES, FeatureStatistics, widen


def outline(part: FeatureStatistics | None) -> dict[str, Any] | None:
    """What the other processes must know of a part before they add it to theirs."""
    if part is None:
        return None
    known: dict[str, Any] = {"eps": part.eps, "labels": part.labels, "of_outputs": part.of_outputs}
    known["HtE"] = None if part.HtE is None else tuple(part.HtE.shape)
    known["plain"] = part.rows is None and part.frequent is None and (part.moments is None) != (part.classes is None)
    if part.classes is not None:
        known["classes"] = len(part.classes.counts)
        known["shape"] = (part.classes.means.shape[1], part.classes.within is not None)
    elif part.moments is not None:
        known["shape"] = (tuple(part.moments.C_hy.shape), part.moments.C_hh is not None)
    return known


def can_add(outlines: Sequence[dict[str, Any] | None]) -> bool:
    """Whether the parts of all processes add up."""
    found = [known for known in outlines if known is not None]
    alike = len({(known.get("shape"), "classes" in known, known["labels"] > 0) for known in found}) == 1
    return alike and all(known["plain"] for known in found) and max(k.get("classes", 0) for k in found) <= CLASSES


def reduced(
    name: str,
    own: FeatureStatistics | None,
    outlines: Sequence[dict[str, Any] | None],
    exchange: Exchange,
    device: torch.device,
) -> FeatureStatistics:
    """The features of all processes together; some of them may have none."""
    found = [known for known in outlines if known is not None]
    result = FeatureStatistics(
        name,
        eps=max(known["eps"] for known in found),
        labels=max(known["labels"] for known in found),
        of_outputs=found[0]["of_outputs"],
        HtE=_residuals(own, found, exchange, device),
    )
    if "classes" in found[0]:
        c = max(known["classes"] for known in found)
        d, gram = found[0]["shape"]
        counts, means, within = _zeros(device, (c,), (c, d), (d, d) if gram else (0, 0))
        nothing = ClassMoments(counts, means, within if gram else None)
        return replace(result, classes=_classes(nothing if own is None else widen(_of(own.classes), c), exchange))
    shape, gram = found[0]["shape"]
    *groups, d, c = shape
    mean_h, mean_y, C_hy, C_yy = _zeros(device, (*groups, d), (c,), shape, (c, c))
    C_hh = _zeros(device, (*groups, d, d))[0] if gram else None
    part = Moments(0, mean_h, mean_y, C_hh, C_hy, C_yy) if own is None else _of(own.moments)
    return replace(result, moments=_moments(part, exchange))


def _moments(part: Moments, exchange: Exchange) -> Moments:
    """Moments of all processes."""
    sums = torch.cat([part.n * part.mean_h.flatten(), part.n * part.mean_y, part.mean_y.new_tensor([part.n])])
    exchange.add(sums)
    n = int(sums[-1])
    mean_h = (sums[: part.mean_h.numel()] / n).reshape(part.mean_h.shape)
    mean_y = sums[part.mean_h.numel() : -1] / n
    dh, dy = part.mean_h - mean_h, part.mean_y - mean_y
    moved = [
        None if C is None else C + part.n * a.unsqueeze(-1) * b.unsqueeze(-2)
        for C, a, b in ((part.C_hh, dh, dh), (part.C_hy, dh, dy), (part.C_yy, dy, dy))
    ]
    for C in moved:
        if C is not None:
            exchange.add(C)
    return Moments(n, mean_h, mean_y, moved[0], _of(moved[1]), _of(moved[2]))


def _classes(part: ClassMoments, exchange: Exchange) -> ClassMoments:
    """Class moments of all processes."""
    sums = torch.cat([(part.counts[:, None] * part.means).flatten(), part.counts])
    exchange.add(sums)
    c = len(part.counts)
    counts = sums[-c:].clone()
    means = sums[:-c].reshape(part.means.shape) / counts.clamp(min=1)[:, None]
    within = part.within
    if within is not None:
        away = torch.where((part.counts > 0)[:, None], part.means - means, 0.0)
        within = within + away.mT @ (part.counts[:, None] * away)
        exchange.add(within)
    return ClassMoments(counts, means, within)


def _residuals(
    own: FeatureStatistics | None, found: Sequence[dict[str, Any]], exchange: Exchange, device: torch.device
) -> Tensor | None:
    """``HᵀE`` of all rows, or None where some rows have none."""
    if any(known["HtE"] is None for known in found):
        return None
    total = _zeros(device, found[0]["HtE"])[0] if own is None or own.HtE is None else own.HtE.clone()
    exchange.add(total)
    return total


def _zeros(device: torch.device, *shapes: Sequence[int]) -> list[Tensor]:
    return [torch.zeros(tuple(shape), dtype=torch.float64, device=device) for shape in shapes]


def _of(value: Any) -> Any:
    assert value is not None
    return value
