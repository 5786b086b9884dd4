"""Mean and spread of a value over seeds: the one place where reports, experiments and the command line take them from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (n − 1), number and range of values; a single value has deviation 0."""

    mean: float
    deviation: float
    count: int
    least: float
    largest: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and spread of the finite values; ``None`` if there are none.

    >>> spread([1.0, None, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, count=2, least=1.0, largest=3.0)
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    squares = math.fsum((value - mean) ** 2 for value in known)
    return Spread(mean, math.sqrt(squares / max(1, len(known) - 1)), len(known), min(known), max(known))


def spread_text(values: Iterable[float | None], mean: str = ".2f", deviation: str = ".2f", sigmas: int = 1) -> str:
    """``0.91 ± 0.02``, mean and standard deviations in the given formats; a single value alone, without values nothing.

    >>> spread_text([1.0, 2.0, 3.0], ".4g", ".2g"), spread_text([0.5], ".1f"), spread_text([])
    ('2 ± 1', '0.5', '')
    """
    found = spread(values)
    if found is None:
        return ""
    return f"{found.mean:{mean}}" + (f" ± {sigmas * found.deviation:{deviation}}" if found.count > 1 else "")
