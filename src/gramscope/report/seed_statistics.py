"""Mean and spread over the seeds of a setting, aligned by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gramscope.report.loaded_runs import Setting, is_number


@dataclass(frozen=True)
class Summary:
    """Mean of some values and their sample standard deviation (n − 1); a single value has deviation ``None``."""

    mean: float
    deviation: float | None
    count: int

    @property
    def low(self) -> float:
        """Mean − 2σ."""
        return self.mean - 2 * (self.deviation or 0.0)

    @property
    def high(self) -> float:
        """Mean + 2σ."""
        return self.mean + 2 * (self.deviation or 0.0)


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Summary of the finite values; ``None`` if there are none.

    >>> summarise([1.0, None, 3.0])
    Summary(mean=2.0, deviation=1.4142135623730951, count=2)
    """
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    mean = math.fsum(known) / len(known)
    if len(known) == 1:
        return Summary(mean, None, 1)
    return Summary(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)), len(known))


@dataclass(frozen=True)
class Curve:
    """A value over training: steps, the time of each (epoch, step or seconds) and the summary over seeds."""

    steps: list[int]
    times: list[float]
    values: list[Summary]

    def __bool__(self) -> bool:
        return bool(self.steps)


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
