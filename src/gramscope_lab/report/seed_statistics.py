"""Mean and spread over the seeds of a setting, aligned by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from gramscope_lab.report.loaded_runs import Runs, Setting
from gramscope_lab.report.run_files import is_number

#: a standard deviation of fewer seeds says little: their range is shown instead
FEW_SEEDS = 5


@dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation (n − 1), number and range of values; a single value has deviation ``None``."""

    mean: float
    deviation: float | None
    count: int
    least: float
    largest: float

    @property
    def low(self) -> float:
        """Lower end of the spread: mean − 2σ, of fewer than :data:`FEW_SEEDS` values the least."""
        return self.least if self.deviation is None or self.count < FEW_SEEDS else self.mean - 2 * self.deviation

    @property
    def high(self) -> float:
        """Upper end of the spread: mean + 2σ, of fewer than :data:`FEW_SEEDS` values the largest."""
        return self.largest if self.deviation is None or self.count < FEW_SEEDS else self.mean + 2 * self.deviation


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Summary of the finite values; ``None`` if there are none.

    >>> summarise([1.0, None, 3.0])
    Summary(mean=2.0, deviation=1.4142135623730951, count=2, least=1.0, largest=3.0)
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    squares = math.fsum((v - mean) ** 2 for v in known)
    deviation = math.sqrt(squares / (len(known) - 1)) if len(known) > 1 else None
    return Summary(mean, deviation, len(known), min(known), max(known))


def spread_sentence(runs: Runs) -> str:
    """What bands and error bars show, which depends on the number of seeds."""
    counts = sorted({len(setting.runs) for setting in runs.settings})
    if not counts or counts[-1] == 1:
        return "There is one seed, so no spread is shown."
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    if counts[-1] < FEW_SEEDS:
        return f"{seeds}: bands and bars show the range of the values, from the least to the largest."
    less = "" if counts[0] >= FEW_SEEDS else f", of fewer than {FEW_SEEDS} seeds the range of the values"
    return f"{seeds}: bands and bars show mean ± 2σ, σ the standard deviation over seeds{less}."


@dataclass(frozen=True)
class Curve:
    """A value over training: steps, the time of each (epoch, step or seconds) and the summary over seeds."""

    steps: list[int]
    times: list[float]
    values: list[Summary]

    def __bool__(self) -> bool:
        return bool(self.steps)

    @cached_property
    def by_step(self) -> dict[int, Summary]:
        """The summary at each step."""
        return dict(zip(self.steps, self.values, strict=True))


def evaluation_curve(setting: Setting, key: str, clock: str) -> Curve:
    """A value of the whole net over training; ``clock`` is the unit of its times: epoch, step or seconds."""
    return _curve(setting, key, None, clock)


def layer_curve(setting: Setting, measure: str, layer: str, clock: str) -> Curve:
    """A measure of one layer over training."""
    return _curve(setting, measure, layer, clock)


def _curve(setting: Setting, key: str, layer: str | None, clock: str) -> Curve:
    """The curve of a key, computed once for each setting."""
    if (key, layer, clock) in setting.curves:
        return setting.curves[key, layer, clock]
    values: dict[int, list[float]] = {}
    times: dict[int, list[float]] = {}
    for run in setting.runs:
        for record in run.evaluations if layer is None else run.by_layer.get(layer, []):
            value = record.get(key)
            if not is_number(value):
                continue
            step = int(record.get("step", 0))
            time = record.get("seconds") if clock == "seconds" else run.time(step) if clock == "epoch" else step
            if is_number(time):
                values.setdefault(step, []).append(float(value))
                times.setdefault(step, []).append(float(time))
    steps = sorted(values)
    summaries = [summary for step in steps if (summary := summarise(values[step])) is not None]
    curve = Curve(steps, [math.fsum(times[step]) / len(times[step]) for step in steps], summaries)
    setting.curves[key, layer, clock] = curve
    return curve
